"""What fields show first where nothing else is known: the default model, and a text and a neuron about the ice bear."""

from icebear.models.loading.presets import DEFAULT as MODEL
from icebear.records import Neuron

__all__ = ["MODEL", "NEURON", "PROMPT"]
PROMPT = "The ice bear lives in the"
NEURON = Neuron(29, "ffn", 860)
"""It fires on the ice bear."""
