"""`flip`: find few edits that make a token or phrase the answer, or that suppress the current one.

With a source prompt, heads are swapped first: at the last token they take their outputs after that prompt. Where swaps
do not suffice, and without a source, FFN neurons are set instead.

Each round ranks heads (or neurons) by the gradient of the margin times how far each may move, tries the best ones in a
batch of forward passes, neurons at several strengths, and keeps the edit with the largest margin. If none has a larger
margin than before, they are ranked by that distance alone. Then it removes edits that are not needed, and weakens those
of neurons together as far as the flip holds. Each token of a phrase is predicted after the tokens before it, and a
neuron may be set where any of them is predicted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from icebear.concepts.methods.attnlrp import ATTNLRP, AttnLRP
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.results.effects import likely_ids
from icebear.concepts.results.ranking import unraveled
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import likelier_form
from icebear.models.text.prompts import PromptLike, prompt_json, prompt_line
from icebear.recipe import Recipe
from icebear.records import Neuron
from icebear.steering.apply import reading_sources_once, steer
from icebear.steering.flipping.last_token import Edits, LastToken, NeuronStep, as_edit, values_by_step
from icebear.steering.flipping.phrases import flip_holds, wanted_ids
from icebear.steering.provenance import EditedNeuron, FlipRecord
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, typed

if TYPE_CHECKING:
    from icebear.db.store import Store

CANDIDATES = 24
"""Heads or neurons that each round tries, neurons at `LEVELS` strengths each."""
LEVELS = (0.5, 1.0)
"""Shares of the way to the limit of each activation."""
REACH_SOURCE = 2.5
"""An activation may move this many times the way to its value in the source prompt, or to zero with `suppress`."""
MARGIN = 0.05
"""The margin of a finished flip, in logits, so that another machine's rounding does not undo it."""

Choice = tuple[Tensor, Tensor]
"""(L, F, S) the score of each neuron and head at each step, 0 or less for no candidate; and the limit of its move."""
Chooser = Callable[["SearchState", Edits], Choice]


@dataclass(frozen=True)
class SearchState:
    """The state of a search: what is asked, the tokens, and for each neuron and head the activations and their limits,
    (L, F, S), F counts neurons, then heads; a head moves from 0 to 1."""

    request: FlipRequest
    last: LastToken
    tokens: tuple[int, ...]
    """The wanted tokens, one after the other; or the tokens of which one shall leave the `top_k` most probable ones."""
    now: Tensor
    goal: Tensor | None
    """The value that each may move to, towards its activation in the source prompt or zero; None: `low` and `high`."""
    low: Tensor
    high: Tensor
    """The limits without a goal: the activation range, or with `unbounded` the largest magnitude of the layer."""
    searched: slice
    """The columns of `now` that are searched: heads, or neurons."""
    prefer: tuple[Neuron, ...] = ()
    """Neurons that every round tries."""

    @property
    def model(self) -> Model:
        return self.request.model

    @property
    def top_k(self) -> int | None:
        """None if the tokens are wanted."""
        return self.request.top_k if self.request.suppress else None

    @property
    def text(self) -> str:
        return "".join(self.model.answer_text(token) for token in self.tokens)

    def activations(self, edits: Edits) -> Tensor:
        """(L, F, S) under edits."""
        values = self.now.clone()
        for neuron_step, value in edits.items():
            values[neuron_step] = value
        return values

    def limits(self, up: Tensor) -> Tensor:
        """(L, F, S) the limit of each activation: towards the goal, or up or down if there is none."""
        if self.goal is None:
            return torch.where(up, self.high, self.low)
        return self.goal


@dataclass(frozen=True)
class _Result:
    """Edits, their margin (see `margins`), and for each round of the search the total of edited rows (each round has a
    gradient pass as well) and the margin."""

    edits: dict[NeuronStep, float]
    margin: float
    rounds: tuple[tuple[int, float], ...] = ()


def by_gradient(state: SearchState, edits: Edits) -> Choice:
    """Score by the first-order change of the margin: the gradient times the distance to the limit."""
    gradients = _gradients(state, edits)
    limits = state.limits(gradients > 0)
    return gradients * (limits - state.activations(edits)), limits


def by_distance(state: SearchState, edits: Edits) -> Choice:
    """Score by the distance to the limit: |goal - now| with a source prompt."""
    limits = state.limits(state.high - state.now > state.now - state.low)
    return (limits - state.activations(edits)).abs(), limits


WAYS = by_gradient, by_distance
"""After a round in vain the gradient gives way to distances for a round, because it is zero before a step."""


@dataclass(frozen=True)
class FlipRequest:
    """The arguments of `flip`, and how it searches."""

    model: Model
    prompt: PromptLike
    to: str | int | None = None
    source: PromptLike | None = None
    max_neurons: int = 10
    suppress: bool | str = False
    top_k: int = 5
    store: Store | None = None
    on_progress: OnProgress = unwatched
    unbounded: bool = False
    heads: bool = True
    ways: Sequence[Chooser] = WAYS
    """How candidates are chosen; a way is tried where those before it are in vain."""


@typed
def flip(
    model: Model,
    prompt: PromptLike,
    to: str | int | None = None,
    source: PromptLike | None = None,
    max_neurons: int = 10,
    suppress: bool | str = False,
    top_k: int = 5,
    store: Store | None = None,
    on_progress: OnProgress = unwatched,
    unbounded: bool = False,
    heads: bool = True,
) -> Recipe:
    """Find at most `max_neurons` edits after which the model's answer begins with `to`: swaps of heads or, where they
    do not suffice, values of FFN neurons.

    If it does already, the recipe has no edits. The recipe's provenance holds a `FlipRecord`.

    Parameters
    ----------
    prompt
        A text, token ids, or a chat.
    to
        A token, for which the last token is edited; or a phrase, for which neurons are set there and at the
        tokens of the phrase (`Edit.where` ``step:1``, ...).
    source
        A source prompt of any length (an interchange intervention): heads take their outputs where its answer is
        predicted. Where that does not suffice, neurons move towards their activations there; where that does not
        suffice either, and without `source`, neurons move either way.
    max_neurons
        The maximum number of edits.
    suppress
        Instead of `to`: suppress the current answer, or this phrase. The answer (of a phrase, one of its tokens) leaves
        the `top_k` most probable tokens. Without `source`, neurons move towards zero.
    store
        An index. The neurons that it finds for the token are candidates too, and the record has their examples.
    on_progress
        Called with (edits, `max_neurons`) after each round.
    unbounded
        Allow activations outside the neurons' activation range on the texts of
        `icebear.concepts.vocabulary.calibration`.
    heads
        Whether heads are swapped, which needs `source`.

    Returns
    -------
    Recipe

    Raises
    ------
    InputError
        If no flip was found (the message says how near it came), or for an argument that cannot be used.
    """
    return flip_by(
        FlipRequest(model, prompt, to, source, max_neurons, suppress, top_k, store, on_progress, unbounded, heads)
    )


@reading_sources_once()
def flip_by(request: FlipRequest) -> Recipe:
    """Return the recipe of `flip`."""
    model, prompt, store = request.model, request.prompt, request.store
    wanted = _wanted(request)
    if store:
        store.check(model.fingerprint, model.name)
    state = _start(request, wanted)
    if store:
        from icebear.db.terms import has_words

        hits = store.search(state.text.strip(), k=20) if has_words(state.text) else []
        state = replace(state, prefer=tuple(hit.neuron for hit in hits if hit.neuron.site == "ffn"))
    state, result = _flipped(state)
    edits = _edits(state, result.edits)
    if not flip_holds(model, edits, prompt, state.tokens, state.top_k):
        raise InputError(f"The flip of {state.text!r} failed its check; please report this prompt.")
    record = FlipRecord(
        prompt=prompt_json(prompt),
        text=state.text,
        phrase=state.tokens,
        top_k=state.top_k,
        source=None if request.source is None else prompt_json(request.source),
        unbounded=request.unbounded,
        left_source=state.goal is None and (request.source is not None or state.top_k is not None),
        before=tuple(model.predict(prompt, 5, state.tokens[:1], -1)),
        rounds=result.rounds,
        neurons=_neurons(state, edits, store),
    )
    name = f"{prompt_line(prompt)} -> {'not ' * bool(state.top_k)}{state.text.strip()}"
    with steer(model, edits):
        after = model.predict(prompt, max(5, state.top_k or 0), [row.id for row in record.before], -1)
    provenance = {**record.provenance(), "after": [vars(row) for row in after]}
    return Recipe.for_model(model, name, edits, found_by="flip", **provenance)


def _wanted(request: FlipRequest) -> tuple[int, ...] | None:
    """Return the wanted (or suppressed) tokens, None for the current answer. Raises `InputError`."""
    model, to, suppress = request.model, request.to, request.suppress
    if (to is None) is not bool(suppress):
        raise InputError("Give either the wanted token (to) or suppress.")
    if not (model.task.is_causal or model.task.unembeds):
        raise InputError(f"flip needs a model that predicts the next token; {model.name} does not.")
    if not model.ffn_width:
        raise InputError(f"flip edits FFN neurons, which {model.name} does not have.")
    if not model.task.is_causal:
        logging.getLogger("icebear").warning(
            "%s has an output at each token; flip reads and edits the last one.", model.name
        )
    check_int(request.max_neurons, "max_neurons")
    if suppress:
        check_int(request.top_k, "top_k", 1, model.output_size - 1)
    if request.source is not None and model.ids(request.source) == model.ids(request.prompt):
        raise InputError("The source prompt equals the prompt; give another source prompt.")
    if suppress is True:
        return None
    answer = likelier_form(model, request.prompt, to if to is not None else suppress)
    return wanted_ids(model, answer, request.prompt)


def _start(request: FlipRequest, wanted: tuple[int, ...] | None) -> SearchState:
    model = request.model
    ids = model.ids(request.prompt)
    tokens = wanted or (int(LastToken(model, ids).logits([{}])[0, 0].argmax()),)
    source = None if request.source is None else model.ids(request.source)
    swapped = source if request.heads and not request.suppress and "attn" in model.sites else None
    last = LastToken(model, ids, tokens, swapped)
    activations, goal = last.activations(), None
    plain = activations[:, : model.width("ffn")]
    if source is not None:
        goal = LastToken(model, source, tokens).activations()
    elif request.suppress:
        goal = torch.zeros_like(plain)
    if request.unbounded:
        high = plain.abs().amax(1, keepdim=True).expand_as(plain)  # of a layer at a step
        low = -high
    else:  # or where it is, if that is further
        seen = calibrate(model)
        low, high = torch.minimum(seen.low[..., None], plain), torch.maximum(seen.high[..., None], plain)
        if goal is not None and not model.reads_any_text:  # seen are random ids only
            low, high = torch.minimum(low, goal), torch.maximum(high, goal)
    if goal is not None:
        goal = plain + REACH_SOURCE * (goal - plain)
        goal = goal if request.unbounded else torch.clamp(goal, low, high)
    swap = torch.zeros_like(activations[:, model.width("ffn") :])
    swap[..., 0] = 1  # at the last token
    low, high = torch.cat((low, 0 * swap), 1), torch.cat((high, swap), 1)
    goal = None if goal is None else torch.cat((goal, swap), 1)
    return SearchState(request, last, tokens, activations, goal, low, high, slice(None))


def _searches(state: SearchState) -> list[SearchState]:
    """Return the searches, one after the other until the flip holds: heads; neurons towards the goal, and freely."""
    count, width = state.model.width("ffn"), state.now.shape[1]
    neurons = replace(state, searched=slice(count))
    heads = [replace(state, searched=slice(count, None))] * (width > count)
    towards = [neurons] * (state.goal is not None)
    return [*heads, *towards, replace(neurons, goal=None)]


def _flipped(state: SearchState) -> tuple[SearchState, _Result]:
    """Search edits, prune and weaken them; return the state of the successful search and its result."""
    unedited = _step_margins(state, [{}])
    start = result = _Result({}, _combined(state, unedited)[0].item())
    if _flips_hold(state, unedited)[0]:
        return state, start
    for searched in _searches(state):
        if result.margin < MARGIN:
            next_result = _search(searched, replace(start, rounds=result.rounds))
            if next_result.margin > result.margin:
                state, result = searched, next_result
            else:
                result = replace(result, rounds=next_result.rounds)
    if not _flips_hold(state, _step_margins(state, [result.edits]))[0]:
        raise InputError(_failure(state, result.edits))
    return state, replace(result, edits=_weakened(state, _pruned(state, result.edits)))


def _search(state: SearchState, result: _Result) -> _Result:
    """Add one edit in each round, the one with the largest margin."""
    request = state.request
    while result.margin < MARGIN and len(result.edits) < request.max_neurons:
        edits = result.edits
        for choose in request.ways:
            if result.edits is edits:
                result = _round(state, choose, result)
        if result.edits is edits:
            break
        request.on_progress(len(result.edits), request.max_neurons)
    return result


def _round(state: SearchState, choose: Chooser, result: _Result) -> _Result:
    """Return the result with one more edit, or with the same edits if none has a larger margin."""
    proposals = _proposals(state, choose, result.edits)
    if not proposals:
        return result
    reached, rows = margins(state, proposals), len(proposals) + (result.rounds[-1][0] if result.rounds else 0)
    best = int(reached.argmax())
    if reached[best] <= result.margin + 1e-4:  # in vain, but spent
        return replace(result, rounds=(*result.rounds, (rows, result.margin)))
    return _Result(proposals[best], reached[best].item(), (*result.rounds, (rows, reached[best].item())))


def margins(state: SearchState, proposals: Sequence[Edits]) -> Tensor:
    """(P,) the margin of the flip in logits, under each of P proposals of edits. For a phrase it is the smallest margin
    of its tokens, or, if one is below `MARGIN`, `MARGIN` less the sum of what they lack; to suppress, the largest."""
    return _combined(state, _step_margins(state, proposals))


def _combined(state: SearchState, step_margins: Tensor) -> Tensor:
    if state.top_k:
        return step_margins.amax(1)
    lacking = (MARGIN - step_margins).clamp(min=0).sum(1)
    return torch.where(lacking > 0, MARGIN - lacking, step_margins.amin(1))


def _step_margins(state: SearchState, proposals: Sequence[Edits]) -> Tensor:
    """(P, S) each wanted logit minus the largest other one; with `top_k`, the k-th largest other one minus it."""
    logits = state.last.logits(proposals)
    steps = range(len(state.tokens))
    wanted = logits[:, steps, state.tokens].clone()
    logits[:, steps, state.tokens] = -torch.inf
    if state.top_k:
        return logits.topk(state.top_k).values[..., -1] - wanted
    return wanted - logits.amax(-1)


def _flips_hold(state: SearchState, step_margins: Tensor) -> list[bool]:
    positive = step_margins > 0
    return (positive.any(1) if state.top_k else positive.all(1)).tolist()


def _proposals(state: SearchState, choose: Chooser, edits: Edits) -> list[dict[NeuronStep, float]]:
    """Return the edits with one more swap, or with one more neuron (or one of them moved further) at several
    strengths."""
    scores, limits = choose(state, edits)
    score = torch.zeros_like(scores)
    score[:, state.searched] = scores[:, state.searched].nan_to_num(0.0, 0.0, 0.0)
    best = score.flatten().topk(min(CANDIDATES, score.numel())).indices
    neuron_steps = list(zip(*(axis.tolist() for axis in unraveled(best, score.shape)), strict=True))
    neuron_steps += [(neuron.layer, neuron.index, step) for neuron in state.prefer for step in range(score.shape[2])]
    return [
        {**edits, neuron_step: (state.now + level * (limits - state.now))[neuron_step].item()}
        for neuron_step in dict.fromkeys(neuron_steps)
        if score[neuron_step] > 0
        for level in (LEVELS if neuron_step[1] < state.model.width("ffn") else (1.0,))  # a head moves all the way
    ]


def _gradients(state: SearchState, edits: Edits, method: AttnLRP | None = None) -> Tensor:
    """(L, F, S) the gradient, under edits, of the summed margins of the tokens that lack `MARGIN`, or of the smallest
    margin; to suppress, of the largest."""

    def margin(logits: Tensor) -> Tensor:
        steps, tokens = list(range(len(state.tokens))), list(state.tokens)
        others = logits.detach().clone()
        others[steps, tokens] = -torch.inf
        other = others.topk(state.top_k or 1).indices[:, -1]
        lead = logits[steps, tokens] - logits[steps, other]  # (S,)
        if state.top_k:
            return -lead.amin()
        lacking = lead < MARGIN
        return lead[lacking].sum() if lacking.any() else lead.amin()

    return state.last.gradients(edits, margin, method)


def _pruned(state: SearchState, edits: dict[NeuronStep, float]) -> dict[NeuronStep, float]:
    """Remove the edits that are not needed, the least needed first."""
    while len(edits) > 1:
        fewer = [{neuron_step: value for neuron_step, value in edits.items() if neuron_step != gone} for gone in edits]
        reached = margins(state, fewer)
        best = int(reached.argmax())
        if reached[best] < MARGIN:
            return edits
        edits = fewer[best]
    return edits


def _weakened(state: SearchState, edits: dict[NeuronStep, float]) -> dict[NeuronStep, float]:
    """Scale all edits of neurons together towards the plain activations, as far as the flip holds."""
    plain = {at: state.now[at].item() for at in edits if at[1] < state.model.width("ffn")}
    if not plain:
        return edits
    weaker = [
        {**edits, **{at: round(value + share / 20 * (edits[at] - value), 4) for at, value in plain.items()}}
        for share in range(1, 21)
    ]
    reached = margins(state, weaker).tolist()
    return next((scaled for scaled, margin in zip(weaker, reached, strict=True) if margin >= MARGIN), edits)


def _edits(state: SearchState, edits: Edits) -> list[Edit]:
    model, source = state.model, state.request.source
    read = None if source is None else source if isinstance(source, str) else tuple(model.ids(source))
    return [as_edit(model, neuron_step, value, read) for neuron_step, value in sorted(edits.items())]


def _neurons(state: SearchState, edits: Sequence[Edit], store: Store | None) -> tuple[EditedNeuron, ...]:
    method = None if state.model.has_scan else ATTNLRP
    relevance, rows = state.now * _gradients(state, {}, method), []
    values = values_by_step(state.model, edits)
    for edit, at, effects in zip(edits, values, _effects_alone(state, values), strict=True):
        if edit.source is not None:
            rows.append(EditedNeuron(edit.neuron, *effects))
            continue
        examples = store.examples(edit.neuron, "+" if edit.value > 0 else "-", 3) if store else []
        row = EditedNeuron(
            edit.neuron,
            *effects,
            round(state.now[at].item(), 4),
            relevance[at].item(),
            calibrate(state.model).share(at[:2], edit.value),
            tuple(example.sentence.text for example in examples),
        )
        rows.append(row)
    return tuple(rows)


def _effects_alone(state: SearchState, edits: Edits) -> list[tuple[float, tuple[str, ...], tuple[str, ...]]]:
    """Return what each edit does alone: the probability of the token of its step, and the likely next words that it
    raises and lowers there. The likely words are those without edits and with all of them."""
    plain, edited, *each = state.last.logits([{}, edits, *(dict([edit]) for edit in edits.items())])
    effects = []
    for (_, _, step), alone in zip(edits, each, strict=True):
        likely = likely_ids(torch.stack([plain[step], edited[step]]))
        changes = (alone - plain)[step, likely]
        texts = [state.model.answer_text(id) for id in likely]
        raised, lowered = effect_words(texts, changes - changes.mean())
        probability = alone[step].softmax(-1)[state.tokens[step]].item()
        effects.append((probability, tuple(raised), tuple(lowered)))
    return effects


def _failure(state: SearchState, edits: Edits) -> str:
    request, model, k = state.request, state.model, state.top_k or 1
    worst = int(_step_margins(state, [edits])[0].argmax() if state.top_k else _step_margins(state, [edits])[0].argmin())
    with steer(model, _edits(state, edits), prompt_tokens=len(state.last.ids)):
        tokens = model.predict(state.last.before(worst), k, [state.tokens[worst]], -1)
    token = next(token for token in tokens if token.id == state.tokens[worst])
    phrase = f" of {state.text!r}" if state.last.steps > 1 else ""
    within = "" if request.unbounded else " inside their activation range"
    further = [] if request.unbounded else ["activations outside their range (unbounded)"]
    if state.top_k:
        return (
            f"No edits of at most {request.max_neurons} neurons{within} take {token.text!r}{phrase} out of the {k} "
            f"most probable tokens. With {len(edits)} edits, its probability is {token.probability:.3f}. Try "
            f"{_or('a larger max_neurons', 'a smaller top_k', *further)}."
        )
    other = "another source prompt"
    if request.source is None:
        other = f"a source prompt after which the model predicts {token.text!r}"
    return (
        f"No flip to {token.text!r}{phrase} was found with at most {request.max_neurons} neurons{within}. "
        f"With {len(edits)} edits, the probability of {token.text!r} is {token.probability:.3f}, and "
        f"{tokens[0].text!r} has {tokens[0].probability:.3f}. Try {_or('a larger max_neurons', other, *further)}."
    )


def _or(*choices: str) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
