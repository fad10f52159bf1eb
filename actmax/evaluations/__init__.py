"""The evaluations of `icebear evaluate`. A new one is a file, and a line here."""

from __future__ import annotations

_CONCEPTS = "icebear.concepts.evaluation"

EVALUATIONS = {
    "faithfulness": (f"{_CONCEPTS}.faithfulness:Faithfulness", "Remove tokens and measure the predicted answer."),
    "groundtruth": (f"{_CONCEPTS}.groundtruth:GroundTruth", "Test whether relevance lies on the evidence."),
    "pruning": (f"{_CONCEPTS}.pruning:Pruning", "Prune FFN neurons or heads and measure the predictions."),
    "ablation": (
        f"{_CONCEPTS}.ablation:AblationCurves",
        "Measure sufficiency and necessity of a method's first nodes.",
    ),
    "circuits": (f"{_CONCEPTS}.circuits:Circuits", "Check edges, graphs and groups by interventions."),
    "effects": (f"{_CONCEPTS}.effects:EffectsHold", "Test whether effects hold in a paraphrase and can be read."),
    "truth": (
        "icebear.steering.evaluations.truth:KnownMechanisms",
        "Judge methods on small models whose mechanism is known.",
    ),
    "flips": ("icebear.steering.evaluations.flips:Flips", "Measure how often answers flip, and the side effects."),
    "labels": ("icebear.actmax.evaluations.labels:Labels", "Measure how many neurons have a significant label."),
    "steering": (
        "icebear.steering.evaluations.concepts:ConceptSteering",
        "Compare concepts of few neurons with a residual vector.",
    ),
}
"""Name -> the class, as `pkgutil.resolve_name` takes it, and its line in `icebear evaluate -h`."""
