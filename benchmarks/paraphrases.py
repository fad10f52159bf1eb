"""Do effects of neurons on the next token hold in a paraphrase?

python -m benchmarks.paraphrases --samples 8 --out effects

Each pair of an ablation task gets a paraphrase: a sentence before the prompt that leaves the answer as it is. Neurons
are changed at a token, from their value in the prompt to that in the counterfactual; the effect is measured on the
likely tokens of the pair. The same change of the same neuron at the same word is measured in the paraphrase. The
tables have the correlation of the two (`effect`) and, over the same tokens, of the effect in the paraphrase with the
logit lens (`direct`), the mean Jacobian lens (`mean`), the same neuron's effect in an unrelated prompt, and the
effect of a random neuron of the same layer. Two nodes are taken in each third of the layers, at the last and at
earlier tokens, and in tables called `shown` the ten with the largest relevance of all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks import task_pairs
from benchmarks.task_pairs import Pair, Pairs, Tasks, answers, relevance_of
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.passes.sites import hooks
from icebear.concepts.results.effects import LIKELY
from icebear.concepts.results.result import Relevance
from icebear.concepts.vocabulary.lens import mean_lens, mean_rows
from icebear.concepts.vocabulary.weight_rows import direct_row, unembedding
from icebear.evaluation.protocol import Evaluation, Line, Lines, Part, Seed, Table
from icebear.models.model import Model
from icebear.records import Neuron, Ranked

PARAPHRASES = {
    "simple": "It was a quiet day, and the work was done. {}",
    "phrase": "It was late in the evening. {}",
    "within-clause": "This is what I have heard. {}",
    "across-clause": "It has been like this for years. {}",
    "indirect-object": "It was a warm afternoon in spring. {}",
    "greater-than": "This is written in the old books. {}",
    "capitals": "It is well known that {}",
    "opposites": "Every child learns at school that {}",
    "pronouns": "It happened on the way home. {}",
}
"""A beginning for each task that leaves the answer as it is."""
THIRDS = ("first", "middle", "last")
POSITIONS = ("last-token", "earlier-token")
PREDICTED = ("direct", "mean", "effect", "unrelated prompt", "random neuron")
"""Logit lens, mean Jacobian lens, the effect in the first prompt; as controls the same neuron's effect in an unrelated
prompt, and the effect of a random neuron of the same layer."""
CORRELATION = {
    "mean": "mean over a pair's nodes of the correlation with the effect in the paraphrase",
    "median": "median [quartiles] over pairs of the median over nodes of the same",
}
THIRD_NODES = 2
"""Nodes of each third of the layers, at the last token and at earlier ones."""
SHOWN_NODES = 10
"""Nodes with the largest relevance of all."""
Change = tuple[Neuron, int, float]
"""A neuron, a position, and what is added to its activation there."""


@dataclass(frozen=True)
class Sample:
    """A pair, and a pair of another task."""

    task: str
    pair: Pair
    other: Pair


@dataclass(frozen=True)
class EffectsHold(Evaluation):
    """Test whether the effects of neurons hold in a paraphrase.

    The command measures the effect of a node on the likely next tokens in a prompt. It correlates this effect with
    the effect of the same change of the neuron in a paraphrase, and with the logit lens, the averaged Jacobian lens
    and two controls.
    """

    name: ClassVar = "effects"
    tasks: Tasks = "all"
    samples: Pairs = 20
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        task_pairs.pairs_of(self.tasks)

    def parts(self, model: Model) -> Iterator[Part]:
        chosen, notes = [], []
        for task, usable, _ in task_pairs.usable_by_task(
            model, task_pairs.pairs_of(self.tasks), 2 * self.samples, self.seed
        ):
            kept_pairs = [pair for pair in usable if is_paraphrased(model, task, pair)]
            notes.append(f"{task}: {len(kept_pairs)} of {len(usable)} pairs are answered in the paraphrase too")
            chosen += [(task, pair) for pair in kept_pairs[: self.samples]]
        random.Random(self.seed).shuffle(chosen)
        samples = [Sample(*sample, _other(chosen, number)) for number, sample in enumerate(chosen)]
        yield Part(
            {},
            samples,
            partial(measured, model),
            methods={name: name for name in PREDICTED},
            settings={"tasks": self.tasks},
            tables=_tables,
            listings=_listings,
            notes=lambda lines: [
                *notes,
                "shown: the ten nodes of a pair with the largest relevance at all layers and tokens",
            ],
        )


def _other(chosen: Sequence[tuple[str, Pair]], number: int) -> Pair:
    """Return the next pair of another task; of the same, where there is one task."""
    behind = [*chosen[number + 1 :], *chosen[: number + 1]]
    return next((pair for task, pair in behind if task != chosen[number][0]), behind[0][1])


def paraphrase(task: str, prompt: str) -> str:
    frame = PARAPHRASES[task]
    return frame.format(prompt if frame.endswith(". {}") else prompt[0].lower() + prompt[1:])


def is_paraphrased(model: Model, task: str, pair: Pair) -> bool:
    """Return whether the paraphrases of both prompts have the same tokens from the second on, and the same answers."""
    texts = [(text, paraphrase(task, text)) for text in (pair.prompt, pair.counterfactual)]
    ids = [(model.token_ids(text), model.token_ids(longer)) for text, longer in texts]
    same = all(longer[1 - len(short) :] == short[1:] for short, longer in ids)
    return same and task_pairs.is_usable(model, Pair(texts[0][1], texts[1][1], pair.answer, pair.counterfactual_answer))


def measured(model: Model, sample: Sample) -> Line:
    """Return the correlations of a pair's nodes; JSON-ready."""
    pair, generator = sample.pair, random.Random(sample.pair.prompt)
    relevance = relevance_of(model, pair, answers(model, pair), "ffn")
    rows = [row for cell in product(range(3), POSITIONS) for row in chosen_nodes(model, relevance, *cell)]
    shown_from = len(rows)
    rows += relevance.top(SHOWN_NODES, "ffn", position="all")
    tokens = likely(model, pair)
    ids, longer_ids, other_ids = (
        model.token_ids(text) for text in (pair.prompt, paraphrase(sample.task, pair.prompt), sample.other.prompt)
    )
    changes = [(row.neuron, row.position, change_of(relevance, row.neuron, row.position)) for row in rows]
    randoms = [Neuron(row.neuron.layer, "ffn", generator.randrange(model.width("ffn"))) for row in rows]
    drawn = [
        (neuron, at, change_of(relevance, neuron, at)) for neuron, (_, at, _) in zip(randoms, changes, strict=True)
    ]
    predicted = {
        **projections(model, changes, tokens),
        "effect": changed(model, ids, changes, tokens),
        "unrelated prompt": changed(model, other_ids, _moved(changes, ids, other_ids), tokens),
        "random neuron": changed(model, ids, drawn, tokens),
    }
    truth = changed(model, longer_ids, _moved(changes, ids, longer_ids), tokens)
    results = [
        {
            "neuron": str(row.neuron),
            "position": row.position,
            "third": THIRDS[third_of(model, row.neuron.layer)],
            "place": POSITIONS[row.position < len(ids) - 1],
            "shown": at >= shown_from,
            "correlation": {name: correlate(predicted[name][at], truth[at]) for name in PREDICTED},
        }
        for at, row in enumerate(rows)
    ]
    return {"task": sample.task, **vars(pair), "other": sample.other.prompt, "nodes": results, "methods": {}}


# --- nodes and effects ---


def third_of(model: Model, layer: int) -> int:
    return 3 * layer // model.layers


def chosen_nodes(model: Model, relevance: Relevance, third: int, where: str) -> list[Ranked]:
    """Return the nodes with the largest relevance in a third of the layers, at the last or at earlier tokens."""
    layers = [layer for layer in range(model.layers) if third_of(model, layer) == third]
    last = relevance.predicted_at
    positions = [last] if where == POSITIONS[0] else [at for at in range(last) if at not in relevance.prompt.sinks]
    rows = [row for at in positions for row in relevance.top(THIRD_NODES, "ffn", position=at, layers=layers)]
    rows = [row for row in rows if row.activation != row.counterfactual]
    return sorted(rows, key=lambda row: -row.relevance)[:THIRD_NODES]


def change_of(relevance: Relevance, neuron: Neuron, position: int) -> float:
    """Return the activation in the counterfactual prompt minus that in the prompt."""
    scores, at = relevance.neurons, (neuron.layer, position, neuron.index)
    return (scores.counterfactual["ffn"][at] - scores.activation["ffn"][at]).item()


def _moved(changes: Sequence[Change], ids: Sequence[int], other_ids: Sequence[int]) -> list[Change]:
    """Return the changes at the tokens of another prompt that are as far from its end, but not at the first one."""
    return [(neuron, max(1, at + len(other_ids) - len(ids)), change) for neuron, at, change in changes]


def likely(model: Model, pair: Pair) -> list[int]:
    best = [model.next_logits(text).topk(LIKELY).indices.tolist() for text in (pair.prompt, pair.counterfactual)]
    return list(dict.fromkeys([*best[0], *best[1]]))


@torch.no_grad()
def changed(model: Model, ids: Sequence[int], changes: Sequence[Change], tokens: Sequence[int]) -> Tensor:
    """Return (N, W) the logits of tokens minus their logits with each of N changes."""
    batch = model.read_ids([list(ids)] * (1 + len(changes)))

    def visit(site: str, layer: int, x: Tensor) -> Tensor:
        x = x.clone()
        for row, (neuron, position, change) in enumerate(changes, 1):
            if neuron.layer == layer:
                x[row, position, neuron.index] += change
        return x

    layers = dict.fromkeys(("ffn", neuron.layer) for neuron, _, _ in changes)
    with model.lock, hooks(model, layers, visit):
        logits = model.logits(batch, [len(ids) - 1])[:, 0, list(tokens)].float().cpu()
    return logits[0] - logits[1:]


def projections(model: Model, changes: Sequence[Change], tokens: Sequence[int]) -> dict[str, Tensor]:
    """Return (N, W) what the logit lens and the mean Jacobian lens predict."""
    neurons, lens = [neuron for neuron, _, _ in changes], mean_lens(model)
    mean = lens.rows(model, neurons) if lens else mean_rows(model, neurons)
    rows = {"direct": torch.stack([direct_row(model, neuron) for neuron in neurons]), "mean": mean}
    minus = -torch.tensor([change for _, _, change in changes])[:, None]
    unembedded = unembedding(model, torch.tensor(tokens)).T
    return {name: minus * (x.to(unembedded) @ unembedded).detach().cpu() for name, x in rows.items()}


def correlate(x: Tensor, y: Tensor) -> float:
    """Return the correlation; 0 if one is constant."""
    return normalize(x - x.mean(), dim=0).dot(normalize(y - y.mean(), dim=0)).item()


# --- tables ---


def _tables(lines: Lines) -> dict[str, Table]:
    tables = {}
    for third in THIRDS:
        for where in POSITIONS:
            tables[f"{third}-third-{where}"] = Table(CORRELATION, _lines(lines, third, where))
        tables[f"shown-{third}-third"] = Table(CORRELATION, _lines(lines, third, None, shown=True))
    return {name: table for name, table in tables.items() if table.lines}


def _nodes(line: Line, third: str | None, where: str | None, shown: bool) -> list[Line]:
    fits = {"third": third, "place": where, "shown": shown}
    return [node for node in line["nodes"] if all(value in (None, node[name]) for name, value in fits.items())]


def _lines(lines: Lines, third: str, where: str | None, shown: bool = False) -> list[Line]:
    """Return a line for each pair that has such nodes."""
    result = []
    for line in lines:
        if nodes := _nodes(line, third, where, shown):
            values = {name: [node["correlation"][name] for node in nodes] for name in PREDICTED}
            methods = {name: {"mean": fmean(row), "median": median(row)} for name, row in values.items()}
            result.append({**line, "methods": methods})
    return result


def _listings(lines: Lines) -> dict[str, list[Line]]:
    """Return the medians over all nodes."""
    rows = []
    for shown, third, where in product((False, True), THIRDS, POSITIONS):
        nodes = [node for line in lines for node in _nodes(line, third, where, shown)]
        if nodes:
            medians = {name: median(node["correlation"][name] for node in nodes) for name in PREDICTED}
            rows.append({"layers": third, "position": where, "shown": shown, "nodes": len(nodes), **medians})
    return {"median correlation over nodes": rows}


if __name__ == "__main__":
    command(EffectsHold)()
