"""Where each architecture keeps its neurons: data, not code.

A family is found by the model type in its configuration; nothing is guessed for an unknown one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """Dotted module names, those below `layers` relative to one layer."""

    name: str
    layers: str = "model.layers"
    ffn_out: str = "mlp.down_proj"
    """The FFN's second linear map: its input is the site `ffn`, its matrix is W2."""
    ffn_in: str = "mlp.gate_proj"
    """The FFN's first linear map, W1; the gate of a gated one."""
    attn_out: str = "self_attn.o_proj"
    """The attention output projection: its input is the site `attn`."""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    final_norm: str = "model.norm"
    ffn_norm: str = ""
    """A norm between W2 and the residual stream (sandwich norms), or empty."""
    attn_norm: str = ""
    norm_offset: float = 0.0
    """The gain of a norm is offset + weight."""


LLAMA = Family("llama")
GEMMA3 = Family(
    "gemma3",
    ffn_norm="post_feedforward_layernorm",
    attn_norm="post_attention_layernorm",
    norm_offset=1.0,
)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, name="mistral"),
    "qwen2": replace(LLAMA, name="qwen2"),
    "qwen3": replace(LLAMA, name="qwen3"),
    "gemma3_text": GEMMA3,
}
"""By `config.model_type`."""
