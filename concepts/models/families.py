"""The module names of each architecture's neurons, as data.

A family is chosen by the model type in the configuration; nothing is guessed for an unknown one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """Dotted module names; those after `layers` are relative to one layer."""

    layers: str = "model.layers"
    ffn_out: str = "mlp.down_proj"
    """The FFN's second linear map, W_out; its input is the site `ffn`."""
    ffn_in: str = "mlp.gate_proj"
    """The FFN's first linear map, W_in; the gate of a gated FFN (the first rows, if gate and up are one map).
    Of several names, the first one that a layer has."""
    experts: str = ""
    """The experts of a mixture; their neurons are the site `ffn` instead, and their weights the site `router`."""
    expert_logits: bool = False
    """Whether experts are chosen by logits, with a softmax after the choice; else by probabilities."""
    shared: str = ""
    """The second linear map of the expert that every token uses; its input is the site `shared`."""
    attn_out: str = "self_attn.o_proj"
    """The attention output projection; its input is the site `attn`."""
    cross: str = ""
    """The output projection of the cross-attention; its input is the site `cross`."""
    q: str = "self_attn.q_proj"
    """Empty, like k and v, if they are computed from compressed values."""
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    """One map whose output is q, k and v, instead of three maps."""
    qkv_order: Literal["apart", "grouped"] = "apart"
    """``apart``: all of q, then k, then v. ``grouped``: for each key-value head its query heads, its key, its value."""
    final_norm: str = "model.norm"
    """The norm before the unembedding, or empty."""
    unembedding_in: str = ""
    """A linear map between the final norm and the unembedding, or empty."""
    ffn_norm: str = ""
    """A norm between W_out and the residual stream (sandwich norm), or on the stream after it (post-norm), or empty."""
    attn_norm: str = ""
    norm_offset: float = 0.0
    """The gain of a norm is offset + weight."""
    residual_scale: str = ""
    """The configuration entry that multiplies everything written to the residual stream, or empty."""
    logit_scale: str = ""
    """The configuration entry that multiplies the logits, or after a ``/`` divides them."""
    activations: tuple[str, ...] = ()
    """The family's own classes of element-wise non-linearities (AttnLRP Eq. 9)."""
    position_inputs: tuple[str, ...] = ("position_embeddings",)
    """The arguments of a layer that encode positions: cos and sin, ALiBi, a relative bias, numbers."""
    position_method: str = ""
    """A method inside a layer that returns positions."""
    position_embedding: str = ""
    """The module or parameter of the model that is added to the token embeddings."""
    decoder: Family | None = None
    """The decoder of an encoder-decoder; its layers are numbered after the encoder's."""


LLAMA = Family()
LIKE_LLAMA = """
    llama mistral qwen2 qwen3 stablelm smollm3 olmo seed_oss helium ministral hunyuan_v1_dense ernie4_5
""".split()
UNGATED = replace(LLAMA, ffn_in="mlp.up_proj")
OLMO2 = replace(LLAMA, ffn_norm="post_feedforward_layernorm", attn_norm="post_attention_layernorm")
GRANITE = replace(LLAMA, residual_scale="residual_multiplier", logit_scale="/logits_scaling")
COHERE = replace(LLAMA, logit_scale="logit_scale")
MIXTURE = replace(LLAMA, experts="mlp.experts")
GLM = replace(LLAMA, ffn_in="mlp.gate_up_proj")
GEMMA3 = replace(OLMO2, norm_offset=1.0)
GPT2 = Family(
    layers="transformer.h",
    ffn_out="mlp.c_proj",
    ffn_in="mlp.c_fc",
    attn_out="attn.c_proj",
    qkv="attn.c_attn",
    final_norm="transformer.ln_f",
    position_inputs=(),
    position_embedding="transformer.wpe",
)
BLOOM = Family(
    layers="transformer.h",
    ffn_out="mlp.dense_4h_to_h",
    ffn_in="mlp.dense_h_to_4h",
    attn_out="self_attention.dense",
    qkv="self_attention.query_key_value",
    qkv_order="grouped",
    final_norm="transformer.ln_f",
    activations=("BloomGelu",),
    position_inputs=("alibi",),
)
OPT = Family(
    layers="model.decoder.layers",
    ffn_out="fc2",
    ffn_in="fc1",
    attn_out="self_attn.out_proj",
    final_norm="model.decoder.final_layer_norm",
    unembedding_in="model.decoder.project_out",
    position_inputs=(),
    position_embedding="model.decoder.embed_positions",
)
OPT_350M = replace(OPT, final_norm="", ffn_norm="final_layer_norm", attn_norm="self_attn_layer_norm")

BERT = Family(
    layers="bert.encoder.layer",
    ffn_out="output.dense",
    ffn_in="intermediate.dense",
    attn_out="attention.output.dense",
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    final_norm="",
    ffn_norm="output.LayerNorm",
    attn_norm="attention.output.LayerNorm",
    position_inputs=(),
    position_embedding="bert.embeddings.position_embeddings",
)
VIT = Family(
    layers="vit.layers",
    ffn_out="mlp.fc2",
    ffn_in="mlp.fc1",
    attn_out="attention.o_proj",
    q="attention.q_proj",
    k="attention.k_proj",
    v="attention.v_proj",
    final_norm="vit.layernorm",
    position_inputs=(),
    position_embedding="vit.embeddings.position_embeddings",
)
T5_DECODER = Family(
    layers="decoder.block",
    ffn_out="layer.2.DenseReluDense.wo",
    ffn_in="layer.2.DenseReluDense.wi_0 layer.2.DenseReluDense.wi",
    attn_out="layer.0.SelfAttention.o",
    cross="layer.1.EncDecAttention.o",
    q="layer.0.SelfAttention.q",
    k="layer.0.SelfAttention.k",
    v="layer.0.SelfAttention.v",
    final_norm="decoder.final_layer_norm",
    position_inputs=("position_bias",),
    position_method="layer.0.SelfAttention.compute_bias",
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(LIKE_LLAMA, LLAMA),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe"), MIXTURE),
    "gpt_oss": replace(MIXTURE, expert_logits=True),
    "qwen2_moe": replace(MIXTURE, shared="mlp.shared_expert.down_proj"),
    "glm4_moe": replace(MIXTURE, shared="mlp.shared_experts.down_proj"),
    "deepseek_v3": replace(MIXTURE, shared="mlp.shared_experts.down_proj", q="", k="", v=""),
    "granitemoe": replace(GRANITE, experts="block_sparse_moe.experts", expert_logits=True),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), OLMO2),
    "phi3": replace(GLM, qkv="self_attn.qkv_proj"),
    "granite": GRANITE,
    "cohere": COHERE,
    "cohere2": COHERE,
    "arcee": UNGATED,
    "apertus": UNGATED,
    "nemotron": replace(UNGATED, norm_offset=1.0),
    "starcoder2": replace(LLAMA, ffn_out="mlp.c_proj", ffn_in="mlp.c_fc"),
    "glm": GLM,
    "glm4": replace(GLM, ffn_norm="post_mlp_layernorm", attn_norm="post_self_attn_layernorm"),
    "gemma": replace(LLAMA, norm_offset=1.0),
    "gemma2": GEMMA3,
    "gemma3_text": GEMMA3,
    "gemma3": replace(GEMMA3, layers="model.language_model.layers", final_norm="model.language_model.norm"),
    "gpt2": GPT2,
    "phi": Family(ffn_out="mlp.fc2", ffn_in="mlp.fc1", attn_out="self_attn.dense", final_norm="model.final_layernorm"),
    "gpt_neox": replace(
        BLOOM,
        layers="gpt_neox.layers",
        attn_out="attention.dense",
        qkv="attention.query_key_value",
        final_norm="gpt_neox.final_layer_norm",
        position_inputs=("position_embeddings",),
    ),
    "gptj": Family(
        layers="transformer.h",
        ffn_out="mlp.fc_out",
        ffn_in="mlp.fc_in",
        attn_out="attn.out_proj",
        q="attn.q_proj",
        k="attn.k_proj",
        v="attn.v_proj",
        final_norm="transformer.ln_f",
        position_inputs=("position_ids",),
        position_method="attn._get_embed_positions",
    ),
    "opt": OPT,
    "bloom": BLOOM,
    "falcon": replace(BLOOM, position_inputs=("position_embeddings", "alibi")),
    "bert": BERT,
    "distilbert": replace(
        BERT,
        layers="distilbert.transformer.layer",
        ffn_out="ffn.lin2",
        ffn_in="ffn.lin1",
        attn_out="attention.out_lin",
        q="attention.q_lin",
        k="attention.k_lin",
        v="attention.v_lin",
        ffn_norm="output_layer_norm",
        attn_norm="sa_layer_norm",
        position_embedding="distilbert.embeddings.position_embeddings",
    ),
    "t5": replace(
        T5_DECODER,
        layers="encoder.block",
        ffn_out="layer.1.DenseReluDense.wo",
        ffn_in="layer.1.DenseReluDense.wi_0 layer.1.DenseReluDense.wi",
        cross="",
        final_norm="encoder.final_layer_norm",
        decoder=T5_DECODER,
    ),
    "vit": VIT,
    "deit": replace(
        VIT,
        layers="deit.layers",
        final_norm="deit.layernorm",
        position_embedding="deit.embeddings.position_embeddings",
    ),
}
"""By `config.model_type`."""

SCANS = re.compile(
    r"Mamba\d?(Mixer|Layer)$|(FalconH1|Bamba)Mixer$|Delta(Net|Attention)$|Rglru$|RwkvSelfAttention$|LSTMLayer$"
)
"""Classes of modules that no family can have. They multiply a state with activations at each token; the rule for
products (AttnLRP Eq. 15) would halve the relevance of the past at each token."""


def family_of(config: Any) -> Family | None:
    """Return the family of a transformers configuration, None if it is unknown."""
    family = FAMILIES.get(config.model_type)
    return OPT_350M if family is OPT and not config.do_layer_norm_before else family
