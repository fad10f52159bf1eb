"""The configuration of models in TransformerLens' format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from icebear.errors import ModelError

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
    "positional_embedding_type": ("standard", "rotary", None),
    "attention_dir": ("causal", "bidirectional"),
}
"""The values of fields that icebear computes; models with others are refused."""


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
        lacking = [name for name in REQUIRED if name not in known]
        if lacking:
            raise ModelError(f"The config.json of {source} lacks {', '.join(lacking)}; add the values of the model.")
        for name, values in COMPUTED.items():
            if name in entries and entries[name] not in values and not (name == "act_fn" and entries.get("attn_only")):
                allowed = ", ".join(json.dumps(value) for value in values)
                raise ModelError(
                    f"{source} has {name} = {json.dumps(entries[name])}, which icebear does not compute; it computes "
                    f"only {allowed}."
                )
        if known.get("gated_mlp") and known.get("act_fn") == "solu_ln":
            raise ModelError(f"{source} has a gated FFN with solu_ln, which icebear does not compute.")
        return cls(**known)

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
        parts = {
            "ffn_out": self.attn_only,
            "position_embedding": self.positional_embedding_type != "standard",
        }
        return tuple(name for name, lacking in parts.items() if lacking)

    def scale(self, layer: int) -> float:
        """Return the divisor of the attention scores of a layer."""
        head_scale = math.sqrt(self.d_head) if self.attn_scale == -1 else self.attn_scale
        return (head_scale if self.use_attn_scale else 1.0) * (layer + 1 if self.scale_attn_by_inverse_layer_idx else 1)
