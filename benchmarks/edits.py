"""Flips and concepts as edits of knowledge, in the form of CounterFact (Meng et al. 2022).

python -m benchmarks.edits --out edits
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

from benchmarks.steering import repeated_trigrams
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.concepts.vocabulary.weight_rows import direct_rows, unembedding
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.evaluation.flips import NEURONS, RANDOM, SEARCHES
from icebear.evaluation.protocol import Evaluation, Part, Seed, Setting
from icebear.models.model import Model
from icebear.records import Neuron
from icebear.steering.apply import steer
from icebear.steering.concept.concept import Concept
from icebear.steering.flipping.flip import FlipRequest, flip_by
from icebear.steering.side_effects import HeldOutContexts

SEARCHED = 2
"""Paraphrases, after the prompt itself, that are not for the test: the searches of older tables saw them."""
NEIGHBOURS = 8
"""Other subjects of the relation, at most."""
CONCEPT = 20
"""Neurons of the concept."""
STEPS = 8
"""Halvings of its strength, from twice the activation range of its neurons."""
WRITTEN = 30
"""Tokens after the prompt."""

RELATIONS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Relation -> prompts about a subject, the first to be edited, the next `SEARCHED` left out; and subjects
with their objects. Our own."""

COLUMNS = {
    "flipped": "whether the other object becomes the next token of the prompt",
    "efficacy": "whether the other object becomes more probable than the true one after the prompt",
    "generalisation": "the same, over paraphrases",
    "specificity": "share of prompts about other subjects that keep their next token",
    "fluency": "1 less the share of repeated three-token sequences in 30 tokens after the prompt",
    "off_target_kl": "KL at held-out contexts, in nats; lower is better",
    "neurons": "edited; lower is better",
}
CHOSEN = (NEURONS, RANDOM)
LIKE_OBJECT = "concept"
METHODS = (*CHOSEN, LIKE_OBJECT, "nothing")


@dataclass(frozen=True)
class Case:
    relation: str
    subject: str
    true: str
    new: str
    source: str
    """The subject of the new object."""
    neighbours: tuple[str, ...]

    def prompts(self) -> list[str]:
        """Return the prompt to be edited, the paraphrases for a search, and the paraphrases for the test."""
        return [template.format(self.subject) for template in RELATIONS[self.relation]["prompts"]]


def cases(model: Model, seed: int = 0) -> tuple[list[Case], int]:
    """Return cases whose true object the model predicts, each with another object; and how many facts were tried."""
    generator, chosen, tried = np.random.default_rng(seed), [], 0
    for relation, of in RELATIONS.items():
        tried += len(of["objects"])
        known = [(s, o) for s, o in of["objects"].items() if _says(model, of["prompts"][0].format(s), o)]
        for subject, true in known:
            others = [(s, o) for s, o in known if _first(model, o) != _first(model, true)]
            if others:
                source, new = others[int(generator.integers(len(others)))]
                subjects = [s for s, _ in known if s not in (subject, source)]
                neighbours = tuple(generator.permutation(subjects)[:NEIGHBOURS].tolist())
                chosen.append(Case(relation, subject, true, new, source, neighbours))
    return chosen, tried


def _first(model: Model, text: str) -> int:
    return model.tokens_of(f" {text}")[0]


def _says(model: Model, prompt: str, answer: str) -> bool:
    return int(model.next_logits(prompt).argmax()) == _first(model, answer)


def sample(model: Model, contexts: HeldOutContexts, case: Case, max_neurons: int = 10) -> dict[str, Any]:
    """Return the case and each method's numbers; JSON-ready."""
    made: dict[str, Callable[[], Sequence[Edit]]] = {
        **{name: partial(_flip, model, case, max_neurons, name) for name in CHOSEN},
        LIKE_OBJECT: partial(_by_concept, model, case),
        "nothing": list,
    }
    before = _standings(model, case, [])
    return {
        **vars(case),
        "methods": {name: _measured(model, contexts, case, make, before) for name, make in made.items()},
    }


def _flip(model: Model, case: Case, max_neurons: int, choose: str = NEURONS) -> Sequence[Edit]:
    prompt, source = case.prompts()[0], RELATIONS[case.relation]["prompts"][0].format(case.source)
    how = {**SEARCHES[choose], "heads": False}
    request = FlipRequest(model, prompt, _first(model, case.new), source, max_neurons, **how)
    return list(flip_by(request))


def _measured(
    model: Model, contexts: HeldOutContexts, case: Case, make: Callable[[], Sequence[Edit]], before: dict[str, Any]
) -> dict[str, float]:
    """Return a method's numbers; without edits they are those of the plain model."""
    try:
        edits = list(make())
    except InputError:
        edits = []
    after = _standings(model, case, edits)
    return {
        "flipped": float(after["first"]),
        "efficacy": float(after["prompt"]),
        "generalisation": after["paraphrases"],
        "specificity": float(np.mean([a == b for a, b in zip(after["neighbours"], before["neighbours"], strict=True)])),
        "fluency": after["fluency"],
        "off_target_kl": contexts.off_target_kl(edits) if edits else 0.0,
        "neurons": float(len({edit.neuron for edit in edits})),
    }


def _standings(model: Model, case: Case, edits: Sequence[Edit]) -> dict[str, Any]:
    """Return which object is more probable after each prompt, with edits."""
    new, true = _first(model, case.new), _first(model, case.true)
    prompt, *paraphrases = case.prompts()
    about = RELATIONS[case.relation]["prompts"][0]
    with steer(model, edits):
        logits = model.next_logits(prompt)
        others = [model.next_logits(text) for text in paraphrases[SEARCHED:]]
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
    """Steer the neurons whose W_out rows add most to the new object's logit less the true one's, at the last token, as
    little as makes the new object the next token. Raises `InputError` where it does not become that."""
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
    """Return FFN neurons by what each adds to the difference of two logits at the end of its activation range."""
    reads = unembedding(model, torch.tensor([new, true]))
    seen = calibrate(model)
    gains = torch.zeros(model.layers, model.width("ffn"))
    for layer in model.layers_with("ffn"):
        rows = direct_rows(model, "ffn", layer)
        if rows is not None:
            gains[layer] = (rows @ (reads[0] - reads[1])).cpu()
    best = torch.maximum(gains * seen.high, gains * seen.low)  # (L, F)
    places = torch.stack(torch.unravel_index(best.flatten().topk(size).indices, best.shape), 1).tolist()
    weights = {(Neuron(layer, "ffn", index), "+" if gains[layer, index] > 0 else "-"): 1.0 for layer, index in places}
    return Concept.of(model, model.answer_text(new), weights)


@dataclass(frozen=True)
class KnowledgeEdits(Evaluation):
    """Flips and concepts as edits of knowledge: paraphrases, neighbouring facts, off-target KL.

    The facts are our own, in CounterFact's form; only facts that the model predicts count. About a minute a fact.
    """

    name: ClassVar = "edits"
    cases: Annotated[int, Setting("How many of the facts that the model predicts; 0 for all.", least=0)] = 0
    seed: Seed = 0
    max_neurons: Annotated[int, Setting()] = 10

    def parts(self, model: Model) -> Iterator[Part]:
        known, tried = cases(model, self.seed)
        if not known:
            raise InputError(f"{model.name} predicts none of {tried} facts, so there is nothing to edit.")
        count = min(self.cases or len(known), len(known))
        chosen = [known[place * len(known) // count] for place in range(count)]  # of all relations
        contexts = HeldOutContexts(model)
        yield Part(
            COLUMNS,
            chosen,
            lambda case: sample(model, contexts, case, self.max_neurons),
            methods={name: name for name in METHODS},
            notes=lambda lines: notes(lines, tried),
        )


def notes(lines: Sequence[dict[str, Any]], tried: int) -> list[str]:
    by_relation = {line["relation"]: sum(one["relation"] == line["relation"] for one in lines) for line in lines}
    counts = ", ".join(f"{name} {count}" for name, count in by_relation.items())
    return [
        f"{len(lines)} cases ({counts}); {tried} facts were tried, and only facts that the model predicts count",
        "where a method has no edits, its numbers are those of the plain model, which nothing has",
    ]


if __name__ == "__main__":
    command(KnowledgeEdits)()
