"""`with steer(model, edits):` the model runs with edited neurons, and is as before on exit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from concepts.models import Model
from concepts.taps import visiting
from db.errors import InputError
from db.records import Neuron
from steering.edits import Edit, acts_at
from steering.recipe import Recipe

Statistic = Callable[[Neuron, str], float]


@contextmanager
def steer(model: Model, edits: Recipe | Iterable[Edit | str], statistic: Statistic | None = None) -> Iterator[Model]:
    """Inside, every forward pass of `model` has `edits` applied, in order; also under `generate` and `attribute`.

    Works with and without KV cache, in batches, with left padding and beam search. Outside `generate`, the
    whole input counts as the prompt.
    statistic: gives a neuron's recorded ``max`` or ``std`` for edits in those units (an index's does).
    """
    if isinstance(edits, Recipe):
        edits.check(model)
    wanted = [Edit.parse(edit) if isinstance(edit, str) else edit for edit in edits]
    wanted = [edit.in_raw_units(statistic or _no_statistic) for edit in wanted]
    for edit in wanted:
        model.check(edit.neuron)
    with model.lock:
        where = _Positions()
        by_place: dict[tuple[str, int], list[Edit]] = {}
        for edit in wanted:
            site = "attn" if edit.neuron.site == "head" else edit.neuron.site
            by_place.setdefault((site, edit.neuron.layer), []).append(edit)

        def visit(site: str, layer: int, x: Tensor) -> Tensor:
            for edit in by_place[site, layer]:
                x = _apply(edit, x, where, model.head_dim)
            return x

        with where.following(model.net), visiting(model, by_place, visit):
            yield model


def _no_statistic(neuron: Neuron, unit: str) -> float:
    raise InputError(
        f"An edit of {neuron} is in units of its {unit}, which an index records; build one with icebear index and "
        "name it with --store, or give a plain number."
    )


def _apply(edit: Edit, x: Tensor, where: _Positions, head_dim: int) -> Tensor:
    """x (B, T, N) with one edit applied at the tokens where it acts."""
    index = edit.neuron.index
    columns = slice(index * head_dim, (index + 1) * head_dim) if edit.neuron.site == "head" else slice(index, index + 1)
    old = x[..., columns]  # (B, T, 1 or head_dim)
    acts, strength = where.acting(edit, x.device)  # (B, T, 1)
    new = {
        "set": lambda: torch.full_like(old, edit.value),
        "scale": lambda: old * edit.value,
        "add": lambda: old + edit.value,
    }[edit.op]()
    if edit.decay != 1:
        new = old + strength.to(x.dtype) * (new - old)
    new = torch.where(acts, new, old)
    return torch.cat((x[..., : columns.start], new, x[..., columns.stop :]), dim=-1)


class _Positions:
    """Which token of the text each column of the running forward pass is, and how long the prompt is."""

    def __init__(self) -> None:
        self.position = torch.zeros(1, 1, dtype=torch.long)  # (B, T) of the running pass; negative for padding
        self.prompt_length = torch.ones(1, dtype=torch.long)  # (B,)
        self.prompt_columns: int | None = None

    @contextmanager
    def following(self, net: Any) -> Iterator[None]:
        """Keep up with the calls of `net` and of its `generate`."""
        generate = net.generate

        def following_generate(inputs: Any = None, **kwargs: Any) -> Any:
            ids: Any = kwargs["input_ids"] if inputs is None else inputs
            self.prompt_columns = ids.shape[1]
            try:
                return generate(inputs, **kwargs)
            finally:
                self.prompt_columns = None

        handle = net.register_forward_pre_hook(self._before, with_kwargs=True)
        net.__dict__["generate"] = following_generate
        try:
            yield
        finally:
            del net.__dict__["generate"]
            handle.remove()

    def _before(self, net: Any, args: tuple, kwargs: dict) -> None:
        tokens: Any = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs["inputs_embeds"]
        batch, new = tokens.shape[:2]
        cache = kwargs.get("past_key_values")
        past = cache.get_seq_length() if cache is not None else 0
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            mask = torch.ones(batch, past + new, dtype=torch.long)
        mask = mask.cpu().long()
        position = (mask.cumsum(1) - 1).masked_fill(mask == 0, -1)  # (B, past + T)
        columns = self.prompt_columns or past + new
        self.prompt_length = mask[:, :columns].sum(1)
        self.position = position[:, past : past + new]

    def acting(self, edit: Edit, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the edit acts and how strongly, both (B, T, 1) for the running pass."""
        steps = self.position - (self.prompt_length[:, None] - 1)
        acts = [
            [position >= 0 and acts_at(edit.where, position, length) for position in row]
            for row, length in zip(self.position.tolist(), self.prompt_length.tolist(), strict=True)
        ]
        strength = edit.decay ** steps.clamp(min=0).double()
        return torch.tensor(acts, device=device)[..., None], strength.to(device)[..., None]
