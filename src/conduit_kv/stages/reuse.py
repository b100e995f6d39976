"""The reuse stage of one request: images come as stored K/V, and few of their tokens run.

The text that a request begins with sees nothing but itself. Its K/V are exact wherever it comes
back, and whole blocks of it are taken from the store too: they never run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conduit_kv.cache import VisualCache, VisualLayer
from conduit_kv.cache.cache import borrowed
from conduit_kv.errors import PlanError
from conduit_kv.families import Family
from conduit_kv.families.piece import Piece
from conduit_kv.methods.reuse import ReuseMethod, ReuseView
from conduit_kv.methods.reuse.base import top
from conduit_kv.reuse.entry import Entry
from conduit_kv.reuse.fill import Recorder
from conduit_kv.reuse.keys import TEXT_BLOCK, Key
from conduit_kv.reuse.rotate import columns_of, rotary_of, rotate
from conduit_kv.reuse.shelf import Shelf, Taken

if TYPE_CHECKING:
    from conduit_kv.engine.compress import Run
    from conduit_kv.stack import Stream


@dataclass(frozen=True)
class Usage:
    """What reuse did to a request, over all of its turns.

    Attributes
    ----------
    image_tokens, text_tokens : int
        Tokens of turns that brought images.
    cached_image_tokens, cached_text_tokens : int
        Visual and text tokens whose K/V were in the store.
    computed_tokens : int
        Visual tokens whose image had to be prefilled alone.
    refreshed_tokens : int
        Visual tokens that were computed again in this request.
    stored : dict
        Per tier (``memory``, ``disk``, ``redis``): entries, bytes and seconds of what came from it.
    fill_seconds : float
        What it took to prefill images alone.
    saved_seconds : float
        Estimate: what computing the stored entries took when it was done, less loading.
    """

    image_tokens: int = 0
    text_tokens: int = 0
    cached_image_tokens: int = 0
    cached_text_tokens: int = 0
    computed_tokens: int = 0
    refreshed_tokens: int = 0
    stored: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)
    fill_seconds: float = 0.0
    saved_seconds: float = 0.0

    def add(self, images: Sequence[Taken], text: Sequence[Taken]) -> Usage:
        """With images and blocks of text that were just taken."""
        stored = dict(self.stored)
        found = [one for one in images if one.tier != "computed"]
        computed = [one for one in images if one.tier == "computed"]
        for one in (*found, *text):
            entries, size, seconds = stored.get(one.tier, (0, 0, 0.0))
            stored[one.tier] = (entries + 1, size + one.entry.nbytes, seconds + one.seconds)
        return replace(
            self,
            cached_image_tokens=self.cached_image_tokens + sum(one.entry.tokens for one in found),
            cached_text_tokens=self.cached_text_tokens + sum(one.entry.tokens for one in text),
            computed_tokens=self.computed_tokens + sum(one.entry.tokens for one in computed),
            stored=stored,
            fill_seconds=self.fill_seconds + sum(one.seconds for one in computed),
            saved_seconds=self.saved_seconds
            + sum(max(0.0, one.entry.seconds - one.seconds) for one in (*found, *text)),
        )


@dataclass(frozen=True)
class _Part:
    """An entry of a turn.

    Attributes
    ----------
    columns : Tensor
        ``[N]`` int64 ascending, its tokens' places in the turn.
    entry : Entry
    keys : Tensor
        ``[L, G, N, d]``, rotated to their places.
    """

    columns: Tensor
    entry: Entry
    keys: Tensor


@dataclass
class _Turn:
    """A turn that brings images, between its top-level forward and its text stack.

    Attributes
    ----------
    images : list of _Part
        In the order of the sequence.
    text : list of _Part
        Blocks that the turn begins with.
    missing : list of Key
        Of the blocks after these that are to be stored.
    """

    family: Family
    text_model: nn.Module
    images: list[_Part]
    text: list[_Part]
    missing: list[Key]

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.images[0].entry.layers


@dataclass
class Reuse:
    """The reuse stage of one request.

    Attributes
    ----------
    method : ReuseMethod
    cache : VisualCache
    shelf : Shelf
        Where entries come from.
    usage : Usage
    refreshed : Tensor
        ``[n]`` int64, the visual tokens of the newest turn that were computed again, to the last
        layer.
    notes : list of str
    decided_at : int
        Columns seen at the end of the newest turn that brought images: what was computed again was
        chosen by its text, so that it cannot be taken back in part.
    running : bool
        Whether a turn is being run in passes.
    """

    method: ReuseMethod
    cache: VisualCache
    shelf: Shelf
    usage: Usage = field(default_factory=Usage)
    refreshed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    notes: list[str] = field(default_factory=list)
    decided_at: int = 0
    running: bool = False
    _turn: _Turn | None = None
    _listening: _Listener | None = None
    _pilot: _Pilot | None = None

    def __post_init__(self) -> None:
        self.cache = borrowed(self.cache)

    def fork(self, cache: VisualCache) -> Reuse:
        """This stage's state for a fork of its cache."""
        return replace(
            self, cache=cache, notes=list(self.notes), _turn=None, _listening=None, _pilot=None
        )

    def select_rows(self, rows: Sequence[int]) -> None:
        """Follow the cache when beams are reordered: nothing here belongs to a row."""

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held for later: its kind, itself, and its bytes."""
        yield "positions", self.refreshed, self.refreshed.numel() * self.refreshed.element_size()

    @property
    def waiting(self) -> bool:
        """Whether the next step's images have been taken from the shelf."""
        return self._turn is not None

    @property
    def listening(self) -> bool:
        """Whether stage 1 is being scored."""
        return self._listening is not None

    @property
    def steering(self) -> bool:
        """Whether tokens leave a pass layer by layer."""
        return self._pilot is not None

    def steer(self, layer: int, stream: Stream) -> None:
        """Before a layer of a pass that is steered."""
        if self._pilot is not None:
            self._pilot.steer(layer, stream)

    def take(self, run: Run, ids: Tensor, pieces: Sequence[Piece], positions: Tensor) -> None:
        """Get the entries of a turn's images and of the text it begins with, before it runs.

        Parameters
        ----------
        ids : Tensor
            ``[n]`` int64, the turn's tokens.
        pieces : sequence of Piece
            From :meth:`Family.pieces`, of the turn's tokens alone.
        positions : Tensor
            ``[axes, n]`` int64 of the turn's tokens.
        """
        text_model = run.family.text_model(run.model)
        rotary = rotary_of(text_model, positions)

        def part(columns: Tensor, entry: Entry) -> _Part:
            mine = columns_of(rotary, columns)
            return _Part(columns, entry, rotate(run.family, text_model, entry.keys, mine))

        images, shown = [], []
        # Rotating one image overlaps with loading the next.
        for piece, one in zip(
            pieces, self.shelf.take(run, pieces, self.method.context), strict=True
        ):
            images.append(one)
            shown.append(part(piece.tokens, one.entry))
        # Later turns begin with text too, but it sees all that was before.
        opening = 0 if self.cache.progress.seen else int(pieces[0].tokens[0])
        text, missing = self.shelf.take_text(run, ids[:opening])
        places = torch.arange(opening).split(TEXT_BLOCK)
        said = [part(columns, one.entry) for columns, one in zip(places, text, strict=False)]
        self.usage = self.usage.add(images, text)
        self._turn = _Turn(run.family, text_model, shown, said, missing)

    # -- the two passes ----------------------------------------------------------------------

    def run(
        self,
        stack: Callable[..., Any],
        embeddings: Tensor,
        position_ids: Tensor,
        features: Mapping[str, Any],
    ) -> Any:
        """Run a turn whose images were taken: see :meth:`RequestCache.run`."""
        turn, self._turn = self._turn, None
        if turn is None:
            raise RuntimeError("no images have been taken for this turn")
        progress = self.cache.progress
        whole = progress.step_tokens
        embeddings = embeddings.clone()
        for image in turn.images:
            embeddings[0, image.columns] = image.entry.features.to(embeddings)
        self.cache.take_in(embeddings)
        self.running = True
        try:
            return self._run(turn, stack, embeddings, position_ids)
        finally:
            self.running, self._listening, self._pilot = False, None, None
            self.cache.recorder = None
            progress.step_tokens = whole
            for layer in self.cache.layers:
                layer.close()

    def _run(
        self, turn: _Turn, stack: Callable[..., Any], embeddings: Tensor, position_ids: Tensor
    ) -> Any:
        progress = self.cache.progress
        whole = progress.step_tokens.to(embeddings.device)
        tokens = whole[0].long().cpu()
        layout = progress.layouts[0].select(tokens)
        self._lay_out(turn, tokens)
        visual, text = layout.visual.nonzero().flatten(), layout.text.nonzero().flatten()
        texts, known = len(text), TEXT_BLOCK * len(turn.text)
        # What the store lacks of the opening text runs once, and then is as if it had been there.
        new = torch.arange(known, known + TEXT_BLOCK * len(turn.missing))
        text = text[known + len(new) :]
        last = int(visual[-1])
        span = torch.arange(last + 1, len(tokens)) if last + 1 < len(tokens) else visual[-1:]
        states = embeddings.new_full((1, len(tokens), embeddings.shape[-1]), torch.nan)

        def pass_over(columns: Tensor, **options: Any) -> Any:
            progress.step_tokens = whole[:, columns.to(whole.device)]
            at = columns.to(embeddings.device)
            output = stack(
                embeddings[:, at],
                position_ids[..., columns.to(position_ids.device)],
                self._features(turn, columns),
                **options,
            )
            states[:, at] = output.last_hidden_state
            return output

        def first_pass(columns: Tensor, **options: Any) -> None:
            """Run ``columns``, and the new text with them, which is stored."""
            rows = torch.cat([new, columns])
            if len(new):
                self.cache.recorder = Recorder(turn.family, torch.arange(len(new)))
            start = time.perf_counter()
            if len(rows):
                pass_over(rows, **options)
            if len(new):
                share = len(new) / len(rows)
                self._store(turn, new, len(tokens), (time.perf_counter() - start) * share)

        image = layout.image[visual]
        count = self.method.count(len(visual))
        if self.method.in_one_pass:
            first_pass(new[:0], evict=False)
            pilot = self._pilot = _Pilot(self.method, turn, visual, text)
            output = pass_over(pilot.columns)
            chosen = pilot.running
        elif not count:
            if last + 1 == len(tokens):
                raise PlanError(f"{self.method} leaves nothing to run: end the prompt with text")
            first_pass(new[:0], evict=False)
            chosen = visual[:0]
            output = pass_over(text)
        else:
            scores: list[Tensor] = []
            again = torch.cat([text, span]).unique() if self.method.refresh_text else span
            if self.method.scores_layers:
                first = torch.cat([text, span]).unique()
                listener = _Listener(self.method, self.cache, tokens, image, visual, span, scores)
                if self.method.needs_deviation:
                    pilot = _Pilot(self.method, turn, visual, torch.cat([new, first]), probe=True)
                    listener.pilot = self._pilot = pilot
                    first = pilot.columns[len(new) :]
                self._listening = listener
                first_pass(first, evict=True)
                self._listening = self._pilot = None
            else:  # the question runs in stage 2 alone, since nobody listens to it in stage 1
                first_pass(text[~torch.isin(text, again)], evict=False)
            chosen = visual[self.method.choose(scores, image)]
            output = pass_over(torch.cat([chosen, again]).unique())
        self.refreshed = tokens[chosen]
        self.usage = replace(
            self.usage,
            image_tokens=self.usage.image_tokens + len(visual),
            text_tokens=self.usage.text_tokens + texts,
            refreshed_tokens=self.usage.refreshed_tokens + count,
        )
        self.decided_at = progress.seen
        output.last_hidden_state = states
        return output

    def _store(self, turn: _Turn, columns: Tensor, count: int, seconds: float) -> None:
        """Store the blocks that have just run as the first of ``count`` columns, and been heard."""
        recorder, self.cache.recorder = self.cache.recorder, None
        keys = torch.stack(recorder.keys)
        values = torch.stack([layer.newest(count)[:, columns] for layer in self.cache.layers])
        positions = self.cache.progress.position_ids(0)[:, columns]
        for number, key in enumerate(turn.missing):
            block = slice(number * TEXT_BLOCK, (number + 1) * TEXT_BLOCK)
            entry = Entry(
                digest=key.digest,
                keys=keys[:, :, block].clone(),
                values=values[:, :, block].clone(),
                features=keys.new_empty((TEXT_BLOCK, 0)),
                deepstack=keys.new_empty((0, TEXT_BLOCK, 0)),
                positions=positions[:, block].clone(),
                grid=None,
                seconds=seconds / len(turn.missing),
            )
            self.shelf.store.put(key, entry)

    def _lay_out(self, turn: _Turn, tokens: Tensor) -> None:
        """Put what was taken where its tokens will lie, in every layer."""
        layers = turn.family.layers(turn.text_model)
        for number, layer in enumerate(self.cache.layers):
            like = turn.images[0].keys[number]
            device = next(layers[number].parameters()).device
            shape = (1, like.shape[0], len(tokens), like.shape[2])
            keys = torch.zeros(shape, dtype=like.dtype, device=device)
            values = torch.zeros(shape, dtype=like.dtype, device=device)
            for part in (*turn.text, *turn.images):
                keys[0, :, part.columns] = part.keys[number].to(device)
                values[0, :, part.columns] = part.entry.values[number].to(device)
            layer.open(keys, values, tokens)

    def _features(self, turn: _Turn, columns: Tensor) -> Mapping[str, Any]:
        """What DeepStack adds to those of the columns that are visual tokens."""
        depth = max(image.entry.deepstack.shape[0] for image in turn.images)
        if not depth:
            return {}
        mask = torch.zeros(len(columns), dtype=torch.bool)
        parts: list[list[Tensor]] = [[] for _ in range(depth)]
        for image in turn.images:
            mine = torch.isin(image.columns, columns).to(image.entry.keys.device)
            mask |= torch.isin(columns, image.columns)
            for level in range(depth):
                parts[level].append(image.entry.deepstack[level][mine])
        if not bool(mask.any()):
            return {}
        # Images come in order and columns ascend, so that the order is the same.
        return {
            "visual_pos_masks": mask[None].to(parts[0][0].device),
            "deepstack_visual_embeds": [torch.cat(level) for level in parts],
        }

    def observe(self, layer: int, queries: Tensor, scaling: float) -> None:
        """After a layer of stage 1: ``[1, H, m, d]`` of the text."""
        if self._listening is not None:
            self._listening.observe(layer, queries, scaling)


@dataclass
class _Listener:
    """Scores the visual tokens of a turn while its text runs over them."""

    method: ReuseMethod
    cache: VisualCache
    tokens: Tensor
    image: Tensor
    visual: Tensor
    span: Tensor
    scores: list[Tensor]
    pilot: _Pilot | None = None

    def observe(self, layer: int, queries: Tensor, scaling: float) -> None:
        images = len(self.image.unique())
        if not self.method.listens_to(layer, len(self.cache.layers), images):
            return
        held: VisualLayer = self.cache.layers[layer]
        ran = self.cache.progress.step_tokens[0].long().cpu()
        span = self.tokens[self.span]
        mine = torch.isin(ran, span)
        view = ReuseView(
            layer=layer,
            n_layers=len(self.cache.layers),
            image=self.image,
            values=held.newest(len(self.tokens))[:, self.visual],
            attend=lambda: span_attention(
                held, queries[0][:, mine.to(queries.device)], ran[mine], scaling
            )[self.tokens[self.visual]],
            deviation=None if self.pilot is None else self.pilot.deviation,
        )
        self.scores.append(self.method.score(view).float().cpu())


@dataclass
class _Pilot:
    """Lets visual tokens leave a pass by how far their K and V are from the stored ones.

    Attributes
    ----------
    text : Tensor
        ``[n]`` int64 ascending, the columns of the pass that run in every layer.
    probe : bool
        Whether all of them leave after layer 0, which has told how far the values of layer 1 are.
    columns : Tensor
        ``[n]`` int64 ascending, all columns of the pass.
    running : Tensor
        ``[n]`` int64, the visual columns that run at last.
    by_layer : list of Tensor
        Those that ran in each layer so far.
    deviation : Tensor or None
        ``[G, V, d]``, of the values in layer 1.
    """

    method: ReuseMethod
    turn: _Turn
    visual: Tensor
    text: Tensor
    probe: bool = False
    by_layer: list[Tensor] = field(default_factory=list)
    deviation: Tensor | None = None

    def __post_init__(self) -> None:
        self.running = self.visual
        self.columns = self._with_text()

    def _with_text(self) -> Tensor:
        """``[m]`` int64 ascending, the columns that run now."""
        columns: Tensor = torch.cat([self.running, self.text]).unique()
        return columns

    def steer(self, layer: int, stream: Stream) -> None:
        """Before a layer: choose who runs in it."""
        if layer and (layer == 1 or not self.probe):
            family, module = self.turn.family, stream.family.layers(stream.text_model)[layer]
            at = torch.searchsorted(self._with_text(), self.running)
            hidden = stream.hidden[:, at.to(stream.hidden.device)]
            kept = torch.searchsorted(self.visual, self.running)
            values = family.values(module, hidden)[0]
            values = values - self._stored("values", layer, kept).to(values)
            if self.probe:
                self.deviation, self.running = values, self.visual[:0]
            else:
                keys = family.keys(module, hidden)[0]
                keys = keys - self._stored("keys", layer, kept).to(keys)
                far = _norms(keys) + _norms(values)
                count = self.method.counts(len(self.visual), self.turn.layers)[layer]
                self.running = self.running[top(far, count)]
            stream.activate([torch.searchsorted(self.columns, self._with_text())])
        self.by_layer.append(self.running)

    def _stored(self, name: str, layer: int, kept: Tensor) -> Tensor:
        parts = [getattr(image.entry, name)[layer] for image in self.turn.images]
        # Images come in the order of the sequence, and so do visual tokens.
        return torch.cat(parts, dim=1)[:, kept.to(parts[0].device)]


def _norms(difference: Tensor) -> Tensor:
    """``[G, n, d]`` to ``[n]`` fp32, all KV heads together."""
    return difference.float().pow(2).sum((0, 2)).sqrt()


def span_attention(held: VisualLayer, queries: Tensor, rows: Tensor, scaling: float) -> Tensor:
    """Attention that each token of a sequence gets, mean over heads and ``rows``.

    Parameters
    ----------
    queries : Tensor
        ``[H, Q, d]``, RoPE applied.
    rows : Tensor
        ``[Q]`` int64, the tokens that they are.

    Returns
    -------
    Tensor
        ``[T]`` fp32; 0 for tokens that are not held.
    """
    group = queries.shape[0] // held.kv_heads
    alike = held.heads_agree(0)
    heads = [list(range(held.kv_heads))] if alike else [[head] for head in range(held.kv_heads)]
    total = torch.zeros(held.progress.counts[0])
    for members in heads:
        index, keys, _ = held.read(0, members)
        mine = queries[members[0] * group : (members[-1] + 1) * group].float()
        logits = torch.matmul(
            mine.reshape(len(members), -1, mine.shape[-1]), keys.float().transpose(1, 2)
        )
        logits = logits.view(mine.shape[0], len(rows), -1) * scaling
        hidden = index > rows[:, None]
        logits.masked_fill_(hidden.to(logits.device), float("-inf"))
        total[index] += logits.softmax(-1).sum(0).mean(0).cpu()
    return total / queries.shape[0]
