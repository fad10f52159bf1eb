"""Small configurations of every family."""

from __future__ import annotations

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    BartConfig,
    BertConfig,
    BloomConfig,
    CLIPConfig,
    DeiTConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    DistilBertConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SiglipConfig,
    StableLmConfig,
    T5Config,
    ViTConfig,
)

LIKE_LLAMA = "olmo cohere arcee nemotron starcoder2 apertus".split()
WITH_HEADS = "seed_oss helium ministral hunyuan_v1_dense ernie4_5 gemma glm glm4".split()
"""Whose head width is of its own by default."""

FEW = {"num_local_experts": 4}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
MIXTURES: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "qwen2_moe": {},
    "gpt_oss": {**FEW, "sliding_window": 4},
    "granitemoe": {**FEW, "residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_multiplier": 0.3},
    "glm4_moe": {**FEW, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **{**FEW, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"num_key_value_heads": 4, "head_dim": 4},
    },
}

LLAMA_3 = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 5e5}
PUBLISHED = {
    "Llama 3.1 8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, **LLAMA_3
    ),
    "Llama 3.1 70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, **LLAMA_3
    ),
}
"""The sizes of models that are too large for a test."""


def _parts(layers: int = 2, positions: int = 64) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    base = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    small = {
        **base,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    grouped = {**small, "num_key_value_heads": 2, "max_position_embeddings": positions}
    return base, small, grouped


def dense(layers: int = 2, positions: int = 64) -> dict[str, PreTrainedConfig]:
    """name -> configuration, 24 wide."""
    base, small, grouped = _parts(layers, positions)
    gpt = {
        **base,
        "n_embd": 24,
        "n_layer": layers,
        "n_head": 4,
        "n_inner": 20,
        "n_positions": positions,
    }
    sliding = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    gemma = {**grouped, "head_dim": 6, "sliding_window": 4, "query_pre_attn_scalar": 6}
    falcon = {**small, "ffn_hidden_size": 20}
    neox = {**small, "max_position_embeddings": positions, "rotary_pct": 0.5}
    learned = {**small, "max_position_embeddings": positions}
    wide = {**small, "hidden_size": 32, "max_position_embeddings": positions}
    return {
        "llama": LlamaConfig(**grouped),
        "mistral": MistralConfig(**grouped, sliding_window=4),
        "qwen2": Qwen2Config(**grouped),
        "qwen3": Qwen3Config(**grouped, head_dim=6),
        "olmo2": Olmo2Config(**grouped),
        "stablelm": StableLmConfig(**grouped, partial_rotary_factor=1 / 3),
        **{name: CONFIG_MAPPING[name](**grouped) for name in LIKE_LLAMA},
        "smollm3": CONFIG_MAPPING["smollm3"](**grouped, no_rope_layers=[1, 0] * (layers // 2)),
        **{name: CONFIG_MAPPING[name](**grouped, **sliding) for name in ("olmo3", "cohere2", "exaone4")},
        **{name: CONFIG_MAPPING[name](**grouped, head_dim=6) for name in WITH_HEADS},
        "granite": GraniteConfig(
            **grouped, residual_multiplier=0.5, logits_scaling=3.0, embedding_multiplier=2.0, attention_multiplier=0.3
        ),
        "phi3": Phi3Config(**grouped, original_max_position_embeddings=positions),
        "gemma2": Gemma2Config(**gemma),
        "gemma3": Gemma3TextConfig(**{**gemma, **sliding}),
        "gpt2": GPT2Config(**gpt),
        "gptj": GPTJConfig(**gpt, rotary_dim=4),
        "phi": PhiConfig(**wide, partial_rotary_factor=0.5),
        "gpt_neox": GPTNeoXConfig(**neox),
        "gpt_neox, serial": GPTNeoXConfig(**neox, use_parallel_residual=False),
        "opt": OPTConfig(**learned, ffn_dim=20, word_embed_proj_dim=24),
        "opt, norms behind": OPTConfig(**learned, ffn_dim=20, word_embed_proj_dim=16, do_layer_norm_before=False),
        "bloom": BloomConfig(**base, hidden_size=24, n_layer=layers, n_head=4),
        "falcon": FalconConfig(**falcon, multi_query=True),
        "falcon, grouped": FalconConfig(**falcon, new_decoder_architecture=True, num_kv_heads=2),
        "falcon, alibi": FalconConfig(**falcon, multi_query=False, alibi=True),
    }


def mixtures(layers: int = 2) -> dict[str, PreTrainedConfig]:
    """Mixtures of four experts."""
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 6}
    few["shared_expert_intermediate_size"] = 16
    grouped = _parts(layers)[2]
    return {
        "mixtral": MixtralConfig(**grouped, num_local_experts=4),
        **{name: CONFIG_MAPPING[name](**{**grouped, **few, **extra}) for name, extra in MIXTURES.items()},
        "qwen3_moe": Qwen3MoeConfig(
            **grouped, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2, head_dim=6
        ),
    }


DIFFERENT = (
    *"llama gemma3 olmo2 cohere2 nemotron apertus granite phi3 smollm3 gpt2 gptj gpt_neox bloom mixtral".split(),
    *("gpt_oss", "deepseek_v3", "opt, norms behind", "falcon, grouped", "falcon, alibi"),
)
"""Families whose layers differ in more than names and sizes: for laws that tests/test_layouts.py or
tests/test_reference.py have for every family in another form."""


def different() -> dict[str, PreTrainedConfig]:
    """Name -> configuration of `DIFFERENT`."""
    each = {**dense(), **mixtures()}
    return {name: each[name] for name in DIFFERENT}


def others() -> dict[str, tuple[str, PreTrainedConfig]]:
    """name -> (auto class, configuration) of other models than causal ones; images are 16 x 24 (for CLIP and SigLIP
    16 x 16), patches 8 x 8."""
    base, small, _ = _parts()
    names = {"id2label": {0: "none", 1: "ice", 2: "bear"}, "label2id": {"none": 0, "ice": 1, "bear": 2}}
    bert = {**small, "max_position_embeddings": 64}
    distil = {
        **base,
        "dim": 24,
        "hidden_dim": 20,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
    }
    t5 = {
        **base,
        "d_model": 24,
        "d_kv": 6,
        "d_ff": 20,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "relative_attention_num_buckets": 8,
    }
    bart = {
        **{**base, "d_model": 24, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20},
        **{"encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 0},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
        "forced_eos_token_id": None,
    }
    image = {**small, "image_size": (16, 24), "patch_size": 8, "num_channels": 3}
    square = {**image, "image_size": 16}
    return {
        "bert": ("AutoModelForMaskedLM", BertConfig(**bert)),
        "bert, sequence": ("AutoModelForSequenceClassification", BertConfig(**bert, **names)),
        "bert, token": ("AutoModelForTokenClassification", BertConfig(**bert, **names)),
        "distilbert": ("AutoModelForMaskedLM", DistilBertConfig(**distil)),
        "distilbert, sequence": ("AutoModelForSequenceClassification", DistilBertConfig(**distil, **names)),
        "distilbert, token": ("AutoModelForTokenClassification", DistilBertConfig(**distil, **names)),
        "t5": ("AutoModelForSeq2SeqLM", T5Config(**t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
        "t5, relu": ("AutoModelForSeq2SeqLM", T5Config(**t5)),
        "bart": ("AutoModelForSeq2SeqLM", BartConfig(**bart)),
        "mbart": ("AutoModelForSeq2SeqLM", CONFIG_MAPPING["mbart"](**bart)),
        "vit": ("AutoModelForImageClassification", ViTConfig(**image, **names)),
        "deit": ("DeiTForImageClassification", DeiTConfig(**image, **names)),
        "dinov2": ("AutoModelForImageClassification", Dinov2Config(**square, **names)),
        "dinov2, swiglu": ("AutoModelForImageClassification", Dinov2Config(**square, **names, use_swiglu_ffn=True)),
        "dinov2, registers": (
            "AutoModelForImageClassification",
            Dinov2WithRegistersConfig(**square, **names, num_register_tokens=3),
        ),
        "clip": ("AutoModelForImageClassification", CLIPConfig(vision_config=square, **names)),
        "siglip": ("AutoModelForImageClassification", SiglipConfig(vision_config=square, **names)),
    }
