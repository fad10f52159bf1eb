"""`AttributionRequest`: what is explained, also of answers named by texts, compared with what, and what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, TypedDict, get_args

import torch

from icebear.concepts.methods.attnlrp import ATTNLRP
from icebear.concepts.methods.difference_rules import DIFFERENCE, Difference
from icebear.concepts.methods.method import Method, OnePass
from icebear.concepts.methods.registry import method_of
from icebear.concepts.passes.prompt import Recorded, recorded_positions
from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.results.result import Relevance
from icebear.concepts.weights.changed_weights import ModelPair
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Phrase, Token, likelier_form, per_prompt, phrase_ids, prompt_request, read_once
from icebear.models.text.answer import Answer, Span
from icebear.models.text.counterfactual_images import about, counterfactual_image
from icebear.models.text.images import encode_pixels
from icebear.models.text.prompt_images import counterfactual_prompt, with_image
from icebear.models.text.prompts import Prompt, PromptLike, PromptRequest, Prompts, prompts_of, special_note
from icebear.notes import say
from icebear.values import check_int, common_length, of_type, one_of, several


def at_first_difference(
    model: Model, prompt: Any, target: Token | None, contrast: Token | None, counterfactual: Any = None
) -> tuple[Any, Any, Any, Any]:
    """Return the arguments of `attribute` for the first token in which two answers of several tokens differ.

    The tokens that they share are appended to the prompt and to each counterfactual. An answer of several tokens that
    has no other one to differ from is explained at its first token that is not a space, and the spaces are appended. If
    the two answers differ from the first token on, the first token is explained. Single tokens, labels, and the answers
    of models that are not causal stay as they are. What was chosen is logged.

    Parameters
    ----------
    model
    prompt, counterfactual
        A prompt; a prompt, several prompts or None.
    target, contrast

    Raises
    ------
    InputError
        If one answer begins with the other.
    """
    named = {role: text for role, text in (("target", target), ("contrast", contrast)) if isinstance(text, str)}
    if not named or isinstance(prompt, Answer) or not model.task.is_causal or model.labels:
        return prompt, target, contrast, counterfactual
    read = Prompt.of(prompt)
    tokens: dict[str, tuple[Any, ...]] = {"target": (target,), "contrast": (contrast,)} | {
        role: _tokens(model, text, role, read) for role, text in named.items()
    }
    target_tokens, contrast_tokens = tokens["target"], tokens["contrast"]
    if len(target_tokens) == len(contrast_tokens) == 1:
        return prompt, target, contrast, counterfactual
    if target is None or contrast is None:  # a space alone is no answer that can be read
        answer = contrast_tokens if target is None else target_tokens
        shared = list(takewhile(lambda token: not model.text(token).strip(), answer[:-1]))
        chosen = (None, answer[len(shared)]) if target is None else (answer[len(shared)], None)
    else:
        shared = list(target_tokens[: common_length(target_tokens, contrast_tokens)])
        if len(shared) == min(len(target_tokens), len(contrast_tokens)):
            raise InputError(
                f"One of the answers {target!r} and {contrast!r} begins with the other; give two answers that differ "
                "in a token."
            )
        chosen = target_tokens[len(shared)], contrast_tokens[len(shared)]
    _say_which(model, named, shared, [model.text(token) for token in chosen if token is not None])
    if not shared:
        return prompt, *chosen, counterfactual
    others, is_one = ([], True) if counterfactual is None else prompts_of(counterfactual)
    longer = [_continued(model, other, shared) for other in others]
    return _continued(model, read, shared), *chosen, next(iter(longer), None) if is_one else longer


def note_ending(model: Model, prompt: Any) -> None:
    """Log that a prompt ends in a space, and what is likely without it: words have their space in their own token."""
    text = Prompt.of(prompt).text
    bare = (text or "").rstrip(" ")
    if not model.task.is_causal or not bare or bare == text or model.pieces(model.ids(prompt))[-1].strip():
        return
    word = model.predict(bare, 1)[0]
    say(f"The prompt ends in a space; without it, {word.text!r} ({word.number}) is the likeliest.")


def note_special(model: Model, prompt: Any) -> None:
    """Log that special tokens which the tokenizer adds change the question (see `special_note`)."""
    if note := special_note(model, prompt):
        say(note)


def _tokens(model: Model, text: str, role: str, prompt: Prompt) -> tuple[Any, ...]:
    """Return the tokens of an answer. Raises `InputError` if it has none."""
    return tuple(model.continuation(text, prompt)) or (model.token_id(text, role, prompt),)


def _say_which(model: Model, named: dict[str, str], shared: Sequence[int], chosen: Sequence[str]) -> None:
    answers, words = (" and ".join(map(repr, named.values())), ", not ".join(map(repr, chosen)))
    if shared:
        common = "".join(model.pieces(list(shared)))
        say(f"{answers} begin with {common!r}, which is appended to each prompt; explained is {words}.")
    else:
        say(f"Of {answers} the first token is explained: {words}. --target-text explains all tokens.")


def _continued(model: Model, read: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a prompt with tokens at its end: a text, where its tokenizer reads them so."""
    known = [*model.ids(read), *ids]
    text = (read.text or "") + "".join(model.pieces(list(ids)))
    written = replace(read, text=text, ids=None) if read.text is not None and read.pair is None else None
    return written if written and model.ids(written) == known else Prompt(ids=tuple(known), image=read.image)


KeepOption = Literal["all", "top"]
ObjectiveName = Literal["log-odds", "logit"]


class AttributeOptions(TypedDict, total=False):
    """Options of `attribute` that few need."""

    image: Any
    """Of a model of images and text, the image that the prompt is about: a path, an image, or pixels (C, H, W) as the
    model reads them with token ids; a list with one for each prompt. A counterfactual prompt is about the same one."""
    counterfactual_image: Any
    """Of an image, what it is compared with: ``blur``, ``grey``, ``mask:FILE`` (blurred where FILE is light), or
    another image of the same size: a path, an image or pixels. Default of a classifier: ``blur``, unless a method, a
    counterfactual or a base model is named; of a prompt with an image: none."""
    prefix: str | Sequence[str] | None
    """Encoder-decoders: what the decoder has written before the target."""
    number: ObjectiveName | None
    """The objective. ``log-odds``: the logit of the target minus the mean of all other logits, weighted by
    probability. ``logit``: the logit, as in the paper. Default: log-odds, and the logit with a contrast, counterfactual
    or base model (docs/explain.md#objective)."""
    record: Recorded
    """The positions whose neurons are recorded: ``all`` (the default), ``last`` (where the prediction is made), or a
    list. All neurons of 2,000 tokens take gigabytes in a large model."""
    keep: KeepOption
    """``top``: record all neurons only where the prediction is made (or at `record`). At all other positions record the
    sums by layer, head and token, and of each site the `k` neurons that contribute most to the target and the k that
    contribute most against it, without sinks and a chat's template. It saves memory with one counterfactual of equal
    length, or without one."""
    k: int
    """Default: 100."""
    checkpoint: bool | None
    """Keep one residual stream per layer and recompute the rest. Default: from 2,048 tokens on; from four tokens for
    each unit of the model's width on, the outputs of fused attention are kept too."""
    strict: bool
    """Raise `MissingRule` for an operation without a rule. False: warn, and list it in the result."""


class AttributeKeywords(AttributeOptions, total=False):
    """All arguments of `attribute` after the contrast; it documents them."""

    target_text: Phrase | Sequence[Phrase] | None
    counterfactual: PromptLike | Prompts | None
    base_model: Model | None
    method: Method | str | None
    sites: Sequence[str] | None
    span: Span | None
    position: int | Sequence[int] | None


def checked_options(options: AttributeOptions) -> AttributeOptions:
    """Return the options of `attribute`. Raises `InputError`, or `UnknownName` with the nearest one."""
    for name in options:
        one_of(name, "argument of attribute", ["target", "contrast", *AttributeKeywords.__annotations__])
    one_of(options.get("keep", "all"), "value of keep", get_args(KeepOption))
    if options.get("number") is not None:
        one_of(options["number"], "number to explain", get_args(ObjectiveName))
    for name in ("checkpoint", "strict"):
        of_type(options.get(name), name, ("bool", "None"))
    record = options.get("record", "all")
    record = record if isinstance(record, str) else tuple(several(record))
    if not record:
        raise InputError("record names no position; give all, last or positions, or record no neurons (sites=()).")
    return {**options, "record": record}


@dataclass(frozen=True)
class AttributionRequest:
    """The checked arguments of `attribute`."""

    model: Model
    requests: tuple[PromptRequest, ...]
    """What is explained of each prompt."""
    method: Method | None
    """None: the default with a counterfactual, which depends on the lengths of both prompts."""
    sites: tuple[str, ...]
    record: Recorded
    k: int | None
    """The number of neurons recorded at other positions (``keep="top"``); None: all neurons at `record`."""
    checkpoint: bool | None
    strict: bool
    models: ModelPair | None = None
    """With a base model."""

    @classmethod
    def of(
        cls,
        model: Model,
        requests: Sequence[PromptRequest],
        method: Method | str | None,
        sites: Sequence[str] | None,
        base_model: Model | None,
        options: AttributeOptions,
    ) -> AttributionRequest:
        """Check the arguments. Raises `InputError`."""
        compares = base_model is not None or any(row.counterfactuals for row in requests)
        resolved = _method(method, compares)
        if base_model is not None and resolved not in (None, DIFFERENCE):
            raise InputError(f"Two models are compared by difference rules, not by {resolved!r}; leave out method.")
        record, keep, number = options["record"], options.get("keep"), options.get("number")
        if keep == "top" and record == "all":
            record = "last"
        if base_model is not None and number == "log-odds":
            raise InputError(
                "A comparison with a base model explains logits, not log-odds; leave out number='log-odds'."
            )
        number = number or ("logit" if base_model else None)
        rows = tuple(_with_objective(row, number) for row in requests)
        if model.task.reads_text and any(row.prompt.image is not None for row in requests):
            _check_with_images(resolved, base_model)
        models = ModelPair(model, base_model) if base_model is not None else None
        most = check_int(options.get("k", 100), "The number of neurons to keep") if keep == "top" else None
        recorded = _sites(model, sites, resolved)
        return cls(
            model=model,
            requests=rows,
            method=resolved,
            sites=recorded,
            record=record,
            k=most,
            checkpoint=options.get("checkpoint"),
            strict=options.get("strict", True),
            models=models,
        )

    @property
    def base_model(self) -> Model | None:
        return self.models.base if self.models else None

    def recording_all(self) -> AttributionRequest:
        """Return the request with all neurons recorded at all positions, for results that are combined first."""
        return self if self.k is None else replace(self, record="all", k=None)

    def reduced(self, relevance: Relevance) -> Relevance:
        """Reduce a result of `recording_all` to what the request records."""
        if self.k is None:
            return relevance
        prompt = relevance.prompt
        recorded = recorded_positions(self.record, prompt.target_positions, len(prompt.ids))
        return replace(relevance, neurons=relevance.neurons.only(self.k, recorded, prompt))


def _method(method: Method | str | None, compares: bool) -> Method | None:
    """Return the method. Raises `InputError` if it needs a counterfactual, or cannot use one."""
    if method is None:
        return None if compares else ATTNLRP
    method = method if isinstance(method, Method) else method_of(method)
    if compares:
        return method.for_comparison()
    if method.needs_counterfactual:
        raise InputError(f"The method {method!r} needs a counterfactual; give one, or choose another method.")
    return method


def _check_with_images(method: Method | None, base_model: Model | None) -> None:
    """Raise `InputError` for what does not explain prompts with images."""
    if base_model is not None:
        raise InputError("Two models are compared on texts; leave out the image or the base model.")
    if method is not None and not (
        isinstance(method, (OnePass, Difference)) and not getattr(method, "positions", False)
    ):
        raise InputError(
            f"The method {method!r} does not explain prompts with images; choose attnlrp, cp-lrp, gxi or difference."
        )


def _sites(model: Model, sites: Sequence[str] | None, method: Method | None) -> tuple[str, ...]:
    """Return the recorded sites. Raises `InputError` if the method scores tokens only."""
    if sites is None:
        known = model.sites if model.has_family and (method is None or method.scores_neurons) else ()
        return tuple(site for site in ("ffn", "attn", "mixer") if site in known)
    sites = tuple(several(sites))
    if sites and method is not None and not method.scores_neurons:
        raise InputError(
            f"The method {method!r} scores tokens, not neurons; choose another method, or record no neurons (sites=())."
        )
    for site in sites:
        model.layers_with(neuron_site(site))
    return tuple(dict.fromkeys(map(neuron_site, sites)))


def _with_objective(row: PromptRequest, number: ObjectiveName | None) -> PromptRequest:
    """Set the kind of number that is explained. Raises `InputError`."""
    compares = bool(row.counterfactuals) or row.contrast is not None or row.contrast_phrase is not None
    if number == "log-odds" and compares:
        raise InputError(
            "A comparison with a contrast or a counterfactual explains logits, not log-odds; leave out "
            "number='log-odds', or leave out the contrast and the counterfactual."
        )
    if row.contrast_phrase is None:
        return replace(row, kind=number or ("logit" if compares else "log-odds"))
    if not row.contrast_phrase or row.answer == row.contrast_phrase:
        raise InputError("The contrast is empty or equal to the explained phrase; choose another contrast.")
    equal = row.answer is not None and len(row.answer) == len(row.contrast_phrase)
    return replace(row, kind="centered-logit" if equal else "mean-centered-logit")


def prompt_requests(
    model: Model,
    prompt: Any,
    target: Any,
    contrast: Any,
    target_text: Any,
    counterfactual: Any,
    prefix: Any,
    position: Any,
) -> tuple[list[PromptRequest], bool]:
    """Return the request of each prompt, and whether it is a single one. Arguments are one for all, or one for each.
    Raises `InputError`."""
    prompts, is_single = prompts_of(prompt)
    phrases = per_prompt(target_text, len(prompts), is_phrase=True)
    target, contrast, prefix, position = (per_prompt(x, len(prompts)) for x in (target, contrast, prefix, position))
    others = _counterfactuals(counterfactual, len(prompts), is_single)
    if len(prompts) == 1:
        note_ending(model, prompts[0])
        note_special(model, prompts[0])
    rows = zip(prompts, target, contrast, phrases, prefix, position, map(tuple, others), strict=True)
    return [_request(model, *row) for row in rows], is_single


def _request(
    model: Model,
    prompt: Prompt,
    target: Token | None,
    contrast: Any,
    phrase: Phrase | None,
    prefix: str | None,
    position: int | None,
    counterfactuals: tuple[Prompt, ...],
) -> PromptRequest:
    """Return the request of one prompt; of answers of several tokens, for the first one in which they differ."""
    target, contrast, phrase = (likelier_form(model, prompt, answer, position) for answer in (target, contrast, phrase))
    if phrase is None and position is None:
        others = list(counterfactuals) or None
        prompt, target, contrast, others = at_first_difference(model, prompt, target, contrast, others)
        counterfactuals = tuple(others or ())
    token_contrast = contrast if phrase is None else None
    row = prompt_request(model, prompt, target, token_contrast, phrase, prefix, position)
    row = replace(row, counterfactuals=tuple(read_once(model, other) for other in counterfactuals))
    if row.is_phrase and row.answer and row.prompt.ids and model.task.is_causal:
        _check_rotations(model, len(row.prompt.ids), row.answer, len(row.answer))
    if phrase is None or contrast is None:
        return row
    return replace(row, contrast_phrase=phrase_ids(model, contrast, prompt), answer=phrase_ids(model, phrase, prompt))


def compared_images(model: Model, prompt: Any, kind: Any, counterfactual: Any, is_compared: bool) -> Any:
    """Return the images to compare images with, or the counterfactual.

    kind: see `counterfactual_image`; by default ``blur`` for a classifier, unless is_compared: a method, a
    counterfactual or a base model is named. Raises `InputError` for a prompt without an image, or two counterfactuals.
    """
    if kind is None and (is_compared or model.task.reads_text):
        return counterfactual
    if counterfactual is not None:
        raise InputError("An image has one counterfactual; leave out counterfactual or counterfactual_image.")
    prompts, is_single = prompts_of(prompt)
    if model.task.reads_text:
        if any(read.image is None for read in prompts):
            raise InputError("The prompt has no image, so it has no counterfactual image; leave it out.")
        compared = [counterfactual_prompt(model, read, kind, about(kind)) for read in prompts]
        return compared[0] if is_single else compared
    images = [read.image if read.text is None else read.text for read in prompts]
    pixels = [counterfactual_image(model, image, "blur" if kind is None else kind) for image in images]
    if kind is None and any(torch.equal(encode_pixels(model, a), b) for a, b in zip(images, pixels, strict=True)):
        return None  # of one color: nothing is blurred
    others = [Prompt(image=image, about=about("blur" if kind is None else kind)) for image in pixels]
    return others[0] if is_single else others


def about_images(model: Model, prompt: Any, counterfactual: Any, image: Any) -> tuple[Any, Any]:
    """Return prompts and counterfactuals with the images that they are about, as the model reads them.

    image: that of each prompt, or one for all; None for prompts that have their image, or none. A counterfactual
    without an image gets that of the prompt. Raises `InputError`.
    """
    prompts, is_single = prompts_of(prompt)
    images = per_prompt(image, len(prompts)) if isinstance(image, list) else [image] * len(prompts)
    if not model.task.reads_text:
        if image is not None:
            raise InputError(f"{model.name} reads images alone; give the image as the prompt.")
        return prompt, counterfactual
    if image is None and all(read.image is None for read in prompts):
        return prompt, counterfactual
    read = [with_image(model, _with_default_image(each, x)) for each, x in zip(prompts, images, strict=True)]
    if counterfactual is None:
        return read[0] if is_single else read, None
    others, is_one = prompts_of(counterfactual)
    partners = read * len(others) if is_single else read
    parts = zip(others, partners, strict=False)
    compared = [with_image(model, _with_default_image(each, x.image)) for each, x in parts]
    return read[0] if is_single else read, compared[0] if is_one else compared


def _with_default_image(prompt: Prompt, image: Any) -> Prompt:
    """Return a prompt about an image, unless it has one."""
    return prompt if image is None or prompt.image is not None else replace(prompt, image=image)


def _counterfactuals(counterfactual: Any, count: int, is_single: bool) -> Sequence[Sequence[Prompt]]:
    if counterfactual is None:
        return [()] * count
    if isinstance(counterfactual, Answer):
        counterfactual = list(counterfactual.prompt_ids)
    others, is_one = prompts_of(counterfactual)
    if is_single or is_one:
        return [others] * count
    if len(others) != count:
        raise InputError(
            f"There are {count} prompts but {len(others)} counterfactuals; give one counterfactual for each prompt."
        )
    return [[other] for other in others]


def _check_rotations(model: Model, begins: int, ids: Sequence[int], stop: int) -> None:
    """Raise `InputError` if one pass would give some new tokens other positions than they were written with.

    begins: the number of tokens before the first new one. stop: the number of new tokens that are explained or read.
    """
    longest = model.scales_positions_from
    crossing = longest - begins + 1  # the number of the first new token that is written after more tokens than that
    if begins <= longest and stop > crossing:
        raise InputError(
            f"{model.name} rotates positions by other angles in texts of more than {longest} tokens. So one pass does "
            f"not compute these tokens as they are written from number {crossing} ({model.text(ids[crossing])!r}) "
            f"on; explain tokens within 0:{crossing}."
        )


def answer_request(
    model: Model, answer: Answer, span: Span | None, contrast: Token | Phrase | None, counterfactual: Any
) -> PromptRequest:
    """Return the request for a span of an answer, after all tokens before it. Raises `InputError`."""
    answer.check(model)
    start, stop = answer.token_range(span)
    read, explained = Prompt(ids=tuple(answer.before(start)), image=answer.image), answer.ids[start:stop]
    _check_rotations(model, len(answer.prompt_ids), answer.ids, stop)
    if isinstance(contrast, str) and answer.token_strings[start].startswith(" ") and not contrast.startswith(" "):
        contrast = f" {contrast}"  # a span is found without its space too
    answer_contrast = (contrast,) if isinstance(contrast, int) else contrast
    form = None if answer_contrast is None else likelier_form(model, read, answer_contrast)
    contrast_phrase = None if form is None else phrase_ids(model, form, read)
    (others,) = _counterfactuals(counterfactual, 1, True)
    others = [with_image(model, _with_default_image(other, answer.image)) for other in others]
    compared = tuple(
        Prompt(ids=(*model.ids(other), *answer.ids[:start]), image=other.image, about=other.about) for other in others
    )
    is_phrase = len(explained) > 1 or (contrast_phrase is not None and len(contrast_phrase) > 1)
    return PromptRequest(
        read,
        answer=tuple(explained),
        contrast=contrast_phrase[0] if contrast_phrase and not is_phrase else None,
        is_phrase=is_phrase,
        contrast_phrase=contrast_phrase if is_phrase else None,
        before=model.task.before(read, None),
        counterfactuals=compared,
        answer_start=len(answer.prompt_ids),
    )
