"""`Claim`: what was measured, the threshold that it must reach, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cattrs.strategies import configure_union_passthrough

from icebear.claims.kind import Kind, Measured
from icebear.claims.kinds import KINDS
from icebear.convert import converter
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.result_files import saved_as
from icebear.values import real, seed_of

MARGIN = 0.05
"""A threshold is below the measured value by this share of it, or by the standard error if that is larger."""
LEAST_GAP = 0.01
"""The control must be below the threshold by the margin, or by this if the margin is smaller."""
TOLERANCE = 1e-3
"""The share of a value by which machines may differ."""
TAG = "kind"


@dataclass(frozen=True)
class Provenance:
    """How a claim was measured."""

    model: str
    fingerprint: str
    dtype: str
    versions: dict[str, str]
    seed: int
    date: str
    """As 2026-01-31."""

    def __post_init__(self) -> None:
        seed_of(self.seed)

    @classmethod
    def of(cls, model: Model, seed: int) -> Provenance:
        versions, date = dict(model.made_with["versions"]), datetime.now(UTC).date().isoformat()
        return cls(model.name, model.fingerprint, model.dtype_name, versions, seed, date)


@dataclass(frozen=True)
class Claim:
    """What is claimed (`what`, of some kind), and what decides whether it passes."""

    what: Kind
    threshold: float
    """The value must reach it."""
    control_below: float
    """The control must stay below it."""
    tolerance: float = 0.0
    """How far below the threshold a value still passes, because machines round differently."""
    value: float | None = None
    """As it was measured when the claim was written."""
    control: float | None = None
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        for name in ("threshold", "control_below", "value", "control"):
            if getattr(self, name) is not None:
                real(getattr(self, name), f"The {name} of a claim")
        real(self.tolerance, "The tolerance of a claim", 0)

    @property
    def seed(self) -> int:
        return self.provenance.seed if self.provenance else 0

    def __str__(self) -> str:
        return f"{self.what.kind}: {self.what}"

    @classmethod
    def of(cls, model: Model, what: Kind, measured: Measured | None = None) -> Claim:
        """Measure a claim and set its threshold, which leaves the larger of the standard error and 5 % of the value as
        a margin.

        measured: what `what.measured(model)` returns, if it is known. Raises `InputError` if the control passes too, or
        nearly: such a claim cannot fail.
        """
        measured = measured or what.measured(model)
        margin = max(measured.error, MARGIN * abs(measured.value))
        threshold = measured.value - margin
        if measured.broken_by:
            raise InputError(f"This claim does not hold. {measured.broken_by}")
        if not measured.control < threshold - max(margin, LEAST_GAP):
            raise InputError(
                f"This claim cannot fail, because its control passes too: the {what.value_is} is {measured.value:.3f}, "
                f"and the control ({what.control_is}) is {measured.control:.3f}. Claim something that the control does "
                "not reach."
            )
        threshold, value, control = (round(x, 6) for x in (threshold, measured.value, measured.control))
        tolerance = round(TOLERANCE * abs(value), 6)
        return cls(what, threshold, threshold, tolerance, value, control, Provenance.of(model, 0))


def _converter() -> Any:
    claims_converter = converter()
    configure_union_passthrough(str | int | None, claims_converter)

    def read(value: Any, _: Any) -> Kind:
        name = value.get(TAG) if isinstance(value, dict) else None
        if name not in KINDS:
            raise TypeError(f"{name!r} is not a kind of claim; the kinds are {', '.join(KINDS)}")
        return claims_converter.structure({key: value[key] for key in value if key != TAG}, KINDS[name])

    claims_converter.register_structure_hook_func(lambda kind: kind is Kind, read)  # not of its subclasses
    claims_converter.register_unstructure_hook_func(
        lambda kind: kind is Kind, lambda what: {TAG: what.kind, **claims_converter.unstructure(what, type(what))}
    )
    return claims_converter


CONVERTER = _converter()


saved_as(Claim, CONVERTER.unstructure, lambda saved, _: CONVERTER.structure(saved, Claim))
