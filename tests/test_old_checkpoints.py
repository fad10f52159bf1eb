"""State dicts of TransformerLens and of what came before it have the logits of a transformer that is written out."""

import json
import math
import os
import pickle
import sys
from dataclasses import make_dataclass
from types import ModuleType

import pytest
import torch
from test_cli import run

from icebear import attribute, load_model
from icebear.errors import InputError, ModelError

IDS = [7, 3, 1, 4, 5, 3]
SMALL = {
    **{"n_layers": 2, "d_model": 12, "n_heads": 3, "d_head": 4, "d_mlp": 10, "d_vocab": 11, "n_ctx": 9},
    **{"act_fn": "gelu", "normalization_type": "LN"},
}
GROKKING = {
    **{"n_layers": 1, "d_model": 128, "n_heads": 4, "d_head": 32, "d_mlp": 512, "d_vocab": 114, "d_vocab_out": 113},
    **{"n_ctx": 3, "act_fn": "relu", "normalization_type": None},
}
OTHELLO = {
    **{"n_layers": 2, "d_model": 512, "n_heads": 8, "d_head": 64, "d_mlp": 2048, "d_vocab": 61, "n_ctx": 59},
    **{"act_fn": "gelu", "normalization_type": "LNPre"},
}
"""Othello-GPT has eight such layers."""
SHORTFORMER = {"attn_only": True, "normalization_type": None, "positional_embedding_type": "shortformer"}


def canonical(config):
    """Random weights by TransformerLens' names and shapes."""
    width, head, heads, words = (config[name] for name in ("d_model", "d_head", "n_heads", "d_vocab"))
    has_norm, generator = config["normalization_type"] == "LN", torch.Generator().manual_seed(0)
    shapes = {"embed.W_E": (words, width), "unembed.W_U": (width, config.get("d_vocab_out", words))}
    if config.get("positional_embedding_type") != "rotary":
        shapes["pos_embed.W_pos"] = config["n_ctx"], width
    for block in (f"blocks.{layer}" for layer in range(config["n_layers"])):
        shapes |= {f"{block}.attn.W_{letter}": (heads, width, head) for letter in "QKV"}
        shapes |= {f"{block}.attn.b_{letter}": (heads, head) for letter in "QKV"}
        shapes |= {f"{block}.attn.W_O": (heads, head, width), f"{block}.attn.b_O": (width,)}
        norms = [f"{block}.ln1"]
        if not config.get("attn_only"):
            norms.append(f"{block}.ln2")
            shapes |= {f"{block}.mlp.W_in": (width, config["d_mlp"]), f"{block}.mlp.b_in": (config["d_mlp"],)}
            shapes |= {f"{block}.mlp.W_out": (config["d_mlp"], width), f"{block}.mlp.b_out": (width,)}
            if config["act_fn"] == "solu_ln":
                shapes |= {f"{block}.mlp.ln.w": (config["d_mlp"],), f"{block}.mlp.ln.b": (config["d_mlp"],)}
        shapes |= {f"{norm}.{part}": (width,) for norm in norms for part in "wb" if has_norm}
    shapes |= {f"ln_final.{part}": (width,) for part in "wb" if has_norm}
    return {
        name: torch.randn(shape, generator=generator) * 3 / len(shape) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def normed(x, state, name, config):
    """LayerNorm of one vector."""
    if config["normalization_type"] is None:
        return x
    x = x - x.sum() / len(x)
    x = x / (x.pow(2).sum() / len(x) + 1e-5).sqrt()
    return x * state[f"{name}.w"] + state[f"{name}.b"] if f"{name}.w" in state else x


def turned(vector, position):
    """Rotary positions: each pair of the two halves by an angle of its own."""
    half, result = len(vector) // 2, vector.clone()
    for pair in range(half):
        angle = position / 10000 ** (pair / half)
        left, right = vector[pair].item(), vector[pair + half].item()
        result[pair] = left * math.cos(angle) - right * math.sin(angle)
        result[pair + half] = right * math.cos(angle) + left * math.sin(angle)
    return result


def activated(x, state, block, config):
    if config["act_fn"] == "relu":
        return x.clamp(min=0)
    if config["act_fn"] == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    x = x * x.exp() / x.exp().sum()
    return normed(x, state, f"{block}.mlp.ln", config) if config["act_fn"] == "solu_ln" else x


def logits(config, state, ids):
    """The logits (T, V), head by head and token by token."""
    state = {name: value.double() for name, value in state.items()}
    kind = config.get("positional_embedding_type", "standard")
    stream = [state["embed.W_E"][token] for token in ids]
    learned = [state["pos_embed.W_pos"][position] for position in range(len(ids))] if kind != "rotary" else []
    if kind == "standard":
        stream = [x + position for x, position in zip(stream, learned, strict=True)]
    for block in (f"blocks.{layer}" for layer in range(config["n_layers"])):
        read = [normed(x, state, f"{block}.ln1", config) for x in stream]
        at = [x + position for x, position in zip(read, learned, strict=True)] if kind == "shortformer" else read
        stream = [x + state.get(f"{block}.attn.b_O", 0) for x in stream]
        for head in range(config["n_heads"]):

            def part(x, letter, block=block, head=head):
                bias = state.get(f"{block}.attn.b_{letter}")
                return x @ state[f"{block}.attn.W_{letter}"][head] + (0 if bias is None else bias[head])

            queries, keys = ([part(x, letter) for x in at] for letter in "QK")
            if kind == "rotary":
                queries, keys = ([turned(x, n) for n, x in enumerate(rows)] for rows in (queries, keys))
            for position in range(len(ids)):
                scores = torch.stack(
                    [queries[position] @ key / config["d_head"] ** 0.5 for key in keys[: position + 1]]
                )
                weights = scores.exp() / scores.exp().sum()
                mixed = sum(weight * part(x, "V") for weight, x in zip(weights, read[: position + 1], strict=True))
                stream[position] = stream[position] + mixed @ state[f"{block}.attn.W_O"][head]
        if not config.get("attn_only"):
            for position, x in enumerate(stream):
                neurons = (
                    normed(x, state, f"{block}.ln2", config) @ state[f"{block}.mlp.W_in"] + state[f"{block}.mlp.b_in"]
                )
                neurons = activated(neurons, state, block, config)
                stream[position] = x + neurons @ state[f"{block}.mlp.W_out"] + state[f"{block}.mlp.b_out"]
    return torch.stack([normed(x, state, "ln_final", config) @ state["unembed.W_U"] for x in stream])


# --- what old files look like ---


def left_facing(state, *names):
    """Matrices as (outputs, inputs): those with these endings, or all."""
    return {
        name: value.mT.contiguous() if "W_" in name and (not names or name.endswith(names)) else value
        for name, value in state.items()
    }


def of_the_grokking_paper(state):
    """W_E and the blocks are left-facing, W_O is flat, attention has no biases, and there is a mask."""
    old = left_facing(state, "W_E", "W_Q", "W_K", "W_V", "W_in", "W_out")
    old = {name: value for name, value in old.items() if ".attn.b_" not in name}
    flat = {name: value.flatten(0, 1).T.contiguous() for name, value in old.items() if name.endswith("W_O")}
    return {**old, **flat, "blocks.0.attn.mask": torch.ones(3, 3).tril()}


def without_attention_biases(state):
    return {name: value for name, value in state.items() if ".attn.b_" not in name}


def renamed(state, *changes):
    for old, new in changes:
        state = {name.replace(old, new): value for name, value in state.items()}
    return state


def old_solu(state):
    return renamed(state, ("ln_final.", "norm."), (".ln1.", ".norm1."), (".ln2.", ".norm2."))


def bare(state):
    return renamed(state, (".attn.", "."), (".mlp.", "."), ("unembed.", ""), ("pos_embed.", ""), ("embed.", ""))


def of_mingpt(state):
    """Othello-GPT as it was trained."""
    old = {"tok_emb.weight": state["embed.W_E"], "pos_emb": state["pos_embed.W_pos"][None]}
    old["head.weight"] = state["unembed.W_U"].T.contiguous()
    kinds = {"Q": "query", "K": "key", "V": "value"}
    for name, value in state.items():
        block, _, last = name.rpartition(".")
        if last in ("w", "b"):
            old[f"{'ln_f' if block == 'ln_final' else block}.{'weight' if last == 'w' else 'bias'}"] = value
        elif last[2:] in kinds:
            flat = value.transpose(1, 2).flatten(0, 1) if last[0] == "W" else value.flatten()
            old[f"{block}.{kinds[last[2:]]}.{'weight' if last[0] == 'W' else 'bias'}"] = flat
        elif last in ("W_O", "b_O"):
            old[f"{block}.proj.{'weight' if last == 'W_O' else 'bias'}"] = (
                value.flatten(0, -2).T if last == "W_O" else value
            )
        elif ".mlp." in name:
            old[f"{block}.{'0' if last.endswith('in') else '2'}.{'weight' if last[0] == 'W' else 'bias'}"] = (
                value.T if last[0] == "W" else value
            )
    return {name: value.contiguous() for name, value in old.items()}


def same(state):
    return state


CASES = {
    "attention alone, attn_blocks": ({"attn_only": True}, lambda state: renamed(state, ("blocks.", "attn_blocks."))),
    "course of 2022": (SHORTFORMER, lambda state: left_facing(without_attention_biases(state))),
    "ARENA, of two devices": (SHORTFORMER, lambda state: {f"module.{name}": value for name, value in state.items()}),
    "grokking": (GROKKING, of_the_grokking_paper),
    "Othello-GPT": (OTHELLO, same),
    "Othello-GPT, as trained": ({**OTHELLO, "normalization_type": "LN"}, of_mingpt),
    "SoLU": ({"act_fn": "solu_ln"}, same),
    "SoLU of 2022": ({"act_fn": "solu_ln"}, lambda state: old_solu(left_facing(state))),
    "SoLU of 2022, eight layers, square": (
        {"act_fn": "solu_ln", "n_layers": 8, "n_ctx": 12},
        lambda state: old_solu(left_facing(state, "W_pos")),
    ),
    "SoLU of 2022, ten layers, square": ({"act_fn": "solu_ln", "n_layers": 10, "n_ctx": 12}, old_solu),
    "rotary, bare": ({"positional_embedding_type": "rotary"}, bare),
    "bare, left-facing, square FFN": (
        {"d_mlp": 12, "normalization_type": "LNPre"},
        lambda state: bare(left_facing(state)),
    ),
    "square everything": ({"d_vocab": 12, "n_ctx": 12, "d_mlp": 12, "n_heads": 1, "d_head": 12}, same),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_transformer_written_out(name, tmp_path):
    change, layout = CASES[name]
    config = {**SMALL, **change}
    state = canonical(config)
    ids = IDS[: config["n_ctx"]]
    old = layout(state)
    torch.save(old, tmp_path / "model.pt")
    (tmp_path / "model.json").write_text(json.dumps(config))
    has_no_biases = not any("b_Q" in name or "query.bias" in name for name in old)
    expected = logits(config, without_attention_biases(state) if has_no_biases else state, ids)
    model = load_model(str(tmp_path / "model.pt"), dtype="float64")
    with torch.no_grad():
        assert (model.net(torch.tensor([ids])).logits[0] - expected).abs().max() < 1e-9
        in_float32 = load_model(str(tmp_path / "model.pt"), dtype="float32").net(torch.tensor([ids])).logits[0]
    assert (in_float32 - expected).abs().max() < 1e-5 * expected.abs().max()
    assert expected.std() > 0.1


@pytest.mark.parametrize("method", ["attnlrp", "cp-lrp", "difference"])
def test_relevance_of_shortformer_positions_is_conserved(method, tmp_path):
    config = {**SMALL, **SHORTFORMER}
    torch.save({"model": canonical(config), "config": config}, tmp_path / "model.pt")
    model = load_model(str(tmp_path / "model.pt"), dtype="float64")
    how = {"counterfactual": [7, 3, 2, 4, 5, 3]} if method == "difference" else {}
    result = attribute(model, IDS, 0, 1, method=method, sites=model.sites, **how)
    assert abs(result.conservation().remainder) < 1e-9
    assert abs(result.conservation().target) > 1e-3


# --- where the configuration comes from ---


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("its_config", ["config", "cfg"])
def test_a_configuration_may_be_inside_beside_or_given(key, its_config, tmp_path):
    config, path = {**SMALL, "act_fn": "relu"}, tmp_path / "model.pth"
    state = canonical(config)
    torch.save({key: state, its_config: {**config, "device": torch.device("cpu")}, "epoch": 3}, path)

    def error(act, **how):
        with torch.no_grad():
            result = load_model(str(path), dtype="float64", **how).net(torch.tensor([IDS])).logits[0]
        return (result - logits({**config, "act_fn": act}, state, IDS)).abs().max()

    assert error("relu") < 1e-9 < error("gelu")
    (tmp_path / "config.json").write_text(json.dumps({"act_fn": "gelu"}))  # of another file, perhaps
    assert error("relu") < 1e-9
    (tmp_path / "model.json").write_text(json.dumps({"act_fn": "gelu"}))
    assert error("gelu") < 1e-9
    (tmp_path / "model.json").write_text(json.dumps({"act_fn": "relu"}))
    assert error("gelu", config={"act_fn": "gelu"}) < 1e-9
    assert error("gelu", config=str(tmp_path / "config.json")) < 1e-9


def pickled_config(module, **fields):
    """What torch.save writes for a HookedTransformerConfig of a package that is no longer there."""
    kind = make_dataclass("HookedTransformerConfig", fields)
    kind.__module__ = module
    modules = {name: ModuleType(name) for name in ("transformer_lens", module)}
    modules[module].HookedTransformerConfig = kind
    return kind(**fields), modules


@pytest.mark.parametrize("module", ["HookedTransformerConfig", "config.hooked_transformer_config"])
def test_a_pickled_configuration_is_read_without_its_code(module, tmp_path, monkeypatch):
    """As the grokking demo of TransformerLens saves it."""
    config, modules = pickled_config(f"transformer_lens.{module}", **GROKKING, dtype=torch.float32, device="cuda")
    with monkeypatch.context() as patch:
        for name, fake in modules.items():
            patch.setitem(sys.modules, name, fake)
        state = canonical(GROKKING)
        torch.save({"model": state, "config": config, "test_losses": [0.5]}, tmp_path / "demo.pth")
    model = load_model(str(tmp_path / "demo.pth"), dtype="float64")
    with torch.no_grad():
        assert (
            model.net(torch.tensor([[7, 3, 113]])).logits[0] - logits(GROKKING, state, [7, 3, 113])
        ).abs().max() < 1e-9
    assert not [name for name in sys.modules if name.startswith("transformer_lens")]


def test_a_command_explains_a_file(tmp_path):
    torch.save(canonical(SMALL), tmp_path / "model.pt")
    (tmp_path / "its.json").write_text(json.dumps(SMALL))
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate("abcdefghijk")}))
    names = ["--model", str(tmp_path / "model.pt"), "--config", str(tmp_path / "its.json")]
    ranked = json.loads(run("rank", "abcd", "--json", "--top", "3", *names))
    result = attribute(load_model(str(tmp_path / "model.pt"), config=SMALL), "abcd")
    assert [row["neuron"] for row in ranked["ranking"]] == [str(row.neuron) for row in result.top(3)]
    with pytest.raises(ModelError):
        load_model(str(tmp_path / "model.pt"))


def test_another_kind_of_model_takes_no_configuration(tiny_folder):
    with pytest.raises(InputError):
        load_model(tiny_folder, config=SMALL)


# --- what is refused ---


class Code:
    def __reduce__(self):
        return os.system, ("touch ran",)


def saved(change=None, **more):
    """Write a file of which one weight is changed, or left out."""

    def write(path):
        state = canonical(SMALL)
        for name, value in (change or {}).items():
            state[name] = value(state[name]) if value else None
        torch.save({name: value for name, value in state.items() if value is not None}, path)
        path.with_suffix(".json").write_text(json.dumps({**SMALL, **more}))

    return write


def with_nan(x):
    return x.index_fill(0, torch.tensor([0]), math.nan)


def all_square(path):
    """With an older name, so that nothing says which way round they are."""
    config = {**SMALL, "n_heads": 1, **dict.fromkeys(("d_model", "d_head", "d_mlp", "d_vocab", "n_ctx"), 12)}
    torch.save({f"module.{name}": value for name, value in canonical(config).items()}, path)
    path.with_suffix(".json").write_text(json.dumps(config))


def twice(path):
    state = canonical(SMALL)
    torch.save(state | {"module.embed.W_E": 5 * state["embed.W_E"]}, path)
    path.with_suffix(".json").write_text(json.dumps(SMALL))


def without_act_fn(path):
    torch.save(canonical(SMALL), path)
    path.with_suffix(".json").write_text(json.dumps({name: SMALL[name] for name in SMALL if name != "act_fn"}))


REFUSED = {
    "matrices that are all square": all_square,
    "a weight with two names": twice,
    "no activation function": without_act_fn,
    "code": lambda path: torch.save({"model": Code()}, path),
    "code in a plain pickle": lambda path: path.write_bytes(pickle.dumps(Code())),
    "a whole network": lambda path: torch.save(torch.nn.Linear(2, 2), path),
    "a zip that is none": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
    "nothing": lambda path: path.write_bytes(b""),
    "a text": lambda path: path.write_text("hello world"),
    "a number": lambda path: torch.save(3, path),
    "a list": lambda path: torch.save([torch.ones(2)], path),
    "names that are numbers": lambda path: torch.save({1: torch.ones(2)}, path),
    "another key": lambda path: torch.save({"model": 3}, path),
    "no configuration": lambda path: torch.save(canonical(SMALL), path),
    "of transformers": lambda path: torch.save(
        {"model.layers.0.q_proj.weight": torch.ones(2, 2), "config": SMALL}, path
    ),
    "of another kind": saved(model_type="gpt2"),
    "no W_K": saved({"blocks.1.attn.W_K": None}),
    "no final norm": saved({"ln_final.w": None}),
    "one layer fewer": saved(n_layers=1),
    "a thousand million layers": saved(n_layers=10**9),
    "another width": saved(d_model=13),
    "another vocabulary": saved(d_vocab=10**12),
    "a transposed bias": saved({"blocks.0.attn.b_Q": lambda x: x.T}),
    "a short norm": saved({"ln_final.b": lambda x: x[:3]}),
    "heads side by side": saved({"blocks.0.attn.W_Q": lambda x: x.transpose(0, 1)}),
    "NaN": saved({"blocks.0.mlp.W_in": with_nan}),
    "infinity": saved({"blocks.0.mlp.b_in": lambda x: x / 0}),
    "whole numbers": saved({"embed.W_E": lambda x: x.long()}),
    "a weight too many": saved(attn_only=True),
    "words": saved(n_layers="two"),
    "half a head": saved(n_heads=1.5),
    "truth for a number": saved(d_model=True),
    "a list for a number": saved(n_ctx=[9]),
    "a number for truth": saved(attn_only="yes"),
    "no size": saved(d_mlp=0),
    "a number that no float is": saved(eps=10**400),
    "no number": saved(eps=math.nan),
    "an infinite number": saved(attn_scale=math.inf),
    "a huge context": saved(n_ctx=10**30),
    "a negative size": saved(d_vocab=-3),
    "no field": saved(n_ctx=None),
    "heads that do not fit": saved(n_key_value_heads=2),
    "odd rotation": saved({"pos_embed.W_pos": None}, positional_embedding_type="rotary", rotary_dim=3),
    "an unknown activation": saved(act_fn="xielu"),
    "an unknown activation in a list": saved(act_fn=["gelu"]),
    "a configuration of JSON that is none": lambda path: (saved()(path), path.with_suffix(".json").write_text("{")),
    "a list of JSON": lambda path: (saved()(path), path.with_suffix(".json").write_text("[1]")),
    "deep JSON": lambda path: (saved()(path), path.with_suffix(".json").write_text("[" * 100_000)),
    "a square matrix, some left-facing": saved({"embed.W_E": torch.t}, n_ctx=12, d_vocab=11),
}


@pytest.mark.parametrize("field", ["eps", "attn_scale", "rotary_base"])
def test_a_huge_integer_for_a_float_is_computed_with(field, tmp_path):
    """torch has no integer of this size."""
    saved(**{field: 10**30})(tmp_path / "model.pt")
    model = load_model(str(tmp_path / "model.pt"), device="cpu")
    with torch.no_grad():
        assert model.net(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_load_is_refused_in_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    REFUSED[name](tmp_path / "model.pt")
    if name == "a square matrix, some left-facing":
        state = torch.load(tmp_path / "model.pt")
        torch.save({**state, "pos_embed.W_pos": torch.ones(12, 12)}, tmp_path / "model.pt")
    with pytest.raises(ModelError) as error:
        load_model(str(tmp_path / "model.pt"))
    assert str(error.value).count("\n") == 0
    assert len(str(error.value)) < 400
    assert str(error.value).endswith(".")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"blocks.1.attn.W_K": None}, "blocks.1.attn.W_K"),
        ({"embed.W_E": None}, "embed.W_E"),
        ({"blocks.0.mlp.W_out": None}, "blocks.0.mlp.W_out"),
        ({"blocks.0.ln2.w": None}, "blocks.0.ln2.w"),
        ({"unembed.W_U": with_nan}, "unembed.W_U"),
        ({"blocks.0.attn.W_O": lambda x: x[:2]}, "blocks.0.attn.W_O"),
    ],
)
def test_the_sentence_names_the_weight_as_transformer_lens_does(change, named, tmp_path):
    saved(change)(tmp_path / "model.pt")
    with pytest.raises(ModelError, match=named):
        load_model(str(tmp_path / "model.pt"))


@pytest.mark.parametrize("name", ["missing.pt", "model.npz"])
def test_paths_of_no_model_are_refused(name, tmp_path):
    (tmp_path / "model.npz").write_bytes(b"1")
    with pytest.raises(ModelError):
        load_model(str(tmp_path / name))
