"""Effects of nodes on the next token: logits minus logits when a node is set to its counterfactual value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import hooks, neuron_columns, neuron_site
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.vocabulary.calibration import mean_activations
from icebear.convert import Tabled
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.records import Neuron, Ranked
from icebear.result_files import SavedResult
from icebear.values import check_int

if TYPE_CHECKING:
    import pandas

LIKELY = 150
"""The number of most probable tokens of each prompt that are likely tokens."""
TOKENS_PER_PASS = 8192
"""The largest number of tokens of one pass, over all rows."""
ROWS_PER_PASS = 64
"""The largest number of rows of one pass."""
LOGITS = 2**26
"""The largest number of logits of one pass, in the memory of 256 MB."""
VALUES = 2**26
"""The largest number of activations of a counterfactual that are read only for a control, in the memory of 256 MB."""
PASS = 20
"""A pass costs about as much as this many tokens more."""


@dataclass(frozen=True, eq=False)
class SetNode:
    """A neuron or head at a position, and the value that it is set to."""

    neuron: Neuron
    position: int
    value: Tensor
    """(1,), or (head width,) of a head."""


@dataclass(frozen=True, eq=False, repr=False)
class Effects(SavedResult, Tabled):
    """What each of N nodes does to the W likely next tokens of a prompt."""

    nodes: tuple[Ranked, ...]
    token_ids: tuple[int, ...]
    """(W,) the likely tokens, or the labels, the most probable in any of the prompts first; and target and contrast."""
    tokens: tuple[str, ...]
    matrix: Tensor
    """(N, W) effects in logits, less their mean over the likely tokens."""
    means: Tensor
    """(N,) the mean that was subtracted; 0 for a model with a single output."""
    relative_to: Literal["counterfactual", "average"]
    """What nodes are set to: their value in the counterfactual prompt, or their mean on the calibration texts."""
    phrase: Tensor | None
    """(N,) effect on the log-probability of the explained phrase, in nats; None if one token is explained."""
    log_probability: Tensor | None
    """(N,) effect on the log-probability of the explained token, phrase or label, in nats; None for a model that
    predicts a number."""
    made_with: dict[str, Any]

    def words(self, row: int, k: int = 4) -> tuple[list[str], list[str]]:
        """Return the k likely words that a node raises and lowers most, relative to the other likely tokens."""
        row = check_int(row, "The row of a node", 0, len(self.nodes) - 1)
        return effect_words(self.tokens, self.matrix[row], check_int(k, "The number of words"))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "relative_to": self.relative_to,
            "token_ids": list(self.token_ids),
            "tokens": list(self.tokens),
            "nodes": [node.to_dict() for node in self.nodes],
            "matrix": self.matrix.tolist(),
            "means": self.means.tolist(),
            "phrase": None if self.phrase is None else self.phrase.tolist(),
            "log_probability": None if self.log_probability is None else self.log_probability.tolist(),
        }

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas table with a row for each node and likely token. `to_arrow` returns an Arrow table."""
        import pandas

        rows = [
            (str(node.neuron), node.position, id, text, effect)
            for node, effects in zip(self.nodes, self.matrix.tolist(), strict=True)
            for id, text, effect in zip(self.token_ids, self.tokens, effects, strict=True)
        ]
        return pandas.DataFrame(rows, columns=["neuron", "position", "token_id", "token", "effect"])


def likely_ids(logits: Tensor) -> list[int]:
    """Return the `LIKELY` most probable tokens of each row of logits (P, V), the most probable in any of them first."""
    probabilities = logits.softmax(-1)
    likely = probabilities.topk(min(LIKELY, probabilities.shape[-1])).indices.unique()
    return likely[probabilities[:, likely].amax(0).argsort(descending=True, stable=True)].tolist()


class NodeEffects:
    """Passes over the prompt of a relevance in which nodes take their counterfactual values."""

    def __init__(self, model: Model, relevance: Any) -> None:
        """relevance: a `Relevance`, which imports this module."""
        model.check_made(relevance.made_with["model"], "The relevance")
        self.model, self.relevance = model, relevance
        self.objective: Objective = relevance.explained()
        self.encoder_length = relevance.prompt.encoder_length
        self._prompt_logits: Tensor | None = None

    @cached_property
    def prefix(self) -> Prefix | None:
        ids, has_image = self.objective.batch.row_ids(0), self.objective.batch.images is not None
        return Prefix.of(self.model, [ids[:-1]]) if self.model.task.is_causal and not has_image else None

    @cached_property
    def token_ids(self) -> list[int]:
        """The likely tokens, the most probable in any of the prompts first, and then target and contrast, if they are
        not among them."""
        if self._prompt_logits is None:
            self._prompt_logits = self._pass([[]], 0)[0][0]
        with self.model.lock, torch.no_grad():
            others = [self.model.logits(row.batch, row.all_positions)[0, 0] for row in self._counterfactuals()]
        likely = likely_ids(torch.stack([x.float().cpu() for x in (self._prompt_logits, *others)]))
        explained = (answer.id for answer in (self.relevance.target, self.relevance.contrast) if answer)
        return list(dict.fromkeys([*likely, *explained]))

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        return tuple(map(self.model.answer_text, self.token_ids))

    def _counterfactuals(self) -> list[Objective]:
        other = self.relevance.counterfactual
        return [pair.rows([1]) for pair in other.pairs] if other and other.model is None else []

    @cached_property
    def means(self) -> dict[str, Tensor]:
        return mean_activations(self.model)

    def measure(self, rows: Sequence[Ranked]) -> Effects:
        """Measure the effects of nodes, one at a time."""
        matrix, means, answer = self.effects([[node] for node in rows])
        return Effects(
            tuple(rows),
            tuple(self.token_ids),
            self.tokens,
            matrix,
            means,
            "counterfactual" if self.relevance.counterfactual else "average",
            answer if len(self.objective.positions[0]) > 1 else None,
            None if answer.isnan().any() else answer,
            self.model.made_with,
        )

    def effects(self, sets: Sequence[Sequence[Ranked]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (N, W) the centred effects of setting all nodes of each set, the means (N,), and (N,) the effects on
        the log-probability of the answer, NaN for a model that predicts a number."""
        nodes: list[list[SetNode]] = [[], *([self.node(row) for row in rows] for rows in sets)]
        rows: dict[int, Tensor] = {}
        of_answer: dict[int, Tensor] = {}
        for chosen, start in self._chunks(nodes):  # the prompt itself comes first
            logits, log_probabilities = self._pass([nodes[index] for index in chosen], start)
            of_answer |= zip(chosen, log_probabilities, strict=True)
            self._prompt_logits = logits[0] if self._prompt_logits is None else self._prompt_logits
            rows |= zip(chosen, logits[:, self.token_ids], strict=True)
        ordered, answers = (torch.stack([part[n] for n in range(len(nodes))]) for part in (rows, of_answer))
        effects = ordered[0] - ordered[1:]
        means = effects.mean(1) if effects.shape[1] > 1 else torch.zeros(len(effects))
        return effects - means[:, None], means, answers[0] - answers[1:]

    def node(self, row: Ranked) -> SetNode:
        """Return a node with its counterfactual value. Raises `InputError` if it was not recorded."""
        neuron, scores = row.neuron, self.relevance.neurons
        self.model.check(neuron)
        site, columns = neuron_site(neuron.site), neuron_columns(neuron, self.model.head_dim)
        if not self.relevance.counterfactual:
            if site not in self.means:
                raise InputError(
                    f"Without a counterfactual, {neuron} would be set to its mean activation, which icebear does not "
                    "measure; give a counterfactual."
                )
            value = self.means[site][neuron.layer, columns]
        elif neuron.site != "head" and row.counterfactual is not None:
            value = torch.tensor([row.counterfactual])
        elif site in scores.relevance and row.position in scores.recorded:
            value = scores.counterfactual[site][neuron.layer, scores.recorded.index(row.position), columns]
        else:
            value = self._unrecorded[site][neuron.layer, row.position, columns]
        return SetNode(neuron, row.position, value)

    @property
    def reads_others(self) -> bool:
        """Whether the values of any nodes can be read in little memory: not those in a base model, nor in a
        counterfactual that is long."""
        compared, model = self.relevance.counterfactual, self.model
        values = len(self.relevance.tokens) * model.layers * sum(map(model.width, model.sites))
        return not compared or (compared.model is None and values <= VALUES)

    @cached_property
    def _unrecorded(self) -> dict[str, Tensor]:
        """The aligned activations (L, T, N) in the counterfactuals, by site, where they were not recorded."""
        counterfactual, sites = self.relevance.counterfactual, self.model.sites
        if not counterfactual or counterfactual.model:
            raise InputError("The counterfactual activations were not recorded; pass record='all' to attribute.")
        parts: dict[str, list[Tensor]] = {site: [] for site in sites}
        for pair, weights in zip(counterfactual.pairs, counterfactual.alignments, strict=True):
            other = pair.rows([1])
            values = Values(self.model, other.batch, sites)
            forward(self.model, Logits(other), [values])
            for site, recorded in values.activations(0).items():
                x = recorded.cpu()
                parts[site].append(torch.einsum("st,ltn->lsn", weights.to(x), x))
        return {site: torch.stack(each).mean(0) for site, each in parts.items()}

    def _chunks(self, nodes: Sequence[Sequence[SetNode]]) -> Iterator[tuple[list[int], int]]:
        """Yield the rows of each pass, and its first position: rows that change late share a long prefix."""
        length, positions = len(self.relevance.prompt.ids), self.objective.positions[0]
        logit_rows = LOGITS // (len(positions) * self.model.output_size)
        size = max(1, min(ROWS_PER_PASS, TOKENS_PER_PASS // length, logit_rows))
        starts = [min([*positions, *(node.position for node in row)]) for row in nodes]
        if sum(starts) <= length + PASS or self.prefix is None:
            starts = [0] * len(starts)
        chosen: list[int] = []
        for index in sorted(range(len(nodes)), key=lambda index: -starts[index]):
            start = starts[chosen[-1]] if chosen else 0
            if len(chosen) == size or (start - starts[index]) * len(chosen) > PASS:
                yield chosen, start
                chosen = []
            chosen.append(index)
        yield chosen, starts[chosen[-1]]

    @torch.no_grad()
    def _pass(self, rows: Sequence[Sequence[SetNode]], start: int) -> tuple[Tensor, Tensor]:
        """Return the logits (N, V) of the next token and the log-probability (N,) of the answer, with nodes set."""
        model, positions = self.model, self.objective.all_positions
        with model.lock, self._set(rows, start):
            if start and self.prefix:
                ids = self.objective.batch.ids[:, start:].expand(len(rows), -1)
                logits = self.prefix.logits(ids, [0] * len(rows), [start] * len(rows), [p - start for p in positions])
            else:
                logits = model.logits(self.objective.rows([0] * len(rows)).batch, positions)
        logits = logits.float().cpu()  # (N, P, V)
        columns = [positions.index(position) for position in self.objective.positions[0]]
        targets = torch.tensor(self.objective.targets[0]).expand(len(rows), -1)[..., None]
        logs = model.task.log_probabilities(model, logits[:, columns])
        answer = torch.full((len(rows),), torch.nan) if logs is None else logs.gather(-1, targets).sum((1, 2))
        return logits[:, 0], answer

    @contextmanager
    def _set(self, rows: Sequence[Sequence[SetNode]], start: int) -> Iterator[None]:
        """Set the nodes of each row, in passes that begin at a position of the prompt."""
        by_site_layer: dict[tuple[str, int], list[tuple[int, SetNode]]] = {}
        for row, nodes in enumerate(rows):
            for node in nodes:
                by_site_layer.setdefault((neuron_site(node.neuron.site), node.neuron.layer), []).append((row, node))

        def visit(site: str, layer: int, x: Tensor) -> Tensor:
            x = x.clone()
            before = self.encoder_length if self.model.stack_of(layer) and self.objective.batch.decoder else start
            for row, node in by_site_layer[site, layer]:
                begin, column = node.neuron.index * len(node.value), node.position - before
                if 0 <= column < x.shape[1]:  # a layer of an encoder does not read the decoder's tokens
                    x[row, column, begin : begin + len(node.value)] = node.value.to(x)
            return x

        with hooks(self.model, by_site_layer, visit):
            yield
