"""How much memory a pass takes, from the configuration alone: the pass runs without values, and sizes are added up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from icebear.concepts.methods.attnlrp import ATTNLRP
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import AllNeurons, LargestNeurons, PairedNeurons, Values
from icebear.concepts.passes.run import Recorder, Target, first_layers, forward_backward
from icebear.concepts.passes.storage import memory_at_hand
from icebear.lrp.linear_rules import Rules
from icebear.models.batch import Batch
from icebear.models.loading.fake import fake_model
from icebear.models.model import Model
from icebear.models.prompt_image import PromptImage

KEPT = 100
"""The neurons of ``keep="top"``."""
SITES = ("ffn", "attn")
FEW_LAYERS = (2, 4)
"""Where layers are alike, passes through so many say what each of the others takes."""


@dataclass(frozen=True)
class Need:
    """What an explanation of a prompt takes, in bytes."""

    what: str
    in_pass: int
    """Beyond the weights, on the device of the model."""
    result: int
    """On the device while `PARTS` times its size is free there, else in the memory of the computer."""

    tokens: int
    """Of the prompt, with those of its image."""

    def fits(self, weights: int, device: torch.device) -> bool:
        """Return whether it fits now, with the bytes of the weights."""
        if device.type == "cpu":
            return weights + self.in_pass + self.result <= memory_at_hand(device)
        return weights + self.in_pass <= memory_at_hand(device) and self.result <= memory_at_hand(torch.device("cpu"))


Computation = tuple[str, Rules, int, Callable[[Model, Batch], Recorder | None]]
"""What is computed: its name, its rules, its rows, and its recorder of neurons."""
COMPUTATIONS: tuple[Computation, ...] = (
    ("all neurons", ATTNLRP, 1, lambda model, batch: AllNeurons(model, batch, _sites(model))),
    (
        'largest neurons (keep="top")',
        ATTNLRP,
        1,
        lambda model, batch: LargestNeurons(model, batch, _sites(model), KEPT),
    ),
    ("tokens only (sites=())", ATTNLRP, 1, lambda model, batch: None),
    ("a comparison, all neurons", DIFFERENCE, 2, lambda model, batch: PairedNeurons(model, batch, _sites(model))),
)


def _sites(model: Model) -> list[str]:
    return [site for site in SITES if site in model.sites]


def memory_needs(
    name: str, tokens: int, dtype: torch.dtype, trust_remote_code: bool = False, image: Any = None
) -> tuple[int, list[Need]]:
    """Return the bytes of a model's weights, and what explanations of a prompt of so many tokens of text take. image:
    what the prompt is about, too (see `fake_model`)."""
    needs = []
    with fake_model(name, dtype, trust_remote_code, image) as (model, read):
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in model.net.parameters()}
        # With an image, its tower may take the most, whatever the number of layers.
        is_short = read is None and model.layers > max(FEW_LAYERS) and _are_alike(model)
        counts = FEW_LAYERS if is_short else (model.layers,)
        for computation in COMPUTATIONS:
            batch = _batch(model, tokens, computation[2], read)
            sizes = []
            for count in counts:
                with first_layers(model, count), Allocated(set(storages)) as allocated:
                    result = _explain(model, batch, computation)
                sizes.append(allocated.most - result)
            each_layer = (sizes[-1] - sizes[0]) // max(1, counts[-1] - counts[0])
            in_pass = sizes[-1] + (model.layers - counts[-1]) * each_layer
            needs.append(Need(computation[0], in_pass, result, batch.lengths[0]))
    return sum(storages.values()), needs


def _are_alike(model: Model) -> bool:
    """Return whether all layers have modules of the same kinds, sizes and options."""
    kinds = getattr(model.config, "layer_types", None) or [""]
    layers = [[(name, *_form(part)) for name, part in layer.named_modules()] for layer in model.layer_modules]
    return len(set(kinds)) == 1 and all(layer == layers[0] for layer in layers)


def _form(module: nn.Module) -> tuple[Any, ...]:
    """Return what layers may differ in, such as SmolLM3's `use_rope`."""
    options = {name: x for name, x in vars(module).items() if isinstance(x, int | float | str) and name != "layer_idx"}
    return type(module), options, [x.shape for x in module.parameters(recurse=False)]


def _explain(model: Model, batch: Batch, computation: Computation) -> int:
    """Run a computation, and return the bytes of its result."""
    _, rules, _, recorder_of = computation
    recorder = recorder_of(model, batch)
    forward_backward(model, _FirstToken(batch), [Inputs(), *([recorder] if recorder else [])], rules)
    return sum(x.untyped_storage().nbytes() for x in _kept(recorder))


def _batch(model: Model, tokens: int, rows: int, image: PromptImage | None) -> Batch:
    """Return prompts of so many tokens of text, after those of an image."""
    text = torch.zeros(rows, tokens, dtype=torch.long)
    if image is None:
        return Batch(text, torch.ones_like(text), (tokens,) * rows)
    shown = torch.ones(rows, image.count, dtype=torch.long) * model.net.config.image_token_id
    ids = torch.cat((shown, text), 1)
    prompt = replace(image, prompt_length=ids.shape[1])
    return Batch(ids, torch.ones_like(ids), (ids.shape[1],) * rows, images=(prompt,) * rows)


def _kept(recorder: Recorder | None) -> list[Tensor]:
    """Return the tensors of a recorder that the result has."""
    if not isinstance(recorder, Values):
        return []
    return [*recorder.activation.values(), *recorder.relevance.values()]


class _FirstToken(Target):
    """A logit after the last token; which one does not matter to the memory."""

    def __init__(self, batch: Batch) -> None:
        self.batch: Batch = batch

    def numbers(self, model: Model) -> Tensor:
        options = {"use_cache": False, "logits_to_keep": 1}
        if self.batch.images:
            return model.task.forward(model, self.batch, **options).logits[:, 0, 0]
        return model.net(input_ids=self.batch.ids, **options).logits[:, 0, 0]


class Allocated(TorchDispatchMode):
    """Adds up the bytes of all tensors that are alive, and remembers the most."""

    def __init__(self, known: set[int]) -> None:
        """known: storages that do not count."""
        super().__init__()
        self.known, self.now, self.most = known, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return output

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def freed() -> None:
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, freed)
