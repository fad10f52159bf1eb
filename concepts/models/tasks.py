"""What models of each kind predict, and where: next tokens, masked ones, labels of texts, tokens and images."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.errors import InputError, ModelError

if TYPE_CHECKING:
    from concepts.models.batch import Batch
    from concepts.models.model import Model

Token = str | int

TASKS = {
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForImageClassification": "image",
    "ForImageClassificationWithTeacher": "image",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "seq2seq",
}
"""By how the name of a transformers class ends."""

AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "image": "AutoModelForImageClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
LABELS = ("sequence", "token", "image")
"""Tasks whose answers are labels, not tokens."""


def task_of(class_name: str, encoder_decoder: bool) -> str:
    """Raises `ModelError` for a class that predicts neither tokens nor labels."""
    for ending, task in TASKS.items():
        if class_name.endswith(ending):
            return ("seq2seq" if encoder_decoder else "causal") if task in ("causal", "seq2seq") else task
    raise ModelError(
        f"icebear cannot explain what a {class_name} predicts; it knows classes that end in {', '.join(TASKS)}."
    )


@dataclass(frozen=True)
class Plan:
    """What is explained of a batch of prompts."""

    batch: Batch
    positions: tuple[tuple[int, ...], ...]
    """For each prompt, the positions (of what the decoder reads, where there is one) whose prediction is explained."""
    targets: tuple[tuple[int, ...] | None, ...]
    """The answers explained there; None for the most probable ones."""
    contrasts: tuple[int | None, ...]

    def explained_at(self, row: int) -> tuple[int, ...]:
        """They among all the row's tokens, those of the encoder before those of the decoder."""
        before = self.batch.lengths[row] if self.batch.decoder else 0
        return tuple(before + place for place in self.positions[row])


def plan(
    model: Model, prompts: Sequence[Any], target: Any = None, contrast: Any = None, target_text: Any = None,
    prefix: Any = None, at: Any = None,
) -> Plan:  # fmt: skip
    """Arguments as of `attribute`, each for all prompts or a list with one for each. Raises `InputError`."""
    task = model.task
    if target is not None and target_text is not None:
        raise InputError("target and target_text exclude each other; give one of them.")
    _refuse(target_text is not None and task in LABELS, "target_text", f"{model.name} gives labels; use target")
    _refuse(prefix is not None and task != "seq2seq", "prefix", f"{model.name} has no decoder of its own")
    _refuse(at is not None and task != "token", "at", f"{model.name} does not label single tokens")
    targets, contrasts, texts, prefixes, places = (
        _per_prompt(value, len(prompts)) for value in (target, contrast, target_text, prefix, at)
    )
    if any(text is not None and token is not None for text, token in zip(texts, contrasts, strict=True)):
        raise InputError("target_text cannot be explained against a contrast, which is one token; give one of them.")
    read = prompts if task == "causal" else [part or "" for part in prefixes]  # what answers are written behind
    against = tuple(
        None if token is None else model.answer_id(token, "contrast", before)
        for token, before in zip(contrasts, read, strict=True)
    )
    chosen = [_answer(model, token, text, before) for token, text, before in zip(targets, texts, read, strict=True)]
    positions: list[tuple[int, ...]]
    batch = model.encode(prompts)
    rows = [ids[:length] for ids, length in zip(batch.ids.tolist(), batch.lengths, strict=True)]
    if task == "image":
        positions = [(0,)] * len(prompts)
    elif task == "sequence":
        positions = [(_read_at(model, ids),) for ids in rows]
    elif task == "token":
        positions = [_labelled(model, ids, place) for ids, place in zip(rows, places, strict=True)]
    elif task == "masked":
        positions = [_masks(model, ids, answer) for ids, answer in zip(rows, chosen, strict=True)]
    else:
        before = rows if task == "causal" else [model.tokens_of(text) for text in read]
        starts = [len(ids) - (task == "causal") for ids in before]  # a decoder's start token is not in its text
        longer = [ids + list((answer or ())[:-1]) for ids, answer in zip(before, chosen, strict=True)]
        positions = [
            tuple(range(start, start + len(answer or (0,)))) for start, answer in zip(starts, chosen, strict=True)
        ]
        batch = model.encode(longer) if task == "causal" else model.encode(rows, written=longer)
    return Plan(batch, tuple(positions), tuple(chosen), against)


def _refuse(wrong: bool, name: str, why: str) -> None:
    if wrong:
        raise InputError(f"{name} does not suit this model: {why}.")


def _per_prompt(value: Any, count: int) -> list[Any]:
    if value is None or isinstance(value, (str, int)):
        return [value] * count
    if len(value) != count:
        raise InputError(f"There are {count} prompts but {len(value)} targets or contrasts; give one for each.")
    return list(value)


def _answer(model: Model, token: Token | None, text: str | None, before: Any) -> tuple[int, ...] | None:
    """The tokens of an answer as they are read behind what comes before; None for an open one."""
    if text is None:
        return None if token is None else (model.answer_id(token, behind=before),)
    ids = tuple(model.continuation(text, before))
    if not text or not ids:
        raise InputError("The target text is empty; give at least one token.")
    return ids


def _masks(model: Model, ids: list[int], answer: tuple[int, ...] | None) -> tuple[int, ...]:
    mask = model.mask_id
    places = tuple(place for place, token in enumerate(ids) if token == mask)
    if not places:
        raise InputError(f"The prompt has no {model.text(mask)}; put one where the word shall be predicted.")
    if answer is not None and len(answer) != len(places):
        raise InputError(f"The prompt has {len(places)} masks but the target {len(answer)} tokens; give one for each.")
    return places


def _read_at(model: Model, ids: list[int]) -> int:
    """Where a text's label is read: encoders have a token for it in front, decoders (whose map to the labels is called
    `score`) take the last one that is not padding."""
    if not hasattr(model.net, "score"):
        return 0
    padding = model.config.pad_token_id
    return max((place for place, token in enumerate(ids) if token != padding), default=0)


def _labelled(model: Model, ids: list[int], at: int | None) -> tuple[int, ...]:
    """`at`; by default the token that most probably has another label than the first one (``O`` or the like)."""
    if at is None:
        with model.lock, torch.no_grad():
            scores = logits(model, model.encode([ids]), list(range(len(ids))))[0].float()  # (T, labels)
        special = model.special_ids()
        scores[[place for place, token in enumerate(ids) if token in special]] = -torch.inf
        first = scores.softmax(-1)[:, 0].nan_to_num(nan=2.0)
        return (int(first.argmin()),)
    if not -len(ids) <= at < len(ids):
        raise InputError(f"Position {at} is not one of 0 to {len(ids) - 1}.")
    return (at % len(ids),)


def logits(model: Model, batch: Batch, positions: list[int]) -> Tensor:
    """(B, P, V) logits at `positions` only (those of every token would cost a quarter of the pass), or of labels."""
    parameters = inspect.signature(type(model.net).forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = torch.tensor(positions, device=model.device)
        return model.forward(batch, **options).logits
    return at(model.forward(batch, **options).logits, positions)


def at(logits: Tensor, positions: list[int]) -> Tensor:
    """(B, P, V) of logits (B, T, V), or of those of labels (B, V), which are the same at each position."""
    return logits[:, None].expand(-1, len(positions), -1) if logits.dim() == 2 else logits[:, positions]


def explained(plan: Plan, scores: Tensor, needed: list[int]) -> tuple[list[tuple[int, ...]], Tensor]:
    """The answers explained for each prompt, and the number explained for each (B,); scores (B, needed, V).

    Raises `InputError` where the contrast is what it is the contrast of.
    """
    targets, values = [], []
    for row, places in enumerate(plan.positions):
        here = scores[row, [needed.index(place) for place in places]]  # (P, V)
        chosen = plan.targets[row] or tuple(here.argmax(-1).tolist())
        value = here[range(len(chosen)), list(chosen)].sum()
        contrast = plan.contrasts[row]
        if contrast in chosen:
            raise InputError("The contrast is the explained answer itself, which explains nothing; name another one.")
        if contrast is not None:
            value = value - here[:, contrast].sum()
        targets.append(chosen)
        values.append(value)
    return targets, torch.stack(values)
