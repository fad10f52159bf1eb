"""`attribute_neurons`: relevance of tokens for the activations of neurons, many neurons in one backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.methods.lrp import ATTNLRP, AttnLRP
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import PromptLike
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Conservation, forward_backward, new_accounting
from icebear.concepts.passes.targets import Activations
from icebear.records import Neuron


@dataclass(frozen=True, eq=False)
class NeuronRelevance:
    """Signed relevance of the tokens (T,) for the activation of a neuron, and its conservation accounting."""

    tokens: Tensor
    sums: Conservation
    """The target is the activation."""


def attribute_neurons(
    model: Model,
    prompts: Sequence[PromptLike],
    neurons: Sequence[Neuron],
    positions: Sequence[int],
    method: AttnLRP = ATTNLRP,
) -> list[NeuronRelevance]:
    """Compute the relevance of the tokens of each prompt for the activation of a neuron at a position.

    The lists have one entry for each prompt. Prompts of a batch do not depend on each other, so that one backward pass
    from the sum of all activations explains each. In an encoder-decoder, the decoder reads the same text as the encoder
    (`Model.read`).

    References
    ----------
    AttnLRP: Achtibat et al. 2024, arXiv 2402.05602. Relevance starts at a latent neuron instead of a logit.
    """
    for neuron in neurons:
        model.check(neuron)
    encoded = model.encode(prompts)
    rows = [list(encoded.row_ids(row)) for row in range(len(prompts))]
    if model.task.is_causal:  # later tokens do not influence the neuron
        rows = [ids[: at + 1] for ids, at in zip(rows, positions, strict=True)]
    batch = model.read(rows)
    accounting, inputs = new_accounting(model, len(prompts)), Inputs()
    target = Activations(batch, list(zip(neurons, positions, strict=True)))
    activations, _ = forward_backward(model, target, [inputs], method, accounting=accounting)
    tokens = torch.zeros(encoded.ids.shape, dtype=accounting["softmax"].dtype)  # (B, T)
    for relevance in inputs.relevance():  # encoder and decoder read the same
        tokens[:, : batch.ids.shape[1]] += relevance.sum(-1).cpu()
    return [
        NeuronRelevance(
            tokens[row, :length],
            Conservation(
                target=activations[row].item(),
                tokens=tokens[row, :length].sum().item(),
                **{name: entry[row].item() for name, entry in accounting.items()},
            ),
        )
        for row, length in enumerate(encoded.lengths)
    ]
