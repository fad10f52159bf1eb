"""Records, errors and storage. Nothing in here imports torch."""

from db.errors import IcebearError
from db.records import Neuron, Ranked

__all__ = ["IcebearError", "Neuron", "Ranked"]
