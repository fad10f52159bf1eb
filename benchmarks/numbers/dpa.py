"""DPA's protocol "disrupt and recover" (arXiv 2603.19742): tokens, or heads and FFN neurons at a token, set to zero.

python -m benchmarks.numbers.dpa --samples 100 --out dpa    # known_1000 (tokens, parts), indirect objects (parts)

Disrupt: the share q of largest score is zero; recover: all else is. y(q) = 100 p / p0; score = area of recover - area
of disrupt, over q for tokens and over log q (as a share of its range) for parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from benchmarks.baselines import Gradient, log_probability
from benchmarks.numbers import common
from benchmarks.task_pairs import named
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.common import measure_without
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.pair import Pair
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.passes.inputs import input_hooks
from icebear.concepts.passes.patching import PatchableNodes
from icebear.concepts.passes.sites import eager
from icebear.evaluation.baselines import AttentionRollout, Random
from icebear.evaluation.protocol import Evaluation, Part, Seed, Setting
from icebear.models.model import Model
from icebear.models.objective import Objective, objective_of

SHARES = tuple(step / 10 for step in range(1, 11))
PART_SHARES = tuple(math.exp(-17 + 1.8 * step) for step in range(10))
COLUMNS = {
    "score": "area of recover minus area of disrupt, higher is better",
    "disrupt": "area with the largest scores at zero, lower is better",
    "recover": "area with all others at zero, higher is better",
}
MEAN, SUBJECT = "difference, mean embedding", "difference, another subject"
ALONE = {name: METHODS[name] for name in ("attnlrp", "cp-lrp", "pa-lrp", "gxi", "ig")} | {
    "grad-l2": Gradient(2),
    "rollout": AttentionRollout(),
    "random": Random(),
}
PARTS_OF = ("attnlrp", MEAN, SUBJECT, "attribution patching", "gxi", "gradient", "activation", "random")
ROWS_PER_PASS = 16


@dataclass(frozen=True)
class Fact:
    """A prompt with its answer, and the same prompt of another subject with as many tokens and another answer."""

    prompt: str
    answer: str
    counterfactual: str


@dataclass(frozen=True, repr=False)
class Attention(Method):
    """Attention of the last token, mean over heads of all layers, or of the last one."""

    last: bool = False

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        with eager(model), model.lock, torch.no_grad():
            maps = model.task.forward(model, objective.batch, output_attentions=True).attentions
        chosen = torch.stack(maps[-1:] if self.last else maps)  # (L, B, H, T, T)
        return [chosen[:, 0, :, objective.positions[0][0]].mean((0, 1))]


# --- data ---


def known(rows: Sequence[Mapping[str, str]], seed: int) -> Iterator[tuple[Mapping[str, str], list[str]]]:
    """Yield each fact of known_1000 with the prompts of other subjects of its relation that have another answer."""
    for row in common.shuffled(rows, seed):
        others = [x for x in rows if x["relation_id"] == row["relation_id"] and x["attribute"] != row["attribute"]]
        prompts = [row["prompt"].replace(row["subject"], x["subject"], 1) for x in common.shuffled(others, seed)]
        yield {"prompt": row["prompt"], "answer": row["attribute"]}, prompts


def indirect_objects(rows: Sequence[Mapping[str, str]], seed: int) -> Iterator[tuple[Mapping[str, str], list[str]]]:
    """Yield each prompt with the one in which the receiver gives: its last name is the other one."""
    for row in common.shuffled(rows, seed):
        words = row["prompt"].replace(",", " ").replace(".", " ").split()
        giver = next((w for w in reversed(words) if words.count(w) == 2 and w[0].isupper()), None)
        before, middle, after = row["prompt"].rpartition(giver) if giver else ("", "", "")
        yield row, [f"{before}{row['answer']}{after}"] if middle else []


def facts(model: Model, rows: Iterator[tuple[Mapping[str, str], list[str]]], count: int) -> tuple[list[Fact], str]:
    """Return the first `count` that the model answers rightly and that have a counterfactual; and a note on others."""
    chosen: list[Fact] = []
    tried = right = 0
    for row, prompts in rows:
        if len(chosen) == count:
            break
        tried += 1
        if not common.is_right(model, row["prompt"], row["answer"]):
            continue
        right += 1
        other = next((x for x in prompts if _is_partner(model, row["prompt"], row["answer"], x)), None)
        chosen += [Fact(row["prompt"], row["answer"], other)] if other else []
    return chosen, f"the model is right on {right} of {tried}; {right - len(chosen)} of them have no counterfactual"


def _is_partner(model: Model, prompt: str, answer: str, other: str) -> bool:
    """Whether it has as many tokens, and the model another answer to it."""
    ids, others = model.token_ids(prompt), model.token_ids(other)
    return (
        len(ids) == len(others)
        and ids != others
        and (common.first_tokens(model, [other]) != [common.answer_token(model, prompt, answer)])
    )


# --- measured ---


def token_scores(model: Model, fact: Fact, objective: Objective) -> dict[str, Tensor]:
    """Return (T,) scores of each method."""
    scores = {name: method.scores(model, objective)[0] for name, method in ALONE.items()}
    scores |= {"attention": Attention().scores(model, objective)[0]}
    scores |= {"attention, last layer": Attention(last=True).scores(model, objective)[0]}
    scores[MEAN] = against_mean(model, objective, ())[1].sum(-1)
    scores[SUBJECT] = attribute(model, fact.prompt, _target(objective), counterfactual=fact.counterfactual).tokens
    return scores


def _target(objective: Objective) -> int:
    return (objective.targets[0] or (0,))[0]


def against_mean(model: Model, objective: Objective, sites: tuple[str, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the relevance by difference rules of sites and of tokens (T, D); all embeddings of the counterfactual are
    the mean of the vocabulary. The explained number is the logit."""
    mean = model.embeddings[0].weight.mean(0)
    with input_hooks(model, lambda stack, x: torch.cat((x[:1], mean.expand_as(x[1:])))):
        result = DIFFERENCE.compare(Pair(model, objective.rows([0, 0]), False, sites, "all"))
    return result.relevance, result.tokens[0]


def part_scores(model: Model, fact: Fact, objective: Objective, seed: int) -> tuple[dict[str, Tensor], PatchableNodes]:
    """Return (L, T, H + F) scores of heads and FFN neurons at a token, and the nodes, whose other values are zero."""
    sites, target = ("attn", "ffn"), _target(objective)
    plain = attribute(model, fact.prompt, target, number="logit", sites=sites, method="gxi")
    activation = {"head": plain.activation("attn"), "ffn": plain.activation("ffn")}
    nodes = PatchableNodes(
        model, objective, ("head", "ffn"), activation, {s: torch.zeros_like(x) for s, x in activation.items()}
    )
    joint = lambda attn, ffn, by=lambda x: x.sum(-1): nodes.side_by_side({"head": attn, "ffn": ffn}, by)  # noqa: E731
    norm = lambda x: x.norm(dim=-1)  # noqa: E731
    gradients = [
        (plain.of(site) / x.where(x != 0, 1)).abs() for site, x in zip(sites, activation.values(), strict=True)
    ]
    explain = partial(attribute, model, fact.prompt, target, sites=sites)
    others = {
        "attnlrp": explain(number="logit"),
        SUBJECT: explain(counterfactual=fact.counterfactual),
        "attribution patching": explain(counterfactual=fact.counterfactual, method="gxi@prompt"),
        "gxi": plain,
    }
    mean, _ = against_mean(model, objective, sites)
    scores = {name: joint(x.of("attn"), x.of("ffn")) for name, x in others.items()}
    scores |= {MEAN: joint(mean["attn"], mean["ffn"]), "gradient": joint(*gradients, norm)}
    scores["activation"] = joint(activation["head"].abs(), activation["ffn"].abs(), norm)
    generator = torch.Generator().manual_seed(seed + sum(model.token_ids(fact.prompt)))
    return {**scores, "random": torch.rand(nodes.shape, generator=generator)}, nodes


def without_tokens(model: Model, objective: Objective, zero: Tensor) -> Tensor:
    """Return the probability (N,) of the answer with tokens (N, T) at zero."""
    return measure_without(model, objective, 0, zero, log_probability).exp().cpu()


def without_parts(nodes: PatchableNodes, zero: Tensor) -> Tensor:
    """The same with parts (N, L, T, W) at zero."""
    measured = []
    for part in zero.split(ROWS_PER_PASS):
        with nodes.patched(~part), torch.no_grad():
            measured.append(log_probability(nodes.model, nodes.objective.rows([0] * len(part))))
    return torch.cat(measured).exp()


def curves(
    scores: Mapping[str, Tensor], shares: Sequence[float], p0: float, measure: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Return the areas of each method."""
    sets: dict[bytes, int] = {}  # many methods begin alike
    masks: list[Tensor] = []
    rows: dict[str, list[int]] = {}
    for name, values in scores.items():
        rank = values.flatten().argsort(descending=True, stable=True).argsort()
        tops = [rank < math.ceil(round(share * len(rank), 9)) for share in shares]
        keys = []
        for mask in [*tops, *(~top for top in tops)]:
            key = mask.numpy().tobytes()
            if key not in sets:
                sets[key] = len(masks)
                masks.append(mask.view(values.shape))
            keys.append(sets[key])
        rows[name] = keys
    y = 100 * measure(torch.stack(masks)) / p0
    x = list(shares) if shares is SHARES else [math.log(share) for share in shares]
    return {name: areas(y[keys], x) for name, keys in rows.items()}


def areas(y: Tensor, x: list[float]) -> dict[str, float]:
    """Return the areas of y (2 S,), disrupt before recover; over log q they are shares of its range up to 1."""
    disrupt, recover = y.view(2, -1).tolist()
    begin, end = ([0.0, *x], [*x, 1.0]) if x[0] >= 0 else ([x[0] - 1.8, *x], [*x, 0.0])
    span = 1.0 if x[0] >= 0 else end[-1] - begin[0]
    area = lambda values, at: torch.trapezoid(torch.tensor(values), torch.tensor(at)).item() / span  # noqa: E731
    lost, left = area([100.0, *disrupt], begin), area([*recover, 100.0], end)
    return {"score": left - lost, "disrupt": lost, "recover": left}


def measured(model: Model, fact: Fact, parts: bool, seed: int) -> dict[str, Any]:
    objective = objective_of(model, [fact.prompt], common.answer_token(model, fact.prompt, fact.answer))
    p0 = log_probability(model, objective).exp().item()
    if parts:
        scores, nodes = part_scores(model, fact, objective, seed)
        methods = curves(scores, PART_SHARES, p0, partial(without_parts, nodes))
    else:
        methods = curves(token_scores(model, fact, objective), SHARES, p0, partial(without_tokens, model, objective))
    return {**vars(fact), "p": p0, "methods": methods}


@dataclass(frozen=True)
class DisruptRecover(Evaluation):
    """DPA's protocol: the answer's probability with the most relevant tokens or parts at zero, and with all others."""

    name: ClassVar = "dpa"
    samples: common.Samples = 100
    seed: Seed = 0
    what: Annotated[str, Setting("tokens, parts, parts-indirect-objects; commas.", decides=False)] = "all"

    def parts(self, model: Model) -> Iterator[Part]:
        sets = {
            "tokens": (known, "dpa/known_1000.json"),
            "parts": (known, "dpa/known_1000.json"),
            "parts-indirect-objects": (indirect_objects, "dpa/ioi.json"),
        }
        for name in named(self.what, "part", sets):
            rows, file = sets[name]
            chosen, note = facts(model, rows(common.read(file), self.seed), self.samples)
            measure = partial(measured, model, parts=name != "tokens", seed=self.seed)
            yield Part(COLUMNS, chosen, measure, name=name, notes=lambda lines, note=note: [note])


if __name__ == "__main__":
    command(DisruptRecover)()
