"""Where each architecture keeps its neurons: data, not code.

A family is found by the model type in its configuration; nothing is guessed for an unknown one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Dotted module names, those below `layers` relative to one layer."""

    name: str
    layers: str = "model.layers"
    ffn_out: str = "mlp.down_proj"
    """The FFN's second linear map: its input is the site `ffn`, its matrix is W2."""
    ffn_in: str = "mlp.gate_proj"
    """The FFN's first linear map, W1; the gate of a gated one (the first rows, where gate and up are one map)."""
    experts: str = ""
    """The experts of a mixture, whose neurons are the site `ffn` instead."""
    attn_out: str = "self_attn.o_proj"
    """The attention output projection: its input is the site `attn`."""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    """The map whose output is q, k and v in one, instead of the three."""
    qkv_order: Literal["apart", "grouped"] = "apart"
    """All of q, then k, then v; or, for each key-value head, its query heads, its key and its value."""
    final_norm: str = "model.norm"
    ffn_norm: str = ""
    """A norm between W2 and the residual stream (sandwich norms), or empty."""
    attn_norm: str = ""
    norm_offset: float = 0.0
    """The gain of a norm is offset + weight."""
    activations: tuple[str, ...] = ()
    """Classes of modules that are an element-wise non-linearity (Eq. 9) and are the family's own."""


LLAMA = Family("llama")
GEMMA3 = Family(
    "gemma3",
    ffn_norm="post_feedforward_layernorm",
    attn_norm="post_attention_layernorm",
    norm_offset=1.0,
)
GPT2 = Family(
    "gpt2",
    layers="transformer.h",
    ffn_out="mlp.c_proj",
    ffn_in="mlp.c_fc",
    attn_out="attn.c_proj",
    qkv="attn.c_attn",
    final_norm="transformer.ln_f",
)
BLOOM = Family(
    "bloom",
    layers="transformer.h",
    ffn_out="mlp.dense_4h_to_h",
    ffn_in="mlp.dense_h_to_4h",
    attn_out="self_attention.dense",
    qkv="self_attention.query_key_value",
    qkv_order="grouped",
    final_norm="transformer.ln_f",
    activations=("BloomGelu",),
)
NEOX = replace(
    BLOOM,
    name="gpt_neox",
    layers="gpt_neox.layers",
    attn_out="attention.dense",
    qkv="attention.query_key_value",
    final_norm="gpt_neox.final_layer_norm",
)
GPTJ = replace(
    LLAMA,
    name="gptj",
    layers="transformer.h",
    ffn_out="mlp.fc_out",
    ffn_in="mlp.fc_in",
    attn_out="attn.out_proj",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    final_norm="transformer.ln_f",
)
OPT = replace(
    LLAMA,
    name="opt",
    layers="model.decoder.layers",
    ffn_out="fc2",
    ffn_in="fc1",
    attn_out="self_attn.out_proj",
    final_norm="model.decoder.final_layer_norm",
)
PHI = replace(
    LLAMA,
    name="phi",
    ffn_out="mlp.fc2",
    ffn_in="mlp.fc1",
    attn_out="self_attn.dense",
    final_norm="model.final_layernorm",
)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, name="mistral"),
    "qwen2": replace(LLAMA, name="qwen2"),
    "qwen3": replace(LLAMA, name="qwen3"),
    "mixtral": replace(LLAMA, name="mixtral", experts="mlp.experts"),
    "qwen3_moe": replace(LLAMA, name="qwen3_moe", experts="mlp.experts"),
    "olmo2": replace(LLAMA, name="olmo2", ffn_norm="post_feedforward_layernorm", attn_norm="post_attention_layernorm"),
    "phi3": replace(LLAMA, name="phi3", ffn_in="mlp.gate_up_proj", qkv="self_attn.qkv_proj"),
    "stablelm": replace(LLAMA, name="stablelm"),
    "gemma2": replace(GEMMA3, name="gemma2"),
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "phi": PHI,
    "gpt_neox": NEOX,
    "gptj": GPTJ,
    "opt": OPT,
    "bloom": BLOOM,
    "falcon": replace(BLOOM, name="falcon"),
}
"""By `config.model_type`."""
