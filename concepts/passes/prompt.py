"""An explained prompt: its tokens, their roles, the prediction, what it is compared with, and what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from icebear.concepts.passes.inputs import Stream
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.objective import Objective, ObjectiveKind
from icebear.models.text import images
from icebear.models.text.chat import Turn, outside
from icebear.models.text.prompt_images import map_of
from icebear.records import TokenScore
from icebear.values import check_int, several


@dataclass(frozen=True)
class PromptTokens:
    """The T tokens (or image patches) that the model read; the encoder's come before the decoder's."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    target_positions: tuple[int, ...]
    """Where the prediction is made: the last token, the masks, [CLS], or one position for each target token."""
    sinks: tuple[int, ...]
    """Sink tokens, excluded from rankings: the first token, special tokens, and tokens whose residual stream is longer
    than 4 times the median in most layers; never a token where the prediction is made."""
    encoder_length: int
    """The number of tokens that the encoder (or the only stack) read."""
    turns: tuple[Turn, ...] = ()
    """The messages of a chat."""
    answer_start: int | None = None
    """The position of the first token of an answer; None if the next token is explained."""
    is_image: bool = False
    """Whether all of it is an image."""
    image_positions: tuple[int, ...] = ()
    """The tokens of an image in a prompt."""
    special: tuple[int, ...] = ()
    """Special tokens, in a prompt with an image."""

    @classmethod
    def of(cls, model: Model, objective: Objective, row: int, sinks: tuple[int, ...]) -> PromptTokens:
        """sinks: the sinks of the pass, without regard to what is explained."""
        ids, explained = objective.batch.row_ids(row), objective.target_positions(row)
        strings = strings_of(model, objective.batch, row, ids)
        turns = model.turns(ids, strings) if model.task.is_causal else ()
        sinks = tuple(position for position in sinks if position not in explained)
        of_image = image_positions(model, objective.batch, row)
        special = all_special_ids(model) if of_image else set()
        is_image = objective.batch.pixels is not None
        return cls(
            *(ids, strings, explained, sinks, objective.batch.lengths[row], turns),
            is_image=is_image,
            image_positions=of_image,
            special=tuple(position for position, token in enumerate(ids) if token in special),
        )

    @property
    def text(self) -> str:
        if self.is_image:
            return "the image"
        of_image = {*self.image_positions}
        return "".join(
            text if position not in of_image else "[image]" * (position - 1 not in of_image)
            for position, text in enumerate(self.strings)
        )

    @property
    def template(self) -> tuple[int, ...]:
        """The positions of a chat that its template wrote."""
        of_image = {*self.image_positions}
        return tuple(position for position in outside(self.turns, len(self.ids)) if position not in of_image)

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The positions of the image, the text and the template (special tokens among it) of a prompt with an image."""
        of_image = {*self.image_positions}
        written = {*self.template, *self.special} - of_image
        text = (position for position in range(len(self.ids)) if position not in of_image | written)
        return {"image": self.image_positions, "text": tuple(text), "template": tuple(sorted(written))}


def strings_of(model: Model, batch: Batch, row: int, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token of a row of a batch, or the names of an image's patches."""
    if batch.pixels is not None:
        return images.names(model, batch.pixels)
    strings = model.pieces(ids)
    if batch.images is None:
        return strings
    names = dict(zip(image_positions(model, batch, row), batch.images[row].token_names, strict=True))
    return tuple(names.get(position, text) for position, text in enumerate(strings))


def all_special_ids(model: Model) -> set[int]:
    """Return the ids of all special tokens, those that stand around images among them."""
    added = getattr(model.tokenizer, "added_tokens_decoder", {})
    return model.special_ids() | {token for token, how in added.items() if how.special}


def image_positions(model: Model, batch: Batch, row: int) -> tuple[int, ...]:
    """Return the positions of the tokens of an image in a prompt."""
    if batch.images is None:
        return ()
    sign = model.net.config.image_token_id
    return tuple(position for position, token in enumerate(batch.row_ids(row)) if token == sign)


@dataclass(frozen=True)
class Prediction:
    """What the model predicts, and which part is explained."""

    target: TokenScore | None
    """The token explained; None if it is a continuation of several tokens."""
    target_text: str
    contrast: TokenScore | None
    top: tuple[TokenScore, ...]
    """The most probable next tokens."""
    objective: ObjectiveKind

    @classmethod
    def of(cls, model: Model, objective: Objective, row: int, targets: tuple[int, ...], logits: Tensor) -> Prediction:
        """targets: the tokens explained; logits (B, P, V) at the objective's positions."""
        token_logits = logits[row, objective.all_positions.index(objective.positions[row][0])].float()  # (V,)
        contrast = objective.contrasts[row]
        return cls(
            model.token_scores(token_logits, [targets[0]])[0] if len(targets) == 1 else None,
            "".join(model.answer_text(token) for token in targets),
            None if contrast is None else model.token_scores(token_logits, [contrast])[0],
            tuple(model.top_tokens(token_logits, 10)),
            objective.kind,
        )


Recorded = Literal["all", "last"] | Sequence[int]


def prompt_relevance(
    model: Model, objective: Objective, row: int, parts: list[Tensor]
) -> tuple[Tensor, images.ImageMap | None]:
    """Return (T,) relevance of the tokens from that of each stack's embeddings (T, D), or of pixels (C, H, W); of a
    prompt with an image from both."""
    batch = objective.batch
    if batch.pixels is not None:
        image = images.image_map(model, batch.pixels[row], parts[0])
        patches = image.patches.flatten()
        own_tokens = torch.zeros(len(batch.columns(row)) - len(patches), dtype=patches.dtype)
        return torch.cat((own_tokens, patches)), image
    return summed_over_width(model, batch, row, parts), map_of(batch.images[row], parts[1]) if batch.images else None


def summed_over_width(model: Model, batch: Batch, row: int, parts: list[Tensor]) -> Tensor:
    """Return (T,) relevance of the tokens of a text from that of each stack's embeddings (T, D). A token of an image
    has the relevance of the pixels that it was made of, too."""
    columns = batch.columns(row)
    if batch.images is None:
        return torch.cat([part.sum(-1) for part in parts])[columns].cpu()
    embeddings, pixels = parts
    tokens = embeddings.sum(-1)[columns].cpu()
    tokens[list(image_positions(model, batch, row))] += batch.images[row].token_sums(pixels).cpu()
    return tokens


def recorded_at(objective: Objective, row: int, record: Recorded) -> tuple[int, ...]:
    """Return the positions of a row whose neurons are recorded."""
    return recorded_positions(record, objective.target_positions(row), len(objective.batch.columns(row)))


def recorded_positions(record: Recorded, target_positions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the positions, among `count` tokens, whose neurons are recorded. Raises `InputError`."""
    if isinstance(record, str) and record in ("all", "last"):
        return tuple(range(count)) if record == "all" else target_positions
    what = "A position to record, if it is not all or last,"
    return tuple(sorted({check_int(position, what, -count, count - 1) % count for position in several(record)}))


def excluded_positions(model: Model, objective: Objective, stream: Stream, row: int) -> tuple[int, ...]:
    """Return the positions that rankings exclude: sink tokens, and tokens of a chat's template."""
    prompt = PromptTokens.of(model, objective, row, stream.sinks(row))
    return (*prompt.sinks, *prompt.template)


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """What a relevance is compared with: counterfactual prompts, or a base model."""

    prompts: tuple[tuple[str, ...], ...]
    """The tokens of each counterfactual."""
    pairs: tuple[Objective, ...]
    """For each counterfactual the objective of two rows: the prompt, then the counterfactual."""
    alignments: tuple[Tensor, ...]
    """(T, T') for each counterfactual, see `icebear.concepts.methods.multipliers.alignment`."""
    contrasts: tuple[str, ...]
    """The contrast with each counterfactual; empty if a whole continuation is explained."""
    own_answers: bool
    """Whether the contrasts are the model's answers to the counterfactuals."""
    at: str
    """Where multipliers are taken: at ``both`` prompts (difference rules), ``prompt``, ``midpoint`` or ``path``."""
    numbers: tuple[float, ...]
    """The value of the objective in each counterfactual."""
    overlap: float | None
    """With several counterfactuals: the mean share of the 100 largest nodes that two of them have in common."""
    note: str = ""
    """Why the method is not the default."""
    model: str | None = None
    """The name of the base model; the prompt is then the same."""
    predictions: tuple[TokenScore, ...] = ()
    """The most probable next tokens in the (first) counterfactual."""
    image: str = ""
    """Of an image, what it is compared with, in words."""

    @property
    def texts(self) -> list[str]:
        """The counterfactuals as sentences name them."""
        return [self.image or repr("".join(tokens)) for tokens in self.prompts]

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name not in ("pairs", "alignments")}
        return {**fields, "predictions": [vars(token) for token in self.predictions]}

    def __str__(self) -> str:
        others = " and ".join(self.texts[:3])
        more = f" and {len(self.prompts) - 3} more" if len(self.prompts) > 3 else ""
        contrasts = " / ".join(map(repr, dict.fromkeys(self.contrasts)))
        contrast = f", contrast: the counterfactual's top token {contrasts}" if self.own_answers else ""
        where = "" if self.at == "both" else f", multipliers of the {self.at}"
        note = f" ({self.note})" if self.note else ""
        overlap = f"; overlap of their first 100 nodes {self.overlap:.0%}" if self.overlap is not None else ""
        return f"{others}{more}{contrast}{where}{note}{overlap}"
