"""Writes docs/families.md: what works for each causal language model that transformers ships, on a small random one.

python docs/families.py
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from icebear import Model
from icebear.concepts.selftest import TOLERANCE, selftest
from icebear.errors import MissingRule, ModelError

PAGE = Path(__file__).resolve().parent / "families.md"
HEAD = """# Families

Which causal language models of transformers {version} work (`python docs/families.py`). For each model type, a
model of two layers, 32 wide, with random weights from its own configuration runs the self-test of `icebear
doctor`. **Tokens**: the logits under the rules equal the model's, and relevance is conserved under CP-LRP; the
number is the remainder as a share of the explained logit. **Neurons**: the sites that icebear reads; [Add a
family](new-family.md) adds them to models whose tokens work. A refused model raises `MissingRule` with the
operation's name, unless you pass `strict=False`.

Random weights show whether the arithmetic holds, not whether explanations are good. Real weights were tested
for `llama` (SmolLM2-135M), `t5` and `distilbert`.

{counts}

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
LARGEST = 3e7
"""Parameters; what stays larger has parts whose sizes are called otherwise."""
IDS = [5, 9, 23, 42, 7, 31, 12, 50]


def small(kind: str, wanted: dict[str, int]) -> PreTrainedConfig:
    cls = CONFIG_MAPPING[kind]
    known = {*cls().to_dict(), *cls.attribute_map}
    sizes = {name: value for names, value in wanted.items() for name in names.split() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention: the part of a head that is turned, and as many keys as queries
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    return cls(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)


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
    if found.missing:
        return f"refused: {'; '.join(dict.fromkeys(_without_layer(entry) for entry in found.missing))}", neurons
    share = abs(found.conservation().remainder / found.conservation().target)
    good = found.parity <= TOLERANCE[torch.float32] and share <= TOLERANCE[torch.float32]
    return f"{'yes' if good else 'unconserved'}, {share:.0e}", neurons


def _without_layer(entry: str) -> str:
    """``torch.logsumexp (GraniteSWAAttention)`` of ``torch.logsumexp in model.layers.0.self_attn (...)``."""
    operation, _, place = entry.partition(" in ")
    return f"{operation} ({place.rpartition('(')[2]}"


def lines() -> Iterator[tuple[str, str, str]]:
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found = (made(kind, wanted) for wanted in (SMALL | MORE, SMALL, SMALL | LESS))
        model = next((one for one in found if not isinstance(one, str)), None) or made(kind, SMALL)
        yield (kind, model, "") if isinstance(model, str) else (kind, *tokens(model))


def page() -> str:
    rows, counts = [], Counter[str]()
    for kind, works, neurons in lines():
        counts[works.split()[0].rstrip(":,")] += 1
        counts["neurons"] += bool(neurons)
        rows.append(f"| `{kind}` | {works} | {neurons} |\n")
        print(rows[-1], end="", flush=True)
    told = (
        f"Of {len(rows)} kinds {counts['yes']} have the relevance of tokens, {counts['neurons']} of them neurons; "
        f"{counts['refused']} are refused by name, {counts['fails'] + counts['unconserved']} fail, and of "
        f"{counts['not']} no small model was made."
    )
    return HEAD.format(version=transformers.__version__, counts=told) + "".join(rows)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    PAGE.write_text(page())
