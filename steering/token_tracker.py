"""`TokenTracker`: which tokens a running forward pass reads, and which of them are generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icebear.edits import AnyEdit, Edit, acts_at
from icebear.errors import InputError
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.text import images

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


class TokenTracker:
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

    def _generate(self, generate: Callable, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        prompt = next(
            (x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None
        )
        if prompt is None:
            raise InputError("Under `steer` and `watching`, generate needs a prompt: give it input_ids.")
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
            new = len(images.names(self.model, tokens))
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
        self.ran = True
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
