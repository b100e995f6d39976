# Each target builds its own environment from pinned files, once, and works offline afterwards.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
ENVS := .envs
SWEEP ?=  # further options of the sweeps, such as --n 100
PIP := -m pip --disable-pip-version-check --no-input -q

.PHONY: demo test lint types test-5.19 oracle bench speed usage routing hold kvcapsule retoken retrieve reuse soak support-matrix docs clean

demo: $(ENVS)/demo/ready  ## answer real questions with the full cache and under TGV-KV
	$(ENVS)/demo/bin/conduit-kv demo

test: $(ENVS)/test/ready lint types  ## everything that CI checks
	$(ENVS)/test/bin/python -m pytest

lint: $(ENVS)/test/ready
	$(ENVS)/test/bin/ruff check .
	$(ENVS)/test/bin/ruff format --check .

types: $(ENVS)/test/ready
	$(ENVS)/test/bin/mypy

test-5.19: $(ENVS)/transformers-5.19/ready  ## the contracts with the oldest supported Transformers
	$(ENVS)/transformers-5.19/bin/python -m pytest tests/contracts

oracle: $(ENVS)/oracle/ready $(ENVS)/test/ready  ## kept indices against kvpress
	$(ENVS)/oracle/bin/python tests/oracle/kvpress_indices.py $(ENVS)/oracle/indices.json
	$(ENVS)/test/bin/python -m tests.oracle.compare $(ENVS)/oracle/indices.json

speed: $(ENVS)/demo/ready  ## prefill and decoding against plain Transformers, in one run
	$(ENVS)/demo/bin/python benchmarks/speed.py --json benchmarks/results/speed.json
	$(ENVS)/demo/bin/python benchmarks/tables.py

bench: $(ENVS)/demo/ready $(ENVS)/test/ready  ## the headline tables and out/report.html (an hour)
	$(call sweeps,headline)
	$(ENVS)/test/bin/conduit-kv report out/headline -o out/report.html

usage: $(ENVS)/demo/ready  ## the usage table: which plan suits which usage (hours)
	$(call sweeps,usage)

kvcapsule: $(ENVS)/demo/ready  ## fit the built-in model's KVCapsule artefact anew, after its adapter
	$(ENVS)/demo/bin/conduit-kv fit kvcapsule --model embedded --images boards --n 300 \
		--out src/conduit_kv/embedded/kvcapsule.safetensors

retoken: $(ENVS)/demo/ready  ## train the built-in model's ReToken anew, after its adapter
	$(ENVS)/demo/bin/conduit-kv fit retoken --model embedded --data board --images 8 \
		--questions 2000 --steps 300 \
		--out src/conduit_kv/embedded/retoken.safetensors

hold: $(ENVS)/demo/ready  ## what packing costs in answers (hours), and decode speed
	$(ENVS)/demo/bin/python benchmarks/hold_speed.py --model --json benchmarks/results/hold_speed.json
	$(ENVS)/demo/bin/python benchmarks/hold.py --json benchmarks/results/hold.json
	$(ENVS)/demo/bin/python benchmarks/tables.py

routing: $(ENVS)/demo/ready  ## route and reduce on boards, and the prefill of sixteen images (hours)
	$(ENVS)/demo/bin/python benchmarks/routing.py --json benchmarks/results/routing.json
	$(ENVS)/demo/bin/python benchmarks/routing.py --json benchmarks/results/routing.json --time
	$(ENVS)/demo/bin/python benchmarks/tables.py

retrieve: $(ENVS)/demo/ready  ## retrieval on 16 to 64 images: recall, answers, turns, time, memory (hours)
	$(ENVS)/demo/bin/python benchmarks/retrieve.py --json benchmarks/results/retrieve.json $(SWEEP)
	$(ENVS)/demo/bin/python benchmarks/tables.py

reuse: $(ENVS)/demo/ready  ## what reuse costs in answers (hours), and the first token with 16 images
	$(ENVS)/demo/bin/python benchmarks/reuse.py --json benchmarks/results/reuse.json
	$(ENVS)/demo/bin/python benchmarks/tables.py

soak: $(ENVS)/demo/ready  ## 2,000 requests over a store smaller than their images (hours)
	$(ENVS)/demo/bin/python benchmarks/soak.py

support-matrix: test test-5.19  ## write the README's table of what was tested
	$(ENVS)/test/bin/python -m tests.support_matrix

docs: $(ENVS)/docs/ready  ## the site, in out/site; any warning is an error
	$(ENVS)/docs/bin/python -m mkdocs build --strict

.PHONY: lmms ray
lmms: $(ENVS)/lmms/ready  ## lmms-eval's own runner against the bench, offline
	$(ENVS)/lmms/bin/python -m tests.lmms.run

ray: $(ENVS)/ray/ready  ## a run on a local Ray cluster, with an actor that dies
	$(ENVS)/ray/bin/python -m tests.ray.run

clean:
	rm -rf $(ENVS) out

# Run the sweeps of benchmarks/$(1), going on where they were stopped, and write their tables.
define sweeps
	@mkdir -p out/$(1) benchmarks/results/$(1)
	for file in $(notdir $(basename $(wildcard benchmarks/$(1)/*.yaml))); do \
		$(ENVS)/demo/bin/conduit-kv bench -c benchmarks/$(1)/$$file.yaml \
			--json out/$(1)/$$file.json --workers 2 --threads 1 $(SWEEP) || exit; \
		cp out/$(1)/$$file.json benchmarks/results/$(1)/; \
	done
	$(ENVS)/demo/bin/python benchmarks/tables.py
endef

# -- environments ---------------------------------------------------------------------------------

$(ENVS)/demo/ready: requirements/base.txt requirements/pins.txt src/conduit_kv/embedded/requirements.txt pyproject.toml
	$(call environment,demo,requirements/base.txt)
	$(ENVS)/demo/bin/conduit-kv setup embedded
	@touch $@

$(ENVS)/test/ready: $(wildcard requirements/*.txt) \
		src/conduit_kv/embedded/requirements.txt pyproject.toml
	$(call environment,test,requirements/test.txt)
	$(ENVS)/test/bin/python $(PIP) install --no-deps --target $(ENVS)/test/torchvision \
		--upgrade -r requirements/torchvision.txt
	$(ENVS)/test/bin/conduit-kv setup embedded
	@touch $@

$(ENVS)/transformers-5.19/ready: $(wildcard requirements/*.txt) pyproject.toml
	$(call environment,transformers-5.19,requirements/transformers-5.19.txt)
	$(ENVS)/transformers-5.19/bin/python $(PIP) install --no-deps --upgrade \
		--target $(ENVS)/transformers-5.19/torchvision -r requirements/torchvision.txt
	@touch $@

$(ENVS)/docs/ready: requirements/docs.txt requirements/base.txt requirements/pins.txt pyproject.toml
	$(call environment,docs,requirements/docs.txt)
	@touch $@

# lmms-eval pins much that no task here needs: its own code is installed alone.
$(ENVS)/lmms/ready: requirements/lmms.txt requirements/pins.txt pyproject.toml
	$(call environment,lmms,requirements/lmms.txt)
	$(ENVS)/lmms/bin/python $(PIP) install --no-deps lmms-eval==0.7.3 filelock==3.32.7
	$(ENVS)/lmms/bin/conduit-kv setup embedded
	@touch $@

$(ENVS)/ray/ready: requirements/ray.txt requirements/pins.txt pyproject.toml
	$(call environment,ray,requirements/ray.txt)
	$(ENVS)/ray/bin/conduit-kv setup embedded
	@touch $@

$(ENVS)/oracle/ready: requirements/oracle.txt
	$(PYTHON) -m venv $(ENVS)/oracle
	$(ENVS)/oracle/bin/python $(PIP) install -r requirements/oracle.txt
	@touch $@

# An environment $(1) with the pinned packages of $(2) and this package, editable.
define environment
	@echo "building environment $(1) (once)"
	$(PYTHON) -m venv $(ENVS)/$(1)
	$(ENVS)/$(1)/bin/python $(PIP) install -r $(2)
	$(ENVS)/$(1)/bin/python $(PIP) install --no-deps --no-build-isolation -e .
endef
