"""Does `icebear atlas --compare` find the neurons that fine-tuning changed? The change is known: 100 neurons' rows.

The rows through which 100 random FFN neurons read (gate and up) are trained on Python code, and nothing else. Both
models read 300 summaries. AUROC: that a side of a changed neuron has moved farther than one of another neuron.

    python benchmarks/moved.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from icebear import Model, build_index, embed_examples, load_encoder, load_model, open_store, read_corpus
from icebear.actmax.atlas.compare import IndexComparison, compare_indexes
from icebear.actmax.atlas.side_data import side_columns

CHANGED, STEPS, TOKENS, AT_ONCE, RATE = 100, 60, 128, 4, 3e-3
DOCUMENTS = 300
LRP = Path(__file__).parent.parent / "lrp"
"""The code that is trained on."""


def changed_neurons(generator: np.random.Generator) -> dict[int, list[int]]:
    """Return a layer -> its neurons that change, 100 of all; the first and last three layers are left out."""
    layers, indices = (
        generator.integers(3, 27, CHANGED + 10).tolist(),
        generator.integers(0, 1536, CHANGED + 10).tolist(),
    )
    drawn = sorted({*zip(layers, indices, strict=True)})[:CHANGED]
    generator.shuffle(drawn)
    return {layer: [index for at, index in drawn if at == layer] for layer, _ in drawn}


def train(model: Model, neurons: dict[int, list[int]], generator: np.random.Generator) -> None:
    """Train the rows of some neurons on code."""
    weights = [
        (getattr(model.net.model.layers[layer].mlp, name).weight, ids)
        for layer, ids in neurons.items()
        for name in ("gate_proj", "up_proj")
    ]
    for weight, _ in weights:
        weight.requires_grad_(True)
    code = "\n".join(path.read_text() for path in sorted(LRP.glob("**/*.py")))
    ids = model.tokenizer(code)["input_ids"]
    optimizer = torch.optim.Adam([weight for weight, _ in weights], lr=RATE)
    for _ in range(STEPS):
        starts = generator.integers(0, len(ids) - TOKENS, AT_ONCE)
        batch = torch.tensor([ids[start : start + TOKENS] for start in starts])
        with torch.enable_grad():
            optimizer.zero_grad()
            model.net(input_ids=batch, labels=batch).loss.backward()
        for weight, rows in weights:
            rest = torch.ones(len(weight), dtype=bool)
            rest[rows] = False
            weight.grad[rest] = 0
        optimizer.step()
    for weight, _ in weights:
        weight.requires_grad_(False)


def indexed(path: Path, model: Model) -> None:
    with open_store(path, create=True) as store:
        build_index(model, read_corpus("wiki-summaries", DOCUMENTS), store, sites=("ffn",))
        embed_examples(store, load_encoder())


def report(result: IndexComparison, changed: np.ndarray) -> None:
    """Print how well scores tell the sides of changed neurons (N,) from the others."""
    random = np.random.default_rng(0).random(len(changed))
    scores = {"moved": result.moved, "exchanged": result.exchanged, "random": random}
    for name, values in scores.items():
        print(f"AUROC of {name}: {roc_auc_score(changed, values):.3f}")
    is_moved = result.moved > result.least
    for title, members in (("changed", changed), ("other", ~changed)):
        exchanged, share = result.exchanged[members].mean(), is_moved[members].mean()
        print(f"{title} neurons, {members.sum():,} sides: {exchanged:.0%} exchanged, the meaning moved in {share:.1%}")
    print(f"the meaning moved in {is_moved.sum():,} sides, by chance in {(result.by_chance > result.least).sum():,}")
    most = changed[result.order[: changed.sum()]].mean()
    print(f"of the {changed.sum()} sides with most exchanged sentences, {most:.0%} are of changed neurons")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    base, tuned = load_model(), load_model()
    generator = np.random.default_rng(0)
    neurons = changed_neurons(generator)
    train(tuned, neurons, generator)
    indexed(folder / "base.db", base)
    indexed(folder / "tuned.db", tuned)
    with open_store(folder / "base.db") as store, open_store(folder / "tuned.db") as other:
        result = compare_indexes(store, other)
        layer, _, index = side_columns(store, result.sides)
    changed = np.array([i in neurons.get(at, ()) for at, i in zip(layer.tolist(), index.tolist(), strict=True)])
    report(result, changed)
