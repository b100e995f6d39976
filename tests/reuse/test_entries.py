"""An entry is the image's K/V in a plain prefill of the image alone, without its positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from conduit_kv import Plan
from conduit_kv.engine.compress import Run, wrapped
from conduit_kv.errors import PlanError
from conduit_kv.families import family_of
from conduit_kv.families.piece import Piece
from conduit_kv.layout import Layout
from conduit_kv.reuse import Entry, Key, columns_of, fill, rotary_of, rotate, unrotate
from tests.contracts.helpers import error
from tests.families.helpers import reaching_text_model
from tests.tiny import FAMILY_NAMES, VIDEO_NAMES, tiny_inputs, tiny_model

PREFIX = (5, 6, 7)
VARIANTS = (*FAMILY_NAMES, "llava-pixtral", "llava-full")


def pieces_of(name: str, **options: Any) -> tuple[Any, Any, Mapping[str, Any], list[Piece]]:
    model, _ = tiny_model(name)
    family = family_of(model)
    inputs = tiny_inputs(name, **options)
    ids = inputs["input_ids"][0]
    (layout,) = family.layouts(model, [ids], inputs)
    return model, family, inputs, family.pieces(model, ids, inputs, layout)


def entries_of(
    model: Any, family: Any, pieces: Sequence[Piece], prefix: Sequence[int] = PREFIX
) -> list[Entry]:
    run = Run(model, family, Plan())
    with wrapped(run):
        return [fill(run, piece, prefix) for piece in pieces]


def captured(model: Any, family: Any, inputs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """K before RoPE and V of every layer ``[G, T, d]``, by hooks on the plain model."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    text = family.text_model(model)
    width = text.layers[0].self_attn.head_dim
    handles = []

    def keep(store: list[Tensor]) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            store.append(output[0].reshape(output.shape[1], -1, width).transpose(0, 1))

        return hook

    for layer in text.layers:
        attention = layer.self_attn
        source = getattr(attention, "k_norm", attention.k_proj)
        handles.append(source.register_forward_hook(keep(keys)))
        handles.append(attention.v_proj.register_forward_hook(keep(values)))
    deltas = getattr(model.model, "rope_deltas", None)
    try:
        with torch.inference_mode():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = deltas
    return keys, values


@pytest.mark.parametrize("name", VARIANTS)
def test_an_entry_is_the_image_prefilled_alone(name: str) -> None:
    model, family, _, pieces = pieces_of(name, n_images=(2,))
    entries = entries_of(model, family, pieces)
    assert len(entries) == 2
    for piece, entry in zip(pieces, entries, strict=True):
        ids = torch.cat([torch.tensor(PREFIX), piece.span])
        alone: dict[str, Any] = {"input_ids": ids[None], **piece.inputs}
        if family.position_axes > 1:
            alone["mm_token_type_ids"] = family.kinds(model, ids)[None]
        keys, values = captured(model, family, alone)
        visual = family.visual_mask(model, ids)
        assert int(visual.sum()) == len(piece) == entry.tokens
        for layer in range(entry.layers):
            assert error(entry.keys[layer], keys[layer][:, visual]) <= 1e-5
            assert error(entry.values[layer], values[layer][:, visual]) <= 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_features_are_those_of_the_image_among_others(name: str) -> None:
    model, family, inputs, pieces = pieces_of(name, n_images=(3,))
    entries = entries_of(model, family, pieces)
    given = reaching_text_model(family, model, model, **inputs)
    for piece, entry in zip(pieces, entries, strict=True):
        assert error(entry.features, given["inputs_embeds"][0, piece.tokens]) <= 1e-5
    deepstack = given.get("deepstack_visual_embeds") or []
    for number, added in enumerate(deepstack):
        found = torch.cat([entry.deepstack[number] for entry in entries])
        assert error(found, added) <= 1e-5
    assert all(entry.deepstack.shape[0] == len(deepstack) for entry in entries)


@pytest.mark.parametrize("name", [n for n in VIDEO_NAMES if "sliding" not in n])
def test_a_videos_frame_groups_are_pieces_of_their_own(name: str) -> None:
    model, family, inputs, pieces = pieces_of(name, n_images=(0,), n_videos=(1,), frames=4)
    (layout,) = family.layouts(model, [inputs["input_ids"][0]], inputs)
    assert torch.equal(
        torch.cat([piece.tokens for piece in pieces]), layout.visual.nonzero().flatten()
    )
    if family.position_axes > 1:
        assert len(pieces) == 2  # two files' frames make one
    entries = entries_of(model, family, pieces)
    given = reaching_text_model(family, model, model, **inputs)
    for piece, entry in zip(pieces, entries, strict=True):
        assert error(entry.features, given["inputs_embeds"][0, piece.tokens]) <= 1e-5


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_keys_are_rotated_to_any_positions(name: str) -> None:
    """Where a plain prefill has put them: K of the first image, whose context is the same."""
    model, family, inputs, pieces = pieces_of(name, n_images=(1,))
    first = int(pieces[0].tokens[0]) - pieces[0].opening
    prefix = inputs["input_ids"][0, :first].tolist()
    (entry,) = entries_of(model, family, pieces, prefix)
    run = Run(model, family, Plan())
    cache = run.new_cache()
    with torch.inference_mode(), wrapped(run):
        model(**inputs, past_key_values=cache)
    text = family.text_model(model)
    rotary = rotary_of(text, cache.progress.position_ids(0))
    mine = columns_of(rotary, pieces[0].tokens)
    turned = rotate(family, text, entry.keys, mine)
    for layer in range(entry.layers):
        held, keys, _ = cache.layers[layer].read(0, [0, 1])
        assert torch.equal(held, torch.arange(len(held)))
        assert error(turned[layer], keys[:, pieces[0].tokens]) <= 1e-5
    assert error(unrotate(family, text, turned, mine), entry.keys) <= 1e-5


@pytest.mark.parametrize("name", ("llava", "qwen2.5-vl"))
def test_rotation_is_exact_in_bf16(name: str) -> None:
    """fp32 arithmetic: rounding happens once, at the end."""
    model, family, _, pieces = pieces_of(name, n_images=(1,))
    (entry,) = entries_of(model, family, pieces)
    text = family.text_model(model)
    positions = entry.positions + 1000
    rotary = rotary_of(text, positions)
    assert rotary[0].dtype == torch.float32
    low = entry.keys.bfloat16()
    expected = rotate(family, text, low.double().float(), rotary).bfloat16()
    assert torch.equal(rotate(family, text, low, rotary), expected)


@pytest.mark.parametrize("name", ("llava-next-sliding", "qwen2.5-vl-sliding"))
def test_layers_with_a_window_are_refused(name: str) -> None:
    model, family, _, pieces = pieces_of(name, n_images=(1,))
    with pytest.raises(PlanError, match="no causal full attention"):
        entries_of(model, family, pieces)


def test_filling_leaves_the_model_as_it_was() -> None:
    model, family, _, pieces = pieces_of("qwen2.5-vl", n_images=(1,))
    model.model.rope_deltas = torch.tensor([[7]])
    try:
        entries_of(model, family, pieces)
        assert model.model.rope_deltas.tolist() == [[7]]
    finally:
        model.model.rope_deltas = None
    assert "forward" not in vars(model)


# -- keys ------------------------------------------------------------------------------------------


def digests(name: str = "llava", prefix: Sequence[int] = PREFIX, **options: Any) -> list[str]:
    model, _, _, pieces = pieces_of(name, **options)
    return [Key.of(piece, prefix, model).digest for piece in pieces]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_key_does_not_depend_on_the_rest_of_the_prompt(name: str) -> None:
    text = ("Something else ", " then ", " Say what the dog is please.")
    assert digests(name, n_images=(2,)) == digests(name, n_images=(2,), text=text)
    swapped = pieces_of(name, n_images=(2,))
    assert len({Key.of(piece, PREFIX, swapped[0]).digest for piece in swapped[3]}) == 2


def test_keys_tell_apart_all_that_an_entry_depends_on() -> None:
    model, _, _, (piece,) = pieces_of("llava", n_images=(1,))
    key = Key.of(piece, PREFIX, model)
    others = [
        Key.of(piece, (5, 6), model),
        Key.of(piece, PREFIX, model, tenant="another"),
        Key.of(piece, PREFIX, model, processor="another"),
        Key.of(piece, PREFIX, tiny_model("llava-siglip")[0]),
    ]
    changed = dict(piece.inputs)
    changed["pixel_values"] = changed["pixel_values"].clone()
    changed["pixel_values"].view(-1)[-1] += 1e-6
    others.append(
        Key.of(
            Piece(piece.tokens, piece.span, piece.opening, changed, 0, piece.grid), PREFIX, model
        )
    )
    assert len({key.digest, *(other.digest for other in others)}) == len(others) + 1


def test_a_weight_changed_in_place_changes_the_key() -> None:
    import copy

    model, _, _, (piece,) = pieces_of("llava", n_images=(1,))
    other = copy.deepcopy(model)
    before = Key.of(piece, PREFIX, other).digest
    assert before == Key.of(piece, PREFIX, model).digest
    with torch.no_grad():
        other.model.language_model.layers[0].self_attn.k_proj.weight[0, 0] += 1e-3
    assert Key.of(piece, PREFIX, other).digest != before


def test_pixels_of_another_shape_have_another_key() -> None:
    """30 x 100 against 100 x 30 pixels, the same bytes in the same order."""
    inputs = {"pixel_values": torch.arange(9000.0).view(1, 3, 30, 100)}
    turned = {"pixel_values": torch.arange(9000.0).view(1, 3, 100, 30)}
    model, _, _, (piece,) = pieces_of("llava", n_images=(1,))
    keys = [
        Key.of(Piece(piece.tokens, piece.span, 0, each, 0, piece.grid), PREFIX, model)
        for each in (inputs, turned)
    ]
    assert keys[0].digest != keys[1].digest


def test_layout_of_a_text_has_no_pieces() -> None:
    model, _ = tiny_model("llava")
    assert family_of(model).pieces(model, torch.arange(3), {}, Layout.text_only(3)) == []
