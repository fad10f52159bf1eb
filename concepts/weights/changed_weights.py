"""A model and the base model that it was made from: their weights in pairs, and what each change of a weight caused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from icebear.concepts.passes.sites import is_hooked
from icebear.concepts.vocabulary.weight_rows import w_in_rows, w_out_rows
from icebear.concepts.weights.weight_parts import Part, WeightKind, WeightParts
from icebear.errors import InputError
from icebear.lrp.model_pairs import Caused, Entries, PairedWeights
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.parts.linear import packed
from icebear.records import Neuron
from icebear.result_files import Given, MissingModel, given_model, saved_as

PATHS = "name_or_path _name_or_path _model_name_or_path".split()
OF_THE_FILE = [*PATHS, "architectures", "dtype", "torch_dtype", "transformers_version"]
"""Entries of a configuration or module that say where weights are from, and not what is computed."""
RELATED = 0.5
"""The least median cosine of the matrices of a model and its base model; fine-tuning leaves it near 1, and unrelated
weights have 0."""
BLOCK = 256
"""Rows of a weight whose change is computed at once."""


def check_same_shape(model: Model, other: Model) -> None:
    """Raise `InputError` if layers, neurons or outputs differ."""
    shapes = [
        (
            side.net.config.model_type,
            side.layers,
            len(side.labels),
            {site: side.width(site) for site in side.sites} if side.has_family else {},
        )
        for side in (model, other)
    ]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"{other.name} differs from {model.name} in its layers, neurons or outputs; compare a model with one that "
            "was made from it."
        )


def _apart_from_weights(net: nn.Module) -> tuple[dict[str, Any], list[tuple[str, type, dict[str, Any]]]]:
    """Return the configuration, and the class and plain attributes of each module."""

    def plain(values: dict[str, Any]) -> dict[str, Any]:
        kinds = (bool, int, float, str, tuple)
        return {name: x for name, x in values.items() if isinstance(x, kinds) and name not in OF_THE_FILE}

    config: Any = net.config
    values = {name: value for name, value in config.to_dict().items() if name not in OF_THE_FILE}
    return values, [(path, type(module), plain(vars(module))) for path, module in net.named_modules()]


@dataclass(frozen=True, eq=False)
class ChangedWeights:
    """What the changed weights of one kind in one layer caused, by unit: a neuron, a head, a token, or all of it."""

    layer: int | None
    kind: WeightKind
    module: str
    caused: Tensor
    """(N,), in logits."""
    size: Tensor
    """(N,) the norms of the changes."""


@dataclass(eq=False)
class ModelPair:
    """A model and its base model. Raises `InputError` if weights cannot be compared."""

    model: Model
    base: Model
    weight_parts: WeightParts = field(init=False)
    weights: dict[str, tuple[Tensor, Tensor]] = field(init=False)
    """The parameters that differ."""
    common_tokens: int = field(init=False)
    """How many tokens both have, the first ones of the vocabularies."""

    def __post_init__(self) -> None:
        check_same_shape(self.model, self.base)
        for side in (self.model, self.base):
            if side.offloaded or any(map(packed, side.net.modules())):
                raise InputError(
                    f"{side.name} has quantized or offloaded weights, which cannot be compared one by one; load "
                    "both models without bits and device_map."
                )
        parameters = dict(self.model.net.named_parameters())
        everywhere = [dict(side.net.named_parameters(remove_duplicate=False)) for side in (self.model, self.base)]
        self.common_tokens = min(side.config.vocab_size for side in (self.model, self.base))
        if self.model.config.vocab_size != self.base.config.vocab_size:
            everywhere[1] = self._with_common_tokens(everywhere[1])
        shapes = [{name: (x.shape, x.dtype, x.device) for name, x in each.items()} for each in everywhere]
        if shapes[0] != shapes[1] or parameters.keys() != dict(self.base.net.named_parameters()).keys():
            raise InputError(
                f"The weights of {self.base.name} differ from those of {self.model.name} in names, shapes, ties, dtype "
                "or device; load both in the same way."
            )
        theirs = everywhere[1]
        self.weights = {name: (x, theirs[name]) for name, x in parameters.items() if not torch.equal(x, theirs[name])}
        self.weight_parts = WeightParts(self.model)
        matrices = [pair for pair in self.weights.values() if pair[0].dim() > 1]
        cosines = [cosine_similarity(x.flatten().float(), y.flatten().float(), 0).item() for x, y in matrices]
        if cosines and median(cosines) < RELATED:
            logging.getLogger("icebear").warning(
                "%s and its base model %s have unrelated weights (median cosine of the matrices %.2f), so that the "
                "changes are not those of fine-tuning; choose another base model.",
                *(self.model.name, self.base.name, median(cosines)),
            )

    def _with_common_tokens(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the base model's parameters with as many rows of tokens as the model's: those that only one of both
        has are the model's own in both, so that they cause nothing."""
        logging.getLogger("icebear").warning(
            "%s has %d tokens and %s %d; the %d that both have are compared.",
            *(self.model.name, self.model.config.vocab_size, self.base.name, self.base.config.vocab_size),
            self.common_tokens,
        )
        tables = [*self.model.embeddings, self.model.net.get_output_embeddings()]
        of_tokens = {id(x) for table in tables if table is not None for x in table.parameters(recurse=False)}
        common, both = self.common_tokens, dict(theirs)
        for name, x in self.model.net.named_parameters(remove_duplicate=False):
            if id(x) in of_tokens and name in both and x.shape[1:] == both[name].shape[1:]:
                both[name] = torch.cat((both[name][:common], x[common:].to(both[name])))
        return both

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raise `InputError` for a token that only one of both models has."""
        lacking = next((token for token in ids if token >= self.common_tokens), None)
        if lacking is not None:
            raise InputError(
                f"{self.base.name} and {self.model.name} have {self.common_tokens} tokens in common, without token "
                f"{lacking} ({self.model.text(lacking)!r}); leave it out of the prompt and the answers."
            )

    def parts(self, name: str) -> list[Part]:
        """Return the parts of a weight that operations on activations read; of a tied embedding, the unembedding."""
        if name in self.embeddings:
            return [self.by_token(name, "unembedding")]
        return self.weight_parts.of(name)

    def by_token(self, name: str, kind: WeightKind) -> Part:
        count = len(self.weights[name][0])
        return Part(None, kind, name.rpartition(".")[0], count, 0, torch.arange(count))

    @cached_property
    def only_weights_differ(self) -> bool:
        """Whether modules, configuration and buffers are the same, and the base has no hooks."""
        left, right = (_apart_from_weights(side.net) for side in (self.model, self.base))
        buffers, others = (dict(side.net.named_buffers()) for side in (self.model, self.base))
        same = left == right and buffers.keys() == others.keys() and not is_hooked(self.base)
        return same and all(torch.equal(x, others[name]) for name, x in buffers.items())

    @cached_property
    def embeddings(self) -> list[str]:
        """The names of the token embeddings that differ."""
        ids = {id(module.weight) for module in self.model.embeddings} if self.model.task.reads_text else set()
        return [name for name, (weight, _) in self.weights.items() if id(weight) in ids]

    def embedding(self, model: Model, batch: Batch, stack: int) -> Tensor:
        """Return the token embeddings (B, T, D) of a stack in one of the models."""
        modules = model.embeddings
        ids = batch.decoder.ids if stack and batch.decoder else batch.ids
        return modules[min(stack, len(modules) - 1)].forward(ids)  # without hooks: it runs inside of one  # type: ignore[no-any-return]

    @cached_property
    def sizes(self) -> dict[tuple[int | None, WeightKind, str], Tensor]:
        """The norms of the changes, by layer, kind and module, of each unit."""
        sizes: dict[tuple[int | None, WeightKind, str], Tensor] = {}
        squared = cache(_squares)  # a tied embedding has two parts
        for part, weight, base in self.slices():
            key, squares = (part.layer, part.kind, part.module), part.sums(partial(squared, weight, base))
            sizes[key] = sizes[key] + squares if key in sizes else squares
        return {key: squares.sqrt() for key, squares in sizes.items()}

    @contextmanager
    def restored(self, chosen: Sequence[tuple[WeightKind, str, int]]) -> Iterator[None]:
        """Give units, each a kind, a module and an index, the base model's weights inside the context."""
        units: dict[tuple[WeightKind, str], list[int]] = {}
        for kind, module, index in chosen:
            units.setdefault((kind, module), []).append(index)
        undo: list[Callable[[], object]] = []
        with self.model.lock, torch.no_grad():
            try:
                for part, weight, base in self.slices():
                    if indices := units.get((part.kind, part.module)):
                        undo.append(_copy(part, weight, base, torch.tensor(indices)))
                yield
            finally:
                for undo_copy in reversed(undo):
                    undo_copy()

    def slices(self) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Yield the parts of the weights that differ, with the weights in both models."""
        for name, (weight, base) in self.weights.items():
            pairs, owner = [(name, weight, base)], self.model.net.get_submodule(name.rpartition(".")[0])
            if weight.dim() > 1 and hasattr(owner, "is_transposed"):  # experts
                pairs = [(f"{name}[{expert}]", weight[expert], base[expert]) for expert in range(len(weight))]
            if name in self.embeddings:
                yield self.by_token(name, "embedding"), weight, base
                head = self.model.net.get_output_embeddings()
                pairs = pairs if getattr(head, "weight", None) is weight else []
            for each, x, base_x in pairs:
                yield from ((part, x, base_x) for part in self.parts(each))


def _squares(weight: Tensor, base: Tensor, axis: int) -> Tensor:
    """Return the squared norm of the change of each slice along an axis, from blocks of rows."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    others = [dimension for dimension in range(weight.dim()) if dimension != axis]
    rows = (torch.atleast_1d(x).split(BLOCK) for x in (weight, base))
    blocks = ((x - y).to(dtype).square_() for x, y in zip(*rows, strict=True))
    sums = [block.sum(others) if others else block for block in blocks]
    return torch.cat(sums) if axis == 0 else torch.stack(sums).sum(0)


def _copy(part: Part, weight: Tensor, base: Tensor, indices: Tensor) -> Callable[[], object]:
    """Copy the slices of some units, and return a function that undoes it."""
    if part.axis is None or part.units is None:
        before = weight.clone()
        weight.data.copy_(base)
        return lambda: weight.data.copy_(before)
    chosen = torch.isin(part.units, indices).nonzero().flatten().to(weight.device)
    before, axis = weight.index_select(part.axis, chosen), part.axis
    weight.data.index_copy_(axis, chosen, base.index_select(axis, chosen))
    return lambda: weight.data.index_copy_(axis, chosen, before)


class Causes:
    """Collects what changed weights caused in one pass of a pair of models and prompts."""

    def __init__(self, models: ModelPair, batch: Batch) -> None:
        self.models, self.batch = models, batch
        self.sums: dict[tuple[int | None, WeightKind, str], Tensor] = {}
        self.embedded: list[tuple[Tensor, Tensor]] = []
        """The embeddings of each stack (2, T, D), of both prompts, in both models."""
        self.weights = PairedWeights(models.weights, self.add)

    def add(self, name: str, caused: Caused) -> None:
        """Take what a weight caused."""
        for part in self.models.parts(name):
            self._add(part, part.sums(caused.along))

    def _add(self, part: Part, sums: Tensor) -> None:
        key = part.layer, part.kind, part.module
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    def read(self, stack: int, x: Tensor) -> Tensor:
        """Return the input of a stack: the prompt's embeddings, and the counterfactual's in the base model."""
        if self.batch.pixels is not None:
            self.embedded.append((x, x))
            return x
        base_x = self.models.embedding(self.models.base, self.batch, stack).detach().to(x)
        self.embedded.append((x, base_x))
        return torch.cat((x[:1], base_x[1:]))

    def passed_on(self, stack: int, gradient: Tensor) -> Tensor:
        """Return the relevance (T, D) of the prompts' difference, and add what the changed embeddings caused."""
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        model_x, base_x = (x.to(dtype) for x in self.embedded[stack])
        g = gradient[0].to(dtype)
        caused = g * (model_x - base_x) / 2  # (2, T, D)
        if self.models.embeddings and caused.any():
            ids = self.batch.decoder.ids if stack and self.batch.decoder else self.batch.ids
            names = self.models.embeddings
            part = self.models.by_token(names[min(stack, len(names) - 1)], "embedding")
            part = replace(part, units=ids.flatten().cpu())
            self._add(part, part.sums(Entries(caused.sum(-1).flatten()).along))
        return g * ((model_x[0] - model_x[1]) + (base_x[0] - base_x[1])) / 2

    def result(self) -> tuple[ChangedWeights, ...]:
        """Return what every changed weight caused, zero where it was not used."""
        sizes = self.models.sizes.items()
        return tuple(ChangedWeights(*key, self.sums.get(key, torch.zeros_like(size)), size) for key, size in sizes)


def neuron_similarity(model: Model, other: Model, neuron: Neuron) -> dict[str, float]:
    """Return the cosines of the w_in (``reads``) and w_out rows (``writes``) of a neuron in two models."""
    check_same_shape(model, other)
    cosines = {}
    for name, rows in (("reads", w_in_rows), ("writes", w_out_rows)):
        both = [rows(side, neuron.site, neuron.layer) for side in (model, other)]
        pair = [row[neuron.index].double().cpu() for row in both if row is not None]
        if pair:
            cosines[name] = torch.cosine_similarity(pair[0], pair[1], dim=0).item()
    return cosines


def _pair(saved: Any, models: Given) -> ModelPair | MissingModel:
    """Return both models; the missing one, if there is one."""
    sides = [given_model(facts, models) for facts in (saved["model"], saved["base"])]
    missing = next((side for side in sides if isinstance(side, MissingModel)), None)
    return ModelPair(*sides) if missing is None else MissingModel(missing.saved["name"], saved)


def _facts(model: Model) -> dict[str, str]:
    return {"name": model.name, "fingerprint": model.fingerprint}


saved_as(ModelPair, lambda pair: {"model": _facts(pair.model), "base": _facts(pair.base)}, _pair)
