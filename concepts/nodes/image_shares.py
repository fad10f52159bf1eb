"""How much of an explained number comes from the image, the text and the template of a prompt, beside its control."""

from __future__ import annotations

from dataclasses import dataclass

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.results.result import Relevance
from icebear.models.model import Model
from icebear.models.text.prompt_images import counterfactual_prompt

Sums = dict[str, float]


@dataclass(frozen=True)
class ImageShares:
    """Relevance by part of a prompt (``image``, ``text``, ``template``), and the same with the image blurred."""

    sums: Sums
    """Part -> the sum of the relevance of its tokens; they sum to the relevance of all tokens."""
    shares: Sums
    """Part -> the sum of the sizes of its tokens' relevance, as a share of that of all tokens."""
    blurred_sums: Sums
    blurred_shares: Sums

    def __str__(self) -> str:
        parts = [_listed(self.sums, self.shares), _listed(self.blurred_sums, self.blurred_shares)]
        return f"Relevance by part: {parts[0]}. With the image blurred: {parts[1]}."


def image_shares(model: Model, relevance: Relevance) -> ImageShares | None:
    """Measure the shares of a prompt with an image; None for another prompt, a comparison, or a contrast phrase. Raises
    `InputError`."""
    prompt = relevance.prompt
    if not prompt.image_positions or relevance.counterfactual or relevance.contrast_phrase:
        return None
    model.check_made(relevance.made_with["model"], "The relevance")
    blurred = counterfactual_prompt(model, relevance.read, "blur", "")
    targets, contrast = relevance.explained().targets[0], relevance.contrast and relevance.contrast.id
    answer = {"target": targets and targets[0]} if relevance.target else {"target_text": targets}
    number = "log-odds" if relevance.prediction.objective == "log-odds" else "logit"
    control = attribute(
        model,
        blurred,
        contrast=contrast,
        method=relevance.method,
        sites=(),
        number=number,
        **answer,  # type: ignore[call-overload]
    )
    return ImageShares(*_by_part(relevance), *_by_part(control))


def _by_part(relevance: Relevance) -> tuple[Sums, Sums]:
    """Return the sum of each part, and the share of its sizes."""
    values = {name: relevance.tokens[list(positions)] for name, positions in relevance.prompt.parts.items()}
    total = relevance.tokens.abs().sum().clamp(min=1e-30)
    sums = {name: x.sum().item() for name, x in values.items()}
    return sums, {name: (x.abs().sum() / total).item() for name, x in values.items()}


def _listed(sums: Sums, shares: Sums) -> str:
    return ", ".join(f"{name} {sums[name]:+.3f} ({shares[name]:.0%} of the sizes)" for name in sums)
