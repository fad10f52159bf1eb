"""Attribution methods as values: they can be compared, printed and written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttnLRP:
    """AttnLRP (Achtibat et al. 2024) and its variants.

    softmax: ``taylor`` is the paper's rule (Eq. 13); ``constant`` takes the attention weights as
        constants, which is CP-LRP (Ali et al. 2022), and conserves relevance exactly.
    """

    softmax: Literal["taylor", "constant"] = "taylor"

    @property
    def name(self) -> str:
        return {"taylor": "attnlrp", "constant": "cp-lrp"}[self.softmax]


ATTNLRP = AttnLRP()
CP_LRP = AttnLRP(softmax="constant")

METHODS = {method.name: method for method in (ATTNLRP, CP_LRP)}
