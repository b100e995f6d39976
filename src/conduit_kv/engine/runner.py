"""What runs prompts on a model: prefill, extend, step, fork. Sessions and the bench stand on it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conduit_kv.compat import cache_name
from conduit_kv.engine.compress import Run, lock_of, unwrap, wrapped
from conduit_kv.engine.report import Report
from conduit_kv.engine.request import Ending, JoinedCache, RequestCache
from conduit_kv.errors import InputError, ModelError, PlanError
from conduit_kv.families import family_of
from conduit_kv.images import ImageLike, read_image
from conduit_kv.methods.base import Method
from conduit_kv.methods.retrieve import RetrieveMethod
from conduit_kv.plan import Plan
from conduit_kv.reuse.keys import processor_digest
from conduit_kv.reuse.shelf import Shelf, template_prefix
from conduit_kv.reuse.store import Store
from conduit_kv.videos import Video

Message = Mapping[str, Any]
"""``{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ...}]}``."""


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes
    ----------
    text : str
    tokens : tuple of int
    finish : str
        ``"stop"`` (end of turn or a stop string) or ``"length"``.
    report : Report
        What was really done.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    report: Report

    def __str__(self) -> str:
        return self.text


@dataclass
class State:
    """A request between two steps.

    Attributes
    ----------
    cache : RequestCache
    logits : Tensor
        ``[1, V]``, of the newest token.
    ids : list of int
        Tokens that the cache has seen.
    seconds : dict
        Of the newest prefill or turn: ``encode``, ``first_token``.
    """

    cache: RequestCache
    logits: Tensor
    ids: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def report(self) -> Report:
        """What was really done to the request."""
        return Report.of(self.cache, self.seconds)


class Runner:
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

    def __init__(self, model: PreTrainedModel, processor: Any, name: str = "") -> None:
        self.model = unwrap(model)
        self.family = family_of(self.model)
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.name = name or getattr(self.model.config, "name_or_path", "") or self.family.name
        self.model.eval()

    @cached_property
    def store(self) -> Store:
        """In memory: where a reuse stage keeps images, unless a store is given."""
        return Store()

    def shelf(self, store: Store | None = None) -> Shelf:
        """A store as this model's requests use it."""
        return Shelf(
            store if store is not None else self.store,
            self._template_prefix,
            processor_digest(self.processor),
        )

    @cached_property
    def _template_prefix(self) -> tuple[int, ...] | None:
        return template_prefix(self.family, self.model, self.processor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, family={self.family.name!r})"

    @property
    def takes_videos(self) -> bool:
        """Whether the processor has a path for videos; else their frames are shown as images."""
        return getattr(self.processor, "video_processor", None) is not None

    def render(self, messages: Sequence[Message], *, answer_next: bool = True) -> str:
        """The prompt's text, with the family's placeholders for images.

        Raises
        ------
        ModelError
            If the processor has no chat template.
        """
        if not (getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template):
            raise ModelError(
                f"{self.name} has no chat template: set processor.chat_template to the one of its "
                "model card"
            )
        return str(
            self.processor.apply_chat_template(
                list(messages), add_generation_prompt=answer_next, tokenize=False
            )
        )

    def process(
        self,
        text: str,
        images: Sequence[ImageLike] = (),
        *,
        videos: Sequence[Video] = (),
        first: bool = True,
    ) -> dict[str, Any]:
        """The model's inputs for one prompt, on the model's device.

        Parameters
        ----------
        text : str
            From :meth:`render`, or a later part of a conversation.
        images : sequence of path, bytes or PIL image
            As many as ``text`` has placeholders.
        videos : sequence of Video
            Likewise; for processors that take videos (:attr:`takes_videos`).
        first : bool
            Whether the text begins a prompt: the tokenizer then puts its begin token before it,
            unless the template did.

        Raises
        ------
        InputError
            If an image cannot be read, or their number and that of the placeholders differ.
        """
        pictures = [read_image(image) for image in images]
        begin = self.tokenizer.bos_token
        arguments: dict[str, Any] = {
            "text": [text],
            "return_tensors": "pt",
            "add_special_tokens": first and not (begin and text.startswith(begin)),
        }
        if pictures:
            arguments["images"] = [pictures] if self.family.nested_images else pictures
        if videos:
            films = [np.stack([np.asarray(frame) for frame in video.frames]) for video in videos]
            arguments["videos"] = [films] if self.family.nested_videos else films
            arguments["do_sample_frames"] = False
            arguments["video_metadata"] = [
                {
                    "fps": video.fps,
                    "total_num_frames": len(video.frames),
                    "frames_indices": list(range(len(video.frames))),
                }
                for video in videos
            ]
        try:
            inputs = self.processor(**arguments)
        except (ValueError, IndexError, StopIteration) as error:
            raise InputError(
                f"the processor refused {len(pictures)} image(s) and {len(videos)} video(s) for "
                f"this prompt: {error}"
            ) from error
        except ImportError as error:
            raise ModelError(f"the processor of {self.name} needs a package: {error}") from None
        return {
            name: value.to(self.model.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }

    def check_length(self, tokens: int, new: int = 0) -> None:
        """Raise InputError if so many tokens do not fit the model's positions."""
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and tokens + new > limit:
            raise InputError(
                f"the prompt is too long: {tokens} tokens and {new} to answer, but {self.name} has "
                f"{limit} positions; use fewer images or a shorter text"
            )

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        config = self.model.config.get_text_config()
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * width
        return int(numbers * self.model.dtype.itemsize)

    def visible(self, ids: Sequence[int], plan: Plan) -> int:
        """Positions that a prompt takes: fewer than its tokens if a question sees few of them."""
        method = plan.retrieve
        if not isinstance(method, RetrieveMethod) or method.is_identity:
            return len(ids)
        visual = int(self.family.visual_mask(self.model, torch.tensor(ids)).sum())
        if method.long != "error":
            return 0
        if method.positions == "kept" or not visual:
            return len(ids)
        return len(ids) - visual + method.count(visual, self.bytes_per_token)

    @torch.inference_mode()
    def prefill(
        self,
        inputs: Mapping[str, Any],
        plan: Plan | Method | str | None = None,
        *,
        chunk: int | None = None,
        evict: bool = True,
        watch: Sequence[Plan] = (),
        store: Store | None = None,
    ) -> State:
        """Run a prompt and compress its cache.

        Parameters
        ----------
        inputs : mapping
            From :meth:`process`.
        evict : bool
            False leaves the evict stage out of this step.
        watch : sequence of Plan
            Plans whose evict and hold methods observe this prefill too, for :meth:`forks`.
        store : Store
            Where a reuse or retrieve stage keeps images; :attr:`store` by default.
            An error under a plan that has neither.
        """
        plan = Plan.of(plan)
        for other in watch:
            if other.beginning != plan.beginning:
                raise PlanError(
                    f"a prefill under {plan} cannot be watched under {other}: only their evict and "
                    "hold stages may differ"
                )
        plan.check_store(store)
        shelf = self.shelf(store) if plan.takes_entries else None
        run = Run(self.model, self.family, plan, chunk, evict, shelf)
        cache = run.new_cache()
        cache.watchers = [Ending.of(other, cache) for other in watch]
        return self._run(run, cache, inputs, [])

    @torch.inference_mode()
    def extend(
        self,
        state: State,
        inputs: Mapping[str, Any],
        *,
        chunk: int | None = None,
        evict: bool = True,
    ) -> State:
        """Run further tokens, with or without images, on a request's cache, which it changes."""
        run = Run(self.model, self.family, state.cache.plan, chunk, evict)
        return self._run(run, state.cache, inputs, state.ids)

    def _run(
        self, run: Run, cache: RequestCache, inputs: Mapping[str, Any], seen: list[int]
    ) -> State:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if len(ids) != 1 or (mask is not None and not bool(mask.all())):
            raise InputError(
                f"one prompt without padding at a time, not {len(ids)}: decode_together() runs "
                "several, and compress() takes a padded batch"
            )
        self.check_length(self.visible([*seen, *ids[0].tolist()], cache.plan))
        arguments = {name: value for name, value in inputs.items() if name != "attention_mask"}
        start = time.perf_counter()
        with lock_of(self.model), wrapped(run):
            output = self.model(
                **arguments, **{cache_name(type(self.model)): cache}, logits_to_keep=1
            )
        total = time.perf_counter() - start
        seconds = {"encode": run.seconds.get("encode", 0.0), "first_token": total}
        if "fill" in run.seconds:
            seconds["fill"] = run.seconds["fill"]
        return State(cache, output.logits[:, -1], [*seen, *ids[0].tolist()], seconds)

    def forks(self, state: State, plans: Sequence[Plan]) -> list[State]:
        """One state per plan watched in :meth:`prefill`: the prompt's cache under that plan."""
        watchers = state.cache.watchers
        if len(plans) != len(watchers):
            raise PlanError("fork into the plans that the prefill watched, all of them")
        state.cache.watchers = []
        return [
            State(
                state.cache.fork(plan, watcher), state.logits, list(state.ids), dict(state.seconds)
            )
            for plan, watcher in zip(plans, watchers, strict=True)
        ]

    @torch.inference_mode()
    def extend_together(self, states: Sequence[State], ids: Tensor, *, evict: bool = True) -> None:
        """Run further text tokens on several requests' caches, which it changes, as one batch.

        Parameters
        ----------
        states : sequence of State
            Under the same or different plans.
        ids : Tensor
            ``[P, n]`` int64, a row per request.
        evict : bool
            False leaves the evict stage out of this step.
        """
        if ids.shape[1] > 1 and any(state.cache.retrieval is not None for state in states):
            for row, state in enumerate(states):
                inputs = {"input_ids": ids[row : row + 1].to(self.model.device)}
                vars(state).update(vars(self.extend(state, inputs, evict=evict)))
            return
        longest = max(self.visible(state.ids, state.cache.plan) for state in states)
        self.check_length(longest + ids.shape[1])
        run = Run(self.model, self.family, states[0].cache.plan, evict=evict)
        cache = (
            states[0].cache if len(states) == 1 else JoinedCache([state.cache for state in states])
        )
        name = cache_name(type(self.model))
        with lock_of(self.model), wrapped(run):
            output = self.model(
                input_ids=ids.to(self.model.device), logits_to_keep=1, **{name: cache}
            )
        for row, (state, tokens) in enumerate(zip(states, ids.tolist(), strict=True)):
            state.logits = output.logits[row : row + 1, -1]
            state.ids.extend(tokens)

    def step(self, states: Sequence[State], tokens: Sequence[int]) -> None:
        """Run one token on each of several requests, which may have different plans."""
        self.extend_together(states, torch.tensor(tokens)[:, None])

    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        config = self.model.generation_config
        ends = config.eos_token_id if config is not None else None
        if ends is None:
            ends = self.tokenizer.eos_token_id
        return frozenset([ends] if isinstance(ends, int) else ends or [])

    def decode_together(self, states: Sequence[State], max_new_tokens: int) -> list[list[int]]:
        """Answer several requests greedily as one batch; gives their new tokens."""
        ends = self.end_tokens()
        answers: list[list[int]] = [[] for _ in states]
        open_rows = list(range(len(states)))
        for _ in range(max_new_tokens):
            chosen = {row: int(states[row].logits.argmax(-1)) for row in open_rows}
            open_rows = [row for row in open_rows if chosen[row] not in ends]
            for row in open_rows:
                answers[row].append(chosen[row])
            open_rows = [row for row in open_rows if len(answers[row]) < max_new_tokens]
            if not open_rows:
                break
            self.step([states[row] for row in open_rows], [chosen[row] for row in open_rows])
        return answers
