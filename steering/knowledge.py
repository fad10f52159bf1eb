"""Knowledge neurons, the classics (Dai et al. 2022): refined over paraphrases, tested by suppressing and amplifying."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from concepts.attribution import attribute
from concepts.models import Model
from db.errors import InputError
from db.records import Neuron
from steering.apply import steer
from steering.edits import Edit


def refine(model: Model, paraphrases: Sequence[str], answer: str, top: int = 20, share: float = 0.7) -> list[Neuron]:
    """The FFN neurons that are among the `top` most relevant (AttnLRP, at the last token) to the answer after at least
    `share` of the prompts that say the same; those of most prompts first."""
    if not paraphrases:
        raise InputError("There is no prompt to refine over; give several that say the same.")
    found = attribute(model, list(paraphrases), answer, sites=("ffn",))
    counts = Counter(row.neuron for relevance in found for row in relevance.top(top, "ffn"))
    wanted = share * len(paraphrases)
    return [neuron for neuron, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count >= wanted]


@dataclass(frozen=True)
class Effect:
    """Mean probability of the answers of a relation's prompts: as it is, with the neurons at 0, and at twice."""

    relation: str
    plain: float
    suppressed: float
    amplified: float

    def __str__(self) -> str:
        down, up = (100 * (value / self.plain - 1) for value in (self.suppressed, self.amplified))
        return f"{self.relation}: {self.plain:.3f}, suppressed {down:+.0f} %, amplified {up:+.0f} %"


def effects(
    model: Model, neurons: Sequence[Neuron], relations: Mapping[str, Sequence[tuple[str, str]]]
) -> list[Effect]:
    """For each relation, a list of (prompt, answer): neurons that know one relation move its answers and few others."""
    edits = [[], *([Edit(neuron, "scale", factor) for neuron in neurons] for factor in (0.0, 2.0))]
    found = []
    for name, facts in relations.items():
        means = []
        for chosen in edits:
            with steer(model, chosen):
                means.append(sum(model.probability(*fact, "answer") for fact in facts) / len(facts))
        found.append(Effect(name, *means))
    return found
