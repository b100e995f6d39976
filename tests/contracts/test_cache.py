"""Contract 3: logical length is not physical length, whatever is done to a cache."""

from __future__ import annotations

import random

import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conduit_kv.cache import VisualCache
from conduit_kv.errors import PlanError
from conduit_kv.layout import Grid, Layout
from tests.contracts.helpers import examples

LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 4
seeds = st.integers(0, 2**31)
numbers = st.integers(0, LAYERS - 1)


class CacheMachine(RuleBasedStateMachine):
    """Everything that happens to a cache, beside a plain dictionary of what it should hold.

    ``held[layer][row][head]`` maps a token to its K and V.
    """

    @initialize(batch=st.integers(1, 3))
    def begin(self, batch):
        self.cache = VisualCache(["full"] * LAYERS)
        self.held = [[[{} for _ in range(KV_HEADS)] for _ in range(batch)] for _ in range(LAYERS)]
        self.columns: list[list[int]] = [[] for _ in range(batch)]
        """Per row, the token in each column; -1 for padding."""
        self.images: list[list[int]] = [[] for _ in range(batch)]
        self.positions: list[list[int]] = [[] for _ in range(batch)]
        self.evicted = False

    @property
    def batch(self):
        return len(self.columns)

    def count(self, row):
        return len(self.images[row])

    @rule(n=st.integers(1, 5), padded=st.booleans(), seed=seeds)
    def append(self, n, padded, seed):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        missing = [draw.randrange(n) if padded else 0 for _ in range(self.batch)]
        valid = torch.arange(n) >= torch.tensor(missing)[:, None]
        layouts, positions = [], []
        for row in range(self.batch):
            new = n - missing[row]
            first, size = self.count(row), draw.randrange(new + 1)
            start = draw.randrange(new - size + 1)
            visual = torch.zeros(new, dtype=torch.bool)
            visual[start : start + size] = True
            layouts.append(Layout.of(visual, [Grid(1, 1, size)] if size else []))
            number = max(self.images[row], default=-1) + 1
            self.images[row] += [number if image else -1 for image in visual.tolist()]
            at = torch.tensor([draw.randrange(1000) for _ in range(new)])
            positions.append(at[None])
            self.positions[row] += at.tolist()
            self.columns[row] += [-1] * missing[row] + list(range(first, first + new))
        self.cache.progress.advance(valid, layouts, positions)
        for layer, mine in enumerate(self.held):
            shape = (self.batch, KV_HEADS, n, WIDTH)
            keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
            self.cache.layers[layer].update(keys, values)
            for row in range(self.batch):
                for column in range(missing[row], n):
                    token = self.columns[row][len(self.columns[row]) - n + column]
                    for head in range(KV_HEADS):
                        mine[row][head][token] = (
                            keys[row, head, column],
                            values[row, head, column],
                        )
            query = torch.randn((self.batch, HEADS, n, WIDTH), generator=generator)
            self.check_attention(layer, query, missing)

    def check_attention(self, layer, query, missing):
        found = self.cache.layers[layer].attend(query, 0.7, None)
        n = query.shape[2]
        for row in range(self.batch):
            for head in range(HEADS):
                mine = self.held[layer][row][head * KV_HEADS // HEADS]
                for column in range(missing[row], n):
                    token = self.columns[row][len(self.columns[row]) - n + column]
                    seen = sorted(t for t in mine if t <= token)
                    keys, values = (torch.stack([mine[t][k] for t in seen]) for k in (0, 1))
                    weights = (keys @ query[row, head, column] * 0.7).softmax(0)
                    assert torch.allclose(found[row, head, column], weights @ values, atol=1e-5)

    @precondition(lambda self: all(self.images))
    @rule(layer=numbers, kind=st.sampled_from(["all", "same", "own"]), seed=seeds)
    def evict(self, layer, kind, seed):
        """``all`` heads keep the same tokens, the ``same`` number, or each its ``own``."""
        assume(all(head for row in self.held[layer] for head in row))
        draw = random.Random(seed)
        kept = []
        for row in self.held[layer]:
            agree = set(row[0]) == set(row[1])
            if kind == "all" and agree:
                chosen = sorted(draw.sample(sorted(row[0]), draw.randint(1, len(row[0]))))
                kept.append([torch.tensor(chosen)])
            else:
                most = min(len(head) for head in row)
                number = draw.randint(1, most)
                chosen = [
                    sorted(
                        draw.sample(
                            sorted(head), number if kind == "same" else draw.randint(1, len(head))
                        )
                    )
                    for head in row
                ]
                kept.append([torch.tensor(tokens) for tokens in chosen])
        self.cache.layers[layer].keep(kept)
        for row, heads in zip(self.held[layer], kept, strict=True):
            for number, head in enumerate(row):
                tokens = set(heads[0 if len(heads) == 1 else number].tolist())
                for token in set(head) - tokens:
                    del head[token]
        self.evicted = True

    @precondition(lambda self: all(self.images))
    @rule(layer=numbers, seed=seeds)
    def drop(self, layer, seed):
        draw = random.Random(seed)
        gone = []
        for row in self.held[layer]:
            common = sorted(set(row[0]) & set(row[1]))
            most = min(len(common), min(len(head) for head in row) - 1)
            gone.append(
                torch.tensor(sorted(draw.sample(common, draw.randint(0, most))), dtype=torch.long)
            )
        self.cache.layers[layer].drop(gone)
        for row, tokens in zip(self.held[layer], gone, strict=True):
            for head in row:
                for token in tokens.tolist():
                    del head[token]
        self.evicted = self.evicted or any(len(tokens) for tokens in gone)

    @precondition(lambda self: all(len(columns) > 1 for columns in self.columns))
    @rule(share=st.floats(0.01, 0.9))
    def crop(self, share):
        n = max(1, int(share * len(self.columns[0])))
        try:
            self.cache.crop(-n)
        except PlanError as refused:
            assert self.evicted, refused
            return
        for row, columns in enumerate(self.columns):
            lost = {token for token in columns[-n:] if token >= 0}
            del columns[-n:]
            for layer in self.held:
                for head in layer[row]:
                    for token in lost:
                        del head[token]
            left = self.count(row) - len(lost)
            del self.images[row][left:], self.positions[row][left:]

    @precondition(lambda self: all(self.columns))
    @rule(seed=seeds, way=st.sampled_from(["reorder", "select", "repeat"]))
    def choose_rows(self, seed, way):
        draw = random.Random(seed)
        rows = [draw.randrange(self.batch) for _ in range(self.batch)]
        if way == "select":
            rows = sorted(draw.sample(range(self.batch), draw.randint(1, self.batch)))
        if way == "repeat":
            rows = [row for row in range(self.batch) for _ in range(2)]
            if len(rows) > 4:
                return
            self.cache.batch_repeat_interleave(2)
        elif way == "select":
            self.cache.batch_select_indices(torch.tensor(rows))
        else:
            self.cache.reorder_cache(torch.tensor(rows))
        self.columns = [list(self.columns[row]) for row in rows]
        self.images = [list(self.images[row]) for row in rows]
        self.positions = [list(self.positions[row]) for row in rows]
        self.held = [[[dict(head) for head in layer[row]] for row in rows] for layer in self.held]

    @invariant()
    def lengths(self):
        assert self.cache.get_seq_length() == len(self.columns[0])
        assert all(layer.get_seq_length() == len(self.columns[0]) for layer in self.cache)

    @invariant()
    def progress(self):
        progress = self.cache.progress
        for row in range(progress.batch):
            assert progress.counts[row] == self.count(row)
            assert progress.layouts[row].image.tolist() == self.images[row]
            assert progress.position_ids(row)[0].tolist() == self.positions[row]
        if progress.batch:
            whole = progress.last_tokens(len(self.columns[0]))
            assert whole.tolist() == self.columns

    @invariant()
    def contents(self):
        for layer, mine in zip(self.cache, self.held, strict=True):
            if layer.tail is None:
                continue
            for row in range(self.batch):
                for head in range(KV_HEADS):
                    expected = sorted(mine[row][head])
                    tokens, keys, values = layer.read(row, [head])
                    assert tokens.tolist() == layer.held(row, head).tolist() == expected
                    for at, token in enumerate(expected):
                        assert torch.equal(keys[0, at], mine[row][head][token][0])
                        assert torch.equal(values[0, at], mine[row][head][token][1])
                if layer.heads_agree(row):
                    assert set(mine[row][0]) == set(mine[row][1])

    @invariant()
    def bytes(self):
        tokens = sum(len(head) for layer in self.held for row in layer for head in row)
        used, allocated = self.cache.bytes_in_use(), self.cache.bytes_allocated()
        if self.cache.progress.batch:
            assert used["keys"] == used["values"] == tokens * WIDTH * 4
            assert all(allocated[kind] >= used[kind] for kind in ("keys", "values"))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = examples(35)
