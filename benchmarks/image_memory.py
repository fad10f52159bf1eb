"""Peak memory of a prompt with a 512-pixel image and of a text of as many tokens, on a model of SmolVLM's shape (500M).

python benchmarks/image_memory.py

Each figure is from a fresh process. Weights are random: memory does not know.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from resident import peak, resident
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from icebear import Model, attribute

IMAGE = 49190
WORDS = 32
TOKENS = 64
"""Of a tile of 512 pixels: 32 x 32 patches, 4 x 4 of which become a token."""
SHAPE = SmolVLMConfig(
    image_token_id=IMAGE,
    scale_factor=4,
    vision_config={
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 512, "patch_size": 16},
    },
    text_config={
        **{"model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32},
        **{"num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49280},
        **{"max_position_embeddings": 8192},
    },
)
AT_ONCE = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that a peak is what was in use."""
CASES = ("text", "image")


def made() -> Model:
    torch.manual_seed(0)
    with torch.device("meta"):
        net = SmolVLMForConditionalGeneration(SHAPE)
    net.to_empty(device="cpu")
    for weight in net.parameters():  # transformers' own takes minutes
        weight.data.normal_(std=0.02) if weight.dim() > 1 else weight.data.fill_(0.5)
    net.model.text_model.rotary_emb.__init__(SHAPE.text_config)
    return Model(net, name="made, SmolVLM's shape")


def explain(model: Model, case: str) -> None:
    ids = torch.randint(100, 30000, (WORDS,)).tolist()
    if case == "text":
        ids = [*ids, *torch.randint(100, 30000, (TOKENS,)).tolist()]
        attribute(model, ids, method="attnlrp", keep="top")
        return
    pixels = torch.randn(3, 512, 512)
    attribute(model, [*ids[:4], *[IMAGE] * TOKENS, *ids[4:]], image=pixels, method="attnlrp", keep="top")


def main() -> None:
    if len(sys.argv) > 1:
        model = made()
        attribute(model, list(range(100, 108)), sites=())
        weights = sum(weight.numel() * weight.element_size() for weight in model.net.parameters()) >> 20
        peak(lambda: explain(model, sys.argv[1]))
        print(weights, round(resident("VmHWM")))
        return
    print("| prompt | beyond the model, MiB | weights, MiB | process, MiB |\n| --- | --- | --- | --- |")
    for case in CASES:
        done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True, env=AT_ONCE, check=True)
        print(f"| {case} | {' | '.join(done.stdout.split())} |", flush=True)


if __name__ == "__main__":
    main()
