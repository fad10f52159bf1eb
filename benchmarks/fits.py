"""Are the estimates of `icebear doctor --tokens` right? Measured peaks of made models, each in a process of its own.

python -m benchmarks.fits
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config

from benchmarks.resident import resident
from icebear import Model, attribute
from icebear.concepts.memory import memory_needs

SHAPES = {
    "Llama, 135M": (LlamaConfig, (576, 1536, 30, 9, 3, 49152), 1024),
    "Llama, 135M, checkpointed": (LlamaConfig, (576, 1536, 30, 9, 3, 49152), 2048),
    "Llama, 360M": (LlamaConfig, (960, 2560, 32, 15, 5, 49152), 512),
    "Qwen2, 494M": (Qwen2Config, (896, 4864, 24, 14, 2, 151936), 512),
    "GPT-NeoX, 405M": (GPTNeoXConfig, (1024, 4096, 24, 16, 16, 50304), 512),
    "Llama, 1.04B": (LlamaConfig, (2048, 8192, 16, 32, 8, 32000), 1024),
}
"""Name -> class of the configuration; width, FFN width, layers, heads, key heads, vocabulary; tokens of the prompt."""
AT_ONCE = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that a peak is what was in use."""


def configuration(name: str):
    kind, (width, ffn, layers, heads, kv_heads, vocabulary), _ = SHAPES[name]
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    if kind is not GPTNeoXConfig:
        sizes["num_key_value_heads"] = kv_heads
    return kind(**sizes, vocab_size=vocabulary, max_position_embeddings=4096, tie_word_embeddings=True)


def measure(name: str) -> None:
    """Print the peak of all neurons in MiB, weights included."""
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(configuration(name))
    model = Model(net.eval(), None, name)
    weights = sum({x.data_ptr(): x.numel() * x.element_size() for x in net.parameters()}.values()) / 2**20
    ids = torch.randint(100, 30000, (SHAPES[name][2],)).tolist()
    for _ in range(2):
        attribute(model, ids[:8])
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    attribute(model, ids)
    print(weights + resident("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    print("| shape | tokens | estimate, MiB | measured, MiB | estimate / measured |\n| --- | --- | --- | --- | --- |")
    for name, (_, _, tokens) in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            configuration(name).save_pretrained(folder)
            weights, (need, *_) = memory_needs(folder, tokens, torch.float32)
        estimate = (weights + need.in_pass + need.result) / 2**20
        command = [sys.executable, "-m", "benchmarks.fits", "--measure", name]
        done = subprocess.run(command, capture_output=True, text=True, env=AT_ONCE, check=True)
        peak = float(done.stdout.split()[-1])
        print(f"| {name} | {tokens:,} | {estimate:,.0f} | {peak:,.0f} | {estimate / peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
