"""Find the neurons that a language model uses, show what they mean, and steer them.

Each public name is imported when it is first used: ``from icebear import load_model, attribute``.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
