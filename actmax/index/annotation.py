"""`annotate`: the relevance of each token, or patch, for the activation in the examples of a neuron."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from icebear.actmax.measure_heads import add_attention
from icebear.actmax.reading import readable, reading_of
from icebear.concepts.methods.attnlrp import ATTNLRP, VIT, AttnLRP
from icebear.concepts.methods.registry import name_of
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.proved import rules_at_modules
from icebear.concepts.passes.run import Activations, Conservation, forward_backward, new_accounting
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.text.images import image_map
from icebear.models.text.prompts import PromptLike
from icebear.records import POLARITIES, Example, Neuron
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, several, shown, typed

EXAMPLES_PER_PASS = 8
"""The largest number of examples of a pass."""
LAYERS = 5
OVERHEAD = 50
"""The time that a layer takes besides the time for its tokens, as a number of tokens."""


@typed
def annotate(
    model: Model,
    store: Store,
    neurons: Neuron | str | Iterable[Neuron | str],
    k: int = 8,
    method: AttnLRP | None = None,
    on_progress: OnProgress = unwatched,
) -> int:
    """Attribute the maximally activating examples of neurons to their tokens (an image's to its patches), and save the
    relevance in the store.

    The examples of a head get its attention instead. Examples that have an attribution are skipped, and so are images
    that are missing or have changed, which are named. Each batch is committed.

    Parameters
    ----------
    model : Model
    store : Store
        A finished index of this model.
    neurons : Neuron or str, or several of them
    k : int
        The number of examples of each neuron and polarity.
    method : AttnLRP, optional
        The relevance rules; by default `ATTNLRP`, for images `VIT`.
    on_progress : callable
        Called with the number of finished examples and their total.

    Returns
    -------
    int
        The number of examples that were attributed.

    Raises
    ------
    StoreError
        If the index is of another model or dtype.
    InputError
        If the method cannot explain a neuron, or the model does not have a neuron.

    References
    ----------
    Achtibat et al. 2024, AttnLRP (arXiv 2402.05602).
    """
    k = check_int(k, "The number of examples")
    method = (ATTNLRP if model.task.reads_text else VIT) if method is None else method
    if not isinstance(method, AttnLRP):
        raise InputError(f"{shown(method)} cannot explain a neuron; use AttnLRP(...) or CP_LRP.")
    named = [model.check(neuron) for neuron in several(neurons)]
    store.check(model.index_fingerprint, model.name, model.dtype_name)
    reading = reading_of(model, store.facts.all())
    wanted: list[tuple[Neuron, str, Example]] = [
        (neuron, polarity, example)
        for neuron in named
        if neuron.site != "head"
        for polarity in POLARITIES
        for example in store.examples(neuron, polarity, k, name_of(method))
        if example.relevance is None
    ]
    for head in (neuron for neuron in named if neuron.site == "head"):
        add_attention(model, store, head, k)
    # Examples of about the same depth and position share a batch.
    count = 0
    wanted.sort(key=lambda row: (row[0].layer // LAYERS, row[2].token, row[0].layer, row[2].sentence.id))
    for span in _batches([(1 + neuron.layer, 1 + example.token) for neuron, _, example in wanted]):
        on_progress(span.start, len(wanted))
        prompts = readable(reading, ((row, row[2].sentence) for row in wanted[span]))
        for _, group in groupby(prompts, lambda row: getattr(row[1], "shape", None)):  # images of one size
            rows, read = zip(*group, strict=True)
            results = attribute_neurons(
                model, read, [neuron for neuron, _, _ in rows], [example.token for _, _, example in rows], method
            )
            store.example_tables.add_attributions(
                name_of(method),
                [
                    (neuron, polarity, example.sentence.id, tokens.tolist(), sums.to_dict())
                    for (neuron, polarity, example), (tokens, sums) in zip(rows, results, strict=True)
                ],
            )
            count += len(rows)
    on_progress(len(wanted), len(wanted))
    return count


def _batches(sizes: Sequence[tuple[int, int]]) -> list[slice]:
    """Split examples, in their order, into batches that take the least time.

    sizes: the layers and the tokens of each example. Every example of a batch is computed up to its highest layer, and
    padded to its last token.
    """
    best: list[tuple[float, int]] = [(0, 0)]  # of the first 0, 1, ... examples: their time, where the last batch starts
    for end in range(1, len(sizes) + 1):
        able = []
        for start in range(max(0, end - EXAMPLES_PER_PASS), end):
            layers, tokens = map(max, zip(*sizes[start:end], strict=True))
            able.append((best[start][0] + layers * (OVERHEAD + tokens * (end - start)), start))
        best.append(min(able))
    batches, end = [], len(sizes)
    while end:
        batches.append(slice(best[end][1], end))
        end = best[end][1]
    return batches[::-1]


def attribute_neurons(
    model: Model,
    prompts: Sequence[PromptLike],
    neurons: Sequence[Neuron],
    positions: Sequence[int],
    method: AttnLRP = ATTNLRP,
) -> list[tuple[Tensor, Conservation]]:
    """Compute the relevance of the tokens (T,) of each prompt for the activation of a neuron at a position, with its
    conservation accounting, whose target is the activation.

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
    if encoded.pixels is not None:
        return _attributed(model, encoded, encoded, neurons, positions, method)
    rows = [list(encoded.row_ids(row)) for row in range(len(prompts))]
    if model.task.is_causal:  # later tokens do not influence the neuron
        rows = [ids[: at + 1] for ids, at in zip(rows, positions, strict=True)]
    parts = list(model.batches(list(map(len, rows)), len(rows)))
    if len(parts) > 1:
        pick = lambda values, part: [values[row] for row in part]  # noqa: E731
        chosen = ([pick(values, part) for values in (prompts, neurons, positions)] for part in parts)
        return [result for p, n, at in chosen for result in attribute_neurons(model, p, n, at, method)]
    return _attributed(model, encoded, model.read(rows), neurons, positions, method)


def _attributed(
    model: Model, encoded: Batch, batch: Batch, neurons: Sequence[Neuron], positions: Sequence[int], method: AttnLRP
) -> list[tuple[Tensor, Conservation]]:
    """Explain activations in one pass. encoded: the whole prompts; batch: what the model reads of them."""
    accounting, inputs = new_accounting(model, len(neurons)), Inputs()
    target = Activations(batch, list(zip(neurons, positions, strict=True)))
    at_modules = rules_at_modules(model, target, method)
    activations, _ = forward_backward(model, target, [inputs], method, accounting=accounting, at_modules=at_modules)
    tokens = torch.zeros(encoded.ids.shape, dtype=accounting["softmax"].dtype)  # (B, T)
    for relevance in inputs.relevance():  # encoder and decoder read the same
        of_tokens = relevance.sum(-1) if batch.pixels is None else _of_patches(model, batch, relevance)
        tokens[:, : batch.ids.shape[1]] += of_tokens.cpu()
    return [
        (
            tokens[row, :length],
            Conservation(
                target=activations[row].item(),
                tokens=tokens[row, :length].sum().item(),
                **{name: entry[row].item() for name, entry in accounting.items()},
            ),
        )
        for row, length in enumerate(encoded.lengths)
    ]


def _of_patches(model: Model, batch: Batch, relevance: Tensor) -> Tensor:
    """Return the relevance (B, T) of patches from that of pixels (B, C, H, W); of the model's own tokens, which are
    constants, it is 0."""
    assert batch.pixels is not None
    maps = [
        image_map(model, pixels, row).patches.flatten() for pixels, row in zip(batch.pixels, relevance, strict=True)
    ]
    patches = torch.stack(maps)
    return pad(patches, (batch.ids.shape[1] - patches.shape[1], 0))
