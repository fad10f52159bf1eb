"""The evaluations of `icebear evaluate`; a new one is a file and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from icebear.concepts.evaluation.protocol import Evaluation


class Registered(NamedTuple):
    """Where an evaluation's class is, and what `icebear evaluate -h` says of it."""

    module: str
    kind: str
    summary: str

    def load(self) -> type[Evaluation]:
        return getattr(import_module(self.module), self.kind)


EVALUATIONS: dict[str, Registered] = {
    "faithfulness": Registered(
        "icebear.concepts.evaluation.faithfulness", "Faithfulness", "Remove tokens and watch the predicted answer go."
    ),
    "groundtruth": Registered(
        "icebear.concepts.evaluation.groundtruth", "GroundTruth", "Whether relevance lies where the evidence is."
    ),
    "pruning": Registered(
        "icebear.concepts.evaluation.pruning", "Pruning", "Prune FFN neurons or heads and watch the predictions go."
    ),
    "ablation": Registered(
        "icebear.concepts.evaluation.ablation", "AblationCurves", "Sufficiency and necessity of a method's first nodes."
    ),
    "circuits": Registered(
        "icebear.concepts.evaluation.circuits", "Circuits", "Check edges, graphs and groups by interventions."
    ),
    "flips": Registered("icebear.steering.evaluations.flips", "Flips", "How often answers flip, and the side effects."),
    "labels": Registered("icebear.actmax.evaluations.labels", "Labels", "How many neurons have a significant label."),
    "steering": Registered(
        "icebear.steering.evaluations.concepts", "ConceptSteering", "Concepts of few neurons against a residual vector."
    ),
}
