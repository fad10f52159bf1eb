"""The example that `icebear demo` and the app begin with."""

from icebear.records import Neuron

MODEL = "smollm2-135m"
PROMPT = "The ice bear lives in the"
COUNTERFACTUAL = "The wild camel lives in the"
"""It has as many tokens as the prompt."""
NEURON = Neuron(29, "ffn", 860)
"""It fires on the ice bear."""
