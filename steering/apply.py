"""`with steer(model, edits):` runs a model with edited neurons."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import check_vector, hooks, neuron_columns, neuron_site, stream_hooks
from icebear.edits import AnyEdit, Edit, SwapSource, VectorEdit, last_position, parse_edits
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.recipe import Recipe
from icebear.records import Neuron
from icebear.steering.token_tracker import Act, TokenTracker
from icebear.values import check_int, real, several, shown, typed

Statistic = Callable[[Neuron, str], float]
SourceActivations = dict[tuple[str, int], Tensor]
"""Site and layer -> activations (S, N) at all tokens of the prompt of a swap."""

_READING: ContextVar[bool] = ContextVar("reading", default=False)
"""Whether the prompt of a swap is read, in a pass without edits."""
_READ: ContextVar[dict[tuple[Model, SwapSource, tuple[str, ...]], SourceActivations] | None]
_READ = ContextVar("read", default=None)
"""What `reading_sources_once` has read."""


@contextmanager
def reading_sources_once() -> Iterator[None]:
    """Inside, where models stay as they are, several `steer` read the prompt of a swap once."""
    known = _READ.get()
    read = _READ.set({} if known is None else known)
    try:
        yield
    finally:
        _READ.reset(read)


@typed
def steer(
    model: Model,
    edits: Recipe | AnyEdit | str | Iterable[AnyEdit | str],
    statistic: Statistic | None = None,
    trace: bool = False,
    prompt_tokens: int | None = None,
    rows: Sequence[int] | None = None,
    when: Callable[[], bool] | None = None,
) -> AbstractContextManager[list[Act]]:
    """Apply `edits`, in order, in every forward pass inside ``with steer(...)``, also under `generate` and `attribute`.

    It works with and without a KV cache, in batches, with left padding and beam search. Other threads wait, or run
    without the edits between the tokens of a `Model.generate`.

    Parameters
    ----------
    edits
        A recipe, or edits (``L29.ffn.860*0``, or a `VectorEdit`), one or several.
    statistic
        ``statistic(neuron, unit)`` returns a neuron's recorded ``max`` or ``std`` for edits in those units; see
        `Store`.
    trace
        Add an `Act` to the list of ``with ... as acts`` for each edit, row and token that it acts on; while text is
        generated, once for each token that stays in the text.
    prompt_tokens
        Outside `generate`, the first columns that count as the prompt; default all.
    rows
        The rows of a batch that are edited; default all.
    when
        The edits act in the passes for which this returns True, such as those after a monitor flags; default all.

    Returns
    -------
    context manager
        It gives a list of `Act`, which is empty without `trace`. One that is never entered warns when it is collected.

    Raises
    ------
    InputError
        For an edit of a neuron, layer or token that the model does not have, or a unit without `statistic`.
    RecipeError
        For a recipe of another model.
    """
    context = _steered(model, edits, statistic, trace, prompt_tokens, rows, when)
    finalize(context, _warn_of_unused, context.gen, edits).atexit = False  # type: ignore[attr-defined]
    return context


@contextmanager
def _steered(
    model: Model,
    edits: Recipe | AnyEdit | str | Iterable[AnyEdit | str],
    statistic: Statistic | None,
    trace: bool,
    prompt_tokens: int | None,
    rows: Sequence[int] | None,
    when: Callable[[], bool] | None,
) -> Iterator[list[Act]]:
    if isinstance(edits, Recipe):
        edits.check(model)
    if prompt_tokens is not None:
        prompt_tokens = check_int(prompt_tokens, "The number of the prompt's tokens")
    rows = None if rows is None else [check_int(row, "A row of the batch", 0) for row in several(rows)]
    wanted = [edit.in_raw_units(statistic) for edit in parse_edits(edits, model.name)]
    of_neurons, of_vectors = _checked(model, wanted)
    swapped = _swapped_values(model, of_neurons)
    tracker = _EditTracker(model, prompt_tokens, rows)
    tracker.acts_at_some_tokens = any(edit.where != "all" or edit.decay != 1 for edit in wanted)
    acts = tracker.acts
    by_site_layer: dict[tuple[str, int], list[Edit]] = {}
    for edit in of_neurons:
        by_site_layer.setdefault((neuron_site(edit.neuron.site), edit.layer), []).append(edit)

    def is_on() -> bool:
        return not _READING.get() and (when is None or when())

    def visit(site: str, layer: int, x: Tensor) -> Tensor:
        for edit in by_site_layer[site, layer] if is_on() else ():
            x = _apply(edit, x, tracker, model.head_dim, swapped.get(edit), acts if trace else None)
        return x

    def visit_stream(layer: int, x: Tensor) -> Tensor:
        for edit in of_vectors if is_on() else ():
            x = _added(model, edit, x, tracker, acts if trace else None) if edit.layer == layer else x
        return x

    @contextmanager
    def edited() -> Iterator[None]:
        layers = {edit.layer for edit in of_vectors}
        with tracker.following(), hooks(model, by_site_layer, visit), stream_hooks(model, layers, visit_stream):
            yield

    with model.lock.yielding(edited):
        yield acts
    _warn_of_idle(wanted if when is None else (), tracker)


class _EditTracker(TokenTracker):
    """Follows a model with edits."""

    acts_at_some_tokens = False
    """Whether some edits act at some tokens only."""

    def begin(self, rows: int, option: Callable[[str], Any]) -> None:
        if self.acts_at_some_tokens and option("guidance_scale") not in (None, 1):
            raise InputError(
                "With guidance_scale the model reads a second text, whose tokens are no prompt and no answer; leave it "
                "out, or edit all tokens."
            )


def _warn_of_unused(entered: Generator[Any], edits: Any) -> None:
    if getgeneratorstate(entered) == GEN_CREATED:
        logging.getLogger("icebear").warning(
            "steer(model, %s) was never entered, so nothing was edited; write: with steer(model, edits): ...",
            shown(edits),
        )


def _warn_of_idle(edits: Iterable[AnyEdit], tracker: TokenTracker) -> None:
    idle = [edit for edit in edits if edit not in tracker.acted]
    if idle and tracker.ran:
        logging.getLogger("icebear").warning(
            "%s acted at no token; check where it acts, and whether a text was that long.", " and ".join(map(str, idle))
        )


def _checked(model: Model, edits: Iterable[AnyEdit]) -> tuple[list[Edit], list[VectorEdit]]:
    """Return the edits of neurons and the vectors, if the model has their neurons and layers."""
    of_neurons, of_vectors = [], []
    most = torch.finfo(model.dtype).max
    for edit in edits:
        if isinstance(edit, Edit):
            model.check(edit.neuron)
            real(edit.value, f"In {model.dtype_name} the value of an edit of {edit.neuron}", -most, most)
            of_neurons.append(edit)
        else:
            check_int(edit.layer, f"The layer of a vector in {model.name}", 0, model.layers - 1)
            real(max(map(abs, edit.vector), default=0), f"In {model.dtype_name} a number of a vector", 0, most)
            of_vectors.append(edit)
    return of_neurons, of_vectors


def _swapped_values(model: Model, edits: Iterable[Edit]) -> dict[Edit, Tensor]:
    """Return for each swap the activations (S, 1 or head_dim) after its prompt, at all S tokens."""
    by_source: dict[SwapSource, list[Edit]] = {}
    for edit in edits:
        if edit.source is not None:
            by_source.setdefault(edit.source, []).append(edit)
    swapped: dict[Edit, Tensor] = {}
    for source, swaps in by_source.items():
        sites = tuple(dict.fromkeys(neuron_site(edit.neuron.site) for edit in swaps))
        activations = _source_activations(model, source, sites)
        for edit in swaps:
            read = activations[neuron_site(edit.neuron.site), edit.neuron.layer]
            if last_position(edit.where) >= len(read):
                raise InputError(f"{edit} reads a token that its prompt does not have; it has {len(read)} tokens.")
            swapped[edit] = read[:, neuron_columns(edit.neuron, model.head_dim)].clone()  # a view keeps all neurons
    return swapped


def _source_activations(model: Model, source: SwapSource, sites: tuple[str, ...]) -> SourceActivations:
    known = _READ.get()
    if known is not None and (model, source, sites) in known:
        return known[model, source, sites]
    objective = objective_of(model, [source if isinstance(source, str) else list(source)])
    values = Values(model, objective.batch, sites)
    reading = _READING.set(True)
    try:
        forward(model, Logits(objective), [values])
    finally:
        _READING.reset(reading)
    span = lambda layer: objective.batch.span_of(model.stack_of(layer))  # noqa: E731
    read = {
        (site, layer): activations[layer, span(layer)]
        for site, activations in values.activations(0).items()
        for layer in model.layers_with(site)
    }
    if known is not None:
        known[model, source, sites] = read
    return read


def _apply(
    edit: Edit, x: Tensor, tracker: TokenTracker, head_dim: int, swapped: Tensor | None, trace: list[Act] | None
) -> Tensor:
    columns = neuron_columns(edit.neuron, head_dim)
    old = x[..., columns]  # (B, T, 1 or head_dim)
    acts, strength = tracker.acting(edit, x)  # (B, T, 1)
    if swapped is not None:
        new = swapped[tracker.read_at(edit, len(swapped))].to(old)
    else:
        new = {"set": torch.full_like(old, edit.value), "scale": old * edit.value, "add": old + edit.value}[edit.op]
    if edit.decay != 1 or edit.share != 1:
        new = old + strength * (new - old)
    new = torch.where(acts, new, old)
    if trace is not None:
        trace.extend(tracker.acts_of(edit, acts, old, new))
    return torch.cat((x[..., : columns.start], new, x[..., columns.stop :]), dim=-1)


def _added(model: Model, edit: VectorEdit, x: Tensor, tracker: TokenTracker, trace: list[Act] | None) -> Tensor:
    check_vector(model, edit.vector, x)
    acts, strength = tracker.acting(edit, x)  # (B, T, 1)
    new = x + torch.where(acts, strength, 0) * torch.tensor(edit.vector, dtype=x.dtype, device=x.device)
    if trace is not None:
        trace.extend(tracker.acts_of(edit, acts, x, new))
    return new
