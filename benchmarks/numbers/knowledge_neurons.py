"""Knowledge neurons (Dai et al. 2022) at a subject's last token: ranked over some wordings, tested on others.

python -m benchmarks.numbers.knowledge_neurons --samples 300 --out knowledge-neurons

Facts of known_1000 in ParaRel's wordings, and of 40 relations in theirs (relations/). The neurons with the largest mean
score over half of the wordings that the model answers rightly are set to zero, or to twice their activation, at the
subject's last token, in the other half; and at the last token of another subject of the relation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.baselines import log_probability
from benchmarks.numbers import common
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.passes.sites import hooks
from icebear.concepts.stages.stages import stages
from icebear.evaluation.groundtruth import tokens_between
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed
from icebear.models.model import Model
from icebear.models.objective import objective_of

COLUMNS = {
    "suppressed": "change of the right answer's probability in other wordings, neurons at zero, lower is better",
    "amplified": "the same with neurons at twice their activation, higher is better",
    "other suppressed": "change of another subject's right answer, the same neurons at zero",
    "other amplified": "the same at twice",
}
LAST = "attnlrp, last token"
"""Neurons at the last token of the prompt, instead of the subject's."""
K = 10
"""Neurons of each method."""
OTHERS_TRIED = 6


@dataclass(frozen=True)
class Wording:
    """A prompt about a subject, and the characters of the subject."""

    prompt: str
    span: tuple[int, int]
    answer: str


@dataclass(frozen=True)
class Asked:
    """A fact in all wordings, and other subjects of its relation with their answers."""

    relation: str
    subject: str
    answer: str
    frames: tuple[str, ...]
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Fact:
    """What ranks neurons, what tests them, and another subject's fact."""

    ranking: tuple[Wording, ...]
    test: tuple[Wording, ...]
    other: Wording
    in_ranking: Wording
    """The other subject in the first wording that ranks."""


# --- data ---


def worded(frame: str, subject: str, answer: str) -> Wording:
    """Return a frame with {} for the subject; it never ends in a space."""
    start = frame.index("{}")
    return Wording(frame.replace("{}", subject).rstrip(), (start, start + len(subject)), answer)


def frames(relation: str, template: str) -> list[str]:
    """Return the wordings of a relation of known_1000: its own, and those of ParaRel that end in the answer."""
    path = common.DATA / "pararel" / f"{relation}.jsonl"
    patterns = [row["pattern"] for row in common.read(f"pararel/{path.name}")] if path.exists() else []
    ends = [p for p in patterns if p.rstrip(" .").endswith("[Y]") and p.count("[X]") == p.count("[Y]") == 1]
    return list(dict.fromkeys([template, *(p.partition("[Y]")[0].strip().replace("[X]", "{}") for p in ends)]))


def relations() -> dict[str, list[tuple[str, str, tuple[str, ...]]]]:
    """Return relation -> (subject, answer, frames) of all its facts."""
    every: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {}
    for row in common.read("dpa/known_1000.json"):
        own = row["prompt"].replace(row["subject"], "{}", 1)
        fact = row["subject"], row["attribute"], tuple(frames(row["relation_id"], own))
        every.setdefault(row["relation_id"], []).append(fact)
    for path in sorted((common.DATA / "relations").glob("*.json")):
        data = common.read(f"relations/{path.name}")
        of = tuple(data["prompt_templates"] + data.get("prompt_templates_zs", []))
        rows = [(x["subject"], x["object"], of) for x in data["samples"] if isinstance(x["object"], str)]
        every[path.stem] = rows
    return every


def questions(seed: int) -> Iterator[Asked]:
    """Yield a fact of each relation in turn."""
    by_relation = {name: common.shuffled(rows, seed) for name, rows in relations().items()}
    turns = zip_longest(*([(name, row) for row in rows] for name, rows in by_relation.items()))
    for name, (subject, answer, of) in (item for turn in turns for item in turn if item):
        others = [(x, y) for x, y, _ in by_relation[name] if y != answer][:OTHERS_TRIED]
        yield Asked(name, subject, answer, of, tuple(others))


def known_fact(model: Model, known: Sequence[Wording], others: Sequence[tuple[str, str]], seed: int) -> Fact | None:
    """Return the fact for its known wordings; None if they are fewer than two, or no other subject is known."""
    order = common.shuffled(known, seed)
    ranking, test = tuple(order[::2][:3]), tuple(order[1::2][:3])
    for subject, answer in others if test else ():
        other = worded(_frame(test[0]), subject, answer)
        tokens = {common.answer_token(model, other.prompt, x) for x in (answer, test[0].answer)}
        if len(tokens) == 2 and common.is_right(model, other.prompt, answer):
            return Fact(ranking, test, other, worded(_frame(ranking[0]), subject, answer))
    return None


def _frame(wording: Wording) -> str:
    start, end = wording.span
    return f"{wording.prompt[:start]}{{}}{wording.prompt[end:]}"


# --- measured ---


def subject_at(model: Model, wording: Wording) -> int:
    """Return the subject's last token."""
    return list(tokens_between(model, wording.prompt, *wording.span))[-1]


def scores_of(model: Model, fact: Fact) -> dict[str, Tensor]:
    """Return (L, F) the mean score of each method over the wordings that rank."""
    parts: dict[str, list[Tensor]] = {}
    for wording in fact.ranking:
        at, target = subject_at(model, wording), common.answer_token(model, wording.prompt, wording.answer)
        recorded = sorted({at, len(model.token_ids(wording.prompt)) - 1})
        explain = partial(attribute, model, wording.prompt, target, number="logit", sites=("ffn",), record=recorded)
        rows = {name: explain(method=name) for name in ("attnlrp", "gxi")}
        scored = {name: row.ffn[:, 0] for name, row in rows.items()}
        scored[LAST] = rows["attnlrp"].ffn[:, -1]
        scored["activation"] = rows["gxi"].activation("ffn")[:, 0].abs()
        for name, values in scored.items():
            parts.setdefault(name, []).append(values)
    first, other = fact.ranking[0], fact.in_ranking
    target = common.answer_token(model, first.prompt, first.answer)
    contrast = common.answer_token(model, other.prompt, other.answer)
    paired = attribute(model, first.prompt, target, contrast, counterfactual=other.prompt, sites=("ffn",))
    parts["difference"] = [paired.ffn[:, subject_at(model, first)]]
    return {name: torch.stack(values).mean(0) for name, values in parts.items()}


def probabilities(
    model: Model, wordings: Sequence[Wording], chosen: Tensor | None = None, factor: float = 1, last: bool = False
) -> Tensor:
    """Return the right answers' probabilities with neurons (K, 2: layer, index) scaled at each subject's last token, or
    at the last token."""
    rows = torch.arange(len(wordings))
    position = lambda x: len(model.token_ids(x.prompt)) - 1 if last else subject_at(model, x)  # noqa: E731
    at = torch.tensor([position(wording) for wording in wordings])
    layers = [] if chosen is None else sorted(set(chosen[:, 0].tolist()))

    def scaled(site: str, layer: int, x: Tensor) -> Tensor:
        x = x.clone()
        for index in chosen[chosen[:, 0] == layer, 1].tolist():  # type: ignore[index]
            x[rows, at, index] *= factor
        return x

    targets = [common.answer_token(model, wording.prompt, wording.answer) for wording in wordings]
    objective = objective_of(model, [wording.prompt for wording in wordings], targets)
    with hooks(model, [("ffn", layer) for layer in layers], scaled) if layers else nullcontext(), torch.no_grad():
        return log_probability(model, objective).exp()


def measured(model: Model, one: Asked, seed: int) -> dict[str, Any]:
    wordings = [worded(frame, one.subject, one.answer) for frame in one.frames]
    are_right = common.are_right(model, [wording.prompt for wording in wordings], [one.answer] * len(wordings))
    known = [wording for wording, right in zip(wordings, are_right, strict=True) if right]
    fact = known_fact(model, known, one.others, seed)
    about = {"relation": one.relation, "subject": one.subject, "prompts": len(wordings), "right": len(known)}
    if fact is None:
        return {**about, "counts": False, "methods": {}}
    chosen = {name: _largest(values) for name, values in scores_of(model, fact).items()}
    generator = random.Random(f"{seed} {one.subject}")
    layers = chosen["attnlrp"][:, 0].tolist()
    chosen["random"] = torch.tensor([[layer, generator.randrange(model.width("ffn"))] for layer in layers])
    tested = (*fact.test, fact.other)
    plain = probabilities(model, tested)
    methods = {}
    for name, neurons in chosen.items():
        zero, twice = (probabilities(model, tested, neurons, factor, name == LAST) / plain - 1 for factor in (0.0, 2.0))
        numbers = (zero[:-1].mean(), twice[:-1].mean(), zero[-1], twice[-1])
        methods[name] = {column: number.item() for column, number in zip(COLUMNS, numbers, strict=True)}
    lists = {name: rows.tolist() for name, rows in chosen.items()}
    tests = {"test": fact.test[0].prompt, "other": fact.other.prompt, "p": plain.tolist()}
    return {**about, **tests, "neurons": lists, "stages": staged(model, fact), "methods": methods}


def _largest(values: Tensor) -> Tensor:
    order = values.flatten().topk(K).indices
    return torch.stack((order // values.shape[1], order % values.shape[1]), 1)


def staged(model: Model, fact: Fact) -> dict[str, Any] | None:
    """Return the stages of the fact against the other subject; None where the prompts are not aligned."""
    prompt, other = fact.test[0].prompt, fact.other.prompt
    ids, others = model.token_ids(prompt), model.token_ids(other)
    first, second = common.first_tokens(model, [prompt, other])
    if len(ids) != len(others) or ids[-1] != others[-1] or first == second:
        return None
    row = stages(model, prompt, counterfactual=other)
    numbers = {name: getattr(row, name) for name in ("alone", "without", "random", "reached")}
    return {"heads": len(row.heads), "neurons": len(row.neurons), **numbers}


def notes(lines: Lines) -> list[str]:
    prompts, right = (sum(line[key] for line in lines) for key in ("prompts", "right"))
    usable = [line for line in lines if line.get("counts", True)]
    all_staged = [line["stages"] for line in usable if line["stages"] and line["stages"]["alone"] is not None]
    text = f"the model is right on {right} of {prompts} prompts about {len(lines)} facts; {len(usable)} are usable"
    if not all_staged:
        return [text]
    medians = {
        key: median(row[key] for row in all_staged) for key in ("alone", "without", "random", "heads", "neurons")
    }
    return [text, f"stages of {len(all_staged)} facts, medians: {medians}"]


@dataclass(frozen=True)
class KnowledgeNeurons(Evaluation):
    """Neurons of a subject's last token that hold a fact over wordings: suppressed and amplified in other wordings."""

    name: ClassVar = "knowledge-neurons"
    samples: common.Samples = 300
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        tried = list(islice(questions(self.seed), self.samples))
        yield Part(COLUMNS, tried, partial(measured, model, seed=self.seed), notes=notes)


if __name__ == "__main__":
    command(KnowledgeNeurons)()
