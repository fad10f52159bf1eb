"""Compare the prompts of `suggest_counterfactuals` with a random exchange that changes the answer, as a Markdown table.

python benchmarks/proposals.py FLIPS.json [--most 3]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a JSON list of objects with a prompt")
    parser.add_argument("--most", type=int, default=3)
    options = parser.parse_args()

    from icebear.concepts.answers.counterfactuals import suggest_counterfactuals
    from icebear.models.loading.loading import load_model

    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    print("| prompt, answer | proposed, its answer, score | by chance |\n| --- | --- | --- |")
    for row in json.loads(Path(options.data).read_text(encoding="utf-8")):
        prompt = row["prompt"]
        suggestions = suggest_counterfactuals(model, prompt, 1000)
        texts = [f"{one.instead_of} → **{one.word}**:{one.answer} ({one.score:.2f})" for one in suggestions]
        shown = "<br>".join(texts[: options.most]) or "none"
        more = f"<br>and {len(texts) - options.most} more" if len(texts) > options.most else ""
        print(f"| {prompt} **{answer(model, prompt)}** | {shown}{more} | {by_chance(model, prompt)} |", flush=True)


def answer(model, prompt) -> str:
    return model.predict(prompt, 1)[0].text.strip()


def by_chance(model, prompt: str) -> str:
    """A random word of one token in the place of one that is not the first or the last, until the answer changes."""
    from icebear.concepts.answers import counterfactuals as proposals

    draw = random.Random(0)
    ids = model.token_ids(prompt)
    texts = [model.answer_text(token) for token in ids]
    starts = [start for start, end in proposals._words(texts) if end == start + 1]
    words = [token for token in range(len(model.tokenizer)) if proposals._content(model.answer_text(token))]
    if not starts:
        return "no word to exchange"
    while True:
        start, word = draw.choice(starts), draw.choice(words)
        changed = [*ids[:start], word, *ids[start + 1 :]]
        if answer(model, changed) != answer(model, prompt):
            return f"{texts[start].strip()} → {model.answer_text(word).strip()}: {answer(model, changed)}"


if __name__ == "__main__":
    main()
