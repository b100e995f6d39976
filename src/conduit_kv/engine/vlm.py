"""A loaded model: ask it something, or hold a conversation with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conduit_kv.engine.runner import Reply, Runner
from conduit_kv.engine.sampling import Sampling
from conduit_kv.engine.selftest import SelfTest, run_selftest
from conduit_kv.engine.session import Session
from conduit_kv.images import ImageLike
from conduit_kv.methods.base import Method
from conduit_kv.plan import Plan
from conduit_kv.reuse.store import Store
from conduit_kv.videos import VideoLike


class VLM(Runner):
    """A vision-language model with its processor.

    Parameters
    ----------
    model : PreTrainedModel
        Of a known family; also wrapped by PEFT, quantised, or dispatched over several devices.
    processor : ProcessorMixin
        The model's own processor, with a chat template.
    name : str
        As shown in reports.
    """

    def ask(
        self,
        question: str,
        images: Sequence[ImageLike] = (),
        plan: Plan | Method | str | None = None,
        *,
        videos: Sequence[VideoLike] = (),
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        store: Store | None = None,
    ) -> Reply:
        """Answer one question about some images.

        Parameters
        ----------
        question : str
        images : sequence of path, bytes or PIL image
            Shown before the question, in this order.
        plan : Plan, Method or str
            For example ``"tgv-kv:0.2"``; nothing is compressed by default.
        videos : sequence of path, bytes or Video
            Shown after the images, by the processor's path for videos, or frame by frame.
        max_new_tokens : int
        sampling : Sampling
            Greedy by default.
        stop : sequence of str
            The answer ends before the first of these.
        store : Store
            Where a reuse or retrieve stage keeps images; this object's own, in memory, by default.
            An error under a plan that has neither.

        Raises
        ------
        InputError
            If an image cannot be read or the prompt is too long.
        PlanError
            If the plan cannot be carried out.
        """
        return self.session(plan, store=store).ask(
            question,
            images,
            videos=videos,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
        )

    def session(
        self,
        plan: Plan | Method | str | None = None,
        *,
        prefill_chunk: int | None = None,
        store: Store | None = None,
    ) -> Session:
        """A conversation under one plan; images may come at any turn."""
        return Session(self, Plan.of(plan), prefill_chunk, store)

    def load_session(self, path: str | Path, *, store: Store | None = None) -> Session:
        """A conversation that :meth:`Session.save` has written; see :meth:`Session.load`."""
        return Session.load(self, path, store=store)

    def selftest(self) -> SelfTest:
        """Check on this very model that the plain path is plain Transformers, in seconds."""
        return run_selftest(self)
