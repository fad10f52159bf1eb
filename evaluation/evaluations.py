"""The evaluations of `icebear evaluate`. A new one is a file, and a line here."""

from __future__ import annotations

_EXPLANATIONS = "icebear.evaluation.explanations"

EVALUATIONS = {
    "faithfulness": (f"{_EXPLANATIONS}.faithfulness:Faithfulness", "Remove tokens and measure the predicted answer."),
    "groundtruth": (f"{_EXPLANATIONS}.groundtruth:GroundTruth", "Test whether relevance lies on the evidence."),
    "flips": ("icebear.evaluation.uses.flips:Flips", "Measure how often answers flip, and the side effects."),
}
"""Name -> the class, as `pkgutil.resolve_name` takes it, and its line in `icebear evaluate -h`."""
