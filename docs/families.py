"""Writes docs/families.md: what works for each causal language model that transformers ships, on a small random one.

python docs/families.py
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from icebear import Model, attribute
from icebear.concepts.selftest import TOLERANCE, selftest
from icebear.errors import MissingRule, ModelError

PAGE = Path(__file__).resolve().parent / "families.md"
HEAD = """# Families

Which causal language models of transformers {version} work (`python docs/families.py`). For each model type, a
model of two layers, 32 wide, with random weights from its own configuration runs the self-test of `icebear
doctor`. **Tokens**: the logits under the rules equal the model's, and relevance is conserved under CP-LRP; the
number is the remainder as a share of the explained logit. **Neurons**: the sites that icebear reads; [Add a
family](new-family.md) adds them to models whose tokens work. A refused model raises `MissingRule` with the
operation's name, unless you pass `strict=False`. **With a counterfactual**: the model has scans over tokens, which only
[difference rules](compare.md#difference-rules) explain; the number is the remainder of their sum.

Random weights show whether the arithmetic holds, not whether explanations are good. Real weights were tested
for `llama` (SmolLM2-135M), `t5` and `distilbert`.

{counts}

Tokens but no neurons, and why: `deepseek_v4` and `hy_v4` (hyper-connections: several residual streams), `gemma3n_text`
(AltUp: several streams), `hrm_text` (its two stacks run in a loop), `jetmoe` (attention is a mixture as well),
`longcat_flash` (two attentions and FFNs in a layer, experts that do nothing), `minicpm3` and `minimax` (the residual
stream is scaled by numbers that are not in the configuration, or normalised), `prophetnet` and `xlm` (no list of
layers), `zaya` (each layer scales the residual stream). In `gemma4_text`, `gemma4_unified_text` and `mimo_v2_flash` the
width of attention differs between layers, so only the FFN has neurons. A kind of images and text has the neurons of its
text part. `rwkv` and `xlstm` have no entry yet; the FFN and attention of `zamba2` do not write to the residual stream.
`tests/test_layouts.py` checks each entry: W_out rows, norms, logits and sums.

| kind | tokens | neurons |
| --- | --- | --- |
"""
SMALL = {
    "vocab_size": 64,
    "hidden_size n_embd d_model dim model_dim": 32,
    "intermediate_size ffn_hidden_size n_inner ffn_dim d_ff moe_intermediate_size shared_expert_intermediate_size": 40,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers": 2,
    "num_attention_heads n_head n_heads decoder_attention_heads": 4,
    "num_key_value_heads num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings n_positions n_ctx max_seq_len": 128,
    "mamba_chunk_size mamba_d_state": 4,
}
MORE = {
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k moe_topk": 2,
    "n_group topk_group first_k_dense_replace n_shared_experts": 1,
    "qk_nope_head_dim v_head_dim": 8,
    "qk_rope_head_dim rotary_dim": 4,
    "q_lora_rank kv_lora_rank": 16,
    "mamba_n_heads mamba_d_head": 8,
}
LESS = {"head_dim": 32}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
"""Of gated delta nets."""
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "granitemoeshared": {"shared_intermediate_size": 40},
    "gemma3n_text": {
        **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
        **{"activation_sparsity_pattern": [0.5, 0.0], "laurel_rank": 4},
    },
    "gemma3": {
        "vision_config": {
            **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 8, "patch_size": 4},
        },
        "mm_tokens_per_image": 4,
    },
    "fuyu": {"patch_size": 2},
    "falcon_h1": {
        **{"mamba_d_ssm": 64, "lm_head_multiplier": 0.3, "mlp_multipliers": [0.8, 0.5]},
        **{"attention_out_multiplier": 0.6, "ssm_out_multiplier": 0.7},
    },
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"), DELTA),
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "zamba": {"layer_types": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_headdim": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
}
"""What a kind needs besides."""
LARGEST = 3e7
"""Parameters; what stays larger has parts whose sizes are called otherwise."""
IDS = [5, 9, 23, 42, 7, 31, 12, 50]
OTHER = [*IDS[:3], 33, *IDS[4:]]


def small(kind: str, wanted: dict[str, int]) -> PreTrainedConfig:
    cls = CONFIG_MAPPING[kind]
    text = cls().get_text_config().model_type
    if text != kind and "text_config" in cls.sub_configs:  # of images and text
        return cls(text_config=small(text, wanted), **OWN.get(kind, {}))
    known = {*cls().to_dict(), *cls.attribute_map}
    sizes = {name: value for names, value in wanted.items() for name in names.split() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention: the part of a head that is turned, and as many keys as queries
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    return cls(**{**sizes, **OWN.get(kind, {})}, bos_token_id=0, eos_token_id=0, pad_token_id=0)


def made(kind: str, wanted: dict[str, int]) -> Model | str:
    """A small random model that runs; or why there is none."""
    try:
        config = small(kind, wanted)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            text = config.get_text_config().model_type
            return f"not made small; its text part is `{text}`" if text != kind else "not made small"
        torch.manual_seed(0)
        net = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in net.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 0.2)
            net(torch.tensor([IDS]), use_cache=False)
        return Model(net, name=kind)
    except Exception as error:  # whatever a configuration of another's may raise
        return f"not made small ({type(error).__name__})"


def tokens(model: Model) -> tuple[str, str]:
    """Of a model the cells of tokens and neurons."""
    try:
        found = selftest(model, IDS)
    except (MissingRule, ModelError) as error:
        return f"refused: {str(error).split('; ')[0]}", ""
    except Exception as error:
        return f"fails ({type(error).__name__})", ""
    neurons = ", ".join(found.sites)
    if model.has_scan:
        return compared(model), neurons
    if found.missing:
        return f"refused: {'; '.join(dict.fromkeys(_without_layer(entry) for entry in found.missing))}", neurons
    share = abs(found.conserved.remainder / found.conserved.target)
    good = found.parity <= TOLERANCE[torch.float32] and share <= TOLERANCE[torch.float32]
    return f"{'yes' if good else 'unconserved'}, {share:.0e}", neurons


def compared(model: Model) -> str:
    """Of a model with scans the cell of tokens: whether they sum to the difference of two prompts."""
    try:
        sums = attribute(model, IDS, 11, 12, sites=(), counterfactual=OTHER).conservation()
    except MissingRule as error:
        return f"refused: {str(error).split('; ')[0].split('. Method')[0]}"
    share = abs(sums.remainder / sums.target)
    good = share <= TOLERANCE[torch.float32]
    return f"{'with a counterfactual' if good else 'unconserved'}, {share:.0e}"


def _without_layer(entry: str) -> str:
    """``torch.logsumexp (GraniteSWAAttention)`` of ``torch.logsumexp in model.layers.0.self_attn (...)``."""
    operation, _, place = entry.partition(" in ")
    return f"{operation} ({place.rpartition('(')[2]}"


def small_model(kind: str) -> Model | str:
    """The first small model that runs."""
    tried = (made(kind, wanted) for wanted in (SMALL | MORE, SMALL, SMALL | LESS))
    return next((one for one in tried if not isinstance(one, str)), None) or made(kind, SMALL)


def lines() -> Iterator[tuple[str, str, str]]:
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        model = small_model(kind)
        yield (kind, model, "") if isinstance(model, str) else (kind, *tokens(model))


def page() -> str:
    rows, counts = [], Counter[str]()
    for kind, works, neurons in lines():
        counts[works.split()[0].rstrip(":,")] += 1
        counts["neurons"] += bool(neurons)
        rows.append(f"| `{kind}` | {works} | {neurons} |\n")
        print(rows[-1], end="", flush=True)
    told = (
        f"Of {len(rows)} kinds {counts['yes']} have relevance of tokens, {counts['with']} more with a counterfactual, "
        f"and {counts['neurons']} of all these neurons; "
        f"{counts['refused']} are refused by name, {counts['fails'] + counts['unconserved']} fail, and of "
        f"{counts['not']} no small model was made."
    )
    return HEAD.format(version=transformers.__version__, counts=told) + "".join(rows)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    PAGE.write_text(page())
