"""What steering does, with its controls: the outcome of a flip, and of steering with a concept, for every face."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from icebear.concepts.nodes.random_controls import RANDOM_DRAWS
from icebear.edits import AnyEdit, Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.models.text.prompts import PromptLike, prompt_line
from icebear.recipe import Recipe
from icebear.records import RandomControl, TokenScore
from icebear.steering.apply import Statistic, reading_sources_once
from icebear.steering.comparison import Comparison, compare, texts_under
from icebear.steering.concept.concept import Concept
from icebear.steering.dose import dose
from icebear.steering.flipping.last_token import LastToken, values_by_step
from icebear.steering.flipping.phrases import holds
from icebear.steering.provenance import FlipRecord, Outcome
from icebear.steering.random_edits import logits_under, random_edits, random_edits_text
from icebear.steering.side_effects import HeldOutContexts
from icebear.steps import OnProgress, unwatched
from icebear.values import plural

SEED = 0
"""The seed of random edits in every face."""
NEW_TOKENS = 24
"""New tokens of each of the two texts of a flip."""
CONCEPT_TOKENS = 40
"""Of texts that are steered by a concept, unless another number is chosen: they need some room for it."""
KL_DRAWS = 5
"""The draws of random edits whose off-target KL is measured, which takes longer than all the rest."""
KL_STEPS = 8
"""Progress steps that one off-target KL counts as: it takes as long as this many tokens."""
ALL_KL_STEPS = KL_STEPS * (1 + KL_DRAWS)
OUTCOME_STEPS = NEW_TOKENS + ALL_KL_STEPS
"""All steps of `outcome_of`."""


@reading_sources_once()
def outcome_of(
    model: Model,
    recipe: Recipe,
    contexts: HeldOutContexts | None = None,
    on_progress: OnProgress = unwatched,
) -> Outcome:
    """Measure what a flip does to its prompt and elsewhere, and what random edits do.

    contexts: where the off-target KL is measured; default icebear's. on_progress: called with (done, total) steps.
    Raises `InputError` for a recipe that `flip` did not make.
    """
    *_, outcome = outcomes(model, recipe, contexts, on_progress)
    return outcome


def outcomes(
    model: Model,
    recipe: Recipe,
    contexts: HeldOutContexts | None = None,
    on_progress: OnProgress = unwatched,
) -> Iterator[Outcome]:
    """Yield what `outcome_of` measures, what is quick first: probabilities, also under random edits; then with both
    texts; then with the side effects, also of random edits."""
    recipe.check(model)
    record = FlipRecord.of(recipe)
    if record is None:
        raise InputError(f"The recipe {recipe.name!r} was not made by flip, so it has no answer; make one with flip.")
    record.check(model)
    edits, contexts = recipe.neuron_edits(), contexts or HeldOutContexts(model)
    draws = random_edits(model, edits, RANDOM_DRAWS, SEED)
    outcome = _flip_outcome(model, record, edits, draws, contexts)
    yield outcome
    if model.task.generates:
        plain, edited = texts_under(
            model, record.prompt, [[], edits], NEW_TOKENS, lambda done: on_progress(done, OUTCOME_STEPS)
        )
    else:
        plain, edited = record.before[0].text, record.text
    outcome = replace(outcome, plain=plain, edited=edited)
    yield outcome
    yield _with_side_effects(
        outcome, contexts, edits, draws, lambda done: on_progress(NEW_TOKENS + done, OUTCOME_STEPS)
    )


def answer_outcomes(model: Model, prompt: PromptLike, edits: Sequence[AnyEdit]) -> Iterator[Outcome]:
    """Yield what edits, in raw units, do to the answer of a prompt, what is quick first: the probabilities of the
    answers with and without them, in one pass; then also under random edits; then with the side effects of both. Of an
    image there are no side effects: the held-out contexts are texts."""
    contexts = HeldOutContexts(model) if model.task.reads_text else None
    edits, objective, count = list(edits), objective_of(model, [prompt]), len(contexts.contexts) if contexts else 0
    rows = logits_under(model, objective, [[], edits])
    tokens = [int(scores.argmax()) for scores in rows]
    yield _answered(model, edits, tokens, rows, count)
    draws = random_edits(model, edits, RANDOM_DRAWS, SEED)
    drawn = [logits_under(model, objective, draws)] if draws else []
    outcome = _answered(model, edits, tokens, torch.cat([rows, *drawn]), count)
    yield outcome
    if contexts:
        yield _with_side_effects(outcome, contexts, edits, draws, lambda done: None)


def outcome_of_steering(
    model: Model, prompt: PromptLike, edits: Recipe | Sequence[AnyEdit], statistic: Statistic | None = None
) -> Outcome:
    """Return what edits do to the probability of the answer with them, and what random edits do; side effects are not
    measured."""
    raw = [edit.in_raw_units(statistic) for edit in edits]
    _, outcome, *_ = islice(answer_outcomes(model, prompt, raw), 2)
    return outcome


def _answered(model: Model, edits: Sequence[AnyEdit], tokens: list[int], rows: Tensor, contexts: int) -> Outcome:
    """Return the outcome for the answers without and with edits.

    rows: logits (N, V) without and with edits, and under each draw. contexts: the number of held-out contexts.
    """

    def of_scores(scores: Sequence[TokenScore]) -> RandomControl:
        is_logit = scores[0].probability is None
        values = [score.logit if score.probability is None else score.probability for score in scores]
        return _edit_control(edits, f"{'the logit of ' if is_logit else 'P'}({scores[0].text!r})", values)

    old, new = map(of_scores, zip(*(model.token_scores(row, tokens) for row in rows), strict=True))
    sign = 1 if new.change > 0 else -1
    as_far = sum(sign * (value - new.after) >= 0 for value in new.drawn)
    other = old if tokens[0] != tokens[1] else None
    return Outcome(new, "change it as far", new.change != 0, as_far, contexts, SEED, old=other)


def _edit_control(edits: Sequence[AnyEdit], number: str, values: Sequence[float]) -> RandomControl:
    """Return what edits and random ones do to a number. number: its name. values: without edits, with them, and under
    each draw."""
    before, after, *drawn = values
    return RandomControl(plural(len(edits), "edit"), random_edits_text(edits), number, before, after, tuple(drawn))


def steer_concept(
    model: Model,
    concept: Concept,
    prompt: PromptLike,
    recipe: Recipe,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    contexts: HeldOutContexts | None = None,
    on_progress: OnProgress = unwatched,
) -> tuple[Comparison, Outcome]:
    """Generate after a prompt without and with a concept's edits, and measure the concept in both texts and in those
    under random edits, each with the prompt.

    recipe: as `Concept.recipe` makes it. max_new_tokens, temperature, seed: as of `Model.generate`; the draws have the
    seed `SEED`. contexts, on_progress: as of `outcome_of`. Raises `InputError` for a text without a token that counts.
    """
    edits, contexts = list(recipe), contexts or HeldOutContexts(model)
    draws = random_edits(model, edits, RANDOM_DRAWS, SEED)
    tokens = 3 * max_new_tokens
    total = tokens + ALL_KL_STEPS

    def step(done: int) -> None:
        on_progress(done, total)

    comparison = compare(model, prompt, recipe, max_new_tokens, None, temperature, seed, step)
    texts = [comparison.plain.text, comparison.steered.text]
    drawn: Sequence[str] = ()
    if draws and model.task.generates:
        third = lambda done: step(2 * max_new_tokens + done)  # noqa: E731
        drawn = texts_under(model, prompt, draws, max_new_tokens, third, None, temperature, seed)
    begun = prompt_line(prompt)
    measured = concept.measures(model, [begun + text for text in [*texts, *drawn]])
    control = _edit_control(edits, f"{concept.name} in the text", [row.value for row in measured])
    suppress = bool(recipe.provenance.get("suppress"))
    outcome = concept_outcome(concept.name, control, suppress, len(contexts.contexts), (texts[0], texts[1]))
    outcome = replace(outcome, dose=dose(model, edits, model.token_ids(begun + texts[0])))
    return comparison, _with_side_effects(outcome, contexts, edits, draws, lambda done: step(tokens + done))


def concept_outcome(
    name: str, control: RandomControl, suppress: bool, contexts: int, texts: tuple[str, str]
) -> Outcome:
    """Return the outcome of a concept's measures, without its side effects. texts: those without and with edits."""
    sign = -1 if suppress else 1
    reached, as_far = sign * control.change > 0, sum(sign * (value - control.after) >= 0 for value in control.drawn)
    aim = f"{'lower' if suppress else 'raise'} {name} as far"
    return Outcome(control, aim, reached, as_far, contexts, SEED, *texts)


def _flip_outcome(
    model: Model, record: FlipRecord, edits: list[Edit], draws: list[list[Edit]], contexts: HeldOutContexts
) -> Outcome:
    """Return the probabilities without and with edits, under each draw, and with swaps from other prompts, which are
    rows of a batch."""
    ids, swaps = model.ids(record.prompt), any(edit.source is not None for edit in edits)
    last = LastToken(model, ids, record.phrase, model.ids(record.source) if swaps else None)
    logs = last.logits([values_by_step(model, row) for row in ([], edits, *draws)]).log_softmax(-1)  # (N, S, V)
    phrase = _phrase(record, logs)
    previous = logs[:, 0, record.before[0].id].exp().tolist()
    _, reached, *others = holds(logs, record.phrase, record.top_k)
    new, old = (
        _edit_control(edits, f"P({text!r})", values)
        for text, values in ((record.text, phrase), (record.before[0].text, previous))
    )
    aim = f"make {record.text!r} the answer" if record.top_k is None else f"suppress {record.text!r}"
    outcome = Outcome(new, aim, reached, sum(others), len(contexts.contexts), SEED, old=old)
    if not swaps:
        return outcome
    count = len(contexts.contexts)
    sources = range(0, count, max(1, count // RANDOM_DRAWS))[:RANDOM_DRAWS]
    swapped = last.with_swaps(contexts.head_outputs(sources))
    drawn = _phrase(record, swapped.logits([values_by_step(model, edits)] * len(sources)).log_softmax(-1))
    return replace(outcome, other_sources=replace(new, others="the same swaps from other prompts", drawn=tuple(drawn)))


def _phrase(record: FlipRecord, logs: Tensor) -> list[float]:
    """Return the probability of a flip's phrase in each row of logs (N, S, V)."""
    return logs[:, range(logs.shape[1]), record.phrase].sum(1).exp().tolist()


@reading_sources_once()
def _with_side_effects(
    outcome: Outcome,
    contexts: HeldOutContexts,
    edits: Sequence[AnyEdit],
    draws: Sequence[Sequence[AnyEdit]],
    on_step: Callable[[int], None],
) -> Outcome:
    kls: list[float] = []
    on_step(0)
    for kl in contexts.off_target_kls([edits, *draws[:KL_DRAWS]]):
        kls.append(kl)
        on_step(KL_STEPS * len(kls))
    return replace(outcome, off_target_kl=kls[0], random_off_target_kl=tuple(kls[1:]))
