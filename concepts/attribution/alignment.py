"""Which tokens of two prompts are partners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from icebear.errors import InputError


def alignment(ids: Sequence[int], other: Sequence[int], sinks: Sequence[int], other_sinks: Sequence[int]) -> Tensor:
    """(T, T') shares, 1 in each row: what of the other prompt stands for a token of this one.

    Prompts of equal length are partners token by token. Else the longest common beginning and end are; a token between
    them has the mean of what the other prompt has there, or where that is nothing, of the two partners next to it.
    Sinks only stand for sinks. Raises `InputError` where nothing can stand for a token.
    """
    if len(ids) == len(other):
        return torch.eye(len(ids))
    before = _common(ids, other)
    behind = min(_common(ids[::-1], other[::-1]), min(len(ids), len(other)) - before)
    shares = torch.zeros(len(ids), len(other))
    for place in range(before):
        shares[place, place] = 1
    for place in range(1, behind + 1):
        shares[-place, -place] = 1
    middle = range(before, len(other) - behind)
    next_to = [place for place in (before - 1, len(other) - behind) if 0 <= place < len(other)]
    for place in range(before, len(ids) - behind):
        if place in sinks:
            partners = [at for at in middle if at in other_sinks] or list(other_sinks)
        else:
            partners = [at for at in middle if at not in other_sinks] or [at for at in next_to if at not in other_sinks]
        if not partners:
            raise InputError(
                f"Prompts cannot be aligned at token {place}; lengths differ too much ({len(ids)} and {len(other)} "
                f"tokens). Give a counterfactual of about {len(ids)} tokens."
            )
        shares[place, partners] = 1 / len(partners)
    return shares


def _common(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same from the beginning on."""
    count = 0
    while count < min(len(ids), len(other)) and ids[count] == other[count]:
        count += 1
    return count
