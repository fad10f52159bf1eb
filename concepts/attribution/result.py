"""`Relevance`: what an attribution found, ranked and summed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from icebear.concepts import files
from icebear.concepts.attribution import misfits
from icebear.concepts.lrp.positions import Reading, over_layers
from icebear.concepts.methods.method import Method
from icebear.concepts.models.chat import Turn, outside
from icebear.concepts.models.images import ImageMap
from icebear.concepts.models.plan import Number, Plan
from icebear.errors import InputError
from icebear.records import POLARITIES, Neuron, Ranked, TokenScore, as_neuron
from icebear.tables import Tabled
from icebear.values import one_of, several, shown, whole

if TYPE_CHECKING:
    import pandas

Position = int | Literal["last", "all"]


@dataclass(frozen=True)
class Conservation:
    """Where the relevance of the target went; the parts add up to `target`.

    `softmax` is what the bias term of the Taylor rule keeps (AttnLRP Eq. 13; 0 in CP-LRP), `rest` what no
    rule accounts for: rounding, and functions with f(0) != 0.
    """

    target: float
    tokens: float
    positions: float
    biases: float
    softmax: float

    @property
    def rest(self) -> float:
        return self.target - self.tokens - self.positions - self.biases - self.softmax

    def less(self, other: Conservation) -> Conservation:
        return Conservation(*(getattr(self, part.name) - getattr(other, part.name) for part in fields(self)))

    def to_dict(self) -> dict[str, float]:
        names = ("target", "tokens", "positions", "biases", "softmax", "rest")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        others = {
            "positions": self.positions,
            "biases": self.biases,
            "softmax bias (not attributable to a token)": self.softmax,
        }
        parts = [f"{name} {value:z.3f}" for name, value in others.items() if abs(value) >= 5e-4]
        return f"{self.target:z.3f}: {', '.join([f'tokens {self.tokens:z.3f}', *parts, f'rest {self.rest:.1e}'])}"


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """What a relevance is compared with: one other prompt, or the mean over several."""

    prompts: tuple[tuple[str, ...], ...]
    """The tokens of each."""
    pairs: tuple[Plan, ...]
    """For each, what was asked of both prompts: two rows, the other one second."""
    shares: tuple[Tensor, ...]
    """For each (T, T'): what of it stands for each token (`icebear.concepts.attribution.alignment`)."""
    contrasts: tuple[str, ...]
    """What the target is explained against with each; empty for a whole continuation."""
    own: bool
    """Whether that is the other prompt's own answer."""
    activation: dict[str, Tensor]
    """site -> (L, P, N) what stands for the activations, the mean over the prompts."""
    at: str
    """Where the coefficients are from: ``both`` prompts (difference rules), ``prompt``, ``midpoint`` or ``path``; or of
    each ``model`` its own."""
    numbers: tuple[float, ...]
    """The number explained, with each of the other prompts."""
    overlap: float | None
    """Of several: the share of their hundred largest nodes that two of them have in common, in the mean."""
    note: str = ""
    """Why it is not done as by default."""
    model: str = ""
    """The other model, of which it is the same prompt."""


@dataclass(frozen=True, eq=False)
class Rather:
    """Another phrase that an answer is explained against, behind the same prompt."""

    text: str
    token_strings: tuple[str, ...]
    """What was read of it, all but its last token, and its own relevance, which `conserved.tokens` counts as well:"""
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Largest:
    """What is kept of all positions where their neurons are not, with ``keep="top"``."""

    k: int
    ranked: dict[str, tuple[Ranked, ...]]
    """site -> its k that speak most for the target and its k that speak most against it, neither at sinks nor in a
    chat's template."""
    layers: dict[str, Tensor]
    """site -> (L, T) sums over all its neurons."""
    heads: Tensor | None
    """(L, T, H) of whole heads, with the site `attn`."""

    def top(self, k: int, site: str, sign: str) -> list[Ranked]:
        if k > self.k:
            raise InputError(f"The {self.k} largest of each site were kept; pass attribute(k={k}), or keep='all'.")
        return sorted(self.ranked[site], key=lambda r: (-r.relevance if sign == "+" else r.relevance, r.neuron))[:k]


@dataclass(frozen=True, eq=False, repr=False)
class Relevance(Tabled):
    """Signed relevance of one prompt's tokens and neurons for one target."""

    tokens: Tensor
    """(T,) relevance of each input token: of an encoder-decoder what the encoder read, then what the decoder did; of an
    image its patches."""
    token_ids: tuple[int, ...]
    token_strings: tuple[str, ...]
    target: TokenScore | None
    """The token explained; None when a continuation of several is (see `target_text`)."""
    target_text: str
    contrast: TokenScore | None
    predictions: tuple[TokenScore, ...]
    """The most probable next tokens."""
    method: Method
    sites: dict[str, tuple[Tensor, Tensor]]
    """site -> (relevance (L, P, N), activation (L, P, N)), P the positions recorded: T, unless told otherwise."""
    recorded: tuple[int, ...]
    """The positions whose neurons were kept, as `attribute(record=...)` says."""
    sinks: tuple[int, ...]
    """Positions that collect attention and huge activations, set apart in rankings: the first token, special
    tokens, and those whose residual stream is more than 4 x the median position's in most layers."""
    head_count: int
    conserved: Conservation
    made_with: dict[str, Any]
    """See `icebear.concepts.models.provenance`."""
    explained_at: tuple[int, ...]
    """The positions where the prediction is made: the last token, the masks, [CLS]; of a continuation of several tokens
    one for each."""
    read: int
    """How many of the tokens the encoder (or the only stack) read; the decoder has the others."""
    turns: tuple[Turn, ...] = ()
    """Of a chat its messages."""
    answer_from: int | None = None
    """The position of an answer's first token; None where only what comes next is explained."""
    rather: Rather | None = None
    """The phrase that it is explained against."""
    largest: Largest | None = None
    """With ``keep="top"``: what is kept of the other positions."""
    positions: Tensor | None = None
    """(L, T) relevance of the positions in each layer, or (1, T) of position embeddings at the input; only of a method
    with ``positions=True`` (PA-LRP)."""
    image: ImageMap | None = None
    counterfactual: Counterfactual | None = None
    """What it is compared with: relevance is then of differences, `conserved.target` that of the number explained."""
    missing_rules: tuple[str, ...] = ()
    """Operations that took their plain gradient (only with strict=False)."""
    number: Number = "logits"
    """What of the answer is explained."""

    def __repr__(self) -> str:
        against = f" against {self.contrast_text!r}" if self.contrast_text else ""
        counterfactual = f" counterfactual {''.join(self.counterfactual.prompts[0])!r}" if self.counterfactual else ""
        kept = ", ".join(f"{site} {tuple(values[0].shape)}" for site, values in self.sites.items())
        return (
            f"<Relevance of {len(self.tokens)} tokens for {self.target_text!r}{against}{counterfactual}"
            f", {self.method!r}; {kept or 'no neurons'}>"
        )

    def __eq__(self, other: object) -> bool:
        return files.same(self, other)

    def __hash__(self) -> int:
        return hash((self.token_ids, self.explained_at, self.target_text))

    @property
    def predicted_at(self) -> int:
        """The first of `explained_at`."""
        return self.explained_at[0]

    @property
    def contrast_text(self) -> str:
        """What it is explained against; empty for nothing."""
        return self.contrast.text if self.contrast else self.rather.text if self.rather else ""

    @property
    def template(self) -> tuple[int, ...]:
        """Positions of a chat that its template wrote, not a message."""
        return outside(self.turns, len(self.tokens))

    def less(self, other: Relevance) -> Relevance:
        """Of this answer rather than another one behind the same prompt; their tokens before it have the difference."""
        common, counterfactual = self.predicted_at + 1, self.counterfactual
        if not isinstance(other, Relevance) or other.token_ids[:common] != self.token_ids[:common]:
            raise InputError("What a relevance is compared with is another one behind the same prompt; attribute one.")
        if self.positions is not None:
            raise InputError("Relevance of positions is not compared; take attnlrp or cp-lrp.")
        sites = {}
        for site, (values, activation) in self.sites.items():
            shared = [place for place in self.recorded if place < common and place in other.recorded]
            values = values.clone()
            theirs = other.of(site)[:, [other.recorded.index(place) for place in shared]]
            values[:, [self.recorded.index(place) for place in shared]] -= theirs
            sites[site] = values, activation
        tokens = self.tokens.clone()
        tokens[:common] -= other.tokens[:common]
        own = Rather(other.target_text, other.token_strings[common:], other.tokens[common:])
        conserved = self.conserved.less(other.conserved)
        if counterfactual and other.counterfactual:
            numbers = zip(counterfactual.numbers, other.counterfactual.numbers, strict=True)
            counterfactual = replace(counterfactual, numbers=tuple(here - there for here, there in numbers))
        return replace(self, tokens=tokens, sites=sites, rather=own, conserved=conserved, counterfactual=counterfactual)

    def only(self, k: int, recorded: Sequence[int]) -> Relevance:
        """Of one that recorded all positions what ``keep="top"`` keeps: those recorded, and the largest."""
        recorded = [whole(place, "A position to record", 0, len(self.tokens) - 1) for place in several(recorded)]
        every = partial(self.top, k, position="all")
        ranked = {site: (*every(site), *every(site, sign="-")) for site in self.sites}
        heads = self.heads() if "attn" in self.sites else None
        largest = Largest(k, ranked, {site: self.layers(site) for site in self.sites}, heads)
        at, counterfactual = list(recorded), self.counterfactual
        if counterfactual:
            counterfactual = replace(
                counterfactual, activation={site: x[:, at] for site, x in counterfactual.activation.items()}
            )
        sites = {site: (relevance[:, at], activation[:, at]) for site, (relevance, activation) in self.sites.items()}
        return replace(self, sites=sites, recorded=tuple(at), counterfactual=counterfactual, largest=largest)

    def combined(self, reading: Reading = "relu") -> Tensor:
        """(T,) the tokens' relevance and their positions', all layers together (PA-LRP, Eq. 11): ``relu`` counts a
        layer's relevance where it is positive, ``signed`` all of it."""
        if self.positions is None:
            raise InputError("This relevance has no positions; pass method=PA_LRP (--method pa-lrp).")
        return self.tokens + over_layers(self.positions, reading)

    # --- per site -------------------------------------------------------------------------------------

    def of(self, site: str) -> Tensor:
        """(L, P, N) relevance of a site's neurons at the positions recorded."""
        return self._site(site)[0]

    def activation(self, site: str) -> Tensor:
        """(L, P, N) activations of a site's neurons at the positions recorded."""
        return self._site(site)[1]

    def _site(self, site: str) -> tuple[Tensor, Tensor]:
        if not isinstance(site, str) or site not in self.sites:
            have = ", ".join(self.sites) or "none"
            raise InputError(f"This relevance has no site {shown(site)} (it has: {have}); name it in sites=.")
        return self.sites[site]

    @property
    def ffn(self) -> Tensor:
        """(L, P, F)"""
        return self.of("ffn")

    @property
    def attn(self) -> Tensor:
        """(L, P, A)"""
        return self.of("attn")

    @property
    def q(self) -> Tensor:
        return self.of("q")

    @property
    def k(self) -> Tensor:
        return self.of("k")

    @property
    def v(self) -> Tensor:
        return self.of("v")

    def layers(self, site: str = "ffn") -> Tensor:
        """(L, P) relevance summed over a site's neurons; with ``keep="top"`` at all positions, (L, T)."""
        values = self.of(site)
        return self.largest.layers[site] if self.largest else values.sum(-1)

    def heads(self) -> Tensor:
        """(L, P, H) relevance of the attention heads' outputs; with ``keep="top"`` at all positions, (L, T, H)."""
        values = self.attn
        if self.largest and self.largest.heads is not None:
            return self.largest.heads
        return values.unflatten(-1, (self.head_count, -1)).sum(-1)

    def conservation(self) -> Conservation:
        return self.conserved

    @property
    def linear_share(self) -> float | None:
        """The tokens' relevance as a share of the number explained: 1 for difference rules; None where that is 0."""
        return self.conserved.tokens / self.conserved.target if self.conserved.target else None

    def account(self) -> str:
        """Where the number explained went, in a line."""
        if self.counterfactual is None:
            return f"{self.number_text} {self.conserved}"
        whole, tokens, there = self.conserved.target, self.conserved.tokens, fmean(self.counterfactual.numbers)
        return (
            f"Difference {whole:z.3f}: {whole + there:z.3f} in the prompt, {there:z.3f} in the counterfactual; "
            f"tokens {tokens:z.3f}, rest {whole - tokens:z.3f}"
        )

    @property
    def number_text(self) -> str:
        """What of the answer is explained, in words."""
        if self.contrast_text:
            return "Logit difference"
        return {
            "logits": "Logit",
            "log-odds": "Logit against all others",
            "centred": "Logit less the mean of the vocabulary",
            "mean": "Mean logit less the mean of the vocabulary",
        }[self.number]

    def meaning(self) -> str:
        """What it is compared with, in a line."""
        if self.counterfactual is None:
            return "Compared with nothing: many of the largest are large for every prompt. Give a counterfactual."
        told = self.counterfactual
        if told.model:
            return f"Compared with the model {told.model} on the same prompt: relevance here less relevance there"
        others = " and ".join(repr("".join(tokens)) for tokens in told.prompts[:3])
        more = f" and {len(told.prompts) - 3} more" if len(told.prompts) > 3 else ""
        own = (
            f", contrast: the counterfactual's top token {' / '.join(map(repr, dict.fromkeys(told.contrasts)))}"
            if told.own
            else ""
        )
        where = {
            "both": "",
            "prompt": ", coefficients of the prompt",
            "midpoint": ", coefficients of the midpoint",
            "path": ", coefficients of the path between",
        }[told.at]
        note = f" ({told.note})" if told.note else ""
        overlap = f"; their first 100 share {told.overlap:.0%}" if told.overlap is not None else ""
        return f"Compared with {others}{more}{own}{where}{note}{overlap}"

    # --- ranking --------------------------------------------------------------------------------------

    def top(
        self,
        k: int = 20,
        site: str | None = None,
        polarity: Literal["+", "-"] | None = None,
        position: Position = "last",
        include_sinks: bool = False,
        sign: Literal["+", "-"] = "+",
        layers: int | Iterable[int] | None = None,
        include_template: bool = False,
    ) -> list[Ranked]:
        """The k neurons with the largest relevance, largest first; ties go to the smaller neuron id.

        site: one site, ``head`` for whole heads, or None for every neuron site that was recorded.
        polarity: only neurons whose activation (less that in the other prompt) has this sign; not for heads, which have
            none.
        position: ``last`` (where the prediction is made), an index (negative from the end), or ``all``, which ranks
            (neuron, position) pairs and leaves sinks out unless `include_sinks`, and what a chat's template wrote
            unless `include_template`. Of a prediction at several positions (`explained_at`) ``last`` ranks a neuron's
            sum, and tells the position that gave most of it, with the activation there.
        sign: ``-`` ranks the most negative relevance first: what speaks against the target.
        layers: only this one, or these.
        """
        k = whole(k, "The number of neurons to rank")
        one_of(sign, "sign", POLARITIES)
        if polarity is not None:
            one_of(polarity, "polarity", POLARITIES)
        if polarity and site == "head":
            raise InputError("A head has no activation, so it has no polarity; leave the polarity out, or rank attn.")
        found: list[Ranked] = []
        for name in self.sites if site is None else [site]:
            if self.largest and position == "all" and name != "head":
                self._site(name)
                if polarity or include_sinks or include_template or layers is not None:
                    raise InputError("Only the largest of each site were kept; to choose among all pass keep='all'.")
                found += self.largest.top(k, name, sign)
                continue
            positions = self._positions(position, include_sinks, include_template, name)
            chosen = None if layers is None else several(layers)
            found += self._top_of_site(k, name, polarity, positions, sign, chosen, position == "last")
        found.sort(key=lambda r: (-r.relevance if sign == "+" else r.relevance, r.neuron, r.position))
        return found[:k]

    def _kept(self, site: str) -> Sequence[int]:
        """The positions that `of` a site has, or `heads`."""
        return range(len(self.tokens)) if self.largest and site == "head" else self.recorded

    def _positions(self, position: Position, include_sinks: bool, include_template: bool, site: str) -> list[int]:
        """Asked for in the ranking; they must have been recorded."""
        count = len(self.tokens)
        if position == "all":
            apart = {*(() if include_sinks else self.sinks), *(() if include_template else self.template)}
            wanted = [t for t in range(count) if t not in apart]
        elif position == "last":
            wanted = list(self.explained_at)
        elif isinstance(position, Integral) and not isinstance(position, bool) and -count <= position < count:
            wanted = [int(position) % count]
        else:
            raise InputError(f"Position {shown(position)} is not last, all or one of 0 to {count - 1}.")
        if not set(wanted) <= set(self._kept(site)):
            raise InputError(
                f"Only positions {', '.join(map(str, self.recorded)) or 'none'} were recorded; pass record='all' "
                "to rank others."
            )
        return wanted

    def _top_of_site(
        self,
        k: int,
        site: str,
        polarity: str | None,
        positions: list[int],
        sign: str,
        layers: Sequence[int] | None,
        together: bool,
    ) -> Iterable[Ranked]:
        """together: rank a neuron's sum over the positions, at that which gave most."""
        if site == "head":
            relevance, activation = self.heads(), None
        else:
            relevance, activation = self._site(site)
        kept = self._kept(site)
        columns = [kept.index(position) for position in positions]
        chosen = relevance[:, columns].transpose(1, 2)  # (L, N, P): flat order is the order of ties
        where = torch.tensor(columns, dtype=torch.long).expand(chosen.shape)
        signed = 1 if sign == "+" else -1
        if together:
            most = (signed * chosen).argmax(-1, keepdim=True)
            where, chosen = where.gather(-1, most), chosen.sum(-1, keepdim=True)
        scores = signed * chosen
        if polarity and activation is not None:
            compared = activation - self.counterfactual.activation[site] if self.counterfactual else activation
            signs = compared.transpose(1, 2).gather(-1, where)
            scores = scores.masked_fill(signs >= 0 if polarity == "-" else signs < 0, -torch.inf)
        if layers is not None:
            chosen_layers = {whole(layer, "A layer", 0, len(scores) - 1) for layer in layers}
            scores = scores.clone()
            scores[[layer for layer in range(len(scores)) if layer not in chosen_layers]] = -torch.inf
        for place in _largest(scores.flatten(), k):
            layer, rest = divmod(place, chosen.shape[1] * chosen.shape[2])
            index, p = divmod(rest, chosen.shape[2])
            column = int(where[layer, index, p])
            yield Ranked(
                Neuron(layer, site, index),
                kept[column],
                None if activation is None else activation[layer, column, index].item(),
                chosen[layer, index, p].item(),
                self.counterfactual.activation[site][layer, column, index].item()
                if self.counterfactual and site != "head"
                else None,
            )

    def of_neuron(self, neuron: Neuron | str, position: Position = "last") -> float:
        """The relevance of one neuron (or head) at a position, or summed over ``all`` but the sinks and a template's;
        ``last`` is summed over `explained_at`."""
        neuron = as_neuron(neuron)
        values = self.heads() if neuron.site == "head" else self.of(neuron.site)
        layers, _, width = values.shape
        whole(neuron.layer, f"The layer of {neuron}", 0, layers - 1)
        whole(neuron.index, f"The index of {neuron}", 0, width - 1)
        kept = self._kept(neuron.site)
        columns = [kept.index(place) for place in self._positions(position, False, False, neuron.site)]
        return values[neuron.layer, columns, neuron.index].sum().item()

    # --- as other things ------------------------------------------------------------------------------

    def to_dict(self, k: int = 20) -> dict[str, Any]:
        """JSON-ready: tokens, target, conservation, sinks, and the top k neurons of each site."""
        k = whole(k, "The number of neurons", 0)
        return {
            **self.made_with,
            "method": repr(self.method),
            "target": vars(self.target) if self.target else None,
            "target_text": self.target_text,
            "contrast": vars(self.contrast) if self.contrast else None,
            "rather": _rather_dict(self.rather) if self.rather else None,
            "predictions": [vars(token) for token in self.predictions],
            "tokens": [
                {"id": id, "text": text, "relevance": value}
                for id, text, value in zip(self.token_ids, self.token_strings, self.tokens.tolist(), strict=True)
            ],
            "predicted_at": self.predicted_at,
            "explained_at": list(self.explained_at),
            "read": self.read,
            "positions": None if self.positions is None else self.positions.tolist(),
            "patches": self.image.patches.tolist() if self.image else None,
            "sinks": list(self.sinks),
            "turns": [vars(turn) for turn in self.turns],
            "template": list(self.template),
            "answer_from": self.answer_from,
            "conservation": self.conserved.to_dict(),
            "counterfactual": _counterfactual_dict(self) if self.counterfactual else None,
            "missing_rules": list(self.missing_rules),
            "top": {site: [ranked_dict(r) for r in self.top(k, site)] for site in self.sites} if k else {},
        }

    def to_json(self, k: int = 20) -> str:
        return json.dumps(self.to_dict(k), ensure_ascii=False, indent=1, allow_nan=False)

    def to_frame(self, k: int = 100, **ranking: Any) -> pandas.DataFrame:
        """The top k neurons as a pandas table; takes the arguments of `top`. `to_arrow` has it as an Arrow table.

        A head has neither polarity nor activation: there the table has nothing. Prompt, target and contrast are the
        same in each row, so that tables of several prompts can be put together.
        """
        import pandas

        unknown = sorted(set(ranking) - RANKING)
        if unknown:
            raise InputError(f"{unknown[0]!r} is no argument of top; use {', '.join(sorted(RANKING))}.")
        about = {
            "prompt": "".join(self.token_strings),
            "target": self.target_text,
            "contrast": self.contrast_text or None,
        }
        counterfactual = {"counterfactual": float} if self.counterfactual else {}
        types = {"activation": float, **counterfactual, "relevance": float}
        rows = [
            {
                **about,
                "neuron": str(r.neuron),
                "layer": r.neuron.layer,
                "site": r.neuron.site,
                "index": r.neuron.index,
                "position": r.position,
                "token": self.token_strings[r.position],
                "polarity": r.polarity or None,
                "activation": r.activation,
                **({"counterfactual": r.counterfactual} if self.counterfactual else {}),
                "relevance": r.relevance,
            }
            for r in self.top(k, **ranking)
        ]
        return pandas.DataFrame(rows).astype(types if rows else {})

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """All of it as a JSON file, for `load`. Raises `InputError`."""
        files.save(self, path, overwrite)

    @classmethod
    def load(cls, path: str | Path) -> Relevance:
        """What `save` wrote. Raises `InputError`."""
        return files.load(cls, path, misfits=misfits.of_relevance)

    def to_html(self) -> str:
        """A self-contained HTML page: the heatmap, the prediction and the top neurons."""
        from icebear.concepts.render import relevance_page

        return relevance_page(self)

    def _repr_html_(self) -> str:
        from icebear.concepts.render import relevance_fragment

        return relevance_fragment(self)


RANKING = frozenset(inspect.signature(Relevance.top).parameters) - {"self", "k"}
"""The arguments of `Relevance.top` that `Relevance.to_frame` takes."""


def _rather_dict(rather: Rather) -> dict[str, Any]:
    """JSON-ready."""
    tokens = zip(rather.token_strings, rather.tokens.tolist(), strict=True)
    return {"text": rather.text, "tokens": [{"text": text, "relevance": value} for text, value in tokens]}


def _counterfactual_dict(relevance: Relevance) -> dict[str, Any]:
    """JSON-ready."""
    told = relevance.counterfactual
    assert told is not None
    return {
        "prompts": [list(tokens) for tokens in told.prompts],
        "contrasts": list(told.contrasts),
        "own_answers": told.own,
        "at": told.at,
        "numbers": list(told.numbers),
        "model": told.model or None,
        "linear_share": relevance.linear_share,
        "overlap": told.overlap,
        "note": told.note,
    }


def ranked_dict(ranked: Ranked) -> dict[str, Any]:
    """JSON-ready; a head has no activation of its own."""
    return {
        "neuron": str(ranked.neuron),
        "position": ranked.position,
        "polarity": ranked.polarity or None,
        "activation": ranked.activation,
        "relevance": ranked.relevance,
        **({} if ranked.counterfactual is None else {"counterfactual": ranked.counterfactual}),
    }


def _largest(scores: Tensor, k: int) -> list[int]:
    """Places of the k largest finite scores; of equal ones the first (topk alone promises no order)."""
    k = min(k, int((scores > -torch.inf).sum()))
    if k == 0:
        return []
    last = scores.topk(k).values[-1]
    above = (scores > last).nonzero().flatten()
    tied = (scores == last).nonzero().flatten()[: k - len(above)]
    return torch.cat((above, tied)).tolist()
