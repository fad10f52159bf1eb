"""Compare the cost of the rules with LXT: time relative to gradient x input, and peak memory, for tokens only.

python benchmarks/peers.py [--tokens 32 128 512 1024 2048 4096] [--rounds 9] [--python VENV/bin/python]

Without --python an environment for LXT is made in benchmarks/.lxt: transformers 4.57.6, with which LXT 2.1 works (it
asks for torchvision, which a language model does not use: a stub stands in). Both load the same weights in
separate processes; each peak is measured in a fresh process, above the loaded model. Prompts over 1,024 tokens get
three rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from resident import peak

HERE = Path(__file__).parent
NEEDS = ["torch==2.13.0", "transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub<1", "safetensors"]
Work = Callable[[list[int]], object]


def environment() -> Path:
    """A Python that has LXT, made once."""
    folder = HERE / ".lxt"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in (NEEDS, ["--no-deps", "lxt==2.1"]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "made").touch()
    return python


def icebear(folder: str) -> tuple[Work, Work]:
    """AttnLRP, and gradient x input."""
    from icebear import attribute, load_model
    from icebear.concepts.passes.inputs import Inputs
    from icebear.concepts.passes.run import Logits, forward_backward
    from icebear.models.objective import objective_of

    model = load_model(folder)
    plain = lambda ids: forward_backward(model, Logits(objective_of(model, [ids])), [Inputs()])  # noqa: E731
    return lambda ids: attribute(model, ids, sites=()), plain


def lxt(folder: str) -> tuple[Work, Work]:
    """The same by LXT: its patches hold for the whole process, so the plain class is a copy made before them."""
    import importlib.util
    import types

    import torch
    from transformers.models.llama import modeling_llama

    spec = importlib.util.find_spec("transformers.models.llama.modeling_llama")
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    stubs = {name: types.ModuleType(name) for name in ("torchvision", "torchvision.models")}
    vision = types.ModuleType("vision_transformer")
    vision.nn = torch.nn
    stubs["torchvision.models"].vision_transformer = vision
    sys.modules |= stubs
    from lxt.efficient import monkey_patch

    plain = own.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    monkey_patch(modeling_llama)
    ruled = modeling_llama.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def work(net) -> Work:
        net.eval().requires_grad_(False)

        def once(ids: list[int]) -> object:
            x = net.get_input_embeddings()(torch.tensor([ids])).requires_grad_()
            logits = net(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits[0, -1]
            logits.max().backward()
            return (x * x.grad).sum(-1)

        return once

    return work(ruled), work(plain)


def ratios(pair: tuple[Work, Work], tokens: list[int], rounds: int) -> None:
    """Prints the median ratio of the two, taken in turn."""
    import torch

    for count in tokens:
        ids = torch.randint(100, 40000, (count,), generator=torch.Generator().manual_seed(0)).tolist()
        rows = []
        for turn in range((3 if count > 1024 else rounds) + 2):
            seconds = []
            for work in pair:
                start = time.perf_counter()
                work(ids)
                seconds.append(time.perf_counter() - start)
            if turn > 1:  # the first rounds warm up
                rows.append(seconds)
        ratio = statistics.median(a / b for a, b in rows)
        own, plain = (1000 * statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{count} {ratio:.3f} {own:.0f} {plain:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--child", choices=["icebear", "lxt"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=int, choices=[0, 1], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        pair = {"icebear": icebear, "lxt": lxt}[options.child](options.folder)
        if options.peak is None:
            ratios(pair, options.tokens, options.rounds)
        else:
            work, tokens = pair[options.peak], list(range(100, 100 + options.tokens[0]))
            work(tokens[:8])
            peak(lambda: work(tokens))
        return
    from icebear.models.loading.conversion import fetch
    from icebear.models.loading.presets import PRESETS

    folder = str(fetch(PRESETS["smollm2-135m"]))
    pythons = {"icebear": Path(sys.executable), "lxt": options.python or environment()}

    def child(name: str, *arguments: object, **env: str) -> list[str]:
        command = [pythons[name], __file__, "--child", name, "--folder", folder, *map(str, arguments)]
        env |= {"PYTHONPATH": {"icebear": str(HERE.parent), "lxt": ""}[name]}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **env})
        return done.stdout.split()

    print("| | tokens | relevance / gradient x input | ms | ms | peak, MiB | peak, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for count in options.tokens:
        for name in pythons:
            times = child(name, "--rounds", options.rounds, "--tokens", count)[1:]
            at_once = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back, so that a peak is what was in use
            peaks = [child(name, "--peak", which, "--tokens", count, **at_once)[0] for which in (0, 1)]
            print(f"| {name} | {count} | {' | '.join([*times, *peaks])} |", flush=True)


if __name__ == "__main__":
    main()
