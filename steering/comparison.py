"""A model's continuations of a prompt without and with edits: `compare`, and only the texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icebear.edits import AnyEdit
from icebear.models.model import Model
from icebear.models.text.prompts import Prompt, PromptLike, Prompts, prompt_json
from icebear.recipe import Recipe
from icebear.records import TokenScore
from icebear.steering.apply import Statistic, steer


@dataclass(frozen=True)
class Continuation:
    """A continuation, and the most probable first tokens."""

    text: str
    """Only the answer if the model does not generate."""
    next: tuple[TokenScore, ...]
    """The five most probable next tokens, then the ones of the other continuation."""

    def to_dict(self) -> dict[str, Any]:
        return {"first_token": self.next[0].text, "text": self.text, "next": [vars(token) for token in self.next]}


@dataclass(frozen=True)
class Comparison:
    """A prompt's continuation without and with edits."""

    plain: Continuation
    steered: Continuation
    prompt: Any
    """A text, token ids, or a chat's messages."""
    task: str
    edits: tuple[str, ...]
    recipe: str | None
    """The name of the recipe, if the edits are of one."""
    temperature: float
    seed: int
    made_with: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        sides = {"plain": self.plain.to_dict(), "steered": self.steered.to_dict()}
        settings = {name: getattr(self, name) for name in ("prompt", "task", "recipe", "temperature", "seed")}
        return {**self.made_with, **settings, "edits": list(self.edits), **sides}


def compare(
    model: Model,
    prompt: PromptLike,
    edits: Recipe | Sequence[AnyEdit | str],
    max_new_tokens: int,
    statistic: Statistic | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    on_token: Callable[[int], None] | None = None,
) -> Comparison:
    """Generate text and next-token probabilities without and with `edits`.

    edits, statistic: as of `steer`. Other parameters: as of `Model.generate`; `on_token` counts through both texts.
    """

    def texts() -> list[str]:
        if temperature == 0:
            watch = (lambda done: on_token(2 * done)) if on_token else None
            return texts_under(model, prompt, [[], edits], max_new_tokens, watch, statistic)
        plain = model.generate(prompt, max_new_tokens, temperature, seed, on_token)
        watch = (lambda done: on_token(max_new_tokens + done)) if on_token else None
        with steer(model, edits, statistic):
            return [plain, model.generate(prompt, max_new_tokens, temperature, seed, watch)]

    written = texts() if model.task.generates else []
    logits = [model.next_logits(prompt)]
    with steer(model, edits, statistic):
        logits.append(model.next_logits(prompt))
    best = [model.top_tokens(scores, 5) for scores in logits]
    written = written or [tokens[0].text for tokens in best]
    plain, steered = (
        Continuation(text, tuple(model.token_scores(scores, list(dict.fromkeys(token.id for token in tokens)))))
        for text, scores, tokens in zip(written, logits, (best[0] + best[1], best[1] + best[0]), strict=True)
    )
    name = edits.name if isinstance(edits, Recipe) else None
    return Comparison(
        plain,
        steered,
        prompt_json(prompt),
        model.task.name,
        tuple(map(str, edits)),
        name,
        temperature,
        seed,
        model.made_with,
    )


def texts_under(
    model: Model,
    prompt: PromptLike,
    each: Sequence[Recipe | Sequence[AnyEdit | str]],
    max_new_tokens: int,
    on_token: Callable[[int], None] | None = None,
    statistic: Statistic | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Return the text after a prompt under each of several edits, generated as rows of one batch; by default the most
    probable text."""
    prompts: Prompts = [Prompt.of(prompt)] * len(each)
    with ExitStack() as edited:
        for row, edits in enumerate(each):
            edited.enter_context(steer(model, edits, statistic, rows=[row]))
        return model.generate(prompts, max_new_tokens, temperature, seed, on_token)


def continued(
    model: Model,
    prompt: PromptLike,
    edits: Sequence[AnyEdit],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    frequency_penalty: float,
) -> str:
    """Return the text after a prompt with edited neurons. frequency_penalty: what is subtracted from the logit of a
    token for each time that it was generated."""
    length = len(model.ids(prompt))

    def lowered(ids: Tensor, scores: Tensor) -> Tensor:
        new = ids[:, length:]
        return scores.scatter_add(1, new, torch.full(new.shape, -frequency_penalty).to(scores))

    options: dict[str, Any] = {"logits_processor": [lowered]} if frequency_penalty else {}
    with steer(model, edits):
        return model.generate(prompt, max_new_tokens, temperature, seed, **options)
