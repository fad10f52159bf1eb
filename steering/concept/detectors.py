"""Detectors of a concept: neurons with weights, or a vector of the residual stream, read at each token.

Both are linear in what they read. The value of a token is the sum of their contributions, in standard deviations of the
texts without the concept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.passes.sites import by_site_layer, check_vector, hooks, stream_hooks
from icebear.convert import CONVERTER
from icebear.errors import InputError, ModelError
from icebear.models.model import Model
from icebear.records import POLARITIES, Neuron, sign_of
from icebear.steering.concept.reading import run
from icebear.steps import OnProgress, unwatched
from icebear.values import POSITIVE, one_of, real

Fit = Literal["means", "logistic"]
DETECTORS = ("neurons", *get_args(Fit))
See = Callable[[list[int], Tensor], None]
"""Called with the columns of a detector, and what it reads there (B, T, n), before `scaled`."""


@dataclass(frozen=True)
class ConceptNeuron:
    """A neuron of a concept."""

    neuron: Neuron
    polarity: str
    """``+`` or ``-``: the sign of its activation, relative to the mean, where the concept is present."""
    weight: float
    mean: float
    """The mean over the texts without the concept of the neuron's mean activation in each; `std` is its deviation,
    or that over all texts if the neuron is constant there."""
    std: float
    max_activation: float
    """The largest activation of this polarity in all texts; for ``-`` the smallest activation."""

    def __post_init__(self) -> None:
        one_of(self.polarity, "polarity", POLARITIES)
        if self.neuron.site == "head":
            raise InputError(f"{self.neuron} is a whole head, and a concept consists of neurons; leave it out.")
        real(self.weight, f"The weight of {self.neuron}", 0)
        for name in ("mean", "max_activation"):
            real(getattr(self, name), f"The {name} of {self.neuron}")
        real(self.std, f"The standard deviation of {self.neuron}", POSITIVE)

    @property
    def sign(self) -> int:
        return sign_of(self.polarity)

    def to_dict(self) -> dict[str, Any]:
        return CONVERTER.unstructure(self)


@dataclass(frozen=True)
class ConceptVector:
    """A vector of the residual stream, whose product with the stream after a layer detects a concept."""

    fit: Fit
    """The difference of the means of texts with and without the concept, in standard deviations; or the weights of a
    logistic model."""
    layer: int
    vector: tuple[float, ...] = field(repr=False)
    mean: float
    """The mean of the product over the texts without the concept, and its standard deviation."""
    std: float
    auroc: float
    """On the test texts, which chose neither the vector nor the layer."""

    def __post_init__(self) -> None:
        real(self.mean, "The mean of a vector")
        real(self.std, "The standard deviation of a vector", POSITIVE)
        for number in self.vector:
            real(number, "A number of a vector")


Detector = tuple[ConceptNeuron, ...] | ConceptVector


def contributing(model: Model, detector: Detector, see: See) -> AbstractContextManager[None]:
    """Make a context in which `see` is called in every forward pass, once for each layer that is read."""
    if isinstance(detector, ConceptVector):
        return _stream(model, detector, see)
    columns = by_site_layer(part.neuron for part in detector)
    indices = {
        layer: torch.tensor([detector[row].neuron.index for row in rows], device=model.device)
        for layer, rows in columns.items()
    }

    def visit(site: str, layer: int, x: Tensor) -> None:
        see(columns[site, layer], x.detach().index_select(-1, indices[site, layer].to(x.device)))

    return hooks(model, columns, visit)


def _stream(model: Model, detector: ConceptVector, see: See) -> AbstractContextManager[None]:
    vector = torch.tensor(detector.vector, device=model.device)

    def visit(layer: int, stream: Tensor) -> None:
        check_vector(model, detector.vector, stream)
        see([0], (stream.detach().float() @ vector)[..., None])

    return stream_hooks(model, [detector.layer], visit)


NOT_RUN = "{} did not run the layers that are read, or its values are NaN; read a concept of layers that run."


def scaled(detector: Detector, x: np.ndarray) -> np.ndarray:
    """Return the contributions (..., n) of what a detector reads."""
    if isinstance(detector, ConceptVector):
        return (x - detector.mean) / detector.std
    mean, weight = np.array([(part.mean, part.sign * part.weight / part.std) for part in detector]).T
    return (x - mean) * weight


def size_of(detector: Detector) -> int:
    return 1 if isinstance(detector, ConceptVector) else len(detector)


def contributions(
    model: Model, detectors: Sequence[Detector], rows: Sequence[list[int]], on_progress: OnProgress = unwatched
) -> list[list[np.ndarray]]:
    """Return for each detector, for each row of token ids, the contributions (T, n) at its tokens; n neurons, or 1 for
    a vector. All detectors are read in the same passes."""
    values = [
        [np.full((len(ids), size_of(detector)), np.nan, dtype=np.float32) for ids in rows] for detector in detectors
    ]

    def see(of: list[np.ndarray], part: list[int], columns: list[int], x: Tensor) -> None:
        array = x.float().cpu().numpy()
        for row, number in enumerate(part):
            of[number][:, columns] = array[row, : len(rows[number])]

    @contextmanager
    def reading(part: list[int]) -> Iterator[None]:
        with ExitStack() as stack:
            for detector, of in zip(detectors, values, strict=True):
                stack.enter_context(contributing(model, detector, partial(see, of, part)))
            yield

    run(model, rows, reading, on_progress)
    if any(np.isnan(x).any() for of in values for x in of):
        raise ModelError(NOT_RUN.format(model.name))
    return [[scaled(detector, x) for x in of] for detector, of in zip(detectors, values, strict=True)]
