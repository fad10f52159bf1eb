"""What a GPU would launch, as multiples of gradient x input."""

import pytest
import torch

from benchmarks.operations import LIMITS, Launched, count, ratios


def test_views_and_empty_memory_are_not_launched():
    x = torch.ones(4, 4)
    with Launched() as launched:
        x.view(2, 8).mT[0].expand(3, 2)
        torch.empty(3)
    assert not launched.names
    assert count(lambda: (x @ x).add_(1).sum()) == 3


@pytest.mark.release
def test_no_more_operations_than_the_limits(smol):
    measured = ratios(smol)
    assert measured.keys() == LIMITS.keys()
    assert all(measured[name] <= limit for name, limit in LIMITS.items()), measured
