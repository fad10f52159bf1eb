"""Attribution methods that only evaluations know: baselines of the published tables."""
