"""Knowledge neurons, the classics (Dai et al. 2022): refined over paraphrases, tested by suppressing and amplifying.

python -m benchmarks.knowledge --data benchmarks/facts.json --out knowledge
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from benchmarks.baselines import log_probability
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.common import VARIANTS_PER_PASS
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.evaluation.protocol import Evaluation, Part, Seed, Setting
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.paths import read_text
from icebear.records import Neuron
from icebear.steering.apply import steer

COLUMNS = {
    "suppressed": "median [quartiles] over facts of the change of the answers' probability, neurons at 0",
    "amplified": "median of the same, neurons at twice their activation",
}
"""Of the fact's own answer, of the others', and of its own with random neurons."""


def refine(model: Model, paraphrases: Sequence[str], answer: str, top: int = 20, share: float = 0.7) -> list[Neuron]:
    """The FFN neurons that are among the `top` most relevant (AttnLRP, at the last token) to the answer after at least
    `share` of the prompts that say the same; those of most prompts first."""
    if not paraphrases:
        raise InputError("There is no prompt to refine over; give several that say the same.")
    counts: Counter[Neuron] = Counter()
    for prompts in _parts(paraphrases):
        relevances = attribute(model, prompts, answer, sites=("ffn",), number="logit", record="last")
        counts.update(row.neuron for relevance in relevances for row in relevance.top(top, "ffn"))
    wanted = share * len(paraphrases)
    return [neuron for neuron, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count >= wanted]


@dataclass(frozen=True)
class Effect:
    """Mean probability of the answers of a relation's prompts: as it is, with the neurons at 0, and at twice."""

    relation: str
    plain: float
    suppressed: float
    amplified: float

    @property
    def changes(self) -> tuple[float, float]:
        """By suppressing and by amplifying, as shares of the plain probability."""
        return self.suppressed / self.plain - 1, self.amplified / self.plain - 1


def effects(
    model: Model, neurons: Sequence[Neuron], relations: Mapping[str, Sequence[tuple[str, str]]]
) -> list[Effect]:
    """For each relation, a list of (prompt, answer): neurons that know one relation move its answers and few others."""
    parts = _parts([fact for facts in relations.values() for fact in facts])
    objectives = [objective_of(model, *zip(*part, strict=True)) for part in parts]  # type: ignore[arg-type]
    means = []
    for factor in (1.0, 0.0, 2.0):
        with torch.no_grad(), steer(model, [Edit(neuron, "scale", factor) for neuron in neurons]):
            probabilities = torch.cat([log_probability(model, part) for part in objectives]).exp()
        means.append([part.mean().item() for part in probabilities.split([len(facts) for facts in relations.values()])])
    return [Effect(name, *values) for name, values in zip(relations, zip(*means, strict=True), strict=True)]


def _parts(facts: Sequence[Any]) -> list[list[Any]]:
    """As many at a time as go through the model at once."""
    return [list(facts[start : start + VARIANTS_PER_PASS]) for start in range(0, len(facts), VARIANTS_PER_PASS)]


def read(path: str) -> dict[str, list[tuple[str, str]]]:
    """Read a JSON object: a fact's name -> {"answer": ..., "prompts": [paraphrases]}. Raises `InputError`."""
    try:
        facts = json.loads(read_text(path))
        if not all(isinstance(fact["prompts"], list) for fact in facts.values()):
            raise ValueError
        pairs = {
            name: [(str(prompt), str(fact["answer"])) for prompt in fact["prompts"]] for name, fact in facts.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} must be a JSON object of facts, each with an answer and prompts.") from None
    if len(pairs) < 2 or not all(pairs.values()):
        raise InputError(f"{path} must have two facts or more, each with prompts, so that one can be told from others.")
    return pairs


@dataclass(frozen=True)
class KnowledgeNeurons(Evaluation):
    """Knowledge neurons of facts: what suppressing and amplifying them does to those facts, and to others.

    --data is a JSON object: a fact's name -> its answer and prompts that say the same.
    """

    name: ClassVar = "knowledge"
    data: Annotated[str, Setting("A file of facts.", is_file=True)]
    top: Annotated[int, Setting()] = 20
    quorum: Annotated[
        float, Setting("The share of a fact's prompts whose top a neuron must be in to be the fact's.", least=0)
    ] = 0.7
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        facts = read(self.data)
        yield Part(COLUMNS, list(facts), lambda name: sample(model, facts, name, self.top, self.quorum, self.seed))


def sample(
    model: Model, facts: Mapping[str, Sequence[tuple[str, str]]], name: str, top: int, share: float, seed: int
) -> dict[str, Any]:
    """The refined neurons of a fact, and how much suppressing and amplifying them changes the probability of its own
    answer and of the others' (their mean); and what as many random neurons of the same layers change."""
    prompts, generator = facts[name], random.Random(f"{seed} {name}")
    neurons = refine(model, [prompt for prompt, _ in prompts], prompts[0][1], top, share)
    anywhere = [Neuron(neuron.layer, "ffn", generator.randrange(model.width("ffn"))) for neuron in neurons]
    changes = {effect.relation: effect.changes for effect in effects(model, neurons, facts)}
    own = changes.pop(name)
    others = [sum(values) / len(changes) for values in zip(*changes.values(), strict=True)]
    control = effects(model, anywhere, {name: prompts})[0]
    pairs = {"own": own, "others": others, "random": control.changes}
    return {
        "fact": name,
        "neurons": [str(neuron) for neuron in neurons],
        "plain": control.plain,
        "methods": {whose: dict(zip(COLUMNS, pair, strict=True)) for whose, pair in pairs.items()},
    }


if __name__ == "__main__":
    command(KnowledgeNeurons)()
