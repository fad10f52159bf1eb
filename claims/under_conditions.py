"""Claims under conditions: each is measured again with another data type, kernel, model, seed, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from icebear.claims.checked import CheckedClaims
from icebear.claims.checked_claim import CheckedClaim, ConditionRun, check_claim, not_run
from icebear.claims.claim import Claim
from icebear.claims.conditions import Condition, whole_number
from icebear.claims.kind import NodeId
from icebear.claims.rephrasing import check_paraphrases, versions_of
from icebear.claims.served import ServedModel, check_served
from icebear.errors import IcebearError, InputError, known_error
from icebear.models.loading import loading
from icebear.models.model import Model
from icebear.records import Neuron
from icebear.steering.concept.detectors import ConceptVector
from icebear.steps import OnProgress, counting

Load = Callable[..., Model]
"""Loads the model of the plain run again with other arguments of `load_model`, such as ``dtype="bfloat16"``."""
CheckOne = Callable[[Claim], CheckedClaim]
"""Measures a claim under a condition."""


def check_under(
    model: Model, load: Load, claims: Sequence[Claim], conditions: Sequence[Condition], on_progress: OnProgress
) -> CheckedClaims:
    """Measure claims in a model, and again under each condition. A model is loaded once a condition, and dropped.
    Raises `InputError` for a file of paraphrases that cannot be read."""
    versions = {each: versions_of(each.value) for each in conditions if each.kind == "paraphrases"}
    step = counting(on_progress, len(claims) * (1 + len(conditions)))

    def rows(check_one: CheckOne) -> tuple[CheckedClaim, ...]:
        checked = []
        for claim in claims:
            checked.append(check_one(claim))
            step(1)
        return tuple(checked)

    plain = rows(lambda claim: check_claim(model, claim))
    runs = []
    for condition in conditions:
        reworded = versions.get(condition)
        check_one = (
            partial(check_paraphrases, model, versions=reworded) if reworded else _checker(model, load, condition)
        )
        with threads_of(condition):
            runs.append(ConditionRun(condition, rows(check_one)))
    return CheckedClaims(plain, tuple(runs))


def _checker(model: Model, load: Load, condition: Condition) -> CheckOne:
    """Return what measures a claim under a condition; where the model does not load, it says why."""
    try:
        if condition.kind == "url":
            return partial(check_served, ServedModel.at(condition.value), model)
        changed = model_under(condition, model, load)
    except IcebearError as error:
        why = str(error)
        return lambda claim: not_run(claim, why)
    if condition.kind == "seed":
        return partial(check_claim, changed, seed=whole_number(condition.value))
    return _checker_in_other(model, changed) if condition.kind == "model" else _checker_in(changed)


def model_under(condition: Condition, model: Model, load: Load) -> Model:
    """Return the model of a condition, loaded if it is another one than that of the plain run. Raises
    `IcebearError`."""
    match condition.kind:
        case "dtype" | "attention":
            return load(**{condition.kind: condition.value})
        case "bits":
            return load(bits=int(condition.value))
        case "model":
            return load(name=condition.value)
    return model


def _checker_in(changed: Model) -> CheckOne:
    """Return what measures a claim in a model whose kernels a machine may lack."""

    def checked(claim: Claim) -> CheckedClaim:
        try:
            return check_claim(changed, claim)
        except RuntimeError as error:
            return not_run(claim, str(known_error(error) or error))

    return checked


def _checker_in_other(model: Model, other: Model) -> CheckOne:
    """Return what measures a claim in another model, unless it names parts that this model does not have."""
    same, check_one = same_shape(model, other), _checker_in(other)
    why = f"It names neurons or heads of {model.name}, and {other.name} has another architecture or shape."
    return lambda claim: check_one(claim) if same or not names_parts(claim.what) else not_run(claim, why)


@contextmanager
def threads_of(condition: Condition) -> Iterator[None]:
    """Compute with the number of threads of a condition, if that is what it changes."""
    before = torch.get_num_threads()
    if condition.kind == "threads":
        torch.set_num_threads(whole_number(condition.value))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reload_model(model: Model, name: str | None = None, **changes: Any) -> Model:
    """Load a model by its name with other arguments of `load_model`, or another model in its place. Raises
    `IcebearError`, also if another one than that in memory is loaded."""
    quantized = getattr(model.net.config, "quantization_config", None)
    bits = 8 if getattr(quantized, "load_in_8bit", False) else 4 if getattr(quantized, "load_in_4bit", False) else None
    options: dict[str, Any] = {"device": model.device.type, "dtype": model.dtype_name, "bits": bits, **changes}
    loaded = loading.load_model(name or model.name, **options)
    if name is None and "bits" not in changes and loaded.fingerprint != model.fingerprint:
        raise InputError(
            f"{model.name} has other weights where it is loaded from than in memory; save the model to a folder, and "
            "load it from there."
        )
    return loaded


def same_shape(left: Model, right: Model) -> bool:
    """Return whether two models have the same architecture, with parameters of the same names and shapes."""
    shapes = [{name: x.shape for name, x in model.net.named_parameters()} for model in (left, right)]
    return left.net.config.model_type == right.net.config.model_type and shapes[0] == shapes[1]


def names_parts(value: Any) -> bool:
    """Return whether a claim names neurons or heads, or has a vector of the residual stream."""
    if isinstance(value, Neuron | NodeId | ConceptVector):
        return True
    if isinstance(value, tuple):
        return any(map(names_parts, value))
    return is_dataclass(value) and any(names_parts(getattr(value, field.name)) for field in fields(value))
