"""The usual baseline: a difference-of-means vector in the residual stream, added at every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.concept.reading import LONGEST, batches, counts
from icebear.concepts.models.model import Model


@torch.no_grad()
def stream_means(model: Model, texts: Sequence[str]) -> np.ndarray:
    """(S, L, D) means of the residual stream after each layer, over the tokens that count."""
    rows = [model.token_ids(text, min(LONGEST, model.context_length)) for text in texts]
    means: dict[int, np.ndarray] = {}
    seen: list[np.ndarray] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).float().cpu().numpy())

    with model.lock, ExitStack() as undo:
        for module in model.layer_modules:
            undo.callback(module.register_forward_hook(keep).remove)
        for part in batches(rows):
            seen.clear()
            model.final_stream(model.read([rows[number] for number in part]))
            for row, number in enumerate(part):
                places = counts(model, rows[number])
                means[number] = np.stack([x[row, places].mean(0) for x in seen])
    return np.stack([means[number] for number in range(len(rows))])


def vector_added(model: Model, layer: int, vector: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Make a context in which `vector` (D,) is added to the residual stream after a layer, at every token."""

    def push(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + vector.to(output[0]), *output[1:])
        return output + vector.to(output)

    @contextmanager
    def hooked() -> Iterator[None]:
        hook = model.layer_modules[layer].register_forward_hook(push)
        try:
            yield
        finally:
            hook.remove()

    return lambda: model.lock.yielding(hooked)
