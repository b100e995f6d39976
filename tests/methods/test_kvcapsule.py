"""KVCapsule: fitting, the artefact, packing and attention, against slow references."""

from __future__ import annotations

import pytest
import torch

from conduit_kv import VLM, InputError, PlanError, compress, load_artefact
from conduit_kv.cache import Capsule, PackedSegment
from conduit_kv.capsule import Moments
from conduit_kv.capsule.fit import fit, image_files
from conduit_kv.capsule.moments import _removal
from conduit_kv.engine.report import Report
from conduit_kv.methods.hold.stride_interpolate import interpolation
from conduit_kv.plan import Plan
from tests.contracts.helpers import (
    TOLERANCE,
    as_it_was,
    batch_and_singles,
    converse,
    error,
    held,
    same_held,
    tokens,
    turn,
    with_cache,
)
from tests.tiny import tiny_model
from tests.tiny.parts import picture

FAMILIES = ("llava", "qwen2.5-vl", "qwen3-vl")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Per family: the artefact's file, fitted on a few pictures in blocks of 4."""
    folder = tmp_path_factory.mktemp("artefacts")
    files = {}
    for name in FAMILIES:
        vlm = VLM(*tiny_model(name))
        files[name] = folder / f"{name}.safetensors"
        fit(vlm, [picture(56, 56, seed) for seed in range(12)], files[name], block=4)
    return files


def moments_in(file):
    return Moments.of(load_artefact(file))


def plans(file):
    return [
        f"kvcapsule:0.5(artefact={file})",
        f"kvcapsule:0.5(artefact={file}, rebuild=once)",
        f"pca:0.5(artefact={file})",
        "stride-interpolate:0.5(block=4)",
    ]


def capsules(cache):
    return [s for layer in cache for s in layer.frozen if isinstance(s, PackedSegment)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(4))
def test_what_is_rebuilt_is_what_is_attended(fitted, family, number):
    """Attention on coefficients equals attention on what they stand for."""
    model, _ = tiny_model(family)
    plan = plans(fitted[family])[number]
    run = converse(model, plan, [turn(family, 2)])
    assert len(capsules(run.cache)) == 4
    plain = converse(model, "full", [turn(family, 2)])
    layout = run.cache.progress.layouts[0]
    for mine, its in zip(run.cache, plain.cache, strict=True):
        every = list(range(mine.kv_heads))
        index, keys, values = mine.read(0, every)
        assert torch.equal(index, its.held(0, 0))
        exact = (keys - its.tail.keys[0]).abs().amax((0, 2)) < 1e-6
        assert exact[layout.text].all() and not exact.all()
        if "pca" not in plan:
            store = mine.frozen[0].rows[0][0].store
            blocks = len(mine.frozen[0].rows[0][0].index) // 4
            assert int(exact[layout.visual].sum()) >= blocks * len(store.parts.kept)
        with torch.inference_mode():
            its.tail.keys[0], its.tail.values[0] = keys, values
    later = [tokens(70), tokens(71, 72, 73)]
    found = converse(model, plan, later, cache=run.cache)
    expected = converse(model, "full", later, cache=plain.cache)
    assert error(found.logits, expected.logits) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_follow_the_formulas(fitted, family):
    """One block by hand: RoPE off with the model's own rotation, prediction, RoPE on."""
    from conduit_kv.families import family_of
    from conduit_kv.reuse.rotate import rotary_of, rotate, unrotate

    model, _ = tiny_model(family)
    artefact = moments_in(fitted[family])
    plan = f"kvcapsule:0.5(artefact={fitted[family]})"
    cache = converse(model, plan, [turn(family, 1)]).cache
    plain = converse(model, "full", [turn(family, 1)]).cache
    kind, text = family_of(model), family_of(model).text_model(model)
    rotary = rotary_of(text, cache.progress.position_ids(0))
    visual = torch.nonzero(cache.progress.layouts[0].visual).flatten()[:4]
    for number, (layer, its) in enumerate(zip(cache, plain, strict=True)):
        keys, values = its.tail.keys[0], its.tail.values[0]
        free = unrotate(kind, text, keys[None], rotary)[0]
        mean = artefact.key_mean[number]
        count, rank = artefact.counts(0.5)[number]
        kept = sorted(_removal(artefact.key_covariance[number])[0][:count])
        others = [t for t in range(4) if t not in kept]
        covariance = artefact.key_covariance[number].double()
        ridge = 1e-4 * covariance.diagonal().mean()
        rebuilt = free.clone()
        for t in others:
            inner = covariance[kept][:, kept] + ridge * torch.eye(count, dtype=torch.float64)
            weights = torch.linalg.solve(inner, covariance[kept, t]).float()
            apart = torch.stack([free[:, visual[k]] - mean[:, k] for k in kept])
            rebuilt[:, visual[t]] = mean[:, t] + (weights[:, None, None] * apart).sum(0)
        rebuilt = rotate(kind, text, rebuilt[None], rotary)[0]
        vectors = torch.linalg.eigh(artefact.value_covariance[number].double()).eigenvectors
        basis = vectors.flip(1)[:, :rank].float()
        apart = values[:, visual] - artefact.value_mean[number]
        wanted = artefact.value_mean[number] + basis @ (basis.T @ apart)
        _, found_keys, found_values = layer.read(0, list(range(layer.kv_heads)))
        assert torch.allclose(found_keys[:, visual], rebuilt[:, visual], atol=1e-4)
        assert torch.allclose(found_values[:, visual], wanted, atol=1e-4)


def test_moments_are_those_of_all_blocks(fitted):
    model, processor = tiny_model("llava")
    vlm = VLM(model, processor)
    artefact = moments_in(fitted["llava"])
    assert load_artefact(fitted["llava"]).config["images"] == 12
    assert artefact.block == 4 and artefact.layers == 4
    values = []
    for seed in range(12):
        content = [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]
        text = vlm.render([{"role": "user", "content": content}])
        cache = vlm.prefill(vlm.process(text, [picture(56, 56, seed)])).cache
        visual = torch.nonzero(cache.progress.layouts[0].visual).flatten()
        visual = visual[: len(visual) // 4 * 4]
        values.append(cache.layers[2].tail.values[0][:, visual].unflatten(1, (-1, 4)))
    everything = torch.cat(values, 1).double()
    mean = everything.mean(1)
    assert torch.allclose(artefact.value_mean[2].double(), mean, atol=1e-5)
    apart = everything - mean[:, None]
    covariance = torch.einsum("pbsc,pbtc->st", apart, apart) / everything.shape[1]
    assert torch.allclose(artefact.value_covariance[2].double(), covariance, atol=1e-5)


def random_artefact(layers=5, block=6, seed=0):
    random = torch.Generator().manual_seed(seed)
    pair = []
    for _ in range(2):
        factor = torch.randn(layers, block, block, generator=random)
        factor[:, 2:] *= torch.rand(layers, 1, 1, generator=random)
        pair.append(factor @ factor.transpose(1, 2))
    mean = torch.randn(layers, 2, block, 8, generator=random)
    return Moments(mean, pair[0], mean.clone(), pair[1])


@pytest.mark.parametrize("keep", [0.2, 0.4, 0.75, 1.0])
def test_the_budget_is_spent_to_the_last_number(keep):
    artefact = random_artefact()
    counts = artefact.counts(keep)
    total = sum(a + b for a, b in counts)
    assert total == max(int(keep * 2 * 6 * 5 + 1e-9), 10)
    assert all(1 <= a <= 6 and 1 <= b <= 6 for a, b in counts)
    assert keep == 1.0 or len(set(counts)) > 1
    for (keys, values), parts in zip(counts, artefact.parts(keep), strict=True):
        assert len(parts.kept) == keys and parts.basis.shape == (6, values)


def test_the_order_of_keys_is_the_greedy_one():
    covariance = random_artefact().key_covariance[1].double()

    def left(chosen):
        if not chosen:
            return float(covariance.diagonal().sum())
        inner = covariance[chosen][:, chosen] + 1e-12 * torch.eye(len(chosen)).double()
        cross = covariance[chosen]
        return float((covariance - cross.T @ torch.linalg.solve(inner, cross)).diagonal().sum())

    order, errors = _removal(covariance.float())
    chosen = []
    for step, token in enumerate(order):
        rest = [t for t in range(6) if t not in chosen]
        assert token == min(rest, key=lambda t: left([*chosen, t])) or step == 5
        chosen.append(token)
        assert errors[step + 1] == pytest.approx(left(chosen) / left([]), abs=1e-4)


def test_interpolation():
    weights = interpolation(torch.tensor([1, 3]), 6)
    assert weights.tolist() == [[1, 0], [1, 0], [0.5, 0.5], [0, 1], [0, 1], [0, 1]]


def test_keeping_everything_is_the_identity(fitted):
    model, _ = tiny_model("llava")
    for name in ("kvcapsule", "pca", "stride-interpolate"):
        run = converse(model, f"{name}:1.0", [turn("llava", 1)])
        assert not capsules(run.cache)


def test_nothing_is_lost_where_all_numbers_are_kept(fitted):
    """Just under 1.0 of few numbers is still all of them: the packed path is then exact."""
    model, _ = tiny_model("llava")
    parts = [turn("llava", 2), tokens(70)]
    plain = converse(model, "full", parts)
    for plan in (f"kvcapsule:0.9999(artefact={fitted['llava']})", "stride-interpolate:0.9999"):
        run = converse(model, plan.replace("0.9999)", "0.9999, block=4)"), parts)
        assert error(run.logits, plain.logits) < 0.2
    exact = converse(model, "stride-interpolate:0.999999999999(block=4)", parts)
    assert error(exact.logits, plain.logits) < 1e-4


@pytest.mark.parametrize("number", range(4))
def test_batches_beams_forks_and_bytes(fitted, number):
    model, processor = tiny_model("llava")
    plan = plans(fitted["llava"])[number]
    batch, singles = batch_and_singles("llava", (2, 0, 1))
    step = torch.tensor([[70], [71], [72]])
    with as_it_was(model), compress(model, plan) as run:
        model(**batch)
        together = run.cache
        found = model(input_ids=step, **with_cache(model, together)).logits
        for row, inputs in enumerate(singles):
            model(**inputs)
            logits = model(input_ids=step[row : row + 1], **with_cache(model, run.cache)).logits
            assert error(found[row : row + 1], logits) < 1e-4
            assert same_held(held(together, row), held(run.cache))
        model.generate(**batch, num_beams=2, max_new_tokens=3, do_sample=False)
        report = Report.of(run.cache)
    assert report.kv_bytes < report.full_bytes
    assert (report.learned_bytes > 0) and "learned parts" in str(report)
    vlm = VLM(model, processor)
    watched = [Plan.of(plan), Plan.of("rtn:4")]
    state = vlm.prefill(singles[0], "full", watch=watched)
    fork = vlm.forks(state, watched)[0]
    own = vlm.prefill(singles[0], plan)
    assert vlm.decode_together([fork], 3) == vlm.decode_together([own], 3)


def test_bytes_are_the_share_kept(fitted):
    model, _ = tiny_model("llava")
    cache = converse(model, plans(fitted["llava"])[0], [turn("llava", 2)]).cache
    visual = int(cache.progress.layouts[0].visual.sum())
    report = Report.of(cache)
    text = len(cache.progress.layouts[0]) - visual
    per_token = report.full_bytes / len(cache.progress.layouts[0])
    share = moments_in(fitted["llava"]).counts(0.5)
    kept = sum(a + b for a, b in share) / (2 * 4 * len(share))
    assert report.kv_bytes == pytest.approx(per_token * (text + kept * visual))
    assert report.visual_bits == pytest.approx(16 * kept)
    # The angles are there once, not once per layer.
    assert report.bytes_by_kind["rotary"] == visual * 16 * 4


def test_what_is_left_of_an_image_stays_as_it_is():
    model, _ = tiny_model("llava")
    cache = converse(model, "stride-interpolate:0.5(block=5)", [turn("llava", 1)]).cache
    visual = int(cache.progress.layouts[0].visual.sum())
    assert len(cache.layers[0].frozen[0].held(0, 0)) == visual // 5 * 5 < visual


@pytest.mark.parametrize("other", ["tgv-kv:0.5", "snapkv:128", "random:0.9"])
def test_beside_methods_that_take_tokens_out_it_is_refused(other):
    with pytest.raises(PlanError, match="whole blocks"):
        Plan.parse(f"{other} + kvcapsule:0.4")
    Plan.parse(f"{other} + kvcapsule:1.0")
    Plan.parse("full + kvcapsule:0.4")


def test_refusals(fitted, tmp_path):
    model, processor = tiny_model("qwen2.5-vl")
    with pytest.raises(PlanError, match="another model"):
        converse(model, plans(fitted["llava"])[0], [turn("qwen2.5-vl", 1)])
    with pytest.raises(PlanError, match="another model"):
        load_artefact(fitted["llava"], VLM(model, processor))
    assert load_artefact(fitted["qwen2.5-vl"], model).layers == 4
    with pytest.raises(InputError, match="no artefact can be read"):
        load_artefact(tmp_path / "nothing.safetensors")
    good = fitted["llava"].read_bytes()
    for place in (len(good) - 5, len(good) // 2):
        bad = bytearray(good)
        bad[place] ^= 1
        (tmp_path / "bad.safetensors").write_bytes(bad)
        with pytest.raises(InputError, match=r"damaged|version"):
            load_artefact(tmp_path / "bad.safetensors")
    (tmp_path / "short.safetensors").write_bytes(good[:-100])
    with pytest.raises(InputError, match="damaged"):
        load_artefact(tmp_path / "short.safetensors")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="version"):
        load_artefact(tmp_path / "other.safetensors")
    for text in ("kvcapsule:1.5", "kvcapsule:0", "stride-interpolate:0.1(block=4)"):
        with pytest.raises(PlanError):
            Plan.parse(text)


def test_an_interrupted_fit_goes_on(fitted, tmp_path, monkeypatch):
    from conduit_kv.capsule import fit as module

    vlm = VLM(*tiny_model("llava"))
    pictures = [picture(56, 56, seed) for seed in range(12)]
    out = tmp_path / "a.safetensors"
    monkeypatch.setattr(module, "_SAVE_EVERY", 5)
    seen = []

    def stop(done, total):
        seen.append(done)
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(vlm, pictures, out, block=4, progress=stop)
    assert not out.exists()
    fit(vlm, pictures, out, block=4, progress=lambda done, total: seen.append(done))
    assert seen == [*range(1, 8), *range(6, 13)]
    again, once = moments_in(out), moments_in(fitted["llava"])
    assert torch.allclose(again.key_covariance, once.key_covariance, rtol=1e-5)
    assert not list(tmp_path.glob("*.progress"))
    with pytest.raises(InputError, match="fewer than a block"):
        fit(vlm, pictures, tmp_path / "b.safetensors", block=1000)
    with pytest.raises(InputError, match="no image"):
        fit(vlm, [], tmp_path / "b.safetensors")


def test_the_command(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from conduit_kv.cli import common
    from conduit_kv.cli import fit as command
    from conduit_kv.cli.app import app

    vlm = VLM(*tiny_model("llava"))
    monkeypatch.setattr(command, "load_vlm", lambda *args, **kwargs: vlm)
    assert common.load_vlm
    for seed in range(3):
        picture(56, 56, seed).save(tmp_path / f"{seed}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    assert len(image_files(tmp_path)) == 3
    out = tmp_path / "out.safetensors"
    found = CliRunner().invoke(
        app,
        ["fit", "kvcapsule", "--model", "x", "--images", str(tmp_path), "--out", str(out),
         "--keep", "0.5", "--block", "4"],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "3 images, blocks of 4" in found.output and load_artefact(out).config["images"] == 3
    for bad in (["--images", str(tmp_path / "none")], ["--keep", "2"]):
        found = CliRunner().invoke(
            app, ["fit", "kvcapsule", "--model", "x", "--images", str(tmp_path), "--out", str(out),
                  *bad],
        )  # fmt: skip
        assert found.exit_code == 2


@pytest.mark.parametrize("start", [0, 5_000, 120_000])
def test_turning_the_query_equals_rebuilding_the_keys_at_any_position(start):
    """Where cosines are in fp32, which at large positions is a few thousandths off."""
    torch.manual_seed(1)
    parts = random_artefact().parts(0.5)[2]
    blocks, width = 9, 8
    angles = (torch.arange(start, start + blocks * 6).float()[:, None]
              * 10_000.0 ** -(torch.arange(0, width, 2) / width))  # fmt: skip
    keys, values = (torch.randn(2, blocks * 6, width) for _ in range(2))
    stored = Capsule.of(keys, values, angles.cos(), angles.sin(), parts, False)
    assert stored._turns is not None
    query = torch.randn(1, 4, 1, width)
    index = torch.arange(blocks * 6, dtype=torch.int32)[None, None]
    found, lse = stored.attend(query, 0.3, index)
    k, v = stored.dense(torch.float32)
    logits = query[0, :, 0].view(2, 2, width) @ k.transpose(1, 2) * 0.3
    expected = (logits.softmax(-1) @ v).flatten(0, 1)
    tolerance = 1e-5 if start < 100_000 else 2e-2
    assert torch.allclose(found[0, :, 0], expected, atol=tolerance)
    assert torch.allclose(lse.flatten(), logits.logsumexp(-1).flatten(), atol=tolerance)


def test_blocks_that_are_turned_differently_are_rebuilt():
    torch.manual_seed(1)
    parts = random_artefact().parts(0.5)[2]
    places = torch.arange(12)
    places[9:] += 1  # a gap inside the second block
    angles = places.float()[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    keys, values = (torch.randn(2, 12, 8) for _ in range(2))
    assert Capsule.of(keys, values, angles.cos(), angles.sin(), parts, False)._turns is None
