"""`TokenTracker`: which tokens a running forward pass reads, and which of them are generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from icebear.edits import AnyEdit, Edit, acts_at
from icebear.errors import InputError
from icebear.models.lock import replaced
from icebear.models.model import Model, generation_option
from icebear.models.text import images
from icebear.values import several

POSITIONAL = ("inputs", "generation_config", "logits_processor", "stopping_criteria")
"""The first arguments of transformers' `generate`."""
PROMPTS = ("inputs", "input_ids"), ("inputs_embeds",)
"""The arguments of `generate` that the prompt may be in, as ids and as embeddings."""
UNKNOWN = -2
"""Stands for the id of a token that is an embedding or a patch of an image."""


@dataclass(frozen=True)
class Act:
    """One edit of one token: the row of the batch, the token's position in its text, and the activation (for a head
    or the residual stream the mean) before and after."""

    edit: AnyEdit
    row: int
    position: int
    token: int
    """The token id; negative if the model is given none (image patches, embeddings)."""
    before: float
    after: float


def _is_mask(mask: Any) -> bool:
    """Return whether a mask has a number for each token; others are of pairs, or one for each kind of layer."""
    return isinstance(mask, Tensor) and mask.dim() == 2


def _has_tokens(x: Any) -> bool:
    return x is not None and x.shape[1] > 0


def _mask_of(ids: Tensor, padding: Any, ends: Sequence[int]) -> Tensor | None:
    """Return the mask (B, T) that transformers gives to a prompt without one."""
    padding = int(padding) if padding is not None else None
    return (
        (ids != padding).long()
        if padding is not None and padding not in ends and bool((ids == padding).any())
        else None
    )


def _decoder_columns(ids: Tensor | None, option: Callable[[str], Any]) -> int:
    """Return how many tokens a decoder begins with: its start token, and what it is given."""
    if ids is None:
        return 1
    return ids.shape[1] + bool((ids[:, 0] != option("decoder_start_token_id")).all())


class TokenTracker:
    """Tracks, in each stack, the ids and positions of the columns of the running forward pass, and the length of the
    prompt. The prompt of an encoder-decoder's decoder is its start token, and what it is given."""

    def __init__(self, model: Model, prompt_columns: int | None = None, rows: Sequence[int] | None = None) -> None:
        self.model, self.rows = model, rows
        stacks = model.task.stacks
        self.position = [torch.zeros(1, 1, dtype=torch.long)] * stacks  # (B, T) of the running pass; negative: padding
        self.prompt_length = [torch.ones(1, dtype=torch.long)] * stacks  # (B,)
        self.prompt_columns = prompt_columns
        self.ids = [torch.zeros(1, 1, dtype=torch.long)] * stacks  # (B, T) of the running pass
        self.acts: list[Act] = []
        self._accepted = 0  # of these
        self._acted_at: set[tuple[AnyEdit, int, int]] = set()  # in this generation
        self.generates = False
        self.running = False  # a pass of the whole network
        self.ran = False
        self.acted: set[AnyEdit] = set()
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

    def _generate(self, generate: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.generates:  # a draft by the same network, within a generation
            return generate(*args, **kwargs)
        options = dict(zip(POSITIONAL, args, strict=False)) | kwargs
        option = partial(generation_option, self.model.net, options)
        ids, embeddings = (
            next((x for name in names if _has_tokens(x := options.get(name))), None) for names in PROMPTS
        )
        prompt = ids if embeddings is None else embeddings
        if prompt is None:
            raise InputError("Under `steer` and `watching`, generate needs a prompt: give it input_ids.")
        self.begin(len(prompt), option)
        before = self.prompt_columns, self.prompt_mask
        if len(self.position) == 1:
            self.prompt_columns = prompt.shape[1]
            first_new = 0 if ids is None else ids.shape[1]  # embeddings are in no list of ids
            self.prompt_mask = options.get("attention_mask")
            if self.prompt_mask is None and embeddings is None:
                self.prompt_mask = _mask_of(prompt, option("pad_token_id"), several(option("eos_token_id")))
        else:
            self.prompt_columns = first_new = _decoder_columns(options.get("decoder_input_ids"), option)
            self.prompt_mask = None
        criteria = StoppingCriteriaList([partial(self._step, first_new), *(options.get("stopping_criteria") or ())])
        at = POSITIONAL.index("stopping_criteria")
        if len(args) > at:
            args = (*args[:at], criteria, *args[at + 1 :])
        else:
            kwargs["stopping_criteria"] = criteria
        self.generates, self._accepted, self._acted_at = True, len(self.acts), set()
        try:
            return generate(*args, **kwargs)
        finally:
            self.generates = False
            self.prompt_columns, self.prompt_mask = before

    def begin(self, rows: int, option: Callable[[str], Any]) -> None:
        """Take the number of prompts that are continued, and a function that returns the value of an option. Raises
        `InputError` for a way of generating that cannot be followed."""

    def _step(self, first_new: int, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        self.accept(ids.shape[1] - first_new - 1)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def accept(self, read: int) -> None:
        """Take the number of new tokens that were read and stay, after each step; the last new token is not yet read.

        A pass may read more: drafts that are rejected. Without a cache it reads all tokens again.
        """
        acts = self.acts[self._accepted :]
        del self.acts[self._accepted :]
        for act in acts:
            stack = self.model.stack_of(act.edit.layer)
            stays = act.position < int(self.prompt_length[stack][act.row]) + read
            token = act.edit, act.row, act.position
            if stays and token not in self._acted_at:
                self._acted_at.add(token)
                self.acts.append(act)
        self._accepted = len(self.acts)

    def _run(self, running: bool, *_: Any) -> None:
        self.running = running

    def _base(self, net: Any, args: tuple, kwargs: dict) -> None:
        if not self.running:
            self._before(0, net, args, kwargs)

    def _before(self, stack: int, net: Any, args: tuple, kwargs: dict) -> None:
        self.ran = True
        tokens: Any = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds", kwargs.get("pixel_values"))
        batch, new = tokens.shape[:2]
        if not self.model.task.reads_text:
            new = len(images.names(self.model, tokens))
        cache = kwargs.get("past_key_values")
        past = int(cache.get_seq_length()) if cache is not None else 0
        is_last_stack = stack == len(self.position) - 1  # an encoder's whole text is prompt
        mask = self._mask(kwargs.get("attention_mask"), batch, past + new, is_last_stack)
        position = (mask.cumsum(1) - 1).masked_fill(mask == 0, -1)  # (B, past + T)
        columns = (self.prompt_columns if is_last_stack else None) or past + new
        prompt = (
            self._rows(self.prompt_mask, batch) if is_last_stack and _is_mask(self.prompt_mask) else mask[:, :columns]
        )
        unread = max(0, columns - prompt.shape[1])  # of a prompt that is read in chunks
        self.prompt_length[stack] = prompt.sum(1) + unread
        self.position[stack] = position[:, past : past + new]
        self.ids[stack] = tokens.cpu() if tokens.shape == (batch, new) else torch.full((batch, new), UNKNOWN)

    def _mask(self, attention_mask: Any, batch: int, columns: int, is_last_stack: bool) -> Tensor:
        """(B, past + T) 1 for tokens; if a pass has only masks of pairs (static caches), the mask of the prompt."""
        if not _is_mask(attention_mask):
            attention_mask = self.prompt_mask if is_last_stack else None
        if not _is_mask(attention_mask):
            return torch.ones(batch, columns, dtype=torch.long)
        mask = self._rows(attention_mask, batch)[:, :columns]
        return torch.cat((mask, torch.ones(batch, columns - mask.shape[1], dtype=torch.long)), 1)

    @staticmethod
    def _rows(mask: Any, batch: int) -> Tensor:
        """Return a mask of prompts for the rows of a pass: beams of a prompt are next to each other."""
        return mask.cpu().long().repeat_interleave(batch // len(mask), 0)

    def read_at(self, edit: Edit, tokens: int) -> Tensor:
        """Return which of the tokens of a swap's prompt each token of the running pass takes its value from (B, T)."""
        position = self.position[self.model.stack_of(edit.layer)]
        if edit.where.startswith("position:"):
            return position.clamp(0, tokens - 1)
        return torch.full_like(position, tokens - 1)

    def acts_of(self, edit: AnyEdit, acts: Tensor, old: Tensor, new: Tensor) -> list[Act]:
        stack = self.model.stack_of(edit.layer)
        position = self.position[stack]
        columns: tuple[Tensor, ...] = (position, self.ids[stack], old.mean(-1), new.mean(-1))
        cells = acts[..., 0].expand(old.shape[:2]).nonzero().tolist()
        fields = ((row, [column[row, token].item() for column in columns]) for row, token in cells)
        return [Act(edit, row, *map(int, values[:2]), *values[2:]) for row, values in fields]

    def acting(self, edit: AnyEdit, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the edit acts and how strongly, both (B, T, 1) for the running pass, on the device of `x`."""
        stack = self.model.stack_of(edit.layer)
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
