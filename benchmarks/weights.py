"""What it takes to learn a shape, one neuron's W2 row, and its words, in a made bfloat16 model.

python benchmarks/weights.py
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from icebear import Model, Neuron, project
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.concepts.vocabulary.weight_rows import direct_row

CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    tie_word_embeddings=True,
)
NEURON = Neuron(1, "ffn", 4321)
CASES = {
    "width": lambda model: model.width("ffn"),
    "check": lambda model: model.check(NEURON),
    "head_dim": lambda model: model.head_dim,
    "direct_row": lambda model: direct_row(model, NEURON),
    "project": lambda model: project(model, NEURON),
}


class Numbers:
    """A tokenizer whose texts are numbers."""

    all_special_ids = ()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, 3, 4]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def seconds() -> dict[str, float]:
    """The median of each case's calls, in time of the processor: others may use the machine."""
    torch.manual_seed(0)
    model = Model(LlamaForCausalLM(CONFIG).bfloat16(), Numbers(), "made")
    calibrate(model)
    medians = {}
    for name, case in CASES.items():
        times = []
        for _ in range(10):
            start = time.process_time()
            case(model)
            times.append(time.process_time() - start)
        medians[name] = statistics.median(times[1:])
    return medians


if __name__ == "__main__":
    for name, taken in seconds().items():
        print(f"{name:8s} {1000 * taken:9.3f} ms")
