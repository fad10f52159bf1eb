"""How good explanations are: the protocol of evaluations, their runner and report, and those of explanations."""
