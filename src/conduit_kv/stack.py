"""The decoder loop: the one forward that Conduit takes over.

It runs the model's own decoder layers, one after the other, and gives every stage its moment
between them. Layers are the outer loop and chunks of tokens the inner one, so that a chunked
prefill is the whole one with less memory, and so that a method may decide before any layer which
tokens run on, by a token that comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from conduit_kv.attention import ATTENTION, Answer, Question, Step, register_attention
from conduit_kv.compat import cache_name, text_output
from conduit_kv.errors import ModelError
from conduit_kv.families import Family

if TYPE_CHECKING:
    from conduit_kv.engine.request import JoinedCache, RequestCache


@contextmanager
def attending(text_model: nn.Module) -> Iterator[None]:
    """Let the text model's attention modules call Conduit's function; restored on any exit."""
    register_attention()
    config: Any = text_model.config
    before = config._attn_implementation_internal
    config._attn_implementation_internal = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation_internal = before


class Stream:
    """The step's hidden states on their way through the layers, and which columns run.

    Columns that do not run wait with the state that they had, until they are activated again. What
    the running ones have become is written back only then: one gather per stage, one scatter.

    Parameters
    ----------
    embeddings : Tensor
        ``[B, n, hidden]``.
    position_ids : Tensor
        ``[B, n]``, or ``[3, B, n]`` for M-RoPE.
    features : mapping
        Further arguments of the text model.

    Attributes
    ----------
    hidden : Tensor
        ``[B, m, hidden]`` of the columns that run.
    columns : list of Tensor or None
        Per sequence, ``[m_b]`` int64 ascending on the CPU: the columns that run, without padding;
        None while all of the step's columns run.
    contiguous : bool
        Whether the columns that run take positions without gaps.
    gone : list of Tensor
        Per sequence, ``[n]`` bool: columns that will never run again, padding among them.
    """

    def __init__(
        self,
        family: Family,
        text_model: nn.Module,
        cache: RequestCache | JoinedCache,
        embeddings: Tensor,
        position_ids: Tensor,
        features: Mapping[str, Any],
        chunk: int | None,
    ) -> None:
        self.family, self.text_model, self.cache, self.chunk = family, text_model, cache, chunk
        self.layers, self.position_ids = family.layers(text_model), position_ids
        rotary: tuple[Tensor, Tensor] = text_model.rotary_emb(embeddings, position_ids)  # type: ignore
        self.hidden, self.rotary, self.features = embeddings, rotary, features
        self.columns: list[Tensor] | None = None
        self.gone: list[Tensor] = []
        self.contiguous = False
        self._waiting, self._rotary, self._features = embeddings, rotary, features
        self._index: Tensor | None = None
        self._tokens = cache.progress.step_tokens
        self._changed = False  # whether the waiting states are a tensor of our own
        self._shifted: tuple[list[int], list[Tensor] | None, tuple[Tensor, Tensor]] | None = None

    # -- which columns run -------------------------------------------------------------------

    def tokens(self, row: int) -> Tensor:
        """``[n]`` int32 on the CPU: the tokens that the step's columns are; -1 for padding."""
        return self._tokens[row].cpu()

    def running(self, row: int) -> Tensor:
        """``[m_b]`` int64: the columns of a sequence that run, without padding."""
        if self.columns is not None:
            return self.columns[row]
        return torch.nonzero(self.tokens(row) >= 0).flatten()

    def candidates(self, row: int) -> Tensor:
        """``[m_b]`` int64: those that run and those that wait."""
        left = ~self.gone[row] if self.gone else self.tokens(row) >= 0
        return torch.nonzero(left).flatten()

    def states(self, row: int) -> Tensor:
        """``[m_b, hidden]`` of the columns that run."""
        return self.hidden[row, self.place(row)]

    def place(self, row: int) -> Tensor | slice:
        """Where a sequence's running columns lie among those of the batch."""
        if self.columns is None:
            return self.running(row).to(self.hidden.device)
        return slice(self.hidden.shape[1] - len(self.columns[row]), None)

    def activate(self, columns: Sequence[Tensor]) -> None:
        """Let ``columns`` run from here on, per sequence ``[m_b]`` int64 ascending on the CPU."""
        self._write_back()
        batch, longest = len(columns), max(len(mine) for mine in columns)
        index = torch.full((batch, longest), -1)
        for row, mine in enumerate(columns):
            index[row, longest - len(mine) :] = mine
        index = index.to(self._waiting.device)
        at, rows = index.clamp(min=0), torch.arange(batch, device=index.device)[:, None]
        self.hidden = self._waiting[rows, at]
        cosine, sine = (_columns_of(part, rows, at) for part in self._rotary)
        self.rotary = (cosine, sine)
        self.features = self.family.features_of(self._features, index)
        progress: Any = self.cache.progress
        tokens = _columns_of(self._tokens[..., None], rows, at)[..., 0]
        progress.step_tokens = tokens.masked_fill((index < 0).to(tokens.device), -1)
        progress.step_padded = any(len(mine) < longest for mine in columns)
        self.columns, self._index = list(columns), index

    def drop(self, columns: Sequence[Tensor]) -> None:
        """The columns ``columns`` will never run again: per sequence int64 on the CPU."""
        if not self.gone:
            self.gone = [self.tokens(row) < 0 for row in range(len(columns))]
        for gone, mine in zip(self.gone, columns, strict=True):
            gone[mine] = True

    def put(self, row: int, places: Tensor, states: Tensor) -> None:
        """Change the states of some running columns, ``places`` in the order of `running`."""
        if self.columns is None:
            self.hidden = self.hidden.clone()
        where = self.place(row)
        columns = torch.arange(self.hidden.shape[1], device=self.hidden.device)[where]
        at = columns[places.to(columns.device)]
        self.hidden[row, at] = states.to(self.hidden)

    def _write_back(self) -> None:
        if self._index is None:
            self._waiting, self._changed = self.hidden, False
            return
        if not self._changed:
            self._waiting, self._changed = self._waiting.clone(), True
        row, place = torch.nonzero(self._index >= 0, as_tuple=True)
        ran = self.hidden.to(self._waiting.device)
        self._waiting[row, self._index[row, place]] = ran[row, place]

    def everything(self) -> Tensor:
        """``[B, n, hidden]``: all columns; NaN for tokens that are gone, the last state for others.

        What runs goes on running.
        """
        if self.columns is None:
            return self.hidden
        self._write_back()
        states = self._waiting.clone()
        for row, gone in enumerate(self.gone):
            states[row, (gone & (self.tokens(row) >= 0)).to(states.device)] = torch.nan
        return states

    # -- layers ------------------------------------------------------------------------------

    def ask(self, number: int) -> Answer:
        """A layer's queries and keys for the columns that run, which it does not run through."""
        layer = self.layers[number]
        arguments = {cache_name(type(layer)): None, "use_cache": False, "conduit": Question()}
        try:
            layer(
                self.hidden,
                attention_mask=None,
                position_ids=None,
                position_embeddings=self.rotary,
                **arguments,
            )
        except Answer as answer:
            return answer.with_traceback(None)  # whose frames would hold on to the request
        raise ModelError(f"layer {number} has no attention of Transformers': nothing can be ranked")

    def rotary_of(self, number: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the columns that run, where a layer's positions have no gaps too."""
        shifts = self.cache.shifts(number)
        if not self.contiguous and not any(shifts):
            return self.rotary
        if self._shifted is not None:
            known, columns, found = self._shifted
            if known == shifts and columns is self.columns:
                return found
        positions = self.position_ids
        if self.columns is not None:
            positions = positions[:, -self.hidden.shape[1] :].clone()
            for row, mine in enumerate(self.columns):
                first = self.position_ids[row, mine[0]]
                steps = torch.arange(len(mine), device=positions.device)
                positions[row, positions.shape[1] - len(mine) :] = first + steps
        lower = positions.new_tensor(shifts or [0] * len(positions))
        positions = (positions - lower[:, None]).clamp(min=0)
        rotary: tuple[Tensor, Tensor] = self.text_model.rotary_emb(self.hidden, positions)  # type: ignore
        self._shifted = list(shifts), self.columns, rotary
        return rotary

    def run(self, number: int, step: Step) -> None:
        """Run a layer over the columns that run, a chunk at a time."""
        layer = self.layers[number]
        arguments = {cache_name(type(layer)): self.cache, "use_cache": True, "conduit": step}
        progress = self.cache.progress
        whole, columns = progress.step_tokens, self.hidden.shape[1]
        rotary, size = self.rotary_of(number), self.chunk or columns
        parts = []
        for start in range(0, columns, size):
            part = slice(start, start + size)
            progress.step_tokens = whole[:, part]
            output = layer(
                self.hidden[:, part],
                attention_mask=None,
                position_ids=None,
                position_embeddings=tuple(x[..., part, :] for x in rotary),
                **arguments,
            )
            parts.append(output[0] if isinstance(output, tuple) else output)
        progress.step_tokens = whole
        self.hidden = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.columns is not None:
            counts = [int((self.tokens(row) >= 0).sum()) for row in range(len(self.columns))]
            skipped = [all_ - len(mine) for all_, mine in zip(counts, self.columns, strict=True)]
            self.cache.layers[number].skip(self._tokens.shape[1] - columns, skipped)

    def after(self, number: int) -> None:
        """What a family adds after a layer; tokens that wait get it too."""
        self.hidden = self.family.after_layer(self.text_model, number, self.hidden, self.features)
        if self.columns is not None:
            added = self.family.after_layer(self.text_model, number, self._waiting, self._features)
            self._changed = self._changed or added is not self._waiting
            self._waiting = added

    def finish(self) -> Tensor:
        """All columns, in their order; the cache's progress is as it was."""
        progress: Any = self.cache.progress
        if self.columns is not None:
            progress.step_padded = bool((self._tokens < 0).any())
        progress.step_tokens = self._tokens
        return self.everything()


def _columns_of(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``[..., B, n, d]`` to ``[..., B, m, d]``: the columns ``[B, m]`` of each sequence."""
    batch = tensor.expand(*tensor.shape[:-3], len(rows), -1, -1)
    return batch[..., rows.to(tensor.device), columns.to(tensor.device), :]


def run_stack(
    family: Family,
    text_model: nn.Module,
    cache: RequestCache | JoinedCache,
    embeddings: Tensor,
    position_ids: Tensor,
    features: Mapping[str, Any],
    *,
    chunk: int | None = None,
    evict: bool = True,
    output_hidden_states: bool = False,
) -> BaseModelOutputWithPast:
    """Run the step's tokens through all decoder layers.

    Parameters
    ----------
    embeddings : Tensor
        ``[B, n, hidden]``, images merged in. ``cache.progress`` has taken the tokens in already.
    position_ids : Tensor
        ``[B, n]``, or ``[3, B, n]`` for M-RoPE.
    features : mapping
        Further arguments of the text model (deepstack).
    chunk : int or None
        Run at most so many columns at a time within each layer.
    evict : bool
        Whether the step ends a prefill or a turn. A single column is a decoding step, unless it is
        a pass of a turn that is run in several.
    """
    progress = cache.progress
    columns = embeddings.shape[1]
    progress.step_tokens = progress.step_tokens.to(embeddings.device)
    turn = columns > 1 or cache.in_passes
    deciding = evict and turn and cache.scores_turns
    decoding = not turn and cache.scores_steps
    if turn:
        cache.take_in(embeddings)
    if deciding:
        cache.begin()
    stream = Stream(family, text_model, cache, embeddings, position_ids, features, chunk)
    routing = turn and cache.routes_turns
    step = Step(cache)
    states = [embeddings] if output_hidden_states else []
    with attending(text_model):
        for number, layer in enumerate(stream.layers):
            if routing:
                cache.flow(number, stream)
            cache.enter(layer, stream.hidden)
            listening = routing and cache.listens(number)
            step.keep_queries = deciding or decoding or listening
            stream.run(number, step)
            if step.keep_queries:
                queries = step.queries[0] if len(step.queries) == 1 else torch.cat(step.queries, 2)
                step.queries.clear()
                if listening:
                    cache.listen(number, queries, step.scaling, stream)
                if deciding:
                    cache.observe(number, queries, step.scaling)
                elif decoding:
                    cache.step(number, queries, step.scaling)
            if output_hidden_states:
                states.append(stream.everything())  # as Transformers has it: without what follows
            stream.after(number)
    hidden = stream.finish()
    if deciding:
        cache.finish()
    hidden = text_model.norm(hidden)  # type: ignore[operator]
    if output_hidden_states:
        states[-1] = hidden
    return text_output(hidden, cache, tuple(states) or None)
