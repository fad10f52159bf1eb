"""The network of models in TransformerLens' format, as a transformers model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from icebear.errors import ModelError
from icebear.values import LARGEST, MOST, shown

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "square": torch.square,
    "silu": F.silu,
    "gelu": F.gelu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), lambda x: F.gelu(x, approximate="tanh")),
    **dict.fromkeys(("solu", "solu_ln"), lambda x: x * x.softmax(-1)),
}
NORMS: dict[str | None, Callable[[int, float], nn.Module]] = {
    None: lambda width, eps: nn.Identity(),
    "LN": lambda width, eps: nn.LayerNorm(width, eps),
    "LNPre": lambda width, eps: nn.LayerNorm(width, eps, elementwise_affine=False),
    "RMS": lambda width, eps: nn.RMSNorm(width, eps),
    "RMSPre": lambda width, eps: nn.RMSNorm(width, eps, elementwise_affine=False),
}
REQUIRED = ("n_layers", "d_model", "d_head", "n_ctx", "d_vocab")
COMPUTED: dict[str, tuple[Any, ...]] = {
    "use_local_attn": (False,),
    "post_embedding_ln": (False,),
    "num_experts": (None,),
    "use_normalization_before_and_after": (False,),
    "use_qk_norm": (False,),
    "attn_scores_soft_cap": (-1.0,),
    "output_logits_soft_cap": (-1.0,),
    "use_NTK_by_parts_rope": (False,),
    "use_yarn_rope": (False,),
    "rotary_base_local": (None,),
    "rotary_scaling_factor": (1.0,),
    "act_fn": tuple(ACTIVATIONS),
    "normalization_type": tuple(NORMS),
    "positional_embedding_type": ("standard", "shortformer", "rotary", None),
    "attention_dir": ("causal", "bidirectional"),
}
"""The values of fields that icebear computes; models with others are refused."""
SIZES = {**dict.fromkeys((*REQUIRED, "d_mlp", "n_key_value_heads")), "n_heads": -1, "d_vocab_out": -1}
"""Sizes, and the number that stands for their default."""


def _check_type(name: str, value: Any, kinds: list[str], source: str) -> None:
    """Raise `ModelError` for a field of another type, or a size below 1 that is not the default -1."""
    kind = "None" if value is None else type(value).__name__
    fits = kind in kinds or (kind == "int" and "float" in kinds)
    limit = LARGEST if "float" in kinds else MOST
    if fits and kind in ("int", "float"):  # NaN is in no range
        fits = -limit <= value <= limit and not (name in SIZES and value < 1 and value != SIZES[name])
    if not fits:
        raise ModelError(
            f"The configuration of {source} has {name} = {shown(value)}, which is not of the kind {kinds[0]}, or is "
            "out of range; correct it."
        )


class HookedConfig(PreTrainedConfig):
    """The fields of `HookedTransformerConfig` that the forward pass depends on."""

    model_type = "hooked_transformer"
    attribute_map = {  # noqa: RUF012  # transformers declares it so
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "n_ctx",
        "vocab_size": "d_vocab",
    }
    n_layers: int = 1  # defaults, because transformers 5.4 and 5.5 have no fields without one
    d_model: int = 1
    d_head: int = 1
    n_ctx: int = 1
    d_vocab: int = 1
    n_heads: int = -1
    d_vocab_out: int = -1
    d_mlp: int | None = None
    n_key_value_heads: int | None = None
    act_fn: str | None = "relu"
    attn_only: bool = False
    gated_mlp: bool = False
    parallel_attn_mlp: bool = False
    normalization_type: str | None = "LN"
    final_rms: bool = False
    eps: float = 1e-5
    attention_dir: str = "causal"
    use_attn_scale: bool = True
    attn_scale: float = -1.0
    scale_attn_by_inverse_layer_idx: bool = False
    positional_embedding_type: str | None = "standard"
    rotary_dim: int = 0
    rotary_base: float = 10000
    rotary_adjacent_pairs: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.n_heads = self.d_model // self.d_head if self.n_heads == -1 else self.n_heads
        self.d_vocab_out = self.d_vocab if self.d_vocab_out == -1 else self.d_vocab_out
        self.rotary_dim = self.rotary_dim or self.d_head
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, entries: Mapping[str, Any], source: str) -> HookedConfig:
        """Return the configuration of the entries of a `HookedTransformerConfig`. Raises `ModelError`."""
        entries = {name: None if value == "none" else value for name, value in entries.items()}
        known = {name: value for name, value in entries.items() if name in cls.__annotations__}
        known["rotary_dim"] = known.get("rotary_dim") or 0
        required = (*REQUIRED, *(() if known.get("attn_only") else ("act_fn",)))
        lacking = [name for name in required if name not in known]
        if lacking:
            raise ModelError(f"The configuration of {source} lacks {', '.join(lacking)}; add the values of the model.")
        for name, value in known.items():
            kinds = cls.__annotations__[name].split(" | ")
            _check_type(name, value, kinds, source)
            known[name] = float(value) if kinds[0] == "float" else value  # torch has no integers of that size
        for name, values in COMPUTED.items():
            if name in entries and entries[name] not in values and not (name == "act_fn" and entries.get("attn_only")):
                allowed = ", ".join(json.dumps(value) for value in values)
                raise ModelError(
                    f"{source} has {name} = {json.dumps(entries[name])}, which icebear does not compute; it computes "
                    f"only {allowed}."
                )
        if known.get("gated_mlp") and known.get("act_fn") == "solu_ln":
            raise ModelError(f"{source} has a gated FFN with solu_ln, which icebear does not compute.")
        config = cls(**known)
        if config.n_heads < 1 or config.n_heads % (config.n_key_value_heads or config.n_heads):
            raise ModelError(f"The heads of {source} do not fit (n_heads, n_key_value_heads, d_head); correct them.")
        if config.positional_embedding_type == "rotary" and (
            config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.d_head
        ):
            raise ModelError(
                f"{source} has rotary_dim = {config.rotary_dim}, which is no even part of d_head; correct it."
            )
        return config

    @property
    def is_causal(self) -> bool:
        return self.attention_dir == "causal"

    @property
    def final_normalization(self) -> str | None:
        kind = self.normalization_type
        return kind.replace("LN", "RMS") if kind and self.final_rms else kind

    @property
    def lacks(self) -> tuple[str, ...]:
        """The parts of the family (see `Family`) that a model of this configuration lacks."""
        parts = {"ffn_out": self.attn_only, "position_embedding": self.positional_embedding_type != "standard"}
        return tuple(name for name, lacking in parts.items() if lacking)

    def scale(self, layer: int) -> float:
        """Return the divisor of the attention scores of a layer."""
        head_scale = math.sqrt(self.d_head) if self.attn_scale == -1 else self.attn_scale
        return (head_scale if self.use_attn_scale else 1.0) * (layer + 1 if self.scale_attn_by_inverse_layer_idx else 1)


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

    def forward(self, x: Tensor, allowed: Tensor, positions: Any, cache: Any, maps: list[Tensor] | None) -> Tensor:
        at = x + positions if isinstance(positions, Tensor) else x  # shortformer: queries and keys alone read positions
        q, k, v = (
            part(read).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part, read in ((self.q, at), (self.k, at), (self.v, x))
        )
        if isinstance(positions, tuple):
            q, k = (rotated(part, positions, self.rotary, self.adjacent) for part in (q, k))
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
        learned = config.positional_embedding_type in ("standard", "shortformer")
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
        learned = self.pos_embed(positions) if self.pos_embed is not None else None
        if self.config.positional_embedding_type == "standard":
            x = x + learned
            learned = None
        rotation = self.rotation(positions, x.dtype)
        for block in self.blocks:
            x = block(x, allowed, rotation if learned is None else learned, past_key_values, maps)
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
