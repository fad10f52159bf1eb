"""Options of configurations that are off (or on) by default: with each turned round, a family's laws hold, or the model
is refused by name."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "docs"))
from families import AUTO_CLASSES, SHIPPED, broken, options, small_model

STEEP = [("deepseek_v4", "mlp_bias"), ("qwen4_exp", "norm_topk_prob"), ("qwen4_exp_text", "norm_topk_prob")]
"""These mix residual streams by steep functions, which amplify rounding (2e-3 to 4e-3 in float32, 7e-13 in float64)."""
KNOWN = dict.fromkeys(STEEP, ("batch",))
"""(kind, option) -> the laws that do not hold, each with its reason."""
OF_EACH_KIND = [
    *(("olmo", "clip_qkv"), ("olmoe", "clip_qkv"), ("llama", "attention_bias"), ("llama", "mlp_bias")),
    *(("llama", "tie_word_embeddings"), ("gpt2", "scale_attn_by_inverse_layer_idx"), ("gpt2", "scale_attn_weights")),
    *(("gpt2", "reorder_and_upcast_attn"), ("bloom", "slow_but_exact"), ("stablelm", "use_parallel_residual")),
    *(("bloom", "apply_residual_connection_post_layernorm"), ("stablelm", "qk_layernorm"), ("cohere", "use_qk_norm")),
    *(("falcon", "alibi"), ("falcon", "multi_query"), ("falcon", "new_decoder_architecture"), ("opt", "enable_bias")),
    *(("gpt_neox", "use_parallel_residual"), ("qwen2", "use_sliding_window"), ("qwen3_moe", "norm_topk_prob")),
    *(("gemma3_text", "use_bidirectional_attention"), ("xglm", "scale_embedding"), ("gpt_bigcode", "multi_query")),
    ("xlnet", "bi_data"),
]
"""An option of each kind: biases, norms, ties, orders of blocks, positions, clipping, kernels, experts."""
EVERY = [(kind, auto) for auto in AUTO_CLASSES if auto in SHIPPED for kind in sorted(SHIPPED[auto][1])]


def found(kind, option, auto="AutoModelForCausalLM"):
    model = small_model(kind, auto, option)
    return [] if isinstance(model, str) else broken(model)  # transformers may refuse an option beside others


@pytest.mark.parametrize(("kind", "name"), OF_EACH_KIND)
def test_an_option_of_each_kind_holds_or_is_refused_by_name(kind, name):
    option = next(option for option in options(kind) if option[0] == name)
    assert found(kind, option) == []


@pytest.mark.release
@pytest.mark.parametrize(("kind", "auto"), EVERY, ids=str)
def test_every_option_holds_or_is_refused_by_name(kind, auto):
    plain = small_model(kind, auto)
    if isinstance(plain, str):
        pytest.skip(plain)
    known = broken(plain)  # docs/results/families.csv has it
    each = {option[0]: found(kind, option, auto) for option in options(kind)}
    assert {name: laws for name, laws in each.items() if not {*laws} <= {*known, *KNOWN.get((kind, name), ())}} == {}
