"""Measure the finished examples of the app's first view: python docs/examples.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from icebear import Chat, attribute, circuit, flip, load_model
from icebear.app.web.circuit import measured_record
from icebear.app.web.shared.markdown import read_prompt
from icebear.explanation.explanation import saved_stages, saved_tokens
from icebear.models.model import Model
from icebear.steering.outcome import outcome_of

FOLDER = Path(__file__).parents[1] / "app" / "web" / "why" / "examples"


class Example(NamedTuple):
    title: str
    about: str
    prompt: str
    counterfactual: str
    target: str
    contrast: str


def chat(animals: str) -> str:
    question = {"role": "user", "content": f"Where do {animals} live?"}
    return Chat([question, {"role": "assistant", "content": "They live in the"}]).to_json(None)


EXAMPLES = {
    "geography": Example(
        "Geography",
        "One word of the question decides; the neurons lower Italian cities.",
        "The capital of France is",
        "The capital of Italy is",
        " Paris",
        " Rome",
    ),
    "languages": Example(
        "Two languages",
        "From a language to its country.",
        "She speaks fluent French because she was born in",
        "She speaks fluent Spanish because she was born in",
        " France",
        " Spain",
    ),
    "music": Example(
        "Music",
        "What a musician picks up, and a soldier does not.",
        "The musician picked up his",
        "The soldier picked up his",
        " guitar",
        " rifle",
    ),
    "grammar": Example(
        "Grammar",
        "The verb agrees with the subject, not with the noun before it.",
        "The boys in the photo",
        "The boy in the photo",
        " are",
        " is",
    ),
    "chat": Example(
        "A chat",
        "A word of an answer, in a conversation.",
        chat("ice bears"),
        chat("wild camels"),
        " Arctic",
        " Arabian",
    ),
    "sums": Example(
        "One that does not work",
        "This model cannot add, and its neurons show no sum: the answer is not sure, and wrong.",
        "Two plus two equals",
        "Two plus six equals",
        " five",
        " eight",
    ),
}


def measure(model: Model, example: Example) -> dict[str, Any]:
    """Return the record of an example."""
    prompt, counterfactual = map(read_prompt, (example.prompt, example.counterfactual))
    relevance = attribute(model, prompt, example.target, example.contrast, counterfactual=counterfactual)
    saved = saved_stages(saved_tokens(relevance, prompt, counterfactual), model, relevance)
    recipe = flip(model, prompt, example.contrast, counterfactual)
    return {
        "title": example.title,
        "about": example.about,
        "explanation": saved.to_dict(),
        "flip": recipe.noting(**outcome_of(model, recipe).provenance()).to_dict(),
    }


def measured_circuit(model: Model, example: Example) -> dict[str, Any]:
    """Return the record of an example's circuit."""
    prompt, counterfactual = map(read_prompt, (example.prompt, example.counterfactual))
    return measured_record(circuit(model, prompt, example.target, example.contrast, counterfactual=counterfactual))


if __name__ == "__main__":
    model = load_model("smollm2-135m")
    for name in sys.argv[1:] or EXAMPLES:
        for file, make in ((name, measure), (f"{name}.circuit", measured_circuit)):
            record = json.dumps(make(model, EXAMPLES[name]), ensure_ascii=False, indent=1)
            (FOLDER / f"{file}.json").write_text(record + "\n", encoding="utf-8")
