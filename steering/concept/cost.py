"""The strength at which something costs what it may cost."""

from __future__ import annotations

import math
from collections.abc import Callable

from icebear.errors import InputError

NEAR = 0.02
"""How near the price has to be, of what is wanted."""
STRONGEST = 256.0
TRIES = 40


def strength_at(
    wanted: float, cost: Callable[[float], float], first: float = 1.0, near: float = NEAR
) -> tuple[float, float]:
    """A strength and its cost, within `near` of what is wanted. Raises `InputError` where that cannot be reached.

    cost: of a strength above zero; it grows about as its square while it is small. Secants of the logarithms, inside
    a bracket that shrinks.
    """
    if not wanted > 0 or not math.isfinite(wanted):
        raise InputError(f"A price is above zero nats, not {wanted}.")
    low, high, strength = 0.0, math.inf, first
    seen: list[tuple[float, float]] = []
    for _ in range(TRIES):
        found = cost(strength)
        if abs(found - wanted) <= near * wanted:
            return strength, found
        seen.append((strength, found))
        if found < wanted:
            low = max(low, strength)
        else:
            high = min(high, strength)
        if low >= STRONGEST:
            break
        strength = _next(wanted, seen, low, high)
    best, found = min(seen, key=lambda pair: abs(pair[1] - wanted))
    raise InputError(
        f"A price of {wanted} nats is not reached: {found:.3g} nats at strength {best:.3g} is the nearest; ask for "
        "another price, or give a strength."
    )


def _next(wanted: float, seen: list[tuple[float, float]], low: float, high: float) -> float:
    """By the line through the logarithms of the last two, or a slope of 2; kept inside the bracket."""
    (strength, found), slope = seen[-1], 2.0
    if len(seen) > 1 and min(found, seen[-2][1]) > 0 and strength != seen[-2][0]:
        slope = math.log(found / seen[-2][1]) / math.log(strength / seen[-2][0]) or 2.0
    guess = strength * math.exp(math.log(wanted / max(found, wanted * 1e-6)) / max(slope, 0.5))
    guess = min(max(guess, strength / 8), strength * 8, STRONGEST)
    if math.isfinite(high) and not low < guess < high:
        return math.sqrt(low * high) if low else high / 2
    return guess
