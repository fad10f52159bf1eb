"""`flip`: few neurons, at strengths found by real forward passes, that make a wanted token or phrase come next, or take
the current one away.

Candidates come from AttnLRP under the edits so far (the token to raise against the one to lower), times how far each
activation may move; the best of them, at several strengths, by the margin that a batch of forward passes measures is
taken, again and again. Then what is not needed goes, and the rest is weakened together as far as the flip holds. Of a
phrase each token is predicted behind the ones before it, and a neuron may be set where any of them is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from icebear.concepts.calibration import calibrate
from icebear.concepts.methods.lrp import ATTNLRP, AttnLRP
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import Prompt, PromptLike
from icebear.concepts.vocabulary import project
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.recipe import Recipe
from icebear.records import Neuron
from icebear.steering.apply import steer
from icebear.steering.flipping.last_token import Edits, LastToken, Paraphrases, Place
from icebear.steering.flipping.phrases import flip_holds, prompt_json, prompt_line, wanted_ids
from icebear.steering.flipping.record import EditedNeuron, FlipRecord
from icebear.values import one_of, several, whole

if TYPE_CHECKING:
    from icebear.db.store import Store

CANDIDATES = 24
"""How many neurons are tried in each round, with `LEVELS` strengths each."""
LEVELS = (0.5, 1.0)
"""Shares of the way to the furthest strength allowed."""
REACH_SOURCE = 2.5
"""An activation may go this many times the way to what it is in the source prompt, or to zero with `suppress`."""
REACH = 1.0
"""Beyond what it was seen to be: this many times the largest magnitude that any neuron of the layer has at the last
token."""
MARGIN = 0.05
"""By how much the flip holds in the end, in logits, so that another machine's rounding does not undo it."""

OnProgress = Callable[[int, int], None]
Choice = tuple[Tensor, Tensor]
"""(L, F, S) how good each neuron looks at each step, 0 or less for not at all; and how far it would go."""
Chooser = Callable[["_State", Edits], Choice]


@dataclass(frozen=True)
class _State:
    """What the search knows: the prompt, the tokens, where activations are and how far they may go, (L, F, S)."""

    last: LastToken | Paraphrases
    tokens: tuple[int, ...]
    """The tokens that shall be first, one after the other (or each of paraphrases); or of which one shall leave the
    first `out_of`."""
    out_of: int | None
    now: Tensor
    goal: Tensor | None
    """Their values in the source prompt, or zero."""
    low: Tensor
    high: Tensor
    """How far they may go: the activation range, or with `unbounded` as far as the largest of the layer."""
    unbounded: bool
    choose: Chooser
    max_neurons: int = 10
    prefer: tuple[Neuron, ...] = ()
    """Neurons that are tried in every round."""
    on_progress: OnProgress | None = None

    @property
    def model(self) -> Model:
        return self.last.model

    @property
    def phrase(self) -> tuple[int, ...]:
        """The tokens that come one after the other."""
        return self.tokens[: self.last.steps]

    @property
    def text(self) -> str:
        return "".join(self.model.answer_text(token) for token in self.phrase)

    def activations(self, edits: Edits) -> Tensor:
        """(L, F, S) under edits."""
        values = self.now.clone()
        for place, value in edits.items():
            values[place] = value
        return values

    def furthest(self, up: Tensor) -> Tensor:
        """(L, F, S) how far each activation may go: towards the goal, or up or down where there is none."""
        if self.goal is None:
            return torch.where(up, self.high, self.low)
        goal = self.now + REACH_SOURCE * (self.goal - self.now)
        return goal if self.unbounded else torch.clamp(goal, self.low, self.high)


@dataclass(frozen=True)
class _Result:
    """Edits, by how much the flip holds with them (`margins`), and for each round of the search the edited rows of the
    prompt so far (each round has a gradient pass as well) and the margin reached."""

    edits: dict[Place, float]
    margin: float
    rounds: tuple[tuple[int, float], ...] = ()


# --- how candidates are chosen ---------------------------------------------------------------------------


def by_slope(method: AttnLRP | None, state: _State, edits: Edits) -> Choice:
    """By what the margin gains to first order: the gradient by the rules of a method (None: the plain one) times how
    far the activation may go."""
    slopes = _slopes(state, edits, method)
    furthest = state.furthest(slopes > 0)
    return slopes * (furthest - state.activations(edits)), furthest


def by_distance(state: _State, edits: Edits) -> Choice:
    """By how far the activation may go: |goal - now| with a source prompt."""
    furthest = state.furthest(state.high - state.now > state.now - state.low)
    return (furthest - state.activations(edits)).abs(), furthest


def by_activation(state: _State, edits: Edits) -> Choice:
    """By the size of the activation."""
    reach, furthest = by_distance(state, edits)
    return state.now.abs() * (reach > 0), furthest


def by_chance(seed: int, state: _State, edits: Edits) -> Choice:
    """Drawn uniformly, in either direction; anew in each round."""
    drawn = zlib.crc32(repr((seed, sorted(edits.items()))).encode())  # the same on every machine
    generator = torch.Generator().manual_seed(drawn)
    furthest = state.furthest(torch.rand(state.now.shape, generator=generator) < 0.5)
    moves = (furthest != state.activations(edits)).float()
    return moves * (1e-6 + torch.rand(state.now.shape, generator=generator)), furthest


CHOOSERS: dict[str, Chooser] = {
    "gradient": partial(by_slope, None),
    "relevance": partial(by_slope, ATTNLRP),
    "distance": by_distance,
    "activation": by_activation,
    **{f"chance {seed}": partial(by_chance, seed) for seed in range(3)},
}
"""The first is what `flip` does: relevance finds the same recipes (docs/results.md#flips) and costs more. The others
are its controls, with the same search, reach and budget around them."""


def flip(
    model: Model,
    prompt: PromptLike,
    to: str | int | None = None,
    source: PromptLike | None = None,
    max_neurons: int = 10,
    suppress: bool | str = False,
    top_k: int = 5,
    store: Store | None = None,
    on_progress: OnProgress | None = None,
    unbounded: bool = False,
    choose: str = "gradient",
    paraphrases: Sequence[PromptLike] = (),
) -> Recipe:
    """Find at most `max_neurons` edits of FFN neurons after which the model's answer begins with `to`.

    An answer that comes already needs no edits: the recipe is empty. Its provenance holds a `FlipRecord`.

    Parameters
    ----------
    prompt: a text, or a chat.
    to: a token, for which neurons are set at the last token; or a phrase, for which they are set there and at its own
        tokens (`Edit.where` ``step:1``, ...).
    source: a prompt (of any length) whose activations at (and in) the answer the neurons are moved towards; where that
        is not enough, and without it, neurons go either way.
    suppress: instead of `to`: the current answer leaves the first `top_k` tokens, or, of a phrase, one of its tokens
        does; without `source` neurons are moved towards zero.
    store: an index; the neurons that it finds for the token are tried too, and the record quotes their examples.
    unbounded: neurons may leave their activation range on the texts of `icebear.concepts.calibration`.
    choose: how candidates are chosen, of `CHOOSERS`; all but the first are controls.
    paraphrases: prompts that mean the same; the edits have to work for all of them. Of one token only.

    Raises
    ------
    InputError: no flip was found (it says how near it came), or an argument cannot be used.
    """
    if (to is None) is not bool(suppress):
        raise InputError("Say either which token shall come (to), or that the current one shall not (suppress).")
    if not model.task.is_causal:
        raise InputError(f"flip is for models that write the next token; {model.name} does not.")
    whole(max_neurons, "max_neurons")
    whole(top_k, "top_k", 1, model.output_size - 1)
    one_of(choose, "way to choose candidates", CHOOSERS)
    if source is not None and model.ids(source) == model.ids(prompt):
        raise InputError("The source prompt is the prompt itself; give one that the wanted token follows.")
    paraphrases = [Prompt.of(one) for one in several(paraphrases)]
    phrase = to if to is not None else suppress
    wanted = None if phrase is True else wanted_ids(model, phrase, prompt)
    if store:
        store.check(model.fingerprint, model.name)
    if paraphrases and (wanted is None or suppress or len(wanted) > 1):
        raise InputError("Paraphrases are for a single token that shall come (to).")
    state = _start(model, prompt, wanted, source, top_k if suppress else None, unbounded, paraphrases, choose)
    hits = store.search(state.text.strip(), k=20) if store and state.text.strip() else []
    prefer = tuple(hit.neuron for hit in hits if hit.neuron.site == "ffn")
    state = replace(state, prefer=prefer, max_neurons=max_neurons, on_progress=on_progress)
    state, result = _flipped(state, source is not None)
    edits = _edits(result.edits)
    if not flip_holds(model, edits, prompt, state.phrase, state.out_of):
        raise InputError(f"The flip of {state.text!r} did not hold when it was checked; please report this prompt.")
    record = FlipRecord(
        prompt=prompt_json(prompt),
        text=state.text,
        phrase=state.phrase,
        top_k=state.out_of,
        source=None if source is None else prompt_json(source),
        paraphrases=tuple(map(prompt_json, paraphrases)),
        chosen_by=choose,
        unbounded=unbounded,
        left_source=state.goal is None and (source is not None or state.out_of is not None),
        before=tuple(model.predict(prompt, 5, state.tokens[:1])),
        rounds=result.rounds,
        neurons=_neurons(state, edits, store),
    )
    name = f"{prompt_line(prompt)} -> {'not ' * bool(state.out_of)}{state.text.strip()}"
    with steer(model, edits):
        after = model.predict(prompt, max(5, state.out_of or 0), [row.id for row in record.before])
    provenance = {**record.provenance(), "after": [vars(row) for row in after]}
    return Recipe.for_model(model, name, edits, found_by="flip", **provenance)


def _start(
    model: Model,
    prompt: PromptLike,
    wanted: tuple[int, ...] | None,
    source: PromptLike | None,
    out_of: int | None = None,
    unbounded: bool = False,
    paraphrases: Sequence[PromptLike] = (),
    choose: str = "gradient",
) -> _State:
    ids = model.ids(prompt)
    tokens = wanted or (int(LastToken(model, ids).logits([{}])[0, 0].argmax()),)
    last: LastToken | Paraphrases = LastToken(model, ids, tokens)
    now = last.activations()
    goal = LastToken(model, model.ids(source), tokens).activations() if source is not None else None
    if goal is None and out_of:
        goal = torch.zeros_like(now)
    if unbounded:
        high = (REACH * now.abs().amax(1, keepdim=True)).expand_as(now)  # of a layer at a step
        low = -high
    else:  # or where it is, if that is further
        seen = calibrate(model)
        low, high = torch.minimum(seen.low[..., None], now), torch.maximum(seen.high[..., None], now)
    if paraphrases:
        last = Paraphrases(model, [ids, *map(model.ids, paraphrases)])
        tokens *= 1 + len(paraphrases)
    return _State(last, tokens, out_of, now, goal, low, high, unbounded, CHOOSERS[choose])


def _flipped(state: _State, has_source: bool) -> tuple[_State, _Result]:
    """Return the fewest and weakest edits that were found, and the state of the search that found them."""
    start = _Result({}, margins(state, [{}])[0].item())
    if _holds(state, start.edits):
        return state, start
    result = _search(state, start)
    if result.margin < MARGIN and state.goal is not None:  # not enough
        free = replace(state, goal=None)
        second = _search(free, replace(start, rounds=result.rounds))
        if second.margin > result.margin:
            state, result = free, second
        else:
            result = replace(result, rounds=second.rounds)
    if not _holds(state, result.edits):
        raise InputError(_failure(state, result.edits, has_source))
    return state, replace(result, edits=_weakened(state, _pruned(state, result.edits)))


def _search(state: _State, result: _Result) -> _Result:
    """Take one edit after the other, in every round the one with the largest margin."""
    rows = result.rounds[-1][0] if result.rounds else 0
    while result.margin < MARGIN and len(result.edits) < state.max_neurons:
        proposals = _proposals(state, result.edits)
        if not proposals:
            break
        reached = margins(state, proposals)
        best, rows = int(reached.argmax()), rows + len(proposals)
        if reached[best] <= result.margin + 1e-4:  # in vain, but spent
            return replace(result, rounds=(*result.rounds, (rows, result.margin)))
        result = _Result(proposals[best], reached[best].item(), (*result.rounds, (rows, reached[best].item())))
        if state.on_progress:
            state.on_progress(len(result.edits), state.max_neurons)
    return result


def margins(state: _State, proposals: Sequence[Edits]) -> Tensor:
    """(N,) by how many logits the flip holds, each with its activations set: of a token `_steps`. Of a phrase the
    smallest margin of its tokens, or, where one lacks, `MARGIN` less all that they lack; to take it away the
    largest."""
    steps = _steps(state, proposals)
    if state.out_of:
        return steps.amax(1)
    lacking = (MARGIN - steps).clamp(min=0).sum(1)
    return torch.where(lacking > 0, MARGIN - lacking, steps.amin(1))


def _steps(state: _State, proposals: Sequence[Edits]) -> Tensor:
    """(N, S) each wanted logit minus the largest other one; with `out_of` k, the k-th largest other one minus it."""
    logits = state.last.logits(proposals)
    steps = range(len(state.tokens))
    own = logits[:, steps, state.tokens].clone()
    logits[:, steps, state.tokens] = -torch.inf
    if state.out_of:
        return logits.topk(state.out_of).values[..., -1] - own
    return own - logits.amax(-1)


def _holds(state: _State, edits: Edits) -> bool:
    """By however little."""
    steps = _steps(state, [edits])[0]
    return bool((steps > 0).any() if state.out_of else (steps > 0).all())


def _proposals(state: _State, edits: Edits) -> list[dict[Place, float]]:
    """The edits with one neuron more (or one of them further), at several strengths."""
    score, furthest = state.choose(state, edits)
    score = score.nan_to_num(0.0, 0.0, 0.0)
    best = score.flatten().topk(min(CANDIDATES, score.numel())).indices
    places = list(zip(*(axis.tolist() for axis in torch.unravel_index(best, score.shape)), strict=True))
    places += [(neuron.layer, neuron.index, step) for neuron in state.prefer for step in range(score.shape[2])]
    return [
        {**edits, place: (state.now + level * (furthest - state.now))[place].item()}
        for place in dict.fromkeys(places)
        if score[place] > 0
        for level in LEVELS
    ]


def _slopes(state: _State, edits: Edits, method: AttnLRP | None = ATTNLRP) -> Tensor:
    """(L, F, S) of the margin under edits: the tokens that lack it, each against the other one that it is measured by;
    or the reverse of the one that is nearest to leave."""

    def margin(logits: Tensor) -> Tensor:
        steps, tokens = list(range(len(state.tokens))), list(state.tokens)
        others = logits.detach().clone()
        others[steps, tokens] = -torch.inf
        other = others.topk(state.out_of or 1).indices[:, -1]
        lead = logits[steps, tokens] - logits[steps, other]  # (S,)
        if state.out_of:
            return -lead.amin()
        lacking = lead < MARGIN
        return lead[lacking].sum() if lacking.any() else lead.amin()

    return state.last.slopes(edits, margin, method)


def _pruned(state: _State, edits: dict[Place, float]) -> dict[Place, float]:
    """Without the neurons that are not needed, the least needed first."""
    while len(edits) > 1:
        fewer = [{place: value for place, value in edits.items() if place != gone} for gone in edits]
        reached = margins(state, fewer)
        best = int(reached.argmax())
        if reached[best] < MARGIN:
            return edits
        edits = fewer[best]
    return edits


def _weakened(state: _State, edits: dict[Place, float]) -> dict[Place, float]:
    """All strengths scaled together towards where activations are, as far as the flip holds."""

    def scaled(share: float) -> dict[Place, float]:
        here = {place: state.now[place].item() for place in edits}
        return {place: round(here[place] + share * (value - here[place]), 4) for place, value in edits.items()}

    weaker = [scaled(step / 20) for step in range(1, 21)]
    reached = margins(state, weaker).tolist()
    return next((some for some, margin in zip(weaker, reached, strict=True) if margin >= MARGIN), edits)


def _edits(edits: Edits) -> list[Edit]:
    return [
        Edit(Neuron(layer, "ffn", index), "set", value, where=f"step:{step}" if step else "last")
        for (layer, index, step), value in sorted(edits.items())
    ]


def _neurons(state: _State, edits: Sequence[Edit], store: Store | None) -> tuple[EditedNeuron, ...]:
    """Where neurons were, how relevant they were there, what they write, and what activates them."""
    relevance, rows = state.now * _slopes(state, {}), []
    for edit in edits:
        step = int(edit.where.removeprefix("step:")) if edit.where.startswith("step:") else 0
        place = edit.neuron.layer, edit.neuron.index, step
        words = project(state.model, edit.neuron, 5)
        examples = store.examples(edit.neuron, "+" if edit.value > 0 else "-", 3) if store else []
        row = EditedNeuron(
            edit.neuron,
            round(state.now[place].item(), 4),
            relevance[place].item(),
            calibrate(state.model).share(place[:2], edit.value),
            tuple(word.text for word in words.promoted),
            tuple(word.text for word in words.suppressed),
            tuple(example.sentence.text for example in examples if example.by == "activation"),
        )
        rows.append(row)
    return tuple(rows)


def _failure(state: _State, edits: Edits, source: bool) -> str:
    """How near it came, and what might help."""
    model, place = state.model, state.out_of or 1
    worst = int(_steps(state, [edits])[0].argmax() if state.out_of else _steps(state, [edits])[0].argmin())
    with steer(model, _edits(edits), prompt_tokens=len(state.last.ids)):
        tokens = model.predict(state.last.before(worst), place, [state.tokens[worst]])
    own = next(token for token in tokens if token.id == state.tokens[worst])
    phrase = f" of {state.text!r}" if state.last.steps > 1 else ""
    within = "" if state.unbounded else " inside their activation range"
    further = "" if state.unbounded else ", or let them leave it (--unbounded)"
    if state.out_of:
        return (
            f"No {state.max_neurons} neurons{within} take {own.text!r}{phrase} out of the first {place} tokens: with "
            f"{len(edits)} it still has {own.probability:.3f}; try more neurons or fewer tokens (top_k){further}."
        )
    other = "another source prompt" if source else "a prompt that it follows (source)"
    return (
        f"No {state.max_neurons} neurons{within} make {own.text!r}{phrase} the next token: with {len(edits)} it has "
        f"{own.probability:.3f}, behind {tokens[0].text!r} with {tokens[0].probability:.3f}; try more neurons or "
        f"{other}{further}."
    )
