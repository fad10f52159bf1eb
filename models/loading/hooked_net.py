"""The network of models in TransformerLens' format, as a transformers model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from icebear.models.loading.hooked_config import ACTIVATIONS, NORMS, HookedConfig


class Attention(nn.Module):
    def __init__(self, config: HookedConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.width, self.scale = layer, config.d_head, config.scale(layer)
        self.rotary, self.adjacent = config.rotary_dim, config.rotary_adjacent_pairs
        groups = config.n_key_value_heads or config.n_heads
        self.shared = config.n_heads // groups
        self.q = nn.Linear(config.d_model, config.n_heads * config.d_head)
        self.k = nn.Linear(config.d_model, groups * config.d_head)
        self.v = nn.Linear(config.d_model, groups * config.d_head)
        self.o = nn.Linear(config.n_heads * config.d_head, config.d_model)

    def forward(self, x: Tensor, allowed: Tensor, rotation: Any, cache: Any, maps: list[Tensor] | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if rotation is not None:
            q, k = (rotated(part, rotation, self.rotary, self.adjacent) for part in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        k, v = (part.repeat_interleave(self.shared, 1) if self.shared > 1 else part for part in (k, v))
        scores = (q @ k.transpose(-1, -2) / self.scale).masked_fill(~allowed, -torch.inf)  # (B, H, T, S)
        weights = scores.softmax(-1)
        if maps is not None:
            maps.append(weights)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor], width: int, adjacent: bool) -> Tensor:
    """Rotate the first `width` entries of queries or keys x (B, H, T, d), in pairs of neighbors or of both halves."""
    (cos, sin), rotary, rest = rotation, x[..., :width], x[..., width:]
    if adjacent:
        normal = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), -1).flatten(-2)
    else:
        normal = torch.cat((-rotary[..., width // 2 :], rotary[..., : width // 2]), -1)
    return torch.cat((rotary * cos[:, None] + normal * sin[:, None], rest), -1)


class FFN(nn.Module):
    def __init__(self, config: HookedConfig) -> None:
        super().__init__()
        self.act, width = ACTIVATIONS[config.act_fn], config.d_mlp or 4 * config.d_model
        self.gate = nn.Linear(config.d_model, width, bias=False) if config.gated_mlp else None
        self.up = nn.Linear(config.d_model, width, bias=not config.gated_mlp)
        self.b_in = nn.Parameter(torch.zeros(width)) if config.gated_mlp else None
        kind = None if config.act_fn != "solu_ln" else "LN" if config.normalization_type == "LN" else "LNPre"
        self.ln = NORMS[kind](width, config.eps)
        self.out = nn.Linear(width, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.out(self.act(self.gate(x)) * self.up(x) + self.b_in)
        return self.out(self.ln(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, config: HookedConfig, layer: int) -> None:
        super().__init__()
        self.parallel = config.parallel_attn_mlp
        self.ln1 = NORMS[config.normalization_type](config.d_model, config.eps)
        self.attn = Attention(config, layer)
        self.ln2 = None if config.attn_only else NORMS[config.normalization_type](config.d_model, config.eps)
        self.mlp = None if config.attn_only else FFN(config)

    def forward(
        self, x: Tensor, allowed: Tensor, position_embeddings: Any, past_key_values: Any, maps: list[Tensor] | None
    ) -> Tensor:
        middle = x + self.attn(self.ln1(x), allowed, position_embeddings, past_key_values, maps)
        if self.mlp is None or self.ln2 is None:
            return middle
        return middle + self.mlp(self.ln2(x if self.parallel else middle))


class HookedModel(PreTrainedModel):
    """All of a model but its unembedding."""

    config_class = HookedConfig

    def __init__(self, config: HookedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.d_vocab, config.d_model)
        learned = config.positional_embedding_type == "standard"
        self.pos_embed = nn.Embedding(config.n_ctx, config.d_model) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.ln_final = NORMS[config.final_normalization](config.d_model, config.eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines (B, T, rotary_dim) of the angles by which queries and keys are rotated."""
        config = self.config
        if config.positional_embedding_type != "rotary":
            return None
        half = torch.arange(config.rotary_dim // 2, dtype=torch.promote_types(dtype, torch.float32))
        angles = positions[..., None] / (config.rotary_base ** (half / len(half))).to(positions.device)
        angles = angles.repeat_interleave(2, -1) if config.rotary_adjacent_pairs else torch.cat((angles, angles), -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past, length = past_key_values.get_seq_length() if past_key_values is not None else 0, input_ids.shape[1]
        columns = torch.arange(past + length, device=input_ids.device)
        read = torch.ones_like(columns)[None] if attention_mask is None else attention_mask
        positions = (read.cumsum(-1) - 1).clamp(min=0)[:, past:]  # padding, on either side, has no position
        allowed = read.bool()[:, None, None, :]
        if self.config.is_causal:
            allowed = allowed & (columns <= columns[past:, None])
        allowed = allowed | (columns == columns[past:, None])  # a softmax over nothing would be NaN
        maps: list[Tensor] | None = [] if output_attentions else None
        x = self.embed(input_ids)
        x = x if self.pos_embed is None else x + self.pos_embed(positions)
        rotation = self.rotation(positions, x.dtype)
        for block in self.blocks:
            x = block(x, allowed, rotation, past_key_values, maps)
        return BaseModelOutputWithPast(self.ln_final(x), past_key_values, attentions=tuple(maps or ()))


class Hooked(PreTrainedModel):
    config_class, base_model_prefix = HookedConfig, "model"

    def __init__(self, config: HookedConfig) -> None:
        super().__init__(config)
        self.model = HookedModel(config)
        self.unembed = nn.Linear(config.d_model, config.d_vocab_out)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.unembed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool = False,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        output = self.model(input_ids, attention_mask, past_key_values, use_cache, output_attentions)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.unembed(output.last_hidden_state[:, positions])
        return CausalLMOutputWithPast(None, logits, output.past_key_values, None, output.attentions)


class HookedForCausalLM(Hooked, GenerationMixin):
    """Its output is the next token."""


class HookedForOutputs(Hooked):
    """Its output at a token is of another vocabulary, or depends on the tokens after it."""


class HookedForCausalOutputs(Hooked):
    """Its output at a token is of another vocabulary, and depends on the tokens before it only."""
