"""`flip`: few neurons, at strengths found by real forward passes, that make a wanted token the next one, or take the
current one away.

Candidates come from AttnLRP under the edits so far (the token to raise against the one to lower), times how far each
activation may move; the best of them, at several strengths, by the margin that a batch of forward passes measures is
taken, again and again. Then what is not needed goes, and the rest is weakened together as far as the flip holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from concepts import tasks
from concepts.attribution import Relevance, attribute
from concepts.baselines.common import repeated, resolved
from concepts.models import Model
from concepts.taps import Taps, visiting
from concepts.vocabulary import project
from db.errors import InputError
from db.records import Neuron
from steering.apply import steer
from steering.edits import Edit
from steering.recipe import Recipe

if TYPE_CHECKING:
    from db.store import Store

CANDIDATES = 24
"""How many neurons are tried in each round, with `LEVELS` strengths each."""
LEVELS = (0.5, 1.0)
"""Shares of the way to the furthest strength allowed."""
REACH_LIKE = 2.5
"""An activation may go this many times the way to what it is in the source prompt, or to zero with `away`."""
REACH = 1.0
"""Without either, or where that is not enough, this many times the largest magnitude that any neuron of the layer has
at the last token."""
MARGIN = 0.05
"""By how much the flip holds in the end, in logits, so that another machine's rounding does not undo it."""

Place = tuple[int, int]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class _State:
    """What the search knows: the prompt, the token, where activations are and how far they may go, (L, F)."""

    model: Model
    plan: tasks.Plan
    token: int
    """The one that shall be first; or, with `out_of`, leave so many first tokens."""
    out_of: int | None
    now: Tensor
    goal: Tensor | None
    """Their values in the source prompt, or zero."""
    limit: Tensor
    """(L, 1) the largest magnitude without a goal."""


def flip(
    model: Model, prompt: str, to: str | int | None = None, like: str | None = None, max_neurons: int = 10,
    away: bool = False, top_k: int = 5, store: Store | None = None, on_progress: OnProgress | None = None,
) -> Recipe:  # fmt: skip
    """A recipe of at most `max_neurons` FFN neurons, set at the last token, after which `to` is the top next token.

    like: a source prompt (of any length) whose last token's activations are moved towards; where that is not enough,
        and without it, any neuron may go as far as the largest of its layer.
    away: instead of `to`: the current answer leaves the first `top_k` tokens; without `like` neurons are moved towards
        zero.
    store: an index; the neurons that it finds for the token are tried too, and the recipe tells their examples.
    An answer that is there already needs no edits: the recipe is empty. Raises `InputError` where it cannot be done,
    with how near it came. The recipe's provenance says what was asked and reached.
    """
    if (to is None) is not away:
        raise InputError("Say either which token shall come (to), or that the current one shall go (away).")
    wanted = None if to is None else model.answer_id(to, "wanted token")
    _check(model, prompt, like, max_neurons, top_k)
    if store:
        store.check(model.fingerprint, model.name)
    state = _start(model, prompt, wanted, like, top_k if away else None)
    plain = margins(state, [{}])[0].item()
    if plain > 0:
        return _recipe(state, prompt, like, {}, store)
    prefer = _found_by(store, model.answer(state.token))
    edits, margin = _search(state, plain, prefer, max_neurons, on_progress)
    if margin < MARGIN and state.goal is not None:  # not enough
        further = replace(state, goal=None)
        others, reached = _search(further, plain, prefer, max_neurons, on_progress)
        if reached > margin:
            state, edits, margin = further, others, reached
    if margin <= 0:
        raise InputError(_failure(state, edits, max_neurons, like))
    return _recipe(state, prompt, like, _weakened(state, _pruned(state, edits)), store)


def _found_by(store: Store | None, text: str) -> list[Neuron]:
    """FFN neurons whose examples or W2 rows speak for a token."""
    hits = store.search(text.strip(), k=20) if store and text.strip() else []
    return [hit.neuron for hit in hits if hit.neuron.site == "ffn"]


def _search(
    state: _State, margin: float, prefer: Sequence[Neuron], max_neurons: int, on_progress: OnProgress | None
) -> tuple[dict[Place, float], float]:
    """Edits taken one after the other, and the margin that they reach from the `margin` without any."""
    edits: dict[Place, float] = {}
    while margin < MARGIN and len(edits) < max_neurons:
        found = _step(state, edits, prefer)
        if found is None or found[1] <= margin + 1e-4:
            break
        edits, margin = found
        if on_progress:
            on_progress(len(edits), max_neurons)
    return edits, margin


def _check(model: Model, prompt: str, like: str | None, max_neurons: int, top_k: int) -> None:
    if model.task != "causal":
        raise InputError(f"flip is for models that write the next token; {model.name} does not.")
    if max_neurons < 1:
        raise InputError(f"max_neurons must be at least 1, not {max_neurons}.")
    if not 1 <= top_k < model.answers:
        raise InputError(f"top_k must be 1 to {model.answers - 1}, not {top_k}.")
    if like is not None and model.token_ids(like) == model.token_ids(prompt):
        raise InputError("The source prompt is the prompt itself; give one that the wanted token follows.")


def _start(model: Model, prompt: str, wanted: int | None, like: str | None, out_of: int | None = None) -> _State:
    plan = resolved(model, tasks.plan(model, [prompt], wanted))
    token = wanted if wanted is not None else next(iter(plan.targets[0] or ()))
    now = last_activations(model, prompt)
    goal = last_activations(model, like) if like is not None else torch.zeros_like(now) if out_of else None
    return _State(model, plan, token, out_of, now, goal, REACH * now.abs().amax(1, keepdim=True))


@torch.no_grad()
def last_activations(model: Model, prompt: str) -> Tensor:
    """(L, F) at the last token."""
    plan = tasks.plan(model, [prompt])
    taps = Taps(model, ("ffn",), plan.batch)
    with model.lock, taps.reading():
        tasks.logits(model, plan.batch, list(plan.positions[0]))
    return taps.activation["ffn"][0, :, -1].float().cpu()


@torch.no_grad()
def margins(state: _State, proposals: Sequence[dict[Place, float]]) -> Tensor:
    """(N,) by how many logits the flip holds, each with its activations set at the last token; one batch.

    The wanted logit minus the largest other one; with `out_of` k, the k-th largest other one minus the token's.
    """
    model, plan = state.model, repeated(state.plan, 0, len(proposals))
    by_layer: dict[int, list[tuple[int, int, float]]] = {}
    for row, proposal in enumerate(proposals):
        for (layer, index), value in proposal.items():
            by_layer.setdefault(layer, []).append((row, index, value))

    def visit(site: str, layer: int, x: Tensor) -> Tensor:
        rows, columns, values = zip(*by_layer[layer], strict=True)
        x = x.clone()
        x[list(rows), -1, list(columns)] = torch.tensor(values, dtype=x.dtype, device=x.device)
        return x

    with model.lock, visiting(model, [("ffn", layer) for layer in by_layer], visit):
        logits = tasks.logits(model, plan.batch, list(plan.positions[0]))[:, 0].float()
    own = logits[:, state.token].clone()
    logits[:, state.token] = -torch.inf
    if state.out_of:
        return (logits.topk(state.out_of).values[:, -1] - own).cpu()
    return (own - logits.amax(1)).cpu()


def _step(
    state: _State, edits: dict[Place, float], prefer: Sequence[Neuron]
) -> tuple[dict[Place, float], float] | None:
    """The edits with one neuron more (or one of them further), and their margin; None without candidates."""
    found = _explained(state, edits)
    relevance, activation = found.ffn[:, -1], found.activation("ffn")[:, -1]
    slopes = torch.where(activation == 0, 0, relevance / activation).float()  # (L, F) logits per unit of activation
    furthest = _furthest(state, slopes)
    gain = slopes * (furthest - _where(state, edits))
    gain[~torch.isfinite(gain)] = 0
    places = [divmod(flat, gain.shape[1]) for flat in gain.flatten().topk(CANDIDATES).indices.tolist()]
    places += [(neuron.layer, neuron.index) for neuron in prefer if gain[neuron.layer, neuron.index] > 0]
    proposals = [
        {**edits, place: (state.now + level * (furthest - state.now))[place].item()}
        for place in dict.fromkeys(places)
        if gain[place] > 0
        for level in LEVELS
    ]
    if not proposals:
        return None
    reached = margins(state, proposals)
    chosen = int(reached.argmax())
    return proposals[chosen], reached[chosen].item()


def _explained(state: _State, edits: dict[Place, float]) -> Relevance:
    """What makes the margin under edits: the token against the other one that it is measured by, or the reverse."""
    model, prompt = state.model, list(state.plan.batch.row_ids(0))
    place = state.out_of or 1
    with steer(model, _edits(edits)):
        others = [token.id for token in model.predict(prompt, place + 1) if token.id != state.token]
        pair = (state.token, others[place - 1])
        return attribute(model, prompt, *(reversed(pair) if state.out_of else pair), sites=("ffn",))


def _furthest(state: _State, slopes: Tensor) -> Tensor:
    """(L, F) how far each activation may go in the direction that helps."""
    if state.goal is not None:
        return state.now + REACH_LIKE * (state.goal - state.now)
    return torch.where(slopes > 0, state.limit, -state.limit)


def _where(state: _State, edits: dict[Place, float]) -> Tensor:
    """(L, F) activations, edits included."""
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


def _edits(edits: dict[Place, float]) -> list[Edit]:
    return [Edit(Neuron(layer, "ffn", index), "set", value, where="last") for (layer, index), value in edits.items()]


def _recipe(
    state: _State, prompt: str, like: str | None, edits: dict[Place, float], store: Store | None = None
) -> Recipe:
    """Verified as a user would run it, with what is known about it."""
    model, token = state.model, state.model.answer(state.token)
    before = model.predict(prompt, 5, [state.token])
    made = sorted(_edits(edits), key=lambda edit: edit.neuron)
    with steer(model, made):
        after = model.predict(prompt, max(5, state.out_of or 0), [found.id for found in before])
    first = [found.id for found in after[: state.out_of or 1]]
    if (state.token in first) is bool(state.out_of):
        raise InputError(f"The flip of {token!r} did not hold when it was checked; please report this prompt.")
    asked = {"away": token, "top_k": state.out_of} if state.out_of else {"to": token}
    explained = _explained(state, {})
    return Recipe.for_model(
        model, f"{prompt} -> {'not ' * bool(state.out_of)}{token.strip()}", made,
        found_by="flip", prompt=prompt, tokens=list(state.plan.batch.row_ids(0)), like=like,
        beyond_goal=state.goal is None and (like is not None or state.out_of is not None), **asked,
        before=[vars(found) for found in before], after=[vars(found) for found in after],
        neurons=[_about(state, edit, explained, store) for edit in made],
    )  # fmt: skip


def _about(state: _State, edit: Edit, explained: Relevance, store: Store | None) -> dict[str, Any]:
    """Where a neuron was, where it goes, how relevant it was there, what it writes, and what drives it that way."""
    layer, index = edit.neuron.layer, edit.neuron.index
    words = project(state.model, edit.neuron, 5)
    examples = store.examples(edit.neuron, "+" if edit.value > 0 else "-", 3) if store else []
    return {
        "neuron": str(edit.neuron), "from": round(state.now[layer, index].item(), 4),
        "relevance": explained.ffn[layer, -1, index].item(),
        "promotes": [word.text for word in words.promoted], "suppresses": [word.text for word in words.suppressed],
        "examples": [example.sentence.text for example in examples if example.by == "activation"],
    }  # fmt: skip


def _failure(state: _State, edits: dict[Place, float], max_neurons: int, like: str | None) -> str:
    """How near it came, and what might help."""
    model, place = state.model, state.out_of or 1
    with steer(model, _edits(edits)):
        found = model.predict(list(state.plan.batch.row_ids(0)), place, [state.token])
    own = next(token for token in found if token.id == state.token)
    if state.out_of:
        return (
            f"No {max_neurons} neurons take {own.text!r} out of the first {place} tokens: with {len(edits)} it still "
            f"has {own.probability:.3f}; try more neurons or fewer tokens (top_k)."
        )
    other = "another source prompt" if like else "a source prompt that it follows (like)"
    return (
        f"No {max_neurons} neurons make {own.text!r} the next token: with {len(edits)} it has {own.probability:.3f}, "
        f"behind {found[0].text!r} with {found[0].probability:.3f}; try more neurons or {other}."
    )
