"""`with steer(model, edits):` runs a model with edited neurons."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.edits import Edit, SwapSource, acts_at, last_position, parse_edits
from icebear.errors import InputError
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.models.text import images
from icebear.recipe import Recipe
from icebear.records import Neuron
from icebear.values import check_int, real, several, typed

Statistic = Callable[[Neuron, str], float]

UNKNOWN = -2
"""Stands for the id of a token that is an embedding or a patch of an image."""
_READING: ContextVar[bool] = ContextVar("reading", default=False)
"""Whether the prompt of a swap is read, in a pass without edits."""


@dataclass(frozen=True)
class Act:
    """One edit of one token: the row of the batch, the token's position in its text, and the activation (for a head its
    mean) before and after."""

    edit: Edit
    row: int
    position: int
    token: int
    """The token id; negative if the model is given none (image patches, embeddings)."""
    before: float
    after: float


@typed
@contextmanager
def steer(
    model: Model,
    edits: Recipe | Edit | str | Iterable[Edit | str],
    statistic: Statistic | None = None,
    trace: bool = False,
    prompt_tokens: int | None = None,
    rows: Sequence[int] | None = None,
) -> Iterator[list[Act]]:
    """Apply `edits`, in order, in every forward pass inside the context, also under `generate` and `attribute`.

    It works with and without a KV cache, in batches, with left padding and beam search. Other threads wait, or run
    without the edits between the tokens of a `Model.generate`.

    Parameters
    ----------
    edits
        A recipe, or edits (``L29.ffn.860*0``), one or several.
    statistic
        ``statistic(neuron, unit)`` returns a neuron's recorded ``max`` or ``std`` for edits in those units; see
        `Store`.
    trace
        Add an `Act` to the list of ``with ... as acts`` for each edit, row and token that it acts on.
    prompt_tokens
        Outside `generate`, the first columns that count as the prompt; default all.
    rows
        The rows of a batch that are edited; default all.

    Yields
    ------
    list of Act
        Empty without `trace`.

    Raises
    ------
    InputError
        For an edit of a neuron or token that the model does not have, or a unit without `statistic`.
    RecipeError
        For a recipe of another model.
    """
    if isinstance(edits, Recipe):
        edits.check(model)
    if prompt_tokens is not None:
        prompt_tokens = check_int(prompt_tokens, "The number of the prompt's tokens")
    rows = None if rows is None else [check_int(row, "A row of the batch", 0) for row in several(rows)]
    wanted = [edit.in_raw_units(statistic) for edit in parse_edits(edits)]
    most = torch.finfo(model.dtype).max
    for edit in wanted:
        model.check(edit.neuron)
        real(edit.value, f"In {model.dtype_name} the value of an edit of {edit.neuron}", -most, most)
    swapped = _swapped_values(model, wanted)
    acts: list[Act] = []
    where = _TokenTracker(model, prompt_tokens, rows)
    by_site_layer: dict[tuple[str, int], list[Edit]] = {}
    for edit in wanted:
        by_site_layer.setdefault((neuron_site(edit.neuron.site), edit.neuron.layer), []).append(edit)

    def visit(site: str, layer: int, x: Tensor) -> Tensor:
        for edit in by_site_layer[site, layer] if not _READING.get() else ():
            x = _apply(edit, x, where, model.head_dim, swapped.get(edit), acts if trace else None)
        return x

    @contextmanager
    def edited() -> Iterator[None]:
        with where.following(), hooks(model, by_site_layer, visit):
            yield

    with model.lock.yielding(edited):
        yield acts
    idle = [edit for edit in wanted if edit not in where.acted and edit.where.startswith(("position", "step"))]
    if idle and where.ran:
        logging.getLogger("icebear").warning(
            "%s acted at no token, because no text was that long; check its position.", " and ".join(map(str, idle))
        )


def _swapped_values(model: Model, edits: Iterable[Edit]) -> dict[Edit, Tensor]:
    """Return for each swap the activations (S, 1 or head_dim) after its prompt, at all S tokens."""
    by_source: dict[SwapSource, list[Edit]] = {}
    for edit in edits:
        if edit.source is not None:
            by_source.setdefault(edit.source, []).append(edit)
    swapped: dict[Edit, Tensor] = {}
    for source, swaps in by_source.items():
        objective = objective_of(model, [source if isinstance(source, str) else list(source)])
        values = Values(model, objective.batch, list(dict.fromkeys(neuron_site(edit.neuron.site) for edit in swaps)))
        reading = _READING.set(True)
        try:
            forward(model, Logits(objective), [values])
        finally:
            _READING.reset(reading)
        for edit in swaps:
            span = objective.batch.span_of(model.stack_of(edit.neuron.layer))
            read = values.values(0, values.activation[neuron_site(edit.neuron.site)])[edit.neuron.layer, span]
            if last_position(edit.where) >= len(read):
                raise InputError(f"{edit} reads a token that its prompt does not have; it has {len(read)} tokens.")
            swapped[edit] = read[:, _columns(edit, model.head_dim)]
    return swapped


def _columns(edit: Edit, head_dim: int) -> slice:
    width = head_dim if edit.neuron.site == "head" else 1
    return slice(edit.neuron.index * width, (edit.neuron.index + 1) * width)


def _apply(
    edit: Edit, x: Tensor, where: _TokenTracker, head_dim: int, swapped: Tensor | None, trace: list[Act] | None
) -> Tensor:
    columns = _columns(edit, head_dim)
    old = x[..., columns]  # (B, T, 1 or head_dim)
    acts, strength = where.acting(edit, x)  # (B, T, 1)
    if swapped is not None:
        new = swapped[where.read_at(edit, len(swapped))].to(old)
    else:
        new = {"set": torch.full_like(old, edit.value), "scale": old * edit.value, "add": old + edit.value}[edit.op]
    if edit.decay != 1 or edit.share != 1:
        new = old + strength * (new - old)
    new = torch.where(acts, new, old)
    if trace is not None:
        trace.extend(where.acts_of(edit, acts, old, new))
    return torch.cat((x[..., : columns.start], new, x[..., columns.stop :]), dim=-1)


class _TokenTracker:
    """Tracks, in each stack, the ids and positions of the columns of the running forward pass, and the length of the
    prompt. The prompt of an encoder-decoder's decoder is its start token."""

    def __init__(self, model: Model, prompt_columns: int | None = None, rows: Sequence[int] | None = None) -> None:
        self.model, self.rows = model, rows
        stacks = model.task.stacks
        self.position = [torch.zeros(1, 1, dtype=torch.long)] * stacks  # (B, T) of the running pass; negative: padding
        self.prompt_length = [torch.ones(1, dtype=torch.long)] * stacks  # (B,)
        self.given_columns = self.prompt_columns = prompt_columns
        self.ids = [torch.zeros(1, 1, dtype=torch.long)] * stacks  # (B, T) of the running pass
        self.running = False  # a pass of the whole network
        self.ran = False
        self.acted: set[Edit] = set()
        self.prompt_mask: Tensor | None = None  # (B, T) of its prompts

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track the calls of the model's stacks and of its `generate`."""
        net = self.model.net
        parts = [net] if len(self.position) == 1 else [net.get_encoder(), net.get_decoder()]
        with ExitStack() as undo:
            for stack, part in enumerate(parts):
                before = partial(self._before, stack)
                undo.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
            if parts == [net] and net.base_model is not net:  # which may run without the network around it
                undo.callback(net.register_forward_pre_hook(partial(self._run, True)).remove)
                undo.callback(net.register_forward_hook(partial(self._run, False), always_call=True).remove)
                undo.callback(net.base_model.register_forward_pre_hook(self._base, with_kwargs=True).remove)
            if hasattr(net, "generate"):
                undo.enter_context(replaced(net, "generate", partial(self._generate, net.generate)))
            yield

    def _generate(self, generate: Callable, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        prompt = next(
            (x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None
        )
        if prompt is None:
            raise InputError("Under `steer`, generate needs a prompt: give it input_ids.")
        self.prompt_columns = prompt.shape[1] if len(self.position) == 1 else 1
        self.prompt_mask = kwargs.get("attention_mask") if len(self.position) == 1 else None
        try:
            return generate(inputs, *args, **kwargs)
        finally:
            self.prompt_columns, self.prompt_mask = self.given_columns, None

    def _run(self, running: bool, *_: Any) -> None:
        self.running = running

    def _base(self, net: Any, args: tuple, kwargs: dict) -> None:
        if not self.running:
            self._before(0, net, args, kwargs)

    def _before(self, stack: int, net: Any, args: tuple, kwargs: dict) -> None:
        tokens: Any = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds", kwargs.get("pixel_values"))
        batch, new = tokens.shape[:2]
        if not self.model.task.reads_text:
            new = len(images.names(self.model))
        cache = kwargs.get("past_key_values")
        past = int(cache.get_seq_length()) if cache is not None else 0
        writes = stack == len(self.position) - 1  # an encoder's whole text is prompt
        mask = self._mask(kwargs.get("attention_mask"), batch, past + new, writes)
        position = (mask.cumsum(1) - 1).masked_fill(mask == 0, -1)  # (B, past + T)
        columns = (self.prompt_columns if writes else None) or past + new
        self.prompt_length[stack] = mask[:, :columns].sum(1)
        self.position[stack] = position[:, past : past + new]
        self.ids[stack] = tokens.cpu() if tokens.shape == (batch, new) else torch.full((batch, new), UNKNOWN)

    def _mask(self, attention_mask: Tensor | None, batch: int, columns: int, writes: bool) -> Tensor:
        """(B, past + T) 1 for tokens; if a pass has only a mask of pairs (static caches), the mask of the prompt."""
        if attention_mask is None or attention_mask.dim() != 2:
            attention_mask = self.prompt_mask if writes else None
        if attention_mask is None:
            return torch.ones(batch, columns, dtype=torch.long)
        mask = attention_mask.cpu().long()
        mask = mask.repeat_interleave(batch // len(mask), 0)[:, :columns]  # beams of a prompt are next to each other
        return torch.cat((mask, torch.ones(batch, columns - mask.shape[1], dtype=torch.long)), 1)

    def read_at(self, edit: Edit, tokens: int) -> Tensor:
        """Return which of the tokens of a swap's prompt each token of the running pass takes its value from (B, T)."""
        position = self.position[self.model.stack_of(edit.neuron.layer)]
        if edit.where.startswith("position:"):
            return position.clamp(0, tokens - 1)
        return torch.full_like(position, tokens - 1)

    def acts_of(self, edit: Edit, acts: Tensor, old: Tensor, new: Tensor) -> list[Act]:
        stack = self.model.stack_of(edit.neuron.layer)
        position = self.position[stack]
        columns: tuple[Tensor, ...] = (position, self.ids[stack], old.mean(-1), new.mean(-1))
        cells = acts[..., 0].expand(old.shape[:2]).nonzero().tolist()
        fields = ((row, [column[row, token].item() for column in columns]) for row, token in cells)
        return [Act(edit, row, *map(int, values[:2]), *values[2:]) for row, values in fields]

    def acting(self, edit: Edit, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the edit acts and how strongly, both (B, T, 1) for the running pass, on the device of `x`."""
        self.ran = True
        stack = self.model.stack_of(edit.neuron.layer)
        positions, lengths = self.position[stack], self.prompt_length[stack]
        steps = positions - (lengths[:, None] - 1)
        acts = torch.tensor(
            [
                [position >= 0 and acts_at(edit.where, position, length) for position in row]
                for row, length in zip(positions.tolist(), lengths.tolist(), strict=True)
            ]
        )
        if self.rows is not None:
            acts[[row not in self.rows for row in range(len(acts))]] = False
        if acts.any():
            self.acted.add(edit)
        strength = edit.share * edit.decay ** steps.clamp(min=0).double()
        return acts.to(x.device)[..., None], strength.to(x.device, x.dtype)[..., None]
