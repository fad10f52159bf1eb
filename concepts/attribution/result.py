"""`Relevance`: the result of an attribution."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from icebear.concepts.attribution.prompt import Prediction, PromptTokens
from icebear.concepts.attribution.ranking import NeuronScores, Position, Ranking
from icebear.concepts.files import SavedResult
from icebear.concepts.lrp.positions import Reading, over_layers
from icebear.concepts.methods.method import Method
from icebear.concepts.models.images import ImageMap
from icebear.concepts.models.objective import Objective, ObjectiveKind
from icebear.concepts.passes.run import Conservation
from icebear.convert import Tabled
from icebear.errors import InputError
from icebear.records import Neuron, Ranked, TokenScore
from icebear.values import whole

if TYPE_CHECKING:
    import pandas

OBJECTIVES: dict[ObjectiveKind, str] = {
    "logit": "Logit",
    "log-odds": "Logit against all others",
    "centered-logit": "Logit less the mean of the vocabulary",
    "mean-centered-logit": "Mean logit less the mean of the vocabulary",
}
"""In words."""


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """What a relevance is compared with: one other prompt, or the mean over several."""

    prompts: tuple[tuple[str, ...], ...]
    """The tokens of each."""
    pairs: tuple[Objective, ...]
    """For each, the targets of both prompts: two rows, the other one second."""
    alignments: tuple[Tensor, ...]
    """For each (T, T'): what of it stands for each token (`icebear.concepts.attribution.paired.alignment`)."""
    contrasts: tuple[str, ...]
    """What the target is explained against with each; empty for a whole continuation."""
    own_answers: bool
    """Whether that is the other prompt's own answer."""
    at: str
    """Where the multipliers are from: ``both`` prompts (difference rules), ``prompt``, ``midpoint`` or ``path``; or of
    each ``model`` its own."""
    numbers: tuple[float, ...]
    """The number explained, with each of the other prompts."""
    overlap: float | None
    """Of several: the share of their hundred largest nodes that two of them have in common, in the mean."""
    note: str = ""
    """Why it is not done as by default."""
    model: str | None = None
    """The other model, of which it is the same prompt."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: value for name, value in vars(self).items() if name not in ("pairs", "alignments")}

    def __str__(self) -> str:
        if self.model:
            return f"the model {self.model} on the same prompt: relevance here less relevance there"
        others = " and ".join(repr("".join(tokens)) for tokens in self.prompts[:3])
        more = f" and {len(self.prompts) - 3} more" if len(self.prompts) > 3 else ""
        contrasts = " / ".join(map(repr, dict.fromkeys(self.contrasts)))
        own = f", contrast: the counterfactual's top token {contrasts}" if self.own_answers else ""
        where = "" if self.at == "both" else f", multipliers of the {self.at}"
        note = f" ({self.note})" if self.note else ""
        overlap = f"; their first 100 share {self.overlap:.0%}" if self.overlap is not None else ""
        return f"{others}{more}{own}{where}{note}{overlap}"


@dataclass(frozen=True, eq=False)
class ContrastPhrase:
    """Another phrase that an answer is explained against, behind the same prompt."""

    text: str
    strings: tuple[str, ...]
    """The tokens of it that were read, all but its last one."""
    tokens: Tensor
    """Their own relevance, which `Conservation.tokens` counts as well."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        tokens = zip(self.strings, self.tokens.tolist(), strict=True)
        return {"text": self.text, "tokens": [{"text": text, "relevance": value} for text, value in tokens]}


@dataclass(frozen=True, eq=False, repr=False)
class Relevance(SavedResult, Tabled):
    """Signed relevance of one prompt's tokens and neurons for one target."""

    tokens: Tensor
    """(T,) relevance of each token of `prompt`."""
    prompt: PromptTokens
    prediction: Prediction
    method: Method
    neurons: NeuronScores
    sums: Conservation
    """See `conservation`."""
    made_with: dict[str, Any]
    """See `Model.made_with`."""
    contrast_phrase: ContrastPhrase | None = None
    """The phrase that it is explained against."""
    positions: Tensor | None = None
    """(L, T) relevance of the positions in each layer, or (1, T) of position embeddings at the input; only of a method
    with ``positions=True`` (PA-LRP)."""
    image: ImageMap | None = None
    counterfactual: Counterfactual | None = None
    """What it is compared with: relevance is then of differences, `conservation().target` the difference explained."""
    missing_rules: tuple[str, ...] = ()
    """Operations that took their plain gradient (only with strict=False)."""

    def __repr__(self) -> str:
        against = f" against {self.contrast_text!r}" if self.contrast_text else ""
        counterfactual = f" counterfactual {''.join(self.counterfactual.prompts[0])!r}" if self.counterfactual else ""
        shapes = ", ".join(f"{site} {tuple(x.shape)}" for site, x in self.neurons.relevance.items())
        return (
            f"<Relevance of {len(self.tokens)} tokens for {self.target_text!r}{against}{counterfactual}"
            f", {self.method!r}; {shapes or 'no neurons'}>"
        )

    def __hash__(self) -> int:
        return hash((self.prompt, self.target_text))

    @property
    def target(self) -> TokenScore | None:
        """The token explained; None when a continuation of several is (see `target_text`)."""
        return self.prediction.target

    @property
    def target_text(self) -> str:
        return self.prediction.target_text

    @property
    def contrast(self) -> TokenScore | None:
        return self.prediction.contrast

    @property
    def predictions(self) -> tuple[TokenScore, ...]:
        """The most probable next tokens."""
        return self.prediction.top

    @property
    def predicted_at(self) -> int:
        """The first position where the prediction is made."""
        return self.prompt.target_positions[0]

    @property
    def contrast_text(self) -> str:
        """What it is explained against; empty for nothing."""
        return self.contrast.text if self.contrast else self.contrast_phrase.text if self.contrast_phrase else ""

    def less(self, other: Relevance) -> Relevance:
        """Of this answer rather than another one behind the same prompt; their tokens before it have the difference."""
        common, counterfactual = self.predicted_at + 1, self.counterfactual
        if not isinstance(other, Relevance) or other.prompt.ids[:common] != self.prompt.ids[:common]:
            raise InputError("What a relevance is compared with is another one behind the same prompt; attribute one.")
        if self.positions is not None:
            raise InputError("Relevance of positions is not compared; take attnlrp or cp-lrp.")
        tokens = self.tokens.clone()
        tokens[:common] -= other.tokens[:common]
        if counterfactual and other.counterfactual:
            numbers = zip(counterfactual.numbers, other.counterfactual.numbers, strict=True)
            counterfactual = replace(counterfactual, numbers=tuple(here - there for here, there in numbers))
        return replace(
            self,
            tokens=tokens,
            neurons=self.neurons.less(other.neurons, common),
            contrast_phrase=ContrastPhrase(other.target_text, other.prompt.strings[common:], other.tokens[common:]),
            sums=self.sums.less(other.sums),
            counterfactual=counterfactual,
        )

    def combined(self, reading: Reading = "relu") -> Tensor:
        """(T,) the tokens' relevance and their positions', all layers together (PA-LRP, Eq. 11): ``relu`` counts a
        layer's relevance where it is positive, ``signed`` all of it."""
        if self.positions is None:
            raise InputError("This relevance has no positions; pass method=PA_LRP (--method pa-lrp).")
        return self.tokens + over_layers(self.positions, reading)

    # --- neurons --------------------------------------------------------------------------------------

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites whose neurons were recorded."""
        return tuple(self.neurons.relevance)

    def of(self, site: str) -> Tensor:
        """(L, P, N) relevance of a site's neurons at the positions recorded."""
        return self.neurons.of(site)

    def activation(self, site: str) -> Tensor:
        """(L, P, N) activations of a site's neurons at the positions recorded."""
        self.neurons.of(site)
        return self.neurons.activation[site]

    @property
    def ffn(self) -> Tensor:
        """(L, P, F)"""
        return self.of("ffn")

    @property
    def attn(self) -> Tensor:
        """(L, P, A)"""
        return self.of("attn")

    def layers(self, site: str = "ffn") -> Tensor:
        """(L, P) relevance summed over a site's neurons; with ``keep="top"`` at all positions, (L, T)."""
        return self.neurons.layers(site)

    def heads(self) -> Tensor:
        """(L, P, H) relevance of the attention heads' outputs; with ``keep="top"`` at all positions, (L, T, H)."""
        return self.neurons.heads()

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
            unless `include_template`. Of a prediction at several positions ``last`` ranks a neuron's sum, at the
            position that contributes most, with the activation there.
        sign: ``-`` ranks the most negative relevance first: what speaks against the target.
        layers: only this one, or these.
        """
        ranking = Ranking(k, site, polarity, position, include_sinks, sign, layers, include_template)
        return self.neurons.top(ranking, self.prompt)

    def of_neuron(self, neuron: Neuron | str, position: Position = "last") -> float:
        """The relevance of one neuron (or head) at a position, or summed over ``all`` but the sinks and a template's;
        ``last`` is summed over the positions where the prediction is made."""
        return self.neurons.of_neuron(neuron, position, self.prompt)

    # --- sums -----------------------------------------------------------------------------------------

    def conservation(self) -> Conservation:
        """Where the number explained went."""
        return self.sums

    @property
    def linear_share(self) -> float | None:
        """The tokens' relevance as a share of the number explained: 1 for difference rules; None where that is 0."""
        return self.sums.tokens / self.sums.target if self.sums.target else None

    def conservation_text(self) -> str:
        """Where the number explained went, in a line."""
        if self.counterfactual is None:
            return f"{'Logit difference' if self.contrast_text else OBJECTIVES[self.prediction.objective]} {self.sums}"
        total, tokens, there = self.sums.target, self.sums.tokens, fmean(self.counterfactual.numbers)
        return (
            f"Difference {total:z.3f}: {total + there:z.3f} in the prompt, {there:z.3f} in the counterfactual; "
            f"tokens {tokens:z.3f}, rest {total - tokens:z.3f}"
        )

    def comparison_text(self) -> str:
        """What it is compared with, in a line."""
        if self.counterfactual is None:
            return "Compared with nothing: many of the largest are large for every prompt. Give a counterfactual."
        return f"Compared with {self.counterfactual}"

    # --- export ---------------------------------------------------------------------------------------

    def to_dict(self, k: int = 20) -> dict[str, Any]:
        """JSON-ready: tokens, target, conservation, sinks, and the top k neurons of each site."""
        k, prompt = whole(k, "The number of neurons", 0), self.prompt
        phrase, other = self.contrast_phrase, self.counterfactual
        tokens = zip(prompt.ids, prompt.strings, self.tokens.tolist(), strict=True)
        return {
            **self.made_with,
            "method": repr(self.method),
            "target": vars(self.target) if self.target else None,
            "target_text": self.target_text,
            "contrast": vars(self.contrast) if self.contrast else None,
            "contrast_phrase": phrase.to_dict() if phrase else None,
            "predictions": [vars(token) for token in self.predictions],
            "tokens": [{"id": id, "text": text, "relevance": value} for id, text, value in tokens],
            "predicted_at": self.predicted_at,
            "target_positions": list(prompt.target_positions),
            "encoder_length": prompt.encoder_length,
            "positions": None if self.positions is None else self.positions.tolist(),
            "patches": self.image.patches.tolist() if self.image else None,
            "sinks": list(prompt.sinks),
            "turns": [vars(turn) for turn in prompt.turns],
            "template": list(prompt.template),
            "answer_start": prompt.answer_start,
            "conservation": self.sums.to_dict(),
            "counterfactual": {**other.to_dict(), "linear_share": self.linear_share} if other else None,
            "missing_rules": list(self.missing_rules),
            "top": {site: [row.to_dict() for row in self.top(k, site)] for site in self.sites} if k else {},
        }

    def to_json(self, k: int = 20) -> str:
        return json.dumps(self.to_dict(k), ensure_ascii=False, indent=1, allow_nan=False)

    def to_frame(self, k: int = 100, **ranking: Any) -> pandas.DataFrame:
        """The top k neurons as a pandas table; takes the arguments of `top`. `to_arrow` has it as an Arrow table.

        A head has neither polarity nor activation: there the table has nothing. Prompt, target and contrast are the
        same in each row, so that tables of several prompts can be put together.
        """
        import pandas

        numbers = ["activation", *(["counterfactual"] if self.counterfactual else []), "relevance"]
        whose = [self.prompt.text, self.target_text, self.contrast_text or None]
        rows = [
            [
                *whose,
                str(row.neuron),
                *vars(row.neuron).values(),
                row.position,
                self.prompt.strings[row.position],
                row.polarity or None,
                *(getattr(row, name) for name in numbers),
            ]
            for row in self.top(k, **ranking)
        ]
        names = ["prompt", "target", "contrast", "neuron", "layer", "site", "index", "position", "token", "polarity"]
        return pandas.DataFrame(rows, columns=[*names, *numbers]).astype(dict.fromkeys(numbers, float))

    def to_html(self) -> str:
        """A self-contained HTML page: the heatmap, the prediction and the top neurons."""
        from icebear.concepts.render import page, relevance_fragment

        return page("icebear relevance", relevance_fragment(self, k=30))

    def _repr_html_(self) -> str:
        from icebear.concepts.render import relevance_fragment

        return relevance_fragment(self)
