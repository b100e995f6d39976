"""Segments of tokens that were gathered from stored images: what a question sees of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.attention.paths import Mask, attend
from conduit_kv.cache.segments import Segment


class GatheredSegment(Segment):
    """Keys and values of visual tokens of one sequence, which lie anywhere among the text.

    Unlike in a prefill they are there before the text runs; a row sees those that come before it in
    the sequence.

    Parameters
    ----------
    keys, values : Tensor
        ``[1, G, S, d]``, RoPE applied to the keys.
    tokens : Tensor
        ``[S]`` int64 ascending.
    """

    def __init__(self, keys: Tensor, values: Tensor, tokens: Tensor) -> None:
        self.keys, self.values = keys, values
        self.index = tokens.to(keys.device, torch.int32)[None, None]
        self._first, self._last = int(tokens[0]), int(tokens[-1])

    @property
    def slots(self) -> int:
        return int(self.keys.shape[2])

    @property
    def heads_agree(self) -> bool:
        return True

    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        mask = Mask(self.index, rows, window)
        if window is None and int(rows.min()) > self._last:
            mask = None  # type: ignore[assignment]
        return attend(
            query,
            self.keys,
            self.values,
            scaling,
            slots=self.slots,
            new=0,
            mask=mask,
            with_lse=True,
        )

    def held(self, row: int, head: int) -> Tensor:
        return self.index[0, 0].long().cpu()

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        return self.keys[row, head], self.values[row, head]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        for kind, tensor in (("keys", self.keys), ("values", self.values), ("index", self.index)):
            yield kind, tensor, tensor.numel() * tensor.element_size()

    def select_rows(self, rows: Tensor) -> GatheredSegment:
        return GatheredSegment(
            self.keys.index_select(0, rows), self.values.index_select(0, rows), self.held(0, 0)
        )


class PagedSegment(GatheredSegment):
    """All visual tokens, of which each step reads a few pages: the largest possible products.

    A page is ``page`` neighbouring tokens. Its bound for a query is what the largest product with
    any key between the page's minimum and maximum would be:

    .. math:: u_p = \\sum_c \\max(q_c m_{pc}, q_c M_{pc})

    Each KV head reads the pages whose bound is largest, over its query heads and the step's rows.

    Parameters
    ----------
    keys, values, tokens
        See :class:`GatheredSegment`.
    page : int
        Tokens of a page; the last one may have fewer.
    pages : int
        Pages that a KV head reads in a step.
    question : Tensor
        ``[Q]`` int64: in a step of several rows only these ask for pages.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, tokens: Tensor, page: int, pages: int, question: Tensor
    ) -> None:
        super().__init__(keys, values, tokens)
        missing = -len(tokens) % page
        if missing:
            self.keys, self.values = (F.pad(x, (0, 0, 0, missing)) for x in (keys, values))
            self.index = F.pad(self.index, (0, missing), value=-1)
        paged = self.keys[0].float().unflatten(1, (-1, page))
        filled = (self.index[0, 0] >= 0).view(-1, page)[None, :, :, None]
        self.low = paged.masked_fill(~filled, torch.inf).amin(2)
        self.high = paged.masked_fill(~filled, -torch.inf).amax(2)
        self.page, self.pages = page, min(pages, self.low.shape[1])
        self.question = question
        self.read_last: Tensor | None = None
        """``[G, P']``: the pages that the newest step read."""

    def bounds(self, query: Tensor) -> Tensor:
        """``[G, P]`` fp32 of queries ``[H, n, d]``: the largest over a head's group and rows."""
        kv_heads, _, width = self.low.shape
        rows = query.float().reshape(kv_heads, -1, width)
        # max(q m, q M) is q+ M + q- m.
        bound = rows.clamp(min=0) @ self.high.transpose(1, 2)
        bound += rows.clamp(max=0) @ self.low.transpose(1, 2)
        most: Tensor = bound.amax(1)
        return most

    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        asking = query[0]
        if query.shape[2] > 1:
            mine = torch.isin(rows[0].cpu().long(), self.question)
            asking = query[0][:, mine.to(query.device)] if bool(mine.any()) else query[0]
        chosen = self.bounds(asking).topk(self.pages, dim=1).indices.sort(1).values
        self.read_last = chosen
        head = torch.arange(len(chosen), device=chosen.device)[:, None]
        keys, values = (
            x[0].unflatten(1, (-1, self.page))[head, chosen].flatten(1, 2)[None]
            for x in (self.keys, self.values)
        )
        index = self.index[0, 0].view(-1, self.page)[chosen].flatten(1)[None]
        return attend(
            query, keys, values, scaling, slots=keys.shape[2], new=0,
            mask=Mask(index, rows, window), with_lse=True,
        )  # fmt: skip

    def held(self, row: int, head: int) -> Tensor:
        return self.index[0, 0][self.index[0, 0] >= 0].long().cpu()

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        count = len(self.held(row, head))
        return self.keys[row, head, :count], self.values[row, head, :count]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        yield from super().tensors()
        read = () if self.read_last is None else (self.read_last,)
        for tensor in (self.low, self.high, self.question, *read):
            yield "pages", tensor, tensor.numel() * tensor.element_size()

    def select_rows(self, rows: Tensor) -> PagedSegment:
        raise NotImplementedError("pages belong to one sequence")
