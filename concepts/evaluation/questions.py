"""What a faithfulness evaluation asks: the next word, what a review is, which of four answers is right."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from icebear.concepts.corpus import read_corpus
from icebear.concepts.evaluation.groundtruth import homes
from icebear.concepts.models.model import Model
from icebear.errors import InputError


@dataclass(frozen=True)
class Question:
    """A prompt, as token ids; the answers to choose from (any token, if empty), and the right one, if it is known."""

    prompt: list[int]
    answers: tuple[str, ...] = ()
    right: str | None = None

    def choice(self, model: Model) -> str | None:
        """The answer that is most probable to the model; None for any."""
        if not self.answers:
            return None
        logits = model.next_logits(self.prompt)
        return max(self.answers, key=lambda answer: logits[model.answer_id(answer, "answer")].item())


CORPORA = {"next-word": "wiki-summaries", "reviews": "imdb-reviews", "choice": ""}
"""Task -> its corpus by default."""


def of_task(model: Model, task: str, corpus: str, samples: int, seed: int, longest: int) -> list[Question]:
    """Questions of one of `CORPORA`'s tasks."""
    if task == "choice":
        return choices(model, samples, seed)
    documents = list(read_corpus(corpus).documents())
    if task == "reviews":
        return reviews(model, documents, samples, seed, longest)
    return next_words(model, [text for _, text in documents], samples, seed, longest)


def next_words(model: Model, texts: Iterable[str], samples: int, seed: int = 0, longest: int = 128) -> list[Question]:
    """Beginnings of texts, cut at a random token, 16 to `longest` tokens long."""
    generator = random.Random(seed)
    pool = list(texts)
    generator.shuffle(pool)
    questions = []
    for text in pool:
        ids = model.token_ids(text)
        if len(ids) > 16:
            questions.append(Question(ids[: generator.randint(16, min(longest, len(ids) - 1))]))
        if len(questions) == samples:
            break
    if not questions:
        raise InputError("The corpus has no text of more than 16 tokens; name another --corpus.")
    return questions


def reviews(
    model: Model, documents: Sequence[tuple[str, str]], samples: int, seed: int = 0, longest: int = 128
) -> list[Question]:
    """Whether a review is positive; documents: titles that begin with "positive:" or "negative:", and texts, whose
    beginnings are asked about."""
    tail = model.continuation("\nThe review above is either positive or negative. It is")
    if not documents or longest <= len(tail):
        raise InputError(f"There are no reviews, or no room for them: give more than {len(tail)} --max-tokens.")
    chosen = random.Random(seed).sample(list(documents), min(samples, len(documents)))
    questions = []
    for title, text in chosen:
        kind = title.partition(":")[0]
        if kind not in ("positive", "negative"):
            raise InputError(f"{title!r} does not say whether a review is positive; use --corpus imdb-reviews.")
        head = model.token_ids(f"Review: {text}")[: longest - len(tail)]
        questions.append(Question(head + tail, (" positive", " negative"), f" {kind}"))
    return questions


def choices(model: Model, samples: int, seed: int = 0) -> list[Question]:
    """Which of four cities a person lives in, said in the context; answered by a letter."""
    questions = []
    for context, person, right, cities in homes(samples, seed):
        options = "\n".join(f"{letter}. {city}" for letter, city in zip("ABCD", cities, strict=True))
        prompt = f"{context}\nQuestion: Where does {person} live?\n{options}\nAnswer:"
        questions.append(Question(model.token_ids(prompt), (" A", " B", " C", " D"), f" {'ABCD'[cities.index(right)]}"))
    return questions
