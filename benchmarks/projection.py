"""How far `project`'s claim is from what adding one unit of activation does, by layer.

python benchmarks/projection.py [--neurons 20]

For random neurons of a layer and 20 prompts: the change of the logits of the five words that a neuron promotes most,
when one unit is added at the last token, over what `project` says (10th percentile, median, 90th); and the
correlation of the two over the whole vocabulary (median).
"""

from __future__ import annotations

import argparse

import torch

from icebear import Neuron, load_model
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.concepts.vocabulary.projection import project
from icebear.concepts.vocabulary.weight_rows import direct_row, unembedding
from icebear.steering.flipping.last_token import LastToken

PROMPTS = [
    "The ice bear lives in the",
    "The capital of Germany is",
    "My favourite food is",
    "In the morning she went to the",
    "The opposite of hot is",
    "The dog chased the",
    "Shakespeare was a famous",
    "The largest planet is",
    "He opened the",
    "Two plus two is",
    "The colour of the sky is",
    "They sailed across the",
    "The king of the",
    "The doctor said that the",
    "A year has twelve",
    "She plays the",
    "Bread is made from",
    "The river flows into the",
    "The film was directed by",
    "import numpy as",
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neurons", type=int, default=20)
    options = parser.parse_args()
    model = load_model(dtype="float32")
    calibrate(model)
    words = unembedding(model)
    read = [LastToken(model, model.token_ids(prompt)) for prompt in PROMPTS]
    print("layer   p10 median    p90   correlation")
    for layer in (*range(0, model.layers - 4, 5), *range(model.layers - 4, model.layers)):
        generator = torch.Generator().manual_seed(layer)
        chosen = torch.randperm(model.width("ffn"), generator=generator)[: options.neurons].tolist()
        rows = torch.stack([direct_row(model, Neuron(layer, "ffn", index)) for index in chosen])
        projected = rows @ words.T  # (N, V)
        top = [[word.id for word in project(model, Neuron(layer, "ffn", i), 5).promoted] for i in chosen]
        ratios, correlations = [], []
        for last in read:
            now = last.activations()
            logits = last.logits([{}, *({(layer, i, 0): now[layer, i, 0].item() + 1} for i in chosen)])
            moved = (logits[1:] - logits[0])[:, 0]
            for row, ids in enumerate(top):
                ratios += (moved[row, ids] / projected[row, ids]).tolist()
                correlations.append(torch.corrcoef(torch.stack((moved[row], projected[row])))[0, 1].item())
        low, middle, high = torch.tensor(ratios).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
        print(
            f"{layer:5d} {low:+5.2f}  {middle:+5.2f}  {high:+5.2f}   {torch.tensor(correlations).median():+.2f}",
            flush=True,
        )
