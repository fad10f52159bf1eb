"""How far two computations of the same values are apart, for the laws that models are tested by."""

from __future__ import annotations

from torch import Tensor


def deviation(left: Tensor, right: Tensor) -> float:
    """Return the largest difference, as a share of the largest right value."""
    left, right = (x.detach().cpu().double() for x in (left, right))  # 16 bits would round the difference
    return ((left - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()
