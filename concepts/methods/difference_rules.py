"""Difference rules as a method: prompt and counterfactual are the two rows of one pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from icebear.concepts.methods.method import Method
from icebear.concepts.methods.pair import Pair, PairResult, predictions
from icebear.concepts.passes.inputs import Inputs, Stream, product
from icebear.concepts.passes.neuron_recorders import LargestNeurons, PairedNeurons, Values
from icebear.concepts.passes.prompt import excluded_positions
from icebear.concepts.passes.run import Logits, Recorder, forward, forward_backward
from icebear.concepts.weights.changed_weights import Causes
from icebear.errors import InputError
from icebear.lrp.linear_rules import Epsilon, LinearRule
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.values import one_of


class PairLogits(Logits):
    """The number of a prompt and that of its counterfactual, which gets no gradient. Open answers are read from the
    same pass."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair.objective)
        self.pair = pair

    def numbers(self, model: Model) -> Tensor:
        objective = self.pair.objective
        logits = model.logits(objective.batch, objective.all_positions)
        self.logits = logits.detach()
        columns = [[objective.all_positions.index(at) for at in positions] for positions in objective.positions]
        self.objective = self.pair.answered(self.logits[0, columns[0]], self.logits[1, columns[1]])
        self.targets, numbers = self.objective.evaluate(logits)
        return torch.cat((numbers[:1], numbers[1:].detach()))


@dataclass(frozen=True, repr=False)
class Difference(Method):
    """Difference rules: relevance compared with a counterfactual, which sums exactly to the difference.

    Parameters
    ----------
    softmax
        ``exact`` attributes the change of attention weights too; ``constant`` fixes them at the mean of both prompts.

    References
    ----------
    Shrikumar et al. 2017 (DeepLIFT's rescale rule); for the other rules see `icebear.lrp.differences`.
    """

    softmax: Literal["exact", "constant"] = "exact"
    linear: ClassVar[LinearRule] = Epsilon()
    conv: ClassVar[None] = None
    attention_in: ClassVar[None] = None
    attention_out: ClassVar[None] = None
    scores_neurons = True
    needs_counterfactual = needs_equal_length = keeps_largest = True
    paired: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of(self.softmax, "softmax rule of a difference", ("exact", "constant"))

    def compare(self, pair: Pair) -> PairResult:
        model, objective, batch = pair.model, pair.objective, pair.objective.batch
        causes = Causes(pair.models, batch) if pair.models else None
        target, stream = PairLogits(pair), Stream(model, batch)
        inputs = Inputs(causes.read) if causes else Inputs()
        neurons = PairedNeurons(model, batch, pair.sites, pair.columns)
        excluded = partial(excluded_positions, model, objective, stream)
        largest = None if pair.k is None else LargestNeurons(model, batch, pair.sites, pair.k, excluded, True)
        recorders: list[Recorder] = [inputs, stream, neurons, *([largest] if largest else [])]
        numbers, _ = forward_backward(
            model,
            target,
            recorders,
            self,
            strict=pair.strict,
            checkpoint=pair.checkpoint,
            paired=causes.weights if causes else None,
        )
        if causes is None or batch.pixels is not None:
            (x, c), g = (batch.of_row(row, inputs.values) for row in (0, 1)), batch.of_row(0, inputs.gradients)
            tokens = [product(a - b, gradient) for a, b, gradient in zip(x, c, g, strict=True)]
        else:
            tokens = [causes.passed_on(stack, g) for stack, g in enumerate(inputs.gradients)]
        if causes is not None and not causes.models.only_weights_differ:
            _check_base(causes.models.base, target.objective, numbers[1])
        relevance, activation, counterfactual = neurons.result()
        explained = [objective.all_positions.index(position) for position in objective.positions[0]]
        return PairResult(
            objective=target.objective,
            numbers=(numbers[0].item(), numbers[1].item()),
            tokens=tuple(tokens),
            relevance=relevance,
            activation=activation,
            counterfactual=counterfactual,
            alignment=torch.eye(len(batch.columns(0))),
            sinks=stream.sinks(0),
            logits=target.logits[:1, explained],
            predictions=predictions(model, objective, target.logits),
            largest=largest.row(0) if largest else None,
            changes=causes.result() if causes else (),
        )


def _check_base(base: Model, objective: Objective, number: Tensor) -> None:
    """Raise `InputError` if the base model differs in more than its weights: if its number is not that of the pass."""
    base_objective = objective.rows([1])
    # A recorder of the router makes our code run the experts.
    experts = Values(base, base_objective.batch, ["router"] if base.has_family and base.family.experts else [])
    alone = forward(base, Logits(base_objective), [experts])[0].to(number)
    if (alone - number).abs() > torch.finfo(base.dtype).eps ** 0.5 * alone.abs().clamp(min=1):
        raise InputError(
            f"{base.name} and the model have different configurations, so their outputs would differ even with equal "
            "weights; compare models that have the same configuration."
        )


DIFFERENCE = Difference()
