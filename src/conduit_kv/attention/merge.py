"""Attention over several segments: softmax over the union from softmaxes over the parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    r"""Merge partial attentions by their log-sum-exp, exact to rounding.

    .. math:: o = \sum_p e^{\ell_p - \ell} o_p, \qquad \ell = \log \sum_p e^{\ell_p}

    Parameters
    ----------
    parts : sequence of (Tensor, Tensor)
        Outputs ``[B, H, n, d]`` and log-sum-exps ``[B, H, n]`` fp32. A part in which a row sees
        nothing has ``-inf`` there.

    Returns
    -------
    Tensor
        ``[B, H, n, d]``.
    """
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([part[1] for part in parts])
    weight = torch.softmax(lse, dim=0).nan_to_num(0.0)
    total = sum(
        part[0].float() * share[..., None] for part, share in zip(parts, weight, strict=True)
    )
    return torch.as_tensor(total).to(parts[0][0].dtype)
