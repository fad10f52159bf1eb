"""Compile programs with Tracr, and write them in TransformerLens' format for `load_model`.

    python benchmarks/tracr_models.py FOLDER [NAME ...]

It needs Tracr and what it imports: ``pip install tracr-pypi==1.0.0 networkx``. Each folder gets twenty pairs of random
prompts, for `judged` (docs/truth.md).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tracr.compiler import basis_inference, craft_graph_to_model, expr_to_craft_graph, lib, nodes, rasp_to_graph
from tracr.craft import bases, transformers, vectorspace_fns
from tracr.rasp import rasp

from icebear import load_model

BOS = "BOS"
PROGRAMS: dict[str, tuple[Callable[[], rasp.SOp], set, int, bool]] = {
    "reverse": (lambda: lib.make_reverse(rasp.tokens), {"a", "b", "c"}, 5, False),
    "hist": (lib.make_hist, {"a", "b", "c"}, 5, False),
    "sort": (lambda: lib.make_sort_unique(rasp.tokens, rasp.tokens), {1, 2, 3, 4, 5}, 4, False),
    "frac_prevs": (lambda: lib.make_frac_prevs(rasp.tokens == "x"), {"a", "x"}, 5, True),
    "dyck": (lambda: lib.make_shuffle_dyck(["()"]), {"(", ")"}, 6, True),
    "sort_freq": (lambda: lib.make_sort_freq(5), {"a", "b", "c"}, 5, False),
}
"""Name -> program, its tokens, its longest prompt without BOS, and whether attention is causal."""


def compiled(make: Callable[[], rasp.SOp], words: set, length: int, causal: bool) -> tuple[dict, dict, dict]:
    """Return the configuration, the weights and the vocabulary of a program, as Tracr assembles them."""
    extracted = rasp_to_graph.extract_rasp_graph(make())
    graph, sink = extracted.graph, extracted.sink
    basis_inference.infer_bases(graph, sink, words, length)
    bos = bases.BasisDirection(rasp.tokens.label, BOS)
    expr_to_craft_graph.add_craft_components_to_rasp_graph(graph, bos_dir=bos, mlp_exactness=100)
    model = craft_graph_to_model.craft_graph_to_model(graph, extracted.sources)
    tokens = bases.VectorSpaceWithBasis.from_values(
        rasp.tokens.label, graph.nodes[rasp.tokens.label][nodes.VALUE_SET] | {BOS}
    )
    places = bases.VectorSpaceWithBasis.from_values(rasp.indices.label, range(length))
    output = bases.VectorSpaceWithBasis(sink[nodes.OUTPUT_BASIS])
    space = bases.join_vector_spaces(model.residual_space, tokens, places, output)
    project = lambda own: vectorspace_fns.project(space, own).matrix  # noqa: E731
    layers = layers_of(model)
    heads = [head for attention, _ in layers if attention for head in attention.as_multi().heads()]
    config: dict[str, Any] = {
        "n_layers": len(layers),
        "d_model": space.num_dims,
        "n_heads": max((attention.as_multi().num_heads for attention, _ in layers if attention), default=1),
        "d_head": max((max(head.w_qk.matrix.shape + head.w_ov.matrix.shape) for head in heads), default=1),
        "d_mlp": max((mlp.fst.output_space.num_dims for _, mlp in layers if mlp), default=1),
        "n_ctx": length + 1,
        "d_vocab": tokens.num_dims,
        "d_vocab_out": output.num_dims,
        "act_fn": "relu",
        "normalization_type": None,
        "attention_dir": "causal" if causal else "bidirectional",
        "attn_scale": 1.0,
        "model_type": "hooked_transformer",
    }
    embed = project(tokens).T
    one = bases.BasisDirection("one")
    if one in space:
        embed[:, space.basis.index(one)] = 1
    state = {
        "embed.W_E": embed,
        "pos_embed.W_pos": np.concatenate([np.zeros((1, space.num_dims)), project(places).T]),
        "unembed.W_U": project(output),
    }
    for layer, (attention, mlp) in enumerate(layers):
        state |= {f"blocks.{layer}.{name}": x for name, x in weights(attention, mlp, config, project).items()}
    words_of = lambda own: {str(one.value): n for n, one in enumerate(own.basis)}  # noqa: E731
    tensors = {name: torch.tensor(x, dtype=torch.float32) for name, x in state.items()}
    return config, tensors, {"input": words_of(tokens), "output": words_of(output)}


def layers_of(model: transformers.SeriesWithResiduals) -> list[tuple[Any, Any]]:
    """Return the attention and the MLP of each layer; None where a layer has none."""
    layers: list[list[Any]] = []
    for block in model.blocks:
        place = int(isinstance(block, transformers.MLP))
        if not layers or place == 0 or layers[-1][1] is not None:
            layers.append([None, None])
        layers[-1][place] = block
    return [tuple(layer) for layer in layers]


def weights(attention: Any, mlp: Any, config: dict, project: Callable) -> dict[str, np.ndarray]:
    """Return the weights of a layer by TransformerLens' names."""
    heads, width, size, hidden = (config[name] for name in ("n_heads", "d_model", "d_head", "d_mlp"))
    q, k, v = (np.zeros((heads, width, size)) for _ in range(3))
    o, w_in, w_out = np.zeros((heads, size, width)), np.zeros((width, hidden)), np.zeros((hidden, width))
    for n, head in enumerate(attention.as_multi().heads() if attention else ()):
        keys, values = head.w_qk.matrix.shape[1], head.w_ov.matrix.shape[1]
        q[n, :, :keys] = project(head.w_qk.left_space) @ head.w_qk.matrix
        k[n, :, :keys] = project(head.w_qk.right_space)
        v[n, :, :values] = project(head.w_ov.input_space) @ head.w_ov.matrix
        o[n, :values] = project(head.w_ov.output_space).T
    if mlp:
        count = mlp.fst.output_space.num_dims
        w_in[:, :count] = project(mlp.fst.input_space) @ mlp.fst.matrix
        w_out[:count] = mlp.snd.matrix @ project(mlp.snd.output_space).T
    names = {"attn.W_Q": q, "attn.W_K": k, "attn.W_V": v, "attn.W_O": o}
    return {**names, "mlp.W_in": w_in, "mlp.W_out": w_out}


def write(name: str, folder: Path) -> None:
    config, state, words = compiled(*PROGRAMS[name])
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: x.contiguous() for key, x in state.items()}, folder / "model.safetensors")
    for file, entries in (("config.json", config), ("vocab.json", words)):
        (folder / file).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def write_pairs(folder: Path, count: int = 20) -> None:
    """Write pairs of prompts with different answers at a token."""
    model, draw, rows = load_model(str(folder), device="cpu"), random.Random(0), []
    words = [word for word in model.tokenizer.ids if word != BOS]
    while len(rows) < count:
        some = draw.sample if folder.name == "sort" else lambda words, k: draw.choices(words, k=k)
        own, there = ([BOS, *some(words, model.net.config.n_ctx - 1)] for _ in range(2))
        ids = torch.tensor([[model.tokenizer.ids[word] for word in prompt] for prompt in (own, there)])
        logits = model.net(ids).logits
        answers = logits if logits.shape[-1] == 1 else logits.argmax(-1)[..., None].float()
        places = ((answers[0] - answers[1])[1:, 0].abs() > 0.1).nonzero()[:, 0].tolist()
        if places:
            rows.append({"prompt": own, "counterfactual": there, "position": 1 + draw.choice(places)})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    for one in sys.argv[2:] or PROGRAMS:
        write(one, Path(sys.argv[1]) / one)
        write_pairs(Path(sys.argv[1]) / one)
