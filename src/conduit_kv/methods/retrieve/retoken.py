"""ReToken: one learned token after the question says what it is looking for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conduit_kv.families import Family
from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.artefact import ReTokenArtefact, artefact_for
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod, unit_softmax_means

if TYPE_CHECKING:
    from conduit_kv.retrieve.bank import Part
    from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class ReToken(RetrieveMethod):
    r"""A learned token that retrieves (arXiv 2607.28627): idea known, details reconstructed.

    The question and one learned embedding :math:`e` behind it run through the first layers over
    text alone. In a scored layer :math:`l`, what a query head :math:`h` of :math:`e` reads of the
    question's tokens :math:`j` and of :math:`e` itself, without RoPE, is compared with the stored
    values :math:`V_{l,g,i}` of its KV head :math:`g`:

    .. math::
        u_{l,h} = \sum_j \operatorname{softmax}_j(q_{l,h} \cdot k_{l,g,j})\, v_{l,g,j}, \qquad
        s_i = \operatorname{mean}_{l,h} \tau_{l,h} \cos(u_{l,h}, V_{l,g,i}), \qquad
        s_u = \log \operatorname{mean}_{i \in u} e^{s_i}

    where :math:`e` and the temperatures :math:`\tau` are all that is trained
    (``conduit-kv fit retoken``): the image that holds the answer against the others of its prompt.
    The value of :math:`e` alone, as the paper is said to take it, is the case in which every head
    reads :math:`e` itself; a small model's first layers do not bring the question into that.

    Parameters
    ----------
    artefact : str
        File of the learned token; empty takes the one shipped for this model.
    heads : {"mean", "union"}
        ``"union"``: each query head (of each scored layer) has its own ranking, and tokens are
        chosen from all of them in turn; for ``unit=token``.
    """

    name: ClassVar[str] = "retoken"
    paper: ClassVar[str] = "https://arxiv.org/abs/2607.28627"
    basis: ClassVar[str] = "reconstructed"

    artefact: str = ""
    heads: Literal["mean", "union"] = "mean"

    def check_model(self, text_model: nn.Module) -> None:
        artefact_for(self.artefact, text_model)

    def reads(self, layers: int, text_model: nn.Module) -> Sequence[Part]:
        learned = artefact_for(self.artefact, text_model)
        name: Literal["keys", "values"] = "values" if learned.space == "value" else "keys"
        return [(name, layer) for layer in learned.layers]

    def rank(self, question: Question) -> Ranking:
        learned = artefact_for(self.artefact, question.text_model)
        scores = head_scores(question, learned)  # [l * G, N]
        token = scores.mean(0)
        unit = unit_softmax_means(token, question.unit)
        if self.heads == "union":
            # Best rank in any head: the heads' own lists are gone through side by side.
            order = scores.argsort(dim=1, descending=True, stable=True)
            ranks = torch.empty_like(order).scatter_(
                1, order, torch.arange(order.shape[1]).expand_as(order).contiguous()
            )
            token = -ranks.amin(0).float()
        return Ranking(token, unit)


def head_scores(question: Question, learned: ReTokenArtefact) -> Tensor:
    r"""``[l * H, N]`` fp32: :math:`\tau_{l,h} \cos(u_{l,h}, V_{l,g,i})`."""
    rows = []
    states = question.asking(learned.embedding, learned.layers)
    for place, (layer, behind) in enumerate(zip(learned.layers, states, strict=True)):
        text = Text.of(question.family, question.layer(layer), behind[None], learned.space)
        asked = read(question.family, question.layer(layer), behind[None, -1], text)[0]
        stored = question.values(layer) if learned.space == "value" else question.keys(layer)
        scale = learned.temperature[place].exp()[..., None]
        parts = [cosines(asked, tokens).cpu() for tokens in stored]
        rows.append((torch.cat(parts, dim=-1) * scale).flatten(0, 1))
    return torch.cat(rows)


@dataclass(frozen=True)
class Text:
    """What can be read of some text in a layer.

    Attributes
    ----------
    keys : Tensor
        ``[B, G, n, d]``, position-free.
    read : Tensor
        ``[B, G, n, d]``: their values, or the keys themselves.
    """

    keys: Tensor
    read: Tensor

    @staticmethod
    def of(family: Family, layer: nn.Module, states: Tensor, space: str) -> Text:
        """Of states ``[B, n, D]`` entering a layer."""
        keys = family.keys(layer, states)
        return Text(keys, family.values(layer, states) if space == "value" else keys)

    def then(self, later: Text) -> Text:
        """This text and what follows it."""
        pairs = ((self.keys, later.keys), (self.read, later.read))
        return Text(*(torch.cat(pair, 2) for pair in pairs))


def read(
    family: Family, layer: nn.Module, asking: Tensor, text: Text, seen: Tensor | None = None
) -> Tensor:
    """``[B, G, H/G, d]``: what the query heads of states ``[B, D]`` read of a text.

    Parameters
    ----------
    seen : Tensor, optional
        ``[B, n]`` bool, the tokens that are not padding.
    """
    queries = family.queries(layer, asking[:, None]).unflatten(1, (text.keys.shape[1], -1))
    scaling = float(getattr(family.attention(layer), "scaling", queries.shape[-1] ** -0.5))
    logits = queries[..., 0, :].float() @ text.keys.float().transpose(-1, -2) * scaling
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
    found: Tensor = logits.softmax(-1) @ text.read.float()
    return found


def cosines(asked: Tensor, stored: Tensor) -> Tensor:
    """``[..., G, h, n]`` fp32: cosines of ``[..., G, h, d]`` and ``[..., G, n, d]``."""
    return F.normalize(asked.float(), dim=-1) @ F.normalize(stored.float(), dim=-1).transpose(
        -1, -2
    )
