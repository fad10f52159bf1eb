"""What `icebear explain` and `icebear rank` share: what is explained, compared with what, and by which method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import ModelOptions, PromptOptions, record, shared
from icebear.concepts.models.chat import other_prompt
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


@record
class Explained:
    """The arguments of `attribute` that name the explained number and the method."""

    prompt: PromptOptions
    target: str | None
    contrast: str | None
    counterfactual: tuple[str, ...]
    base_model: str | None
    method: str | None
    span: str | None
    image: str | None
    target_text: str | None
    number: str | None
    prefix: str | None
    at: int | None
    max_new_tokens: int = shared(advanced=True)
    checkpoint: bool | None

    def arguments(self, loading: ModelOptions) -> tuple[Model, dict[str, Any]]:
        """The model, and the arguments of `attribute` behind it; with a span, the prompt is the model's answer."""
        prompt = self.image or self.prompt.read()
        others = [other_prompt(prompt, text) for text in self.counterfactual]
        method = method_named(self.method)
        base_model = loading.load(self.base_model) if self.base_model else None
        model = loading.load()
        if model.task.reads_text is bool(self.image):
            way = "images: give --image" if not self.image else "text: give a PROMPT"
            raise click.UsageError(f"{model.name} reads {way}.")
        names = ("target", "contrast", "target_text", "number", "prefix", "checkpoint")
        return model, {
            "prompt": prompt if self.span is None else answered(model, prompt, self.max_new_tokens),
            "span": None if self.span == "all" else self.span,
            "counterfactual": others if len(others) > 1 else others[0] if others else None,
            "base_model": base_model,
            "method": method,
            "position": self.at,
            **{name: getattr(self, name) for name in names},
        }


def answered(model: Model, prompt: Any, count: int) -> Any:
    """The model's answer, in the room that is left for one."""
    return model.answer(prompt, min(count, model.context_length - len(model.ids(prompt))))


def method_named(name: str | None) -> Any:
    from icebear.concepts.methods.registry import method_of

    return None if name is None else method_of(name)


def position_of(text: str | None) -> Any:
    """Where nodes are ranked, as `icebear.concepts.attribution.ranking.Ranking` takes it."""
    if text in (None, "last", "all"):
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--position {text!r} is not last, all or a number.") from None


def usual_site(model: Model, method: Any) -> str | None:
    """The site that is recorded unless another one is named; None where a model or a method may have no neurons."""
    return "ffn" if model.has_family and (method is None or method.scores_neurons) else None


def recorded(site: str | None, top: int, position: Any) -> dict[str, Any]:
    """The arguments of `attribute` for the neurons that a ranking of a site needs; None: what the method scores."""
    sites = {"sites": ("attn" if site == "head" else site,)} if site else {}
    if position == "all":
        return {**sites, "keep": "top", "k": top}
    return {**sites, "record": "last"} if position == "last" else sites
