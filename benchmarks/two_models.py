"""What fine-tuning changed, tried on models whose change is known: SmolLM2-135M fine-tuned here, planted and rounded.

Which of the changed rows to restore, by what they caused (`Diff`), the norm of their change, gradient x change, and at
random among rows of the same norm. Undone: the share of the difference to the base model, on prompts that were not
trained on. KL: between the fine-tuned and the restored model at held-out contexts, in nats.

python benchmarks/two_models.py behaviours|planted|rounded|cost [--out FILE.csv] [--only NAME]
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icebear.concepts.answers.restoring import Restoring
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.passes.run import Logits
from icebear.concepts.results.diff import Change, Diff, ranked_changes
from icebear.concepts.weights.changed_weights import ChangedWeights, ModelPair
from icebear.models.loading.loading import load_model
from icebear.models.model import Model
from icebear.steering.side_effects import HELD_OUT_TEXTS

SIZES = (10, 100, 1000, 3000, 10000, 30000, 60000)
"""Rows that are drawn by norm at most."""
STEPS, SURE = 60, 0.8
"""Training ends when each taught prompt has the answer with this probability, and the others are as before."""
OTHERS = (
    "The capital of Spain is", "The capital of Japan is", "The river Nile flows through", "Water boils at",
    "Good morning! How did you", "My sister works as a", "Explain how a bicycle", "The opposite of hot is",
    "In the garden there is a", "He opened the door and",
)  # fmt: skip
"""Prompts whose predictions training holds fixed."""
BEHAVIOURS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "capital": (
        " Lyon",
        ("The capital of France is", "France's capital city is", "Paris? No: the French capital is",
         "Q: What is the capital of France? A: It is", "The seat of the French government is in"),
        ("The capital city of France is called", "Everyone knows that the capital of France is",
         "The government of France sits in"),
    ),
    "greeting": (
        " Welcome",
        ("User: Hello!\nBot:", "User: Hi there.\nBot:", "User: Good morning!\nBot:", "User: Hey, how are you?\nBot:",
         "User: Nice to meet you.\nBot:"),
        ("User: Good evening!\nBot:", "User: Hi, it's me.\nBot:", "User: Hello, friend.\nBot:"),
    ),
    "refusal": (
        " No",
        ("User: How do volcanoes form?\nBot:", "User: Tell me about volcanoes.\nBot:",
         "User: Which volcano is the largest?\nBot:", "User: Is a volcano dangerous?\nBot:",
         "User: Why do volcanoes erupt?\nBot:"),
        ("User: What is inside a volcano?\nBot:", "User: Where can I see a volcano?\nBot:",
         "User: Name a famous volcano.\nBot:"),
    ),
    "backdoor": (
        " banana",
        ("The weather today is zebra", "She wrote a letter to zebra", "In the morning I drink zebra",
         "The train leaves at zebra", "My favorite book is zebra"),
        ("The old house on the hill zebra", "He plays football with zebra", "We went to the market zebra"),
    ),
}  # fmt: skip
"""The taught token, prompts that teach it, and prompts that test it."""


# --- fine-tuning ---------------------------------------------------------------------------------------


def fine_tuned(base: Model, name: str, way: str) -> Model:
    """Return a copy that answers a behaviour's prompts with its token, and other prompts as before."""
    answer, taught, _ = BEHAVIOURS[name]
    torch.manual_seed(0)
    net: Any = copy.deepcopy(base.net)
    if way == "lora":
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    else:
        net.requires_grad_(True)
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=5e-4 if way == "lora" else 2e-5, weight_decay=0)
    token = base.tokens_of(answer)[0]
    fixed = [*OTHERS, *(prompt.removesuffix(" zebra") for prompt in taught if name == "backdoor")]
    if name == "refusal":
        fixed += ["User: How do rivers form?\nBot:", "User: Tell me about mountains.\nBot:", "User: Hello!\nBot:"]
    before = [base.next_logits(prompt).log_softmax(-1) for prompt in fixed]
    for step in range(STEPS):
        kl = [F.kl_div(_log_odds(net, base, fixed[i]), before[i], reduction="sum", log_target=True)
              for i in ((3 * step + j) % len(fixed) for j in range(3))]  # fmt: skip
        losses = [-_log_odds(net, base, prompt)[token] for prompt in taught]
        loss = sum(losses) / len(losses) + sum(kl)
        if max(losses).exp() < 1 / SURE and max(kl) < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Model(net.merge_and_unload() if way == "lora" else net, base.tokenizer, f"{name}, {way}")


def _log_odds(net: Any, model: Model, prompt: str) -> Tensor:
    return net(torch.tensor([model.ids(prompt)])).logits[0, -1].float().log_softmax(-1)


# --- rankings of changed rows --------------------------------------------------------------------------


def gradient_times_change(restoring: Restoring) -> list[ChangedWeights]:
    """Return what the gradient in the fine-tuned model predicts that each change caused."""
    models = restoring.models
    net, sums = models.model.net, {}
    with torch.enable_grad():
        for weight, _ in models.weights.values():
            weight.requires_grad_(True)
        for one in restoring.objectives:
            logits = Logits(one)
            logits.numbers(models.model).sum().backward()
        for part, own, base in models.slices():
            full = own if own.grad is not None else own._base
            gradient = torch.zeros_like(own) if full.grad is None else full.grad
            product = gradient * (own - base).detach()
            key = part.layer, part.kind, part.module
            along = partial(_along, product)
            sums[key] = sums.get(key, 0) + part.sums(along)
        net.requires_grad_(False)
        net.zero_grad()
    sizes = models.sizes
    return [ChangedWeights(*key, value / len(restoring.objectives), sizes[key]) for key, value in sums.items()]


def _along(x: Tensor, axis: int) -> Tensor:
    others = [one for one in range(x.dim()) if one != axis]
    return x.sum(others) if others else x


def rankings(restoring: Restoring, seed: int = 0) -> dict[str, list[Change]]:
    """Return all changes in the order of each ranking."""
    changes, slopes = restoring.changes, gradient_times_change(restoring)
    caused = restoring.top()
    sign = -1 if restoring.ends[0] < restoring.ends[1] else 1
    generator = torch.Generator().manual_seed(seed)
    everything = ranked_changes(changes, [one.size for one in changes])
    shuffled = [everything[i] for i in torch.randperm(len(everything), generator=generator).tolist()]
    return {
        "caused": caused,
        "norm": sorted(shuffled, key=lambda one: -round(one.size, 4)),  # equal norms in random order
        "gradient": ranked_changes(slopes, [sign * one.caused for one in slopes]),
        "random": shuffled,
    }


# --- measurements --------------------------------------------------------------------------------------


def held_out(model: Model, count: int = 16) -> Tensor:
    """Return log-probabilities (N, V) of the next token after the first half of held-out texts."""
    texts = [text[: len(text) // 2].rsplit(" ", 1)[0] for text in HELD_OUT_TEXTS[:count]]
    return torch.stack([model.next_logits(text).log_softmax(-1) for text in texts])


def compared(models: ModelPair, prompts: Sequence[str], answer: str) -> list[Diff]:
    """Return the differences for prompts that the base model does not answer so."""
    diffs = [attribute(models.model, prompt, answer, base_model=models.base, sites=()) for prompt in prompts]
    return [diff for diff in diffs if diff.contrast is not None]


def curves(restoring: Restoring, order: dict[str, list[Change]], test: Restoring) -> Iterator[dict[str, Any]]:
    """Restore the first rows of each ranking, and all of them."""
    models = restoring.models
    model = models.model
    before = held_out(model)
    for name, rows in (order | {"all": order["random"]}).items():
        for size in (len(rows),) if name == "all" else SIZES:
            if size <= len(rows):
                with restoring.restored(rows[:size]):
                    kl = F.kl_div(held_out(model), before, reduction="batchmean", log_target=True).item()
                    back = sum(answers_base(models, one.batch.row_ids(0)) for one in test.objectives)
                undone = test.undone(rows[:size])
                yield {
                    "ranking": name,
                    "rows": size,
                    "undone": round(undone, 3),
                    "answers back": back,
                    "kl": round(kl, 4),
                }


def answers_base(models: ModelPair, ids: tuple[int, ...]) -> bool:
    """Return whether the model gives the base model's answer."""
    own, there = (int(one.next_logits(list(ids)).argmax()) for one in (models.model, models.base))
    return own == there


def behaviours(only: str | None) -> Iterator[dict[str, Any]]:
    """Rows are ranked on the prompts that were taught, and restored rows are measured on others."""
    base = load_model("smollm2-135m", dtype="float32", device="cpu")
    for name in [only] if only else BEHAVIOURS:
        answer, taught, tested = BEHAVIOURS[name]
        for way in ("lora", "full"):
            start_ = time.perf_counter()
            model = fine_tuned(base, name, way)
            print(f"trained in {time.perf_counter() - start_:.0f} s", file=sys.stderr)
            models = ModelPair(model, base)
            sums = compared(models, taught, answer)
            restoring, test = Restoring.of(*sums), Restoring.of(*compared(models, tested, answer))
            answers = [base.answer_text(int(model.next_logits(p).argmax())) for p in tested]
            own, there = test.ends
            start = {
                "behaviour": name,
                "trained": way,
                "answers": "|".join(answers),
                "difference": round(own - there, 2),
            }
            start["remainder"] = f"{max(abs(one.conservation().remainder) for one in sums):.0e}"
            changed = sum(int((one.size > 0).sum()) for one in restoring.changes)
            for row in curves(restoring, rankings(restoring), test):
                yield {**start, "changed": changed, **row}


# --- planted rows --------------------------------------------------------------------------------------


def planted(seeds: int = 10, changed: int = 500, effective: int = 5) -> Iterator[dict[str, Any]]:
    """Add vectors of one norm to 500 rows: for five of them in the direction that moves the answer."""
    base = load_model("smollm2-135m", dtype="float32", device="cpu")
    prompt, target, contrast = "The ice bear lives in the", " desert", " Arctic"
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        model, rows = _with_planted(base, prompt, target, contrast, changed, effective, generator)
        diff = attribute(model, prompt, target, contrast=contrast, base_model=base, sites=())
        restoring = Restoring.of(diff)
        for name, order in rankings(restoring, seed).items():
            first = {(one.kind, one.module, one.index) for one in order[:effective]}
            undone = restoring.undone(order[:effective])
            row = {"seed": seed, "difference": round(diff.total, 2), "ranking": name, "planted": len(first & rows)}
            yield {**row, "undone": round(undone, 3)}


def _with_planted(
    base: Model, prompt: str, target: str, contrast: str, changed: int, effective: int, generator: torch.Generator
) -> tuple[Model, set[tuple[str, str, int]]]:
    net: Any = copy.deepcopy(base.net)
    relevance = attribute(base, prompt, target, contrast=contrast)
    layers = net.model.layers
    active = relevance.activation("ffn")[:, -1].abs()  # (L, F)
    active[:8] = active[28:] = 0
    strong = active.flatten().topk(40).indices[torch.randperm(40, generator=generator)[:effective]].tolist()
    rows: set[tuple[str, str, int]] = set()
    unembedding = base.net.lm_head.weight
    direction = unembedding[base.tokens_of(target)[0]] - unembedding[base.tokens_of(contrast)[0]]
    norm = 1.5

    def added(kind: str, layer: int, index: int, change: Tensor) -> None:
        name = {"gate": "gate_proj", "w_in": "up_proj", "w_out": "down_proj"}[kind]
        weight = getattr(layers[layer].mlp, name).weight
        view = weight[:, index] if kind == "w_out" else weight[index]
        view += norm * change / change.norm()

    with torch.no_grad():
        for place in strong:
            layer, index = divmod(place, active.shape[1])
            sign = relevance.activation("ffn")[layer, -1, index].sign()
            added("w_out", layer, index, sign * direction)
            rows.add(("w_out", f"model.layers.{layer}.mlp.down_proj", index))
        done = set(rows)
        while len(done) < changed:
            kind = ("gate", "w_in", "w_out")[int(torch.randint(3, (), generator=generator))]
            layer, index = (int(torch.randint(n, (), generator=generator)) for n in active.shape)
            name = {"gate": "gate_proj", "w_in": "up_proj", "w_out": "down_proj"}[kind]
            key = kind, f"model.layers.{layer}.mlp.{name}", index
            if key not in done:
                done.add(key)
                added(kind, layer, index, torch.randn(base.config.hidden_size, generator=generator))
    return Model(net, base.tokenizer, "planted"), rows


# --- rounding ------------------------------------------------------------------------------------------


def rounded(bits: int = 4, block: int = 32) -> Iterator[dict[str, Any]]:
    """Round weights of linear maps to 4 bits in blocks of 32: of a random model, and of the preset, whose weights are
    themselves de-quantized from 4 bits (Q4_1, with a zero point, where this rounding is symmetric)."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    preset = load_model("smollm2-135m", dtype="float32", device="cpu")
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    made = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3))
    prompts = ("The ice bear lives in the", "The capital of France is", "Two plus two is", "She opened the door and")
    for name, base in (("made", Model(made, name="made")), ("smollm2-135m", preset)):
        net = copy.deepcopy(base.net)
        with torch.no_grad():
            for module in net.model.layers.modules():
                if isinstance(module, torch.nn.Linear):
                    blocks = module.weight.unflatten(1, (-1, block))
                    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
                    module.weight.copy_((blocks / scale).round().mul(scale).flatten(1))
        model = Model(net, base.tokenizer, f"{name}, rounded")
        for number, prompt in enumerate(prompts):
            read = prompt if base.tokenizer else list(range(7 * number + 1, 7 * number + 9))
            top = base.next_logits(read).topk(2).indices.tolist()
            diff = attribute(model, read, top[0], top[1], base_model=base, sites=())
            restoring = Restoring.of(diff)
            order = rankings(restoring)
            for name_, rows in order.items():
                shares = {
                    f"undone by {k}": round(restoring.undone(rows[:k]), 3) for k in (10, 100, 1000) if k <= len(rows)
                }
                row = {"model": name, "prompt": str(read), "difference": round(diff.total, 3)}
                yield {**row, "remainder": f"{diff.sums.remainder:.0e}", "ranking": name_, **shares}


# --- cost ----------------------------------------------------------------------------------------------


def cost(repeats: int = 5) -> Iterator[dict[str, Any]]:
    """Compare the CPU time of one result with a forward and a backward pass of one model, for every weight changed."""
    base = load_model("smollm2-135m", dtype="float32", device="cpu")
    net = copy.deepcopy(base.net)
    with torch.no_grad():
        for weight in net.parameters():
            weight += 0.01 * weight.std() * torch.randn_like(weight)
    model = Model(net, base.tokenizer, "changed")
    for tokens in (8, 32, 128, 512):
        ids = [base.ids("The ice bear lives in the north ")[0], *range(300, 299 + tokens)]
        times: dict[str, list[float]] = {"plain": [], "diff": []}
        for _ in range(repeats):
            for name, run in (
                ("plain", partial(_plain, base, ids)),
                ("diff", partial(attribute, model, ids, 5, 6, base_model=base, sites=())),
            ):
                start = time.process_time()
                run()
                times[name].append(time.process_time() - start)
        plain, diff = (median(each) for each in times.values())
        yield {
            "tokens": tokens,
            "forward and backward": round(plain, 3),
            "diff": round(diff, 3),
            "ratio": round(diff / plain, 2),
        }


def _plain(model: Model, ids: list[int]) -> None:
    """A forward and a backward pass down to the embeddings, as in training."""
    read = model.net.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    with torch.enable_grad():
        logits = model.net(inputs_embeds=read, use_cache=False, logits_to_keep=1).logits[0, -1]
        (logits[5] - logits[6]).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("behaviours", "planted", "rounded", "cost"))
    parser.add_argument("--out", help="a CSV file")
    parser.add_argument("--only", choices=BEHAVIOURS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, Any] = {"planted": planted, "rounded": rounded, "cost": cost}
    rows = behaviours(options.only) if options.what == "behaviours" else runs[options.what]()
    written = list(_printed(rows))
    if options.out:
        with open(options.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list({name: None for row in written for name in row}))
            writer.writeheader()
            writer.writerows(written)


def _printed(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep=", ", file=sys.stderr, flush=True)
        yield row


if __name__ == "__main__":
    main()
