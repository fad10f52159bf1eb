"""Flips and concepts as edits of knowledge, in the form of CounterFact (Meng et al. 2022).

python benchmarks/edits.py --out edits
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.calibration import calibrate
from icebear.concepts.evaluation.protocol import Evaluation, Option, Part, Seed
from icebear.concepts.models.model import Model
from icebear.concepts.vocabulary import unembedding, written
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.records import Neuron
from icebear.steering.apply import steer
from icebear.steering.concept.concept import Concept
from icebear.steering.flipping.search import flip
from icebear.steering.side_effects import HeldOutContexts, repeated_trigrams

SEARCHED = 2
"""Paraphrases that a search may see, behind the prompt itself; the others are reported."""
NEIGHBOURS = 8
"""Other subjects of the relation, at most."""
CONCEPT = 20
"""Neurons of the concept, and"""
STEPS = 8
"""halvings of its strength, from twice what its neurons were seen to do."""
WRITTEN = 30
"""Tokens after the prompt."""

RELATIONS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Relation -> prompts about a subject, the first to be edited, the next `SEARCHED` for a search to see; and subjects
with their objects. Our own."""

COLUMNS = {
    "found": "whether it makes the other object the next token of the prompt",
    "efficacy": "whether the other object is then more probable than the true one after the prompt",
    "generalisation": "the same, over paraphrases that no search saw",
    "specificity": "share of prompts about other subjects that keep their next token",
    "fluency": "1 less the share of repeated three-token sequences in 30 tokens after the prompt",
    "price": "KL at held-out contexts, in nats; lower is better",
    "neurons": "edited; lower is better",
}
CHOSEN = ("relevance", "gradient", "activation", "chance 0")
TOGETHER, LIKE_OBJECT = "relevance, with paraphrases", "concept"
METHODS = (*CHOSEN, TOGETHER, LIKE_OBJECT, "nothing")


@dataclass(frozen=True)
class Case:
    relation: str
    subject: str
    true: str
    new: str
    like: str
    """The subject whose object the new one is."""
    neighbours: tuple[str, ...]

    def prompts(self) -> list[str]:
        """The one to be edited, those that a search may see, and those that none does."""
        return [template.format(self.subject) for template in RELATIONS[self.relation]["prompts"]]


def cases(model: Model, seed: int = 0) -> tuple[list[Case], int]:
    """Those whose true object the model says next, each with the object of another one; and how many were tried."""
    generator, found, tried = np.random.default_rng(seed), [], 0
    for relation, of in RELATIONS.items():
        tried += len(of["objects"])
        known = [(s, o) for s, o in of["objects"].items() if _says(model, of["prompts"][0].format(s), o)]
        for subject, true in known:
            others = [(s, o) for s, o in known if _first(model, o) != _first(model, true)]
            if others:
                like, new = others[int(generator.integers(len(others)))]
                rest = [s for s, _ in known if s not in (subject, like)]
                chosen = tuple(generator.permutation(rest)[:NEIGHBOURS].tolist())
                found.append(Case(relation, subject, true, new, like, chosen))
    return found, tried


def _first(model: Model, text: str) -> int:
    return model.tokens_of(f" {text}")[0]


def _says(model: Model, prompt: str, answer: str) -> bool:
    return int(model.next_logits(prompt).argmax()) == _first(model, answer)


def sample(model: Model, neutral: HeldOutContexts, case: Case, max_neurons: int = 10) -> dict[str, Any]:
    """A line: the case, and each method's numbers."""
    one, seen = partial(_flip, model, case, max_neurons), case.prompts()[1 : 1 + SEARCHED]
    made: dict[str, Callable[[], Sequence[Edit]]] = {
        **{name: partial(one, choose=name) for name in CHOSEN},
        TOGETHER: partial(one, paraphrases=seen),
        LIKE_OBJECT: partial(_by_concept, model, case),
        "nothing": list,
    }
    before = _standings(model, case, [])
    return {
        **vars(case),
        "methods": {name: _measured(model, neutral, case, make, before) for name, make in made.items()},
    }


def _flip(model: Model, case: Case, max_neurons: int, **options: Any) -> Sequence[Edit]:
    prompt, like = case.prompts()[0], RELATIONS[case.relation]["prompts"][0].format(case.like)
    return list(flip(model, prompt, _first(model, case.new), like, max_neurons, **options))


def _measured(
    model: Model, neutral: HeldOutContexts, case: Case, make: Callable[[], Sequence[Edit]], before: dict[str, Any]
) -> dict[str, float]:
    """Where nothing was found the model is as it was."""
    try:
        edits = list(make())
    except InputError:
        edits = []
    after = _standings(model, case, edits)
    return {
        "found": float(after["first"]),
        "efficacy": float(after["prompt"]),
        "generalisation": after["paraphrases"],
        "specificity": float(np.mean([a == b for a, b in zip(after["neighbours"], before["neighbours"], strict=True)])),
        "fluency": after["fluency"],
        "price": neutral.divergence(edits) if edits else 0.0,
        "neurons": float(len({edit.neuron for edit in edits})),
    }


def _standings(model: Model, case: Case, edits: Sequence[Edit]) -> dict[str, Any]:
    """What is more probable after each prompt, with edits."""
    new, true = _first(model, case.new), _first(model, case.true)
    prompt, *rest = case.prompts()
    about = RELATIONS[case.relation]["prompts"][0]
    with steer(model, edits):
        logits = model.next_logits(prompt)
        others = [model.next_logits(text) for text in rest[SEARCHED:]]
        text = model.generate(prompt, max_new_tokens=WRITTEN)
        neighbours = [int(model.next_logits(about.format(subject)).argmax()) for subject in case.neighbours]
    return {
        "first": int(logits.argmax()) == new,
        "prompt": bool(logits[new] > logits[true]),
        "paraphrases": float(np.mean([bool(row[new] > row[true]) for row in others])),
        "fluency": 1 - repeated_trigrams(model.tokens_of(text)),
        "neighbours": neighbours,
    }


# --- a concept for an object ------------------------------------------------------------------------------


def _by_concept(model: Model, case: Case) -> Sequence[Edit]:
    """The neurons whose W2 rows add most to the new object's logit against the true one's, turned up at the last token
    as little as makes it come. Raises `InputError` where it does not."""
    concept = of_object(model, _first(model, case.new), _first(model, case.true))
    prompt, new = case.prompts()[0], _first(model, case.new)

    def comes(strength: float) -> bool:
        with steer(model, concept.recipe(model, strength, where="last")):
            return int(model.next_logits(prompt).argmax()) == new

    low, high = 0.0, 2.0
    if not comes(high):
        raise InputError(f"{CONCEPT} neurons that write {case.new!r} do not make it come.")
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if comes(middle) else (middle, high)
    return list(concept.recipe(model, high, where="last"))


@torch.no_grad()
def of_object(model: Model, new: int, true: int, size: int = CONCEPT) -> Concept:
    """FFN neurons by what each adds to the difference of two logits when it goes as far as it was seen to."""
    reads = unembedding(model, torch.tensor([new, true]))
    seen = calibrate(model)
    gains = torch.zeros(model.layers, model.width("ffn"))
    for layer in model.layers_with("ffn"):
        rows = written(model, "ffn", layer)
        if rows is not None:
            gains[layer] = (rows @ (reads[0] - reads[1])).cpu()
    best = torch.maximum(gains * seen.high, gains * seen.low)  # (L, F)
    places = torch.stack(torch.unravel_index(best.flatten().topk(size).indices, best.shape), 1).tolist()
    weights = {(Neuron(layer, "ffn", index), "+" if gains[layer, index] > 0 else "-"): 1.0 for layer, index in places}
    return Concept.of(model, model.answer_text(new), weights)


@dataclass(frozen=True)
class KnowledgeEdits(Evaluation):
    """Flips and concepts as edits of knowledge: paraphrases, neighbouring facts, off-target KL.

    Facts are our own, in CounterFact's form; those count that the model says by itself. About a minute a fact.
    """

    name: ClassVar = "edits"
    cases: Annotated[int, Option("How many facts, of those that the model knows; 0 for all.", least=0)] = 0
    seed: Seed = 0
    max_neurons: Annotated[int, Option()] = 10

    def parts(self, model: Model) -> Iterator[Part]:
        known, tried = cases(model, self.seed)
        if not known:
            raise InputError(f"{model.name} says none of {tried} facts by itself, so there is nothing to edit.")
        count = min(self.cases or len(known), len(known))
        chosen = [known[place * len(known) // count] for place in range(count)]  # of all relations
        neutral = HeldOutContexts(model)
        yield Part(
            COLUMNS,
            chosen,
            lambda case: sample(model, neutral, case, self.max_neurons),
            methods={name: name for name in METHODS},
            notes=lambda lines: notes(lines, tried),
        )


def notes(lines: Sequence[dict[str, Any]], tried: int) -> list[str]:
    by_relation = {line["relation"]: sum(one["relation"] == line["relation"] for one in lines) for line in lines}
    told = ", ".join(f"{name} {count}" for name, count in by_relation.items())
    return [
        f"{len(lines)} cases ({told}); {tried} facts were tried, those count that the model says next by itself",
        "where a method finds nothing the model is as it was; nothing is the model as it is",
    ]


if __name__ == "__main__":
    command(KnowledgeEdits)()
