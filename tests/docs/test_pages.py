"""What pages say of plans and files can be parsed, and every method says when to use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from conduit_kv.bench.sweep import sweep_of
from conduit_kv.methods import registry
from conduit_kv.methods.catalogue import NAMES
from conduit_kv.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"


def test_every_method_says_when_to_use_it() -> None:
    when = yaml.safe_load((DOCS / "when.yaml").read_text())
    known = {name for names in NAMES.values() for name in names}
    assert known <= set(when) <= known | set(registry())
    assert all(isinstance(text, str) and text for text in when.values())


def test_plans_of_the_pages_can_be_read() -> None:
    text = "\n".join((DOCS / name).read_text() for name in ("plans.md", "defaults.md", "bench.md"))
    found = re.findall(r"`((?:[a-z0-9-]+):[0-9.]+(?:\([^)`]*\))?)`", text)
    assert len(found) > 6
    for plan in found:
        Plan.parse(plan)


def test_sweeps_of_the_pages_can_be_read() -> None:
    text = (DOCS / "bench.md").read_text()
    (block,) = re.findall(r'```yaml title="sweep.yaml"\n(.*?)```', text, re.S)
    settings = sweep_of(yaml.safe_load(block), "page").settings()
    assert len(settings.plans) == 10


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (DOCS / page).read_text()):
        made = target.startswith("methods/") or target in ("commands.md", "changes.md")
        assert made or (DOCS / target).exists(), target
