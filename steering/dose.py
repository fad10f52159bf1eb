"""The dose of a steer: the norm of what edits add to the residual stream, as a share of the stream's norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from icebear.concepts.passes.inputs import Stream
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.concepts.vocabulary.weight_rows import w_out_rows
from icebear.edits import AnyEdit, VectorEdit
from icebear.models.model import Model
from icebear.models.parts.linear import through_norm


def dose(model: Model, edits: Sequence[AnyEdit], ids: Sequence[int]) -> float | None:
    """Return the norm of what edits add to the residual stream, divided by the norm of the stream.

    Of edits in several layers, the largest over these layers, with what the layers below in the same stack added. None
    for edits that set, scale or swap: what they add depends on the text. None without a residual stream, too.

    Parameters
    ----------
    model : Model
    edits : sequence of Edit or VectorEdit
        In raw units.
    ids : sequence of int
        The tokens of a text, on which the stream's norm is the mean, without attention sinks.

    References
    ----------
    The unit is that of hotwire-vllm (`relative_dose`), whose texts fell apart near 1.9.
    """
    if not edits or not all(isinstance(edit, VectorEdit) or edit.op == "add" for edit in edits):
        return None
    added: dict[int, Tensor] = defaultdict(lambda: torch.zeros(model.config.hidden_size))
    for edit in edits:
        row = _written(model, edit)
        if row is None:
            return None
        added[edit.layer] = added[edit.layer] + row
    norms, doses = _stream_norms(model, ids), []
    total = torch.zeros(2, model.config.hidden_size)  # of each stack
    for layer in sorted(added):
        if not norms[layer]:
            return None
        stack = model.stack_of(layer)
        total[stack] += added[layer]
        doses.append(total[stack].norm().item() / norms[layer])
    return max(doses)


def _written(model: Model, edit: AnyEdit) -> Tensor | None:
    """Return what an edit adds to the residual stream (D,); None for a neuron that does not write to it."""
    if isinstance(edit, VectorEdit):
        return edit.share * torch.tensor(edit.vector)
    neuron = edit.neuron
    rows = w_out_rows(model, neuron.site, neuron.layer, slice(neuron.index, neuron.index + 1))
    if rows is None:
        return None
    row = edit.share * edit.value * model.residual_scale(neuron.site) * rows[0]
    for path in model.norms_after(neuron.layer, neuron.site):
        if path != model.family_at(neuron.layer).final_norm:
            _, divisor, _ = calibrate(model).divisors[path]
            row = through_norm(model.net.get_submodule(path), row, model.family.norm_offset, divisor)
    return row.cpu()


@torch.no_grad()
def _stream_norms(model: Model, ids: Sequence[int]) -> list[float]:
    """Return the mean norm of the residual stream after each layer, at the tokens of its stack, without sinks unless
    there are only sinks."""
    batch = model.read([list(ids)])
    stream = Stream(model, batch)
    with model.lock, stream.reading(model):
        model.final_stream(batch)
    norms = stream.norms[0][:, batch.columns(0)]  # (L, T)
    read, sinks = batch.lengths[0], stream.sinks(0)
    stacks = [list(range(read)), list(range(read, norms.shape[1]))]
    counted = [[position for position in stack if position not in sinks] or stack for stack in stacks]
    return [norms[layer, counted[model.stack_of(layer)]].mean().item() for layer in range(model.layers)]
