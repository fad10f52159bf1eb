"""Questions of a faithfulness evaluation: the next word, the sentiment of a review, or one answer of four."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from icebear.actmax.index.corpus import read_corpus
from icebear.errors import InputError
from icebear.evaluation.explanations.groundtruth import homes
from icebear.models.model import Model

SHORTEST = 16
CORPORA = {"next-word": "wiki-summaries", "reviews": "imdb-reviews", "choice": ""}
"""Task -> its default corpus."""


@dataclass(frozen=True)
class Question:
    """A prompt, as token ids; the answers to choose from (any token, if empty), and the right one, if it is known."""

    prompt: list[int]
    answers: tuple[str, ...] = ()
    right: str | None = None

    def choice(self, model: Model) -> str | None:
        """Return the model's most probable answer; None for any token."""
        if not self.answers:
            return None
        logits = model.next_logits(self.prompt)
        return max(self.answers, key=lambda answer: logits[model.answer_id(answer, "answer")].item())


def questions_of(model: Model, task: str, corpus: str, samples: int, seed: int, longest: int) -> list[Question]:
    """Return questions of one of the tasks in `CORPORA`, at most `longest` tokens long."""
    if task == "choice":
        return choices(model, samples, seed)
    documents = list(read_corpus(corpus).documents())
    if task == "reviews":
        return reviews(model, documents, samples, seed, longest)
    return next_words(model, [text for _, text in documents], samples, seed, longest)


def next_words(model: Model, texts: Sequence[str], samples: int, seed: int = 0, longest: int = 128) -> list[Question]:
    """Return beginnings of texts, cut at a random token."""
    generator = random.Random(seed)
    pool = list(texts)
    generator.shuffle(pool)
    questions: list[Question] = []
    for text in pool:
        ids = model.token_ids(text)
        if len(ids) > SHORTEST:
            questions.append(Question(ids[: generator.randint(SHORTEST, min(longest, len(ids) - 1))]))
        if len(questions) == samples:
            break
    if not questions:
        raise InputError(f"The corpus has no text of more than {SHORTEST} tokens; name another --corpus.")
    return questions


def reviews(
    model: Model, documents: Sequence[tuple[str, str]], samples: int, seed: int = 0, longest: int = 128
) -> list[Question]:
    """Ask for the sentiment of the beginnings of reviews.

    documents: titles that begin with "positive:" or "negative:", and texts.
    """
    tail = model.continuation("\nThe review above is either positive or negative. It is")
    if not documents or longest <= len(tail):
        raise InputError(f"No review fits into --max-tokens; set --max-tokens to more than {len(tail)}.")
    questions = []
    for title, text in random.Random(seed).sample(list(documents), min(samples, len(documents))):
        kind = title.partition(":")[0]
        if kind not in ("positive", "negative"):
            raise InputError(f"{title!r} does not say whether a review is positive; use --corpus imdb-reviews.")
        head = model.token_ids(f"Review: {text}")[: longest - len(tail)]
        questions.append(Question(head + tail, (" positive", " negative"), f" {kind}"))
    return questions


def choices(model: Model, samples: int, seed: int = 0) -> list[Question]:
    """Ask in which of four cities a person of the context lives; the answer is a letter."""
    questions = []
    for context, person, right, cities in homes(samples, seed):
        options = "\n".join(f"{letter}. {city}" for letter, city in zip("ABCD", cities, strict=True))
        prompt = f"{context}\nQuestion: Where does {person} live?\n{options}\nAnswer:"
        questions.append(Question(model.token_ids(prompt), (" A", " B", " C", " D"), f" {'ABCD'[cities.index(right)]}"))
    return questions
