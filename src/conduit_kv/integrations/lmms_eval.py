"""The model ``conduit_kv`` of lmms-eval, found through its entry point ``lmms_eval.models``.

lmms-eval --model conduit_kv --model_args pretrained=embedded,plan=tgv-kv:0.2 --tasks pope
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms

from conduit_kv.bench.parallel import Source
from conduit_kv.errors import InputError
from conduit_kv.integrations.lmms_adapter import Adapter
from conduit_kv.plan import Plan

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest


def manifests() -> ModelManifest:
    """What lmms-eval's registry asks for."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(
        model_id="conduit_kv",
        chat_class_path=f"{__name__}.ConduitKv",
        aliases=("conduit-kv",),
    )


class ConduitKv(lmms):  # type: ignore[misc]
    """A model under a plan.

    Parameters
    ----------
    pretrained : str
        ``"embedded"``, a name on the hub, or a folder.
    plan : str
        A plan with options is put in quotes, since lmms-eval cuts arguments at commas:
        ``plan="tgv-kv:0.2(of=visual, cover=0.5)"``.
    batch_size : int
    device : str or None
    dtype : str
    frames : int
        Images that stand for a video.
    log : str or None
        A file for one line per answer: tokens kept, bytes, seconds.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = "embedded",
        plan: str = "full",
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str = "auto",
        frames: int | str = 32,
        log: str | None = None,
        max_batch_size: Any = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise InputError(f"conduit_kv knows no model argument {', '.join(unknown)}")
        if self.rank_count() > 1:
            raise InputError("conduit_kv runs in one process: start it without accelerate")
        chosen = Plan.parse(str(plan).strip("\"'"))
        vlm = Source(str(pretrained), device, dtype).load()
        self.adapter = Adapter(
            vlm, chosen, int(batch_size), int(frames), None if log is None else Path(log)
        )

    @staticmethod
    def rank_count() -> int:
        """Processes of a distributed run."""
        import torch.distributed as distributed

        return distributed.get_world_size() if distributed.is_initialized() else 1

    @property
    def device(self) -> Any:
        return self.adapter.vlm.model.device

    @property
    def batch_size(self) -> int:
        return self.adapter.size

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """Answer all requests, in their order."""
        return [
            GenerationResult(answer.text, TokenCounts(answer.prompt_tokens, answer.tokens))
            for answer in self.adapter.answer(requests, self.task_dict)
        ]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        raise InputError(
            "conduit_kv writes answers and scores none: take the generating form of this task"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        raise InputError(
            "conduit_kv answers single rounds here; `conduit-kv bench` has follow-up tasks"
        )
