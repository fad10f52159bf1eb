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
from typing import TYPE_CHECKING, Any

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
from icebear.steering.flipping.last_token import Edits, LastToken, Place
from icebear.steering.flipping.paraphrases import Paraphrases
from icebear.steering.flipping.phrases import comes, kept, said, wanted_ids
from icebear.values import one_of, several, whole

if TYPE_CHECKING:
    from icebear.db.store import Store

CANDIDATES = 24
"""How many neurons are tried in each round, with `LEVELS` strengths each."""
LEVELS = (0.5, 1.0)
"""Shares of the way to the furthest strength allowed."""
REACH_LIKE = 2.5
"""An activation may go this many times the way to what it is in the source prompt, or to zero with `away`."""
REACH = 1.0
"""Beyond what it was seen to be: this many times the largest magnitude that any neuron of the layer has at the last
token."""
MARGIN = 0.05
"""By how much the flip holds in the end, in logits, so that another machine's rounding does not undo it."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class _State:
    """What the search knows: the prompt, the tokens, where activations are and how far they may go, (L, F, S)."""

    last: LastToken | Paraphrases
    tokens: tuple[int, ...]
    """Those that shall be first, one after the other (or each of paraphrases); or of which one shall leave the first
    `out_of`."""
    out_of: int | None
    now: Tensor
    goal: Tensor | None
    """Their values in the source prompt, or zero."""
    low: Tensor
    high: Tensor
    """How far they may go: what each was seen to be, or beyond that as far as the largest of its layer."""
    beyond: bool

    @property
    def model(self) -> Model:
        return self.last.model


@dataclass(frozen=True)
class _Found:
    """Edits, by how much the flip holds with them (`margins`), and for each round of the search the edited rows of the
    prompt so far (each round has a gradient pass as well) and the margin reached."""

    edits: dict[Place, float]
    margin: float
    rounds: tuple[tuple[int, float], ...] = ()

    def after(self, other: _Found) -> _Found:
        """The better one of a search and of another one before it, at the price of both."""
        spent = other.rounds[-1][0] if other.rounds else 0
        rounds = (*other.rounds, *((rows + spent, margin) for rows, margin in self.rounds))
        best = self if self.margin > other.margin else other
        return replace(best, rounds=rounds)


# --- how candidates are chosen ---------------------------------------------------------------------------

Choice = tuple[Tensor, Tensor]
"""(L, F, S) how good each neuron looks at each step, 0 or less for not at all; and how far it would go."""
Chooser = Callable[[_State, Edits], Choice]


def by_slope(method: AttnLRP | None, state: _State, edits: Edits) -> Choice:
    """By what the margin gains to first order: the gradient by the rules of a method (None: the plain one) times how
    far the activation may go."""
    slopes = _slopes(state, edits, method)
    furthest = _furthest(state, slopes > 0)
    return slopes * (furthest - _where(state, edits)), furthest


def by_distance(state: _State, edits: Edits) -> Choice:
    """By how far the activation may go: |goal - now| with a source prompt."""
    furthest = _furthest(state, state.high - state.now > state.now - state.low)
    return (furthest - _where(state, edits)).abs(), furthest


def by_activation(state: _State, edits: Edits) -> Choice:
    """By the size of the activation."""
    reach, furthest = by_distance(state, edits)
    return state.now.abs() * (reach > 0), furthest


def by_chance(seed: int, state: _State, edits: Edits) -> Choice:
    """Drawn uniformly, in either direction; anew in each round."""
    drawn = zlib.crc32(repr((seed, sorted(edits.items()))).encode())  # the same on every machine
    generator = torch.Generator().manual_seed(drawn)
    furthest = _furthest(state, torch.rand(state.now.shape, generator=generator) < 0.5)
    moves = (furthest != _where(state, edits)).float()
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
    like: PromptLike | None = None,
    max_neurons: int = 10,
    away: bool | str = False,
    top_k: int = 5,
    store: Store | None = None,
    on_progress: OnProgress | None = None,
    beyond: bool = False,
    choose: str = "gradient",
    paraphrases: Sequence[PromptLike] = (),
) -> Recipe:
    """A recipe of at most `max_neurons` edits of FFN neurons after which what the model writes begins with `to`.

    prompt: a text, or a chat.
    to: a token, for which neurons are set at the last token; or a phrase, for which they are set there and at its own
        tokens (`Edit.where` ``step:1``, ...).
    like: a source prompt (of any length) whose activations before (and in) the phrase are moved towards; where that is
        not enough, and without it, neurons go either way.
    away: instead of `to`: the current answer leaves the first `top_k` tokens, or if it is a phrase one of its tokens
        does; without `like` neurons are moved towards zero.
    store: an index; the neurons that it finds for the token are tried too, and the recipe tells their examples.
    beyond: neurons may go further than they were seen to go on `icebear.concepts.calibration`'s texts.
    choose: how candidates are found, of `CHOOSERS`; all but the first are controls.
    paraphrases: prompts that say the same; the edits have to do it for all of them. Of one token only.
    An answer that is there already needs no edits: the recipe is empty. Raises `InputError` where it cannot be done,
    with how near it came. The recipe's provenance says what was asked and reached.
    """
    if (to is None) is not bool(away):
        raise InputError("Say either which token shall come (to), or that the current one shall go (away).")
    _check(model, prompt, like, max_neurons, top_k)
    one_of(choose, "way to choose candidates", CHOOSERS)
    paraphrases = [Prompt.of(one) for one in several(paraphrases)]
    phrase = to if to is not None else away
    wanted = None if to is None and away is True else wanted_ids(model, phrase, prompt)
    if store:
        store.check(model.fingerprint, model.name)
    if paraphrases and (wanted is None or away or len(wanted) > 1):
        raise InputError("Paraphrases are for a single token that shall come (to).")
    state = _start(model, prompt, wanted, like, top_k if away else None, beyond, paraphrases)
    found = plain = _Found({}, margins(state, [{}])[0].item())
    if not _holds(state, plain.edits):
        prefer = _found_by(store, _text(state))
        search = partial(_search, plain, prefer, max_neurons, CHOOSERS[choose], on_progress)
        found = search(state)
        if found.margin < MARGIN and state.goal is not None:  # not enough
            first, found = found, search(replace(state, goal=None)).after(found)
            state = state if found.edits == first.edits else replace(state, goal=None)
        if not _holds(state, found.edits):
            raise InputError(_failure(state, found.edits, max_neurons, like is not None))
        found = replace(found, edits=_weakened(state, _pruned(state, found.edits)))
    recipe = _recipe(state, prompt, like, found, store, choose)
    return recipe.noting(paraphrases=list(map(kept, paraphrases))) if paraphrases else recipe


def _found_by(store: Store | None, text: str) -> list[Neuron]:
    """FFN neurons whose examples or W2 rows speak for a token."""
    hits = store.search(text.strip(), k=20) if store and text.strip() else []
    return [hit.neuron for hit in hits if hit.neuron.site == "ffn"]


def _search(
    found: _Found,
    prefer: Sequence[Neuron],
    max_neurons: int,
    choose: Chooser,
    on_progress: OnProgress | None,
    state: _State,
) -> _Found:
    """Edits taken one after the other."""
    rows = 0
    while found.margin < MARGIN and len(found.edits) < max_neurons:
        proposals = _proposals(state, found.edits, choose(state, found.edits), prefer)
        if not proposals:
            break
        reached = margins(state, proposals)
        best, rows = int(reached.argmax()), rows + len(proposals)
        if reached[best] <= found.margin + 1e-4:  # in vain, but spent
            return replace(found, rounds=(*found.rounds, (rows, found.margin)))
        found = _Found(proposals[best], reached[best].item(), (*found.rounds, (rows, reached[best].item())))
        if on_progress:
            on_progress(len(found.edits), max_neurons)
    return found


def _check(model: Model, prompt: PromptLike, like: PromptLike | None, max_neurons: int, top_k: int) -> None:
    if not model.task.looks_back:
        raise InputError(f"flip is for models that write the next token; {model.name} does not.")
    whole(max_neurons, "max_neurons")
    whole(top_k, "top_k", 1, model.answers - 1)
    if like is not None and model.ids(like) == model.ids(prompt):
        raise InputError("The source prompt is the prompt itself; give one that the wanted token follows.")


def _start(
    model: Model,
    prompt: PromptLike,
    wanted: tuple[int, ...] | None,
    like: PromptLike | None,
    out_of: int | None = None,
    beyond: bool = False,
    paraphrases: Sequence[PromptLike] = (),
) -> _State:
    ids = model.ids(prompt)
    tokens = wanted or (int(LastToken(model, ids).logits([{}])[0, 0].argmax()),)
    last: LastToken | Paraphrases = LastToken(model, ids, tokens)
    now = last.activations()
    goal = LastToken(model, model.ids(like), tokens).activations() if like is not None else None
    if goal is None and out_of:
        goal = torch.zeros_like(now)
    if beyond:
        high = (REACH * now.abs().amax(1, keepdim=True)).expand_as(now)  # of a layer at a step
        low = -high
    else:  # or where it is, if that is further
        seen = calibrate(model)
        low, high = torch.minimum(seen.low[..., None], now), torch.maximum(seen.high[..., None], now)
    if paraphrases:
        last = Paraphrases(model, [ids, *map(model.ids, paraphrases)])
        tokens *= 1 + len(paraphrases)
    return _State(last, tokens, out_of, now, goal, low, high, beyond)


def margins(state: _State, proposals: Sequence[Edits]) -> Tensor:
    """(N,) by how many logits the flip holds, each with its activations set: of a token `_steps`. Of a phrase the
    smallest margin of its tokens, or, where one lacks, `MARGIN` less all that they lack; to take it away the
    largest."""
    found = _steps(state, proposals)
    if state.out_of:
        return found.amax(1)
    lacking = (MARGIN - found).clamp(min=0).sum(1)
    return torch.where(lacking > 0, MARGIN - lacking, found.amin(1))


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
    found = _steps(state, [edits])[0]
    return bool((found > 0).any() if state.out_of else (found > 0).all())


def _proposals(state: _State, edits: Edits, choice: Choice, prefer: Sequence[Neuron]) -> list[dict[Place, float]]:
    """The edits with one neuron more (or one of them further), at several strengths."""
    score, furthest = choice
    score = score.nan_to_num(0.0, 0.0, 0.0)
    best = score.flatten().topk(min(CANDIDATES, score.numel())).indices
    places: list[Place] = [tuple(part.tolist()) for part in torch.stack(torch.unravel_index(best, score.shape), 1)]  # type: ignore[misc]
    places += [(neuron.layer, neuron.index, step) for neuron in prefer for step in range(score.shape[2])]
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
        found = logits[steps, tokens] - logits[steps, other]  # (S,)
        if state.out_of:
            return -found.amin()
        lacking = found < MARGIN
        return found[lacking].sum() if lacking.any() else found.amin()

    return state.last.slopes(edits, margin, method)


def _furthest(state: _State, up: Tensor) -> Tensor:
    """(L, F, S) how far each activation may go: towards the goal, or up or down where there is none."""
    if state.goal is None:
        return torch.where(up, state.high, state.low)
    goal = state.now + REACH_LIKE * (state.goal - state.now)
    return goal if state.beyond else torch.clamp(goal, state.low, state.high)


def _where(state: _State, edits: Edits) -> Tensor:
    """(L, F, S) activations, edits included."""
    found = state.now.clone()
    for place, value in edits.items():
        found[place] = value
    return found


def _pruned(state: _State, edits: dict[Place, float]) -> dict[Place, float]:
    """Without the neurons that are not needed, the least needed first."""
    while len(edits) > 1:
        fewer = [{place: value for place, value in edits.items() if place != gone} for gone in edits]
        found = margins(state, fewer)
        best = int(found.argmax())
        if found[best] < MARGIN:
            return edits
        edits = fewer[best]
    return edits


def _weakened(state: _State, edits: dict[Place, float]) -> dict[Place, float]:
    """All strengths scaled together towards where activations are, as far as the flip holds."""

    def scaled(share: float) -> dict[Place, float]:
        return {place: round(_towards(state, place, value, share), 4) for place, value in edits.items()}

    shares = [step / 20 for step in range(1, 21)]
    found = margins(state, [scaled(share) for share in shares]) if edits else torch.zeros(0)
    enough = [share for share, margin in zip(shares, found.tolist(), strict=False) if margin >= MARGIN]
    return scaled(min(enough)) if enough else edits


def _towards(state: _State, place: Place, value: float, share: float) -> float:
    here = state.now[place].item()
    return here + share * (value - here)


def _edits(edits: Edits) -> list[Edit]:
    return [
        Edit(Neuron(layer, "ffn", index), "set", value, where=f"step:{step}" if step else "last")
        for (layer, index, step), value in sorted(edits.items())
    ]


def _text(state: _State) -> str:
    return "".join(state.model.answer_text(token) for token in _phrase(state))


def _phrase(state: _State) -> tuple[int, ...]:
    """The tokens that come one after the other."""
    return state.tokens[: state.last.steps]


def _recipe(
    state: _State,
    prompt: PromptLike,
    like: PromptLike | None,
    found: _Found,
    store: Store | None,
    choose: str,
) -> Recipe:
    """Verified as a user would run it, with what is known about it."""
    model, text, made = state.model, _text(state), _edits(found.edits)
    before = model.predict(prompt, 5, state.tokens[:1])
    with steer(model, made):
        after = model.predict(prompt, max(5, state.out_of or 0), [row.id for row in before])
    if not comes(model, made, prompt, _phrase(state), state.out_of):
        raise InputError(f"The flip of {text!r} did not hold when it was checked; please report this prompt.")
    asked = {"away": text, "top_k": state.out_of} if state.out_of else {"to": text}
    slopes = _slopes(state, {})
    return Recipe.for_model(
        model,
        f"{said(prompt)} -> {'not ' * bool(state.out_of)}{text.strip()}",
        made,
        found_by="flip",
        prompt=kept(prompt),
        tokens=state.last.ids,
        phrase=list(_phrase(state)),
        like=None if like is None else kept(like),
        chosen_by=choose,
        beyond=state.beyond,
        beyond_goal=state.goal is None and (like is not None or state.out_of is not None),
        **asked,
        before=[vars(row) for row in before],
        after=[vars(row) for row in after],
        rounds=found.rounds,
        neurons=[_about(state, edit, slopes, store) for edit in made],
    )


def _about(state: _State, edit: Edit, slopes: Tensor, store: Store | None) -> dict[str, Any]:
    """Where a neuron was, where it goes, how relevant it was there, what it writes, and what drives it that way."""
    step = int(edit.where.removeprefix("step:")) if edit.where.startswith("step:") else 0
    place = edit.neuron.layer, edit.neuron.index, step
    words = project(state.model, edit.neuron, 5)
    examples = store.examples(edit.neuron, "+" if edit.value > 0 else "-", 3) if store else []
    return {
        "neuron": str(edit.neuron),
        "from": round(state.now[place].item(), 4),
        "relevance": (state.now * slopes)[place].item(),
        "of_its_range": calibrate(state.model).share(place[:2], edit.value),
        "promotes": [word.text for word in words.promoted],
        "suppresses": [word.text for word in words.suppressed],
        "examples": [example.sentence.text for example in examples if example.by == "activation"],
    }


def _failure(state: _State, edits: Edits, max_neurons: int, like: bool) -> str:
    """How near it came, and what might help."""
    model, place = state.model, state.out_of or 1
    worst = int(_steps(state, [edits])[0].argmax() if state.out_of else _steps(state, [edits])[0].argmin())
    with steer(model, _edits(edits), prompt_tokens=len(state.last.ids)):
        found = model.predict(state.last.before(worst), place, [state.tokens[worst]])
    own = next(token for token in found if token.id == state.tokens[worst])
    phrase = f" of {_text(state)!r}" if state.last.steps > 1 else ""
    within = "" if state.beyond else " within what they were seen to be"
    further = "" if state.beyond else ", or let them go beyond that (--beyond)"
    if state.out_of:
        return (
            f"No {max_neurons} neurons{within} take {own.text!r}{phrase} out of the first {place} tokens: with "
            f"{len(edits)} it still has {own.probability:.3f}; try more neurons or fewer tokens (top_k){further}."
        )
    other = "another source prompt" if like else "a source prompt that it follows (like)"
    return (
        f"No {max_neurons} neurons{within} make {own.text!r}{phrase} the next token: with {len(edits)} it has "
        f"{own.probability:.3f}, behind {found[0].text!r} with {found[0].probability:.3f}; try more neurons or "
        f"{other}{further}."
    )
