"""Which of 31 claims about smollm2-135m break in other versions of it, as a Markdown table.

python benchmarks/claims.py [--seeds 20] [--out claims.json]
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from icebear.app.recipes import EXAMPLE_RECIPE
from icebear.claims.checked_claim import check_claim
from icebear.claims.claim import Claim
from icebear.claims.kind import Kind
from icebear.claims.kinds.edits import FlipClaim
from icebear.claims.kinds.meanings import ConceptClaim
from icebear.claims.kinds.predictions import (
    AnswerClaim,
    NecessityClaim,
    SufficiencyClaim,
    most_relevant,
    of_explanation,
    of_graph,
    subject,
)
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.results.ranking import Ranking
from icebear.errors import InputError
from icebear.explanation.explanation import Explanation
from icebear.models.loading.loading import load_model
from icebear.models.model import Model
from icebear.recipe import Recipe
from icebear.steering.concept.finding import find_concept
from icebear.steering.provenance import FlipRecord
from icebear.steering.side_effects import HeldOutContexts

ROOT = Path(__file__).parent.parent
PAIRS = (
    ("The ice bear lives in the", "The wild camel lives in the"),
    ("The capital of Italy is", "The capital of Spain is"),
    ("A teacher works in a", "A nurse works in a"),
)
"""The prompts that are compared, of one length each."""
ANSWERS = ("The opposite of big is",)
DAMAGED = 12
"""The layer that is damaged."""
GROUP, STEPS, BATCH = 64, 40, 4


def drafts(model: Model) -> list[Kind]:
    """Return what is claimed."""
    whats: list[Kind] = []
    for prompt, other in PAIRS:
        relevance = attribute(model, prompt, counterfactual=other, sites=("ffn",))
        explanation = Explanation.of(model, relevance, Ranking(2, "ffn"))
        about = subject(model, relevance)
        whats += [what for what, _ in of_explanation(model, explanation)]
        for count in (100, 1000) if prompt == PAIRS[0][0] else (1000,):
            nodes = most_relevant(relevance, "ffn", count)
            whats += [SufficiencyClaim(**about, nodes=nodes), NecessityClaim(**about, nodes=nodes)]
        graph = circuit(model, prompt, counterfactual=other, nodes=20)
        whats += [what for what, _ in of_graph(model, graph, None)][:2]
    whats += [AnswerClaim(prompt, model.predict(prompt, 1)[0].text) for prompt in ANSWERS]
    recipe = Recipe.load(EXAMPLE_RECIPE)
    flip = FlipRecord.of(recipe)
    assert flip
    kl = HeldOutContexts(model).off_target_kl(list(recipe))
    whats.append(FlipClaim(flip.prompt, flip.text, recipe.edits, round(1.05 * kl, 4)))
    texts = [(ROOT / "examples" / f"{name}.txt").read_text().splitlines() for name in ("music", "not-music")]
    whats += [what for what, _ in ConceptClaim.of(find_concept(model, *texts, "music"))]
    return whats


def rounded(bits: int) -> Callable[[Model], Model]:
    """Round the weights of all layers to so many bits, in groups of 64 with one scale each."""

    def change(model: Model) -> Model:
        for module in _linears(model):
            groups = module.weight.data.unflatten(1, (-1, GROUP))
            scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            module.weight.data = (groups / scale).round().mul(scale).flatten(1)
        return model

    return change


def damaged(model: Model) -> Model:
    """Shuffle the rows of one layer's W_out, as a wrong file would."""
    layer = model.site_module("ffn", DAMAGED)
    order = torch.randperm(layer.weight.shape[1], generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr, index]
    layer.weight.data = layer.weight.data[:, order]  # type: ignore[union-attr, index]
    return model


def fine_tuned(model: Model) -> Model:
    """Train a LoRA adapter of rank 8 on the 40 sentences of examples/music.txt, and merge it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    net = get_peft_model(model.net, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    texts = (ROOT / "examples" / "music.txt").read_text().splitlines()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=5e-4)
    for step in range(STEPS):
        batch = model.padded([model.token_ids(text) for text in texts[step * BATCH % len(texts) :][:BATCH]])
        labels = batch.ids.masked_fill(batch.mask == 0, -100)
        loss = net(input_ids=batch.ids, attention_mask=batch.mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"LoRA: loss {loss.item():.2f} after {STEPS} steps", flush=True)
    return Model(net.merge_and_unload(), model.tokenizer, model.name)


def random_weights(model: Model) -> Model:
    """Return a network of the same shape with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return Model(AutoModelForCausalLM.from_config(model.net.config).float(), model.tokenizer, model.name)


def _linears(model: Model) -> list[nn.Linear]:
    modules = (module for layer in model.layer_modules for module in layer.modules())
    return [module for module in modules if isinstance(module, nn.Linear)]


VERSIONS: dict[str, Callable[[Model], Model]] = {
    "itself": lambda model: model,
    "bfloat16": lambda model: Model(model.net.bfloat16(), model.tokenizer, model.name),
    "8-bit": rounded(8),
    "4-bit": rounded(4),
    "LoRA": fine_tuned,
    "damaged layer": damaged,
    "random weights": random_weights,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="also check the model itself with so many other seeds")
    parser.add_argument("--out", help="write the verdicts to this JSON file")
    options = parser.parse_args()
    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    claims = []
    for what in drafts(model):
        try:
            claims.append(Claim.of(model, what))
        except InputError as error:
            print(f"refused: {what.kind}: {what}. {error}", flush=True)
    print(f"{len(claims)} claims", flush=True)
    results: dict[str, list[Any]] = {}
    for name, change in VERSIONS.items():
        version = change(Model(copy.deepcopy(model.net), model.tokenizer, model.name))
        results[name] = [check_claim(version, claim) for claim in claims]
        print(name, Counter(row.verdict for row in results[name]), flush=True)
    for seed in range(1, options.seeds + 1):
        others = (replace(one, provenance=replace(one.provenance, seed=seed)) for one in claims)  # type: ignore[type-var]
        failing = [str(row.claim) for row in (check_claim(model, one) for one in others) if row.verdict != "passed"]
        print(f"seed {seed}: {len(claims) - len(failing)} of {len(claims)} passed {failing}", flush=True)
    print(table(claims, results))
    if options.out:
        rows = {name: [row.to_dict() for row in some] for name, some in results.items()}
        Path(options.out).write_text(json.dumps(rows, indent=1))


def table(claims: list[Claim], results: dict[str, list[Any]]) -> str:
    """Return for each kind the number of claims that do not pass, by version."""
    kinds = list(dict.fromkeys(claim.what.kind for claim in claims))
    lines = [f"| claims | number | {' | '.join(results)} |", f"| --- | --- |{' --- |' * len(results)}"]
    for kind in [*kinds, ""]:
        chosen = [number for number, claim in enumerate(claims) if kind in ("", claim.what.kind)]
        counts = [sum(rows[number].verdict != "passed" for number in chosen) for rows in results.values()]
        lines.append(f"| {kind or '**all**'} | {len(chosen)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
