"""Where a request's entries come from: a store, and the prompt that images are prefilled in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.families import Family
from conduit_kv.families.piece import Piece
from conduit_kv.reuse.entry import Entry
from conduit_kv.reuse.fill import fill
from conduit_kv.reuse.keys import Key, processor_digest
from conduit_kv.reuse.store import Found, Store

if TYPE_CHECKING:
    from conduit_kv.engine.compress import Run

_AHEAD = 2
"""Entries that are loaded while another is being rotated or filled."""


@dataclass(frozen=True)
class Taken:
    """An entry, and where it came from.

    Attributes
    ----------
    entry : Entry
    tier : str
        ``memory``, ``disk``, ``redis``, or ``computed``.
    seconds : float
        What it took to load or to compute.
    """

    entry: Entry
    tier: str
    seconds: float


def template_prefix(family: Family, model: Any, processor: Any) -> tuple[int, ...] | None:
    """The chat template's tokens before a first image and its opening marks; None without one."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if not (getattr(processor, "chat_template", None) or tokenizer.chat_template):
        return None
    message = {"role": "user", "content": [{"type": "image"}]}
    text = str(processor.apply_chat_template([message], tokenize=False))
    begin = tokenizer.bos_token
    picture = Image.new("RGB", (64, 64), "white")
    inputs = processor(
        text=[text],
        images=[[picture]] if family.nested_images else [picture],
        return_tensors="pt",
        add_special_tokens=not (begin and text.startswith(begin)),
    )
    ids = inputs["input_ids"][0]
    first = int(family.visual_mask(model, ids).nonzero()[0])
    return tuple(ids[: max(0, first - family.opening)].tolist())


@dataclass(frozen=True)
class Shelf:
    """A store as one model's requests use it.

    Attributes
    ----------
    store : Store
    prefix : tuple of int or None
        The chat template's tokens before a first image; None where no template is known.
    processor : str
        Digest of the processor's settings; empty where no processor is known.
    """

    store: Store = field(default_factory=Store)
    prefix: tuple[int, ...] | None = None
    processor: str = ""

    @staticmethod
    def of(store: Store, family: Family, model: Any, processor: Any = None) -> Shelf:
        """A store as requests on one model use it.

        Parameters
        ----------
        processor : ProcessorMixin or None
            With a chat template, if images are to be prefilled inside it.
        """
        store.held.check_model(family.text_model(model))
        if processor is None:
            return Shelf(store)
        return Shelf(store, template_prefix(family, model, processor), processor_digest(processor))

    def context(self, kind: Literal["template", "none"]) -> tuple[int, ...]:
        """The tokens before an image that is prefilled alone.

        Raises
        ------
        PlanError
            If the template is wanted and not known.
        """
        if kind == "none":
            return ()
        if self.prefix is None:
            raise PlanError(
                "images are to be prefilled inside the chat template, which is not known here: "
                "pass processor= to compress(), or write context=none in the plan"
            )
        return self.prefix

    def take(
        self, run: Run, pieces: Sequence[Piece], context: Literal["template", "none"]
    ) -> Iterator[Taken]:
        """The entries of some images, in order; those that are nowhere are computed and stored.

        The next ones are being loaded while the caller works on one.
        """
        prefix = self.context(context)
        keys = [
            Key.of(piece, prefix, run.model, processor=self.processor, tenant=self.store.tenant)
            for piece in pieces
        ]
        device = run.model.device
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="conduit-load") as pool:
            waiting: list[Future[Found | None]] = []
            for number, (piece, key) in enumerate(zip(pieces, keys, strict=True)):
                while len(waiting) < min(len(keys), number + 1 + _AHEAD):
                    waiting.append(pool.submit(self.store.get, keys[len(waiting)]))
                found = waiting[number].result()
                if found is None and key in keys[:number]:
                    found = self.store.get(key)  # the same image, just computed
                if found is not None:
                    yield Taken(found.entry.to(device), found.tier, found.seconds)
                    continue
                start = time.perf_counter()
                entry = fill(run, piece, prefix, digest=key.digest)
                entry = self.store.put(key, entry)
                yield Taken(entry, "computed", time.perf_counter() - start)

    def take_text(self, run: Run, ids: Tensor) -> tuple[list[Taken], list[Key]]:
        """What is stored of a prompt's first text, and the keys of the blocks that follow it.

        Parameters
        ----------
        ids : Tensor
            ``[n]`` int64, the prompt's tokens before its first image.
        """
        keys = Key.of_text(ids, run.model, tenant=self.store.tenant)
        taken: list[Taken] = []
        for key in keys:
            found = self.store.get(key)
            if found is None:  # only a beginning without gaps need not run
                break
            taken.append(Taken(found.entry.to(run.model.device), found.tier, found.seconds))
        return taken, keys[len(taken) :]
