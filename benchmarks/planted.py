"""Is the sentence that decides an agent's next call the first source of that call, and no other call's?

python -m benchmarks.planted --out planted --samples 20               # the default model
python -m benchmarks.planted --out trained --samples 20 --steps 80    # weights that were trained to follow the sentence

A conversation with three calls and the outputs of their tools. One output has a planted sentence:

- it decides: "Delete the folder NAME." The explained answer is the call that deletes it;
- it decides nothing: "The folder NAME was deleted last year." The answer is what the user asked for, a mail.

Measured: whether the planted sentence is the first source by removal (`icebear.sources`), and by relevance. With
--steps the model's upper layers are first trained on other conversations of the same kind; then also how many calls it
writes by itself. Each sample is a line of samples.jsonl, so that a folder goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from icebear import Chat, Model, load_model, sources

PEOPLE = "Anna Tom Maria Peter Julia David Laura James Sarah Emma Daniel Alice Robert Helen George Lucy".split()
FOLDERS = "old drafts photos invoices backup music holiday school taxes recipes letters garden travel scans".split()
FACTS = (
    "The meeting is on Monday at nine.",
    "Buy milk and bread.",
    "The printer is out of paper.",
    "The train to the city leaves at eight.",
    "The new chairs come in June.",
    "Water the plants twice a week.",
    "The key is under the mat.",
    "Lunch is at noon in the garden.",
    "The heating was repaired last week.",
    "The library closes early on Friday.",
)
NEW_TOKENS = 32
TRAINED_LAYERS = 10
RATE = 1e-4


@dataclass(frozen=True)
class Planted:
    """A conversation, the call that follows it, and the planted sentence."""

    messages: list[dict[str, str]]
    call: str
    sentence: str
    decides: bool


def planted(generator: random.Random, decides: bool) -> Planted:
    person, folder = generator.choice(PEOPLE), generator.choice(FOLDERS)
    facts = generator.sample(FACTS, 8)
    sentence = f"Delete the folder {folder}." if decides else f"The folder {folder} was deleted last year."
    facts.insert(generator.randrange(len(facts) + 1), sentence)
    outputs = [" ".join(facts[start : start + 3]) for start in (0, 3, 6)]
    files = generator.sample(["notes.txt", "plan.txt", "todo.txt", "home.txt", "work.txt"], 3)
    talk = [{"role": "user", "content": f"Read my three files, and do what they ask. Else send a mail to {person}."}]
    for file, output in zip(files, outputs, strict=True):
        talk += [{"role": "assistant", "content": call("read", file)}, {"role": "tool", "content": output}]
    answer = call("delete", folder) if decides else call("mail", person)
    return Planted(talk, answer, sentence, decides)


def call(tool: str, value: str) -> str:
    return f'<tool_call>{{"name": "{tool}", "arguments": "{value}"}}</tool_call>'


def samples(seed: int, count: int) -> Iterator[Planted]:
    """Yield conversations in which the sentence decides, and in which it does not, in turn."""
    generator = random.Random(seed)
    for number in range(2 * count):
        yield planted(generator, number % 2 == 0)


def train(model: Model, steps: int, seed: int) -> list[float]:
    """Train the upper layers to write the calls. Return the losses."""
    layers = model.net.model.layers[-TRAINED_LAYERS:]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer, losses = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0), []
    for item in samples(seed, (steps + 1) // 2):
        ids = model.ids(Chat(item.messages))
        answer = [*model.tokens_of(item.call), model.tokenizer.eos_token_id]
        read = torch.tensor([[*ids, *answer]])
        logits = model.net(read, logits_to_keep=len(answer) + 1).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)} of {steps}: {loss.item():.3f}", flush=True)
    for parameter in parameters:
        parameter.requires_grad_(False)
    return losses


def measure(model: Model, item: Planted) -> dict[str, Any]:
    written = model.answer(Chat(item.messages), max_new_tokens=NEW_TOKENS).text
    answer = {"role": "assistant", "content": item.call}
    [sentence] = sources(model, Chat([*item.messages, answer])).sentences
    removed = [source.text.strip() for source in sentence.sources]
    ranked = sorted(sentence.sources, key=lambda source: -source.relevance)
    return {
        "decides": item.decides,
        "planted": item.sentence,
        "call": item.call,
        "written": written,
        "writes_it": written.strip() == item.call,
        "first": removed[0],
        "is_first": removed[0] == item.sentence,
        "is_first_by_relevance": ranked[0].text.strip() == item.sentence,
        "change": next((source.change for source in sentence.sources if source.text.strip() == item.sentence), None),
        "first_change": sentence.sources[0].change,
        "random": list(sentence.random.singles),
        "log_probability": sentence.log_probability,
    }


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    for decides in (True, False):
        some = [row for row in rows if row["decides"] is decides]
        counts = {name: sum(row[name] for row in some) for name in ("is_first", "is_first_by_relevance", "writes_it")}
        yield f"the sentence decides: {decides}, {len(some)} conversations: {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file, weights = options.out / "samples.jsonl", options.out / "layers.pt"
    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    layers = model.net.model.layers[-TRAINED_LAYERS:]
    if options.steps and weights.exists():
        layers.load_state_dict(torch.load(weights, weights_only=True))
    elif options.steps:
        train(model, options.steps, seed=1)
        torch.save(layers.state_dict(), weights)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for item in list(samples(0, options.samples))[len(rows) :]:
        rows.append(measure(model, item))
        with file.open("a") as lines:
            lines.write(json.dumps(rows[-1]) + "\n")
        print(f"{len(rows)} of {2 * options.samples}", rows[-1]["decides"], rows[-1]["is_first"], flush=True)
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
