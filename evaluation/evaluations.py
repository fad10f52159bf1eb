"""The evaluations of `icebear evaluate`. A new one is a file, and a line here."""

EVALUATIONS = {
    "faithfulness": ("icebear.evaluation.faithfulness:Faithfulness", "Remove tokens and measure the predicted answer."),
    "groundtruth": ("icebear.evaluation.groundtruth:GroundTruth", "Test whether relevance lies on the evidence."),
    "flips": ("icebear.evaluation.flips:Flips", "Measure how often answers flip, and the side effects."),
}
"""Name -> the class, as `pkgutil.resolve_name` takes it, and its line in `icebear evaluate -h`."""
