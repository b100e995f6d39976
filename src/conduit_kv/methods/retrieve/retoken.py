"""ReToken: one learned token after the question says what it is looking for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conduit_kv.families import Family
from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.artefact import ReTokenArtefact, artefact_for
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod, unit_softmax_means
from conduit_kv.retrieve.bank import Part
from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class ReToken(RetrieveMethod):
    r"""A learned token that retrieves (arXiv 2607.28627): idea known, details reconstructed.

    The question and one learned embedding :math:`e` behind it run through the first layers over
    text alone. With :math:`z_l` the state of :math:`e` entering a scored layer :math:`l`,
    :math:`u_{l,g} = W_V^{l,g}\, \mathrm{norm}(z_l)` its value in KV head :math:`g`, and
    :math:`V_{l,g,i}` the stored values,

    .. math::
        s_i = \operatorname{mean}_{l,g} \tau_{l,g} \cos(u_{l,g}, V_{l,g,i}), \qquad
        s_u = \log \operatorname{mean}_{i \in u} e^{s_i}

    where :math:`e` and the temperatures :math:`\tau` are all that is trained
    (``conduit-kv fit retoken``): the image that holds the answer against the others of its prompt.

    Parameters
    ----------
    artefact : str
        File of the learned token; empty takes the one shipped for this model.
    heads : {"mean", "union"}
        ``"union"``: each KV head (of each scored layer) has its own ranking, and tokens are chosen
        from all of them in turn; for ``unit=token``.
    """

    name: ClassVar[str] = "retoken"
    paper: ClassVar[str] = "https://arxiv.org/abs/2607.28627"
    basis: ClassVar[str] = "reconstructed"

    artefact: str = ""
    heads: Literal["mean", "union"] = "mean"

    def prepare(self, text_model: nn.Module) -> None:
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
    r"""``[l * G, N]`` fp32: :math:`\tau_{l,g} \cos(u_{l,g}, V_{l,g,i})`."""
    rows = []
    states = question.asking(learned.embedding, learned.layers)
    for place, (layer, state) in enumerate(zip(learned.layers, states, strict=True)):
        asked = project(question.family, question.layer(layer), state[None], learned.space)[0]
        stored = question.values(layer) if learned.space == "value" else question.keys(layer)
        scale = learned.temperature[place].exp()[:, None]
        parts = [cosines(asked, tokens).cpu() for tokens in stored]
        rows.append(torch.cat(parts, dim=1) * scale)
    return torch.cat(rows)


def project(family: Family, layer: nn.Module, states: Tensor, space: str) -> Tensor:
    """``[B, D]`` states entering a layer to ``[B, G, d]``: their values, or position-free keys."""
    reader = family.values if space == "value" else family.keys
    return reader(layer, states[:, None])[:, :, 0]


def cosines(asked: Tensor, stored: Tensor) -> Tensor:
    """``[G, n]`` fp32: cosines of ``[G, d]`` and ``[G, n, d]``."""
    return (F.normalize(stored.float(), dim=-1) @ F.normalize(asked.float(), dim=-1)[..., None])[
        ..., 0
    ]
