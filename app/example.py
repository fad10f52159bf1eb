"""The example that `icebear demo` and the app begin with."""

from icebear.models.loading.presets import DEFAULT as MODEL
from icebear.records import Neuron

__all__ = ["COUNTERFACTUAL", "MODEL", "NEURON", "PROMPT"]
PROMPT = "The ice bear lives in the"
COUNTERFACTUAL = "The wild camel lives in the"
"""It has as many tokens as the prompt."""
NEURON = Neuron(29, "ffn", 860)
"""It fires on the ice bear."""
