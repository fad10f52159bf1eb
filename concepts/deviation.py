"""How far two computations of the same values are apart, for the laws that models are tested by."""

from __future__ import annotations

import math

from torch import Tensor


def deviation(values: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference, as a share of the largest absolute value of the reference; infinite if a
    value is NaN, which no maximum of deviations may overlook."""
    values, reference = (x.detach().cpu().double() for x in (values, reference))  # 16 bits would round the difference
    share = ((values - reference).abs().max() / reference.abs().max().clamp(min=1e-30)).item()
    return math.inf if math.isnan(share) else share
