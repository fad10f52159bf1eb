"""Small made models in TransformerLens' format, one of each variant, and the logits that TransformerLens gives them.

`python tests/hooked_models.py` records the logits; it needs transformer-lens 3 (4 no longer has HookedTransformer):
``pip install --no-deps transformer-lens==3.6.0 einops fancy-einsum jaxtyping wadler-lindig beartype "typeguard<5"
better-abc``.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RECORDED = Path(__file__).parent / "hooked_logits.json"
IDS = [7, 3, 1, 4, 5, 3, 2, 9]
SMALL = {
    **{"n_layers": 2, "d_model": 12, "n_heads": 3, "d_head": 4, "d_mlp": 10, "d_vocab": 11, "n_ctx": 9},
    **{"act_fn": "relu", "normalization_type": None},
}
ROTARY = {"positional_embedding_type": "rotary"}
VARIANTS = {
    "plain": {},
    **{kind: {"normalization_type": kind} for kind in ("LN", "LNPre", "RMS", "RMSPre")},
    "LN, final RMS": {"normalization_type": "LN", "final_rms": True},
    "LNPre, final RMS": {"normalization_type": "LNPre", "final_rms": True},
    **{act: {"act_fn": act} for act in ("relu2", "silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "solu")},
    "solu_ln": {"act_fn": "solu_ln", "normalization_type": "LN"},
    "solu_ln, no norm": {"act_fn": "solu_ln"},
    "gated": {"gated_mlp": True, "act_fn": "silu", "normalization_type": "RMS"},
    "attention only": {"attn_only": True, "normalization_type": "LN"},
    "parallel": {"parallel_attn_mlp": True, "normalization_type": "LN"},
    "bidirectional": {"attention_dir": "bidirectional"},
    "bidirectional, outputs": {"attention_dir": "bidirectional", "d_vocab_out": 4, "normalization_type": "LN"},
    "bidirectional, attention only": {"attention_dir": "bidirectional", "attn_only": True},
    "outputs": {"d_vocab_out": 4},
    "one number": {"d_vocab_out": 1, "attention_dir": "bidirectional"},
    "shortformer": {"positional_embedding_type": "shortformer", "normalization_type": "LN"},
    "rotary": ROTARY,
    "rotary, a part, neighbors": {**ROTARY, "rotary_dim": 2, "rotary_adjacent_pairs": True, "rotary_base": 100},
    "rotary, neighbors, RMS": {**ROTARY, "rotary_adjacent_pairs": True, "normalization_type": "RMS"},
    "scale": {"attn_scale": 0.3},
    "no scale": {"use_attn_scale": False},
    "scale by layer": {"scale_attn_by_inverse_layer_idx": True},
    "shared keys": {"n_heads": 4, "n_key_value_heads": 2},
    "eps": {"normalization_type": "LN", "eps": 0.3},
}


def config_of(name):
    return {**SMALL, **VARIANTS[name]}


def shapes(config):
    """The names and shapes of a state dict, as TransformerLens documents them."""
    width, head, mlp, words = (config[name] for name in ("d_model", "d_head", "d_mlp", "d_vocab"))
    heads, layers, outputs = config["n_heads"], config["n_layers"], config.get("d_vocab_out", words)
    groups, kind = config.get("n_key_value_heads"), config["normalization_type"]
    norm = {"LN": ("w", "b"), "RMS": ("w",)}.get(kind, ())
    end = ("w",) if norm and config.get("final_rms") else norm
    made = {"embed.W_E": (words, width), "unembed.W_U": (width, outputs), "unembed.b_U": (outputs,)}
    if config.get("positional_embedding_type") != "rotary":
        made["pos_embed.W_pos"] = config["n_ctx"], width
    made |= {f"ln_final.{part}": (width,) for part in end}
    for block in (f"blocks.{layer}" for layer in range(layers)):
        made |= {f"{block}.ln1.{part}": (width,) for part in norm}
        made |= {f"{block}.attn.W_Q": (heads, width, head), f"{block}.attn.b_Q": (heads, head)}
        for letter in "KV":
            name = f"_{{}}_{letter}" if groups else f"{{}}_{letter}"
            made |= {f"{block}.attn.{name.format('W')}": (groups or heads, width, head)}
            made |= {f"{block}.attn.{name.format('b')}": (groups or heads, head)}
        made |= {f"{block}.attn.W_O": (heads, head, width), f"{block}.attn.b_O": (width,)}
        if config.get("attn_only"):
            continue
        made |= {f"{block}.ln2.{part}": (width,) for part in norm}
        made |= {f"{block}.mlp.W_in": (width, mlp), f"{block}.mlp.b_in": (mlp,)}
        made |= {f"{block}.mlp.W_out": (mlp, width), f"{block}.mlp.b_out": (width,)}
        if config.get("gated_mlp"):
            made[f"{block}.mlp.W_gate"] = width, mlp
        if config["act_fn"] == "solu_ln" and kind == "LN":
            made |= {f"{block}.mlp.ln.{part}": (mlp,) for part in "wb"}
    return made


def state_of(config):
    """Weights made by arithmetic, the same in every version of torch; large enough that attention is not uniform."""
    state = {}
    for number, (name, shape) in enumerate(shapes(config).items()):
        count = torch.tensor(shape).prod().item()
        places = torch.arange(1, count + 1, dtype=torch.float64)
        noise = ((places + 31.7 * number).sin() * 43758.5453).frac().reshape(shape)  # -1 to 1
        state[name] = (noise + (1 if name.endswith(".w") else 0)).float() * 0.5
    return state


def folder_of(name, folder, **more):
    """Write the model of a variant; more: other entries of its configuration."""
    config = {**config_of(name), **more}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state_of(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "hooked_transformer"}))
    return str(folder)


def lens_logits(name):
    """The logits (T, V) that TransformerLens gives in float64."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(**config_of(name), device="cpu", init_weights=False, dtype=torch.float64)
    net = HookedTransformer(config)
    missing, unknown = net.load_state_dict(state_of(config_of(name)), strict=False)
    assert not unknown
    assert all(part.rpartition(".")[2] in ("mask", "IGNORE", "rotary_sin", "rotary_cos") for part in missing), missing
    with torch.no_grad():
        return net(torch.tensor([IDS]))[0]


if __name__ == "__main__":
    rows = {name: [[round(x, 7) for x in row] for row in lens_logits(name).tolist()] for name in VARIANTS}
    RECORDED.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}\n"
    )
