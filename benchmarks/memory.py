"""Peak memory on a made Llama of 1.04 billion parameters, beyond the model: each figure from a fresh process.

python benchmarks/memory.py [--tokens 1024 4096]

Gradient x input without neurons is what the same pass costs without icebear. Weights are random: memory does not know.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
from attribution import gradient_x_input
from resident import peak
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from icebear import Model, attribute
from icebear.models.loading.conversion import fetch
from icebear.models.loading.presets import PRESETS

ONE_BILLION = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
AT_ONCE = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that a peak is what was in use."""
CASES = {
    "gradient x input": gradient_x_input,
    "tokens": lambda model, ids: attribute(model, ids, sites=(), checkpoint=False),
    "top 100": lambda model, ids: attribute(model, ids, keep="top", checkpoint=False),
    "all neurons": lambda model, ids: attribute(model, ids, checkpoint=False),
    "top 100, checkpointed": lambda model, ids: attribute(model, ids, keep="top", checkpoint=True),
    "all neurons, checkpointed": lambda model, ids: attribute(model, ids, checkpoint=True),
}


def made() -> Model:
    torch.manual_seed(0)
    with torch.device("meta"):
        net = LlamaForCausalLM(ONE_BILLION)
    net.to_empty(device="cpu")
    for weight in net.parameters():  # transformers' own takes minutes
        weight.data.normal_(std=0.02) if weight.dim() > 1 else weight.data.fill_(1)
    net.model.rotary_emb.__init__(ONE_BILLION)
    net.tie_weights()
    return Model(net, AutoTokenizer.from_pretrained(str(fetch(PRESETS["smollm2-135m"]))), name="made, 1.04B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--peak", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        model = made()
        ids = torch.randint(100, 30000, (options.tokens[0],)).tolist()
        attribute(model, ids[:8])
        peak(lambda: CASES[options.peak](model, ids))
        return
    print("| tokens | " + " | ".join(f"{name}, MiB" for name in CASES) + " |\n|" + " --- |" * (len(CASES) + 1))
    for count in options.tokens:
        cells = []
        for name in CASES:
            command = [sys.executable, __file__, "--peak", name, "--tokens", str(count)]
            done = subprocess.run(command, capture_output=True, text=True, env=AT_ONCE)
            cells.append(done.stdout.strip() if done.returncode == 0 else "out of memory")
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
