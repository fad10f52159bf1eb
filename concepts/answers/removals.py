"""The log-probability of an answer after several prompts. Passes share the longest common beginning.

1. Prompts are read in the order of their token ids, so that those with the same beginning are neighbors.
2. A single cache holds keys and values of the last prompt. It is cut where the next one differs, and what comes behind
   is read: no token is read twice behind the same beginning.
3. A model whose cache cannot be cut, because it keeps a state or a window, reads each prompt from its beginning; this
   is measured with a few tokens. So is a prompt that is so long that positions depend on its length, and one with an
   image.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from icebear.concepts.passes.prefix import logits_at
from icebear.errors import InputError
from icebear.models.model import Model, not_nan
from icebear.models.prompt_image import PromptImage
from icebear.models.text.prompts import Prompt
from icebear.values import common_length

CHUNK = 512
"""Tokens that are read in one step: attention needs memory for each pair of them and the tokens before."""
CHECKED = 8
"""Tokens by which sharing is measured."""


class Removals:
    """Passes over an answer after prompts that are alike.

    Parameters
    ----------
    model : Model
        A causal language model.
    answer
        Its token ids.
    """

    def __init__(self, model: Model, answer: Sequence[int]) -> None:
        self.model, self.answer = model, list(answer)
        self.can_cut_cache = _can_cut_cache(model)
        self.seconds = 0.0
        """Spent in passes."""
        self.tokens_read = 0
        self._cache, self._cached = DynamicCache(), list[int]()

    def log_probabilities(self, prompts: Sequence[Sequence[int] | Prompt]) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, log-probability (S,) of each token of the answer) for each prompt, in the order of passes.

        prompts: token ids, or prompts that were read, with their image.
        """
        read = [Prompt.of(prompt) for prompt in prompts]
        rows = [list(prompt.ids or ()) for prompt in read]
        for index in sorted(range(len(rows)), key=rows.__getitem__):
            begun = time.perf_counter()
            yield index, self._pass(rows[index], read[index].image)
            self.seconds += time.perf_counter() - begun

    @torch.no_grad()
    def _pass(self, prompt: list[int], image: PromptImage | None) -> Tensor:
        is_long = len(prompt) + len(self.answer) > self.model.scales_positions_from
        if image is not None or is_long or not self.can_cut_cache:
            self.tokens_read += len(prompt) + len(self.answer)
            logits = self.model.continuation_logits(prompt, self.answer, image)
            return logits.log_softmax(-1)[range(len(self.answer)), self.answer].cpu()
        read = [*prompt, *self.answer[:-1]]
        shared = min(common_length(self._cached, read), len(prompt) - 1)  # the last token predicts the answer's first
        with self.model.lock:
            _cut(self._cache, shared)
            self._cached = read
            self._read(prompt[shared:-1])
            rows = []
            for start in range(len(prompt) - 1, len(read), CHUNK):
                logits = self._step(read[start : start + CHUNK], CHUNK)
                begin = start - len(prompt) + 1
                wanted = torch.tensor(self.answer[begin : begin + CHUNK], device=logits.device)
                rows.append(not_nan(logits.float()).log_softmax(-1).gather(-1, wanted[:, None])[:, 0])
        return torch.cat(rows).cpu()

    def _read(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), CHUNK):
            self._step(ids[start : start + CHUNK], 1)

    def _step(self, ids: Sequence[int], keep: int) -> Tensor:
        """Read tokens behind the cache. Return the logits (n, V) of the last `keep` of them at most."""
        self.tokens_read += len(ids)
        return _logits(self.model, ids, self._cache, keep)


def _logits(model: Model, ids: Sequence[int], cache: DynamicCache, keep: int) -> Tensor:
    inputs = {"input_ids": torch.tensor([list(ids)], device=model.device), "past_key_values": cache}
    last = [*range(max(0, len(ids) - keep), len(ids))]
    return logits_at(model, inputs, last, use_cache=True)[0][0]


def _cut(cache: DynamicCache, length: int) -> None:
    """Cut a cache to its first tokens."""
    extra = cache.get_seq_length() - length
    if extra > 0:
        cache.crop(-extra)


@torch.no_grad()
def _can_cut_cache(model: Model) -> bool:
    """Return whether a cache that was cut gives the logits of a pass from the beginning."""
    count = model.config.vocab_size
    ids = [(7 * at + 3) % count for at in range(CHECKED)]
    half, cache = CHECKED // 2, DynamicCache()
    try:
        with model.lock:
            wanted = _logits(model, ids, DynamicCache(), 1)
            _logits(model, [*ids[:half], *ids[:half]], cache, 1)
            _cut(cache, half)
            logits = _logits(model, ids[half:], cache, 1)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # another kind of cache
    close = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    return bool((logits - wanted).abs().max() <= close * wanted.abs().max())


def check_causal(model: Model) -> None:
    """Raise `InputError` for a model that writes no answer token by token."""
    if not (model.task.is_causal and model.task.generates):
        raise InputError(f"{model.name} does not continue a prompt, so its answers have no sources to remove.")
