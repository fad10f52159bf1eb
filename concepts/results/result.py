"""`Relevance`: the result of an attribution."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import method_of
from icebear.concepts.passes.prompt import Counterfactual, Prediction, PromptTokens
from icebear.concepts.passes.run import Conservation
from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.results.effects import Effects, NodeEffects
from icebear.concepts.results.ranking import By, NeuronScores, Position, Ranking
from icebear.concepts.weights.changed_weights import ModelPair
from icebear.convert import Tabled
from icebear.errors import InputError
from icebear.lrp.positions import Reading, over_layers
from icebear.models.model import Model
from icebear.models.objective import Objective, ObjectiveKind
from icebear.models.text.images import ImageMap
from icebear.models.text.prompts import Prompt, PromptRequest
from icebear.points import HOOKS, TWO_INDICES
from icebear.records import Neuron, Ranked, TokenScore, as_neuron
from icebear.render import heatmap, page, render
from icebear.result_files import SavedResult, saved_as
from icebear.values import check_int, one_of, several, shown, typed

if TYPE_CHECKING:
    import pandas


Names = Literal["icebear", "transformer_lens"]
BY_HEAD = {"attn": HOOKS["head"], **TWO_INDICES}


def arrays(tokens: Tensor, neurons: NeuronScores, names: Names) -> dict[str, np.ndarray]:
    """Return `Relevance.to_arrays`."""
    one_of(names, "naming of arrays", ("icebear", "transformer_lens"))
    sites = {site: values.float().numpy() for site, values in neurons.relevance.items()}
    if names == "icebear":
        return {"tokens": tokens.numpy(), **sites}
    named: dict[str, np.ndarray] = {"hook_embed": tokens.numpy()}
    for site, values in sites.items():
        for layer, rows in enumerate(values):
            if site == "ffn":
                named[f"blocks.{layer}.{HOOKS[site]}"] = rows
            elif site in BY_HEAD and "attn" in sites:
                width = sites["attn"].shape[-1] // neurons.head_count
                named[f"blocks.{layer}.{BY_HEAD[site]}"] = rows.reshape(len(rows), -1, width)
            else:
                named[f"L{layer}.{site}"] = rows
    return named


FAR = 0.1
"""A remainder of the explained number from which a method's note is given."""
OBJECTIVES: dict[ObjectiveKind, str] = {
    "logit": "Logit",
    "log-odds": "Logit against all others",
    "centered-logit": "Logit less the mean of the vocabulary",
    "mean-centered-logit": "Mean logit less the mean of the vocabulary",
}


@dataclass(frozen=True, eq=False)
class ContrastPhrase:
    """The phrase that another phrase is explained against, after the same prompt."""

    text: str
    strings: tuple[str, ...]
    """The tokens of the phrase that the model read: all but the last one."""
    tokens: Tensor
    """(T',) relevance of these tokens, included in `Conservation.tokens`."""

    def to_dict(self) -> dict[str, Any]:
        tokens = zip(self.strings, self.tokens.tolist(), strict=True)
        return {"text": self.text, "tokens": [{"text": text, "relevance": value} for text, value in tokens]}


@dataclass(frozen=True, eq=False)
class Run:
    """The model and the prompt of a relevance, for further measurements."""

    model: Model
    objective: Objective
    """One row, with the explained tokens as targets."""
    models: ModelPair | None = None
    """With a base model."""
    request: PromptRequest | None = None
    """What was asked for; None for a part of it."""


@dataclass(frozen=True, eq=False, repr=False)
class Relevance(SavedResult, Tabled):
    """Signed relevance of the tokens and neurons of one prompt for one target, in logits.

    Shapes: T tokens, L layers, P recorded positions, N neurons of a site, H attention heads.
    """

    tokens: Tensor
    """(T,)"""
    prompt: PromptTokens
    prediction: Prediction
    method: Method
    neurons: NeuronScores
    sums: Conservation
    made_with: dict[str, Any]
    """See `Model.made_with`."""
    run: Run
    contrast_phrase: ContrastPhrase | None = None
    positions: Tensor | None = None
    """Only with PA-LRP: (L, T) relevance of the positions in each layer, or (1, T) of position embeddings."""
    image: ImageMap | None = None
    counterfactual: Counterfactual | None = None
    """If set, relevance is that of differences, and `conservation().target` is the difference explained."""
    missing_rules: tuple[str, ...] = ()
    """With ``strict=False``: the operations that used their plain gradient."""
    at_modules: bool = False
    """Whether the rules were at modules (see `proved`)."""

    @property
    def proved(self) -> str:
        """How it is known that no operation lacks a rule, see `icebear.concepts.passes.proved`."""
        if self.at_modules:
            return "rules at modules: with every operation looked up, another pass of this kind gave the same"
        return "operations without a rule took their gradient" if self.missing_rules else "every operation looked up"

    def __str__(self) -> str:
        against = f" against {self.contrast_text!r}" if self.contrast_text else ""
        counterfactual = f" counterfactual {self.counterfactual.texts[0]}" if self.counterfactual else ""
        shapes = ", ".join(f"{site} {tuple(x.shape)}" for site, x in self.neurons.relevance.items())
        return (
            f"<Relevance of {len(self.tokens)} tokens for {self.target_text!r}{against}{counterfactual}"
            f", {self.method!r}; {shapes or 'no neurons'}>"
        )

    @property
    def target(self) -> TokenScore | None:
        """The token explained; None if it is a continuation of several tokens (see `target_text`)."""
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
        """The contrast token or phrase; empty if there is none."""
        return self.contrast.text if self.contrast else self.contrast_phrase.text if self.contrast_phrase else ""

    def minus(self, other: Relevance) -> Relevance:
        """Subtract the relevance for another answer to the same prompt. Raises `InputError`."""
        common, counterfactual = self.predicted_at + 1, self.counterfactual
        if not isinstance(other, Relevance) or other.prompt.ids[:common] != self.prompt.ids[:common]:
            raise InputError("The two results explain different prompts; subtract results for the same prompt.")
        if self.positions is not None:
            raise InputError("The relevance of pa-lrp cannot be subtracted; compute it with attnlrp or cp-lrp.")
        tokens = self.tokens.clone()
        tokens[:common] -= other.tokens[:common]
        if counterfactual and other.counterfactual:
            numbers = zip(counterfactual.numbers, other.counterfactual.numbers, strict=True)
            counterfactual = replace(counterfactual, numbers=tuple(left - right for left, right in numbers))
        return replace(
            self,
            tokens=tokens,
            neurons=self.neurons.minus(other.neurons, common),
            contrast_phrase=ContrastPhrase(other.target_text, other.prompt.strings[common:], other.tokens[common:]),
            sums=self.sums.minus(other.sums),
            counterfactual=counterfactual,
        )

    def combined(self, reading: Reading = "relu") -> Tensor:
        """Return (T,) relevance of tokens and positions, summed over layers (PA-LRP, Bakish et al. 2025, Eq. 11).

        Parameters
        ----------
        reading : {"relu", "signed"}
            ``relu`` counts the relevance of positions in a layer only where it is positive.
        """
        if self.positions is None:
            raise InputError(
                "This result has no relevance of positional encodings; pass method=PA_LRP (--method pa-lrp)."
            )
        return self.tokens + over_layers(self.positions, reading)

    @property
    def sites(self) -> tuple[str, ...]:
        """The recorded sites."""
        return tuple(self.neurons.relevance)

    def of(self, site: str) -> Tensor:
        """Return (L, P, N) relevance of the neurons of a site, or of heads. Raises `InputError` if it was not
        recorded."""
        return self.neurons.of(site)

    def activation(self, site: str) -> Tensor:
        """Return (L, P, N) activations of the neurons of a site."""
        self.neurons.check_site(site)
        return self.neurons.activation[site]

    @property
    def ffn(self) -> Tensor:
        """(L, P, F) relevance of the FFN neurons."""
        return self.of("ffn")

    @property
    def attn(self) -> Tensor:
        """(L, P, A) relevance of the attention output neurons."""
        return self.of("attn")

    def layers(self, site: str = "ffn") -> Tensor:
        """Return (L, P) relevance summed over the neurons of a site; (L, T) with ``keep="top"``."""
        values, largest = self.of(site), self.neurons.largest
        return largest.layers[neuron_site(site)] if largest else values.sum(-1)

    def heads(self) -> Tensor:
        """Return (L, P, H) relevance of the outputs of the attention heads; (L, T, H) with ``keep="top"``."""
        return self.neurons.heads()

    @typed
    def top(
        self,
        k: int = 20,
        site: str | None = None,
        polarity: Literal["+", "-"] | None = None,
        position: Position = "last",
        include_sinks: bool = False,
        by: By = "positive",
        layers: int | Iterable[int] | None = None,
        include_template: bool = False,
    ) -> list[Ranked]:
        """Rank neurons by relevance, largest first. Ties go to the smaller neuron id.

        The most relevant neurons are those with the largest positive relevance. A neuron without relevance of the
        wanted sign is not listed, so that the list may be shorter than k.

        Parameters
        ----------
        k : int
            The number of neurons.
        site : str, optional
            One site, or ``head`` for attention heads. Default: every recorded site.
        polarity : {"+", "-"}, optional
            Only neurons whose activation (minus the counterfactual activation) has this sign. Not for heads.
        position : {"last", "all"} or int
            ``last`` is where the prediction is made; if there are several such positions, a neuron's sum is ranked and
            reported at the position that contributes most. ``all`` ranks (neuron, position) pairs. An index may count
            from the end.
        include_sinks, include_template : bool
            With ``all``: also rank at sink tokens, and at tokens of a chat's template.
        by : {"positive", "negative", "absolute"}
            ``negative`` ranks the neurons that oppose the answer, and ``absolute`` those of both signs, by the size of
            their relevance.
        layers : int or iterable of int, optional
            Only these layers.

        Returns
        -------
        list of Ranked

        Raises
        ------
        InputError
            If an argument is out of range or was not recorded.
        """
        ranking = Ranking(k, site, polarity, position, include_sinks, by, layers, include_template)
        return self.neurons.top(ranking, self.prompt)

    def of_neuron(self, neuron: Neuron | str, position: Position = "last") -> float:
        """Return the relevance of a neuron or head at a position, or its sum over ``last`` or ``all`` positions."""
        neuron = as_neuron(neuron)
        values = self.heads() if neuron.site == "head" else self.of(neuron.site)
        layers, _, width = values.shape
        check_int(neuron.layer, f"The layer of {neuron}", 0, layers - 1)
        check_int(neuron.index, f"The index of {neuron}", 0, width - 1)
        columns = self.neurons.columns(neuron.site, Ranking(position=position).positions(self.prompt))
        return values[neuron.layer, columns, neuron.index].sum().item()

    def mask(self, nodes: Iterable[Ranked], site: str) -> Tensor:
        """Return which nodes (L, P, N) of a site (for ``head``: (L, P, H)) are among `nodes`."""
        chosen = torch.zeros_like(self.heads() if site == "head" else self.of(site), dtype=torch.bool)
        for node in nodes:
            if node.neuron.site == site:
                column = self.neurons.columns(site, [node.position])[0]
                chosen[node.neuron.layer, column, node.neuron.index] = True
        return chosen

    def effects(self, nodes: int | Sequence[Ranked] = 10) -> Effects:
        """Measure what nodes do to the likely next tokens, by activation patching of one node at a time.

        The effect on a token is its logit in the prompt, minus its logit when the node is set to its value in the
        counterfactual prompt (without one, to its mean on the calibration texts), minus the mean effect on the likely
        tokens. The likely tokens are the 150 most probable ones of the prompt and of the counterfactual.

        Parameters
        ----------
        nodes : int or sequence of Ranked
            The nodes, or the number of nodes with the largest relevance at all tokens.

        Returns
        -------
        Effects
            For a classifier, effects on the labels.

        Raises
        ------
        InputError
            If the values of the nodes were not recorded.

        References
        ----------
        Activation patching: Vig et al. 2020, arXiv 2004.12265; Meng et al. 2022, arXiv 2202.05262.
        """
        node_effects = NodeEffects(self.run.model, self)
        if isinstance(nodes, int):
            return node_effects.measure(self.top(check_int(nodes, "The number of nodes"), position="all"))
        rows = several(nodes)
        for row in rows:
            if not isinstance(row, Ranked):
                raise InputError(f"{shown(row)} is not a ranked node; pass a number, or rows of relevance.top.")
        return node_effects.measure(rows)

    @property
    def read(self) -> Prompt:
        """The prompt that was explained, with what target and contrast share."""
        request = self.run.request
        return request.prompt if request else Prompt(ids=self.prompt.ids[: self.prompt.encoder_length])

    def explained(self) -> Objective:
        """Return the objective of the prompt alone, one row."""
        return self.run.objective

    def conservation(self) -> Conservation:
        """Return where the relevance of the target went."""
        return self.sums

    @property
    def linear_share(self) -> float | None:
        """The share of the explained number that the tokens' relevance sums to: 1 with difference rules."""
        return self.sums.tokens / self.sums.target if self.sums.target else None

    def conservation_text(self) -> str:
        """Return the conservation accounting in a sentence."""
        if self.counterfactual is None:
            number = "Logit difference" if self.contrast_text else OBJECTIVES[self.prediction.objective]
            is_far = abs(self.sums.remainder) > FAR * abs(self.sums.target)
            return f"{number} {self.sums}{self.method.far_note if is_far else ''}"
        total, tokens, number_c = self.sums.target, self.sums.tokens, fmean(self.counterfactual.numbers)
        return (
            f"Difference {total:z.3f}: {total + number_c:z.3f} in the prompt, {number_c:z.3f} in the counterfactual; "
            f"tokens {tokens:z.3f}, remainder {total - tokens:z.3f}"
        )

    def comparison_text(self) -> str:
        """Return what the relevance is compared with in a sentence."""
        if self.counterfactual is None:
            return (
                "Without a counterfactual, many of the neurons with the largest relevance have a large relevance for "
                "every prompt."
            )
        return f"Compared with {self.counterfactual}"

    def to_dict(self, k: int = 20) -> dict[str, Any]:
        """Return a JSON-ready dict with the top k neurons of each site."""
        k, prompt = check_int(k, "The number of neurons", 0), self.prompt
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
            "proved": self.proved,
            "top": {site: [row.to_dict() for row in self.top(k, site)] for site in self.sites} if k else {},
        }

    def to_json(self, k: int = 20) -> str:
        return json.dumps(self.to_dict(k), ensure_ascii=False, indent=1, allow_nan=False)

    def to_frame(self, k: int = 100, **ranking: Any) -> pandas.DataFrame:
        """Return the top k neurons as a pandas table. `to_arrow` returns an Arrow table.

        Parameters
        ----------
        k : int
        **ranking
            Arguments of `top`.
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

    def to_arrays(self, names: Names = "icebear") -> dict[str, np.ndarray]:
        """Return the relevance as plain numpy arrays.

        Parameters
        ----------
        names : {"icebear", "transformer_lens"}
            Ours: ``tokens`` (T,) and each site (L, P, N). TransformerLens': each layer by the name of its activation,
            ``blocks.0.mlp.hook_post`` (P, F) and ``blocks.0.attn.hook_z`` (P, H, d_head), also ``hook_q``, ``hook_k``
            and ``hook_v`` if ``attn`` is recorded; the tokens as ``hook_embed`` (T,). Other sites keep our names.
        """
        return arrays(self.tokens, self.neurons, names)

    def to_html(self) -> str:
        """Return a self-contained HTML page: the heatmap, the prediction and the top neurons."""
        return page("icebear relevance", self._fragment(30))

    def _repr_html_(self) -> str:
        return self._fragment(10)

    def heatmap(self) -> Markup:
        """Return the tokens on the color of their relevance, or the image, as HTML."""
        picture = render("icebear/image.html", png=b64encode(self.image.png()).decode()) if self.image else Markup("")
        return picture if self.prompt.is_image else picture + self.text_heatmap()

    def text_heatmap(self) -> Markup:
        """Return the tokens of the text on the color of their relevance, as HTML."""
        prompt, values = self.prompt, self.tokens.tolist()
        shown = [position for position in range(len(values)) if position not in {*prompt.image_positions}]
        sinks, template = (
            [number for number, position in enumerate(shown) if position in {*gray}]
            for gray in (prompt.sinks, prompt.template)
        )
        return heatmap([prompt.strings[p] for p in shown], [values[p] for p in shown], sinks, template)

    def _fragment(self, k: int) -> Markup:
        """Return the target, the heatmap, conservation and the top k neurons."""
        scores, positions = self.neurons, self.positions
        every = self.counterfactual and (scores.largest or len(scores.recorded) == len(self.tokens))
        k = min(k, scores.largest.k) if scores.largest else k
        return render(
            "icebear/relevance.html",
            relevance=self,
            neurons=self.top(k, position="all" if every else "last") if self.sites else [],
            positions=None if positions is None else (list(self.prompt.strings), positions.sum(0).tolist()),
        )


saved_as(Method, str, lambda text, _: method_of(text))
