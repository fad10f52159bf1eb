"""`ExplainedPrediction`: what `explain` measured, as a record that sentences, screen and page read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icebear.actmax.card import Card
from icebear.concepts.answers.restoring import ExplainedChanges
from icebear.concepts.answers.what_if import WhatIf
from icebear.concepts.nodes.controls import Ablation
from icebear.concepts.nodes.image_heads import ImageHeads
from icebear.concepts.nodes.image_shares import ImageShares
from icebear.concepts.results.effects import Effects
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_records import StageShares
from icebear.concepts.stages.stages import Stages
from icebear.convert import Tabled
from icebear.records import AutomaticLabel, Projection, RandomControl, Ranked
from icebear.result_files import SavedResult

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class ExplainedNode:
    """A ranked neuron or head at a token, with its vocabulary projection and label."""

    ranked: Ranked
    token: str
    projection: Projection | None
    """None for heads, and for sites that do not write to the residual stream."""
    label: str | None = None
    """The label that a person gave, or the automatic label if it is significant."""
    meaning: AutomaticLabel | None = None
    """The automatic label if it is significant."""
    raises: tuple[str, ...] = ()
    """The likely next words that the node raises most here (`effects`)."""
    lowers: tuple[str, ...] = ()
    effect: float | None = None
    """What it does to the explained answer (`effects_on_answer`)."""
    log_probability: float | None = None
    """What it does to the log-probability of the explained answer, in nats (`Effects.log_probability`)."""

    @property
    def words(self) -> str:
        """The tokens that the neuron promotes at the sign of its activation, in any prompt (the logit lens)."""
        return self.projection.words(self.ranked.polarity) if self.projection else ""

    def to_dict(self) -> dict[str, Any]:
        words = {"raises": list(self.raises), "lowers": list(self.lowers), "promotes": self.words or None}
        measured = {"effect": self.effect, "log_probability": self.log_probability}
        return {**self.ranked.to_dict(), "token": self.token, **measured, **words, "label": self.label}


@dataclass(frozen=True, eq=False, repr=False)
class ExplainedPrediction(SavedResult, Tabled):
    """The explanation of a prediction: tokens, nodes, and controls of both."""

    relevance: Relevance
    ranking: Ranking
    nodes: tuple[ExplainedNode, ...]
    ablations: tuple[Ablation, ...] = ()
    """Sufficiency and necessity of the largest nodes, with controls; only with a counterfactual or base model."""
    removal_control: RandomControl | None = None
    """The control that removes the two tokens that contribute most."""
    patch_controls: tuple[RandomControl, ...] = ()
    """Of an image: its first patches deleted, and inserted (`patch_controls`)."""
    image_heads: ImageHeads | None = None
    """Of an image: the heads that move the difference to [CLS], and what they read."""
    image_shares: ImageShares | None = None
    """Of a prompt with an image: relevance by part, also with the image blurred."""
    silencing_control: RandomControl | None = None
    """The control that sets the first nodes to 0 (`silencing_control`)."""
    cards: tuple[Card, ...] = ()
    """Cards of the first neurons, if there is a store."""
    effects: Effects | None = None
    """The effects of the nodes on the next token; None where nodes cannot be set."""
    random_effects: tuple[float, ...] = ()
    """Without a counterfactual: what random nodes of the same layers and tokens do to the answer."""
    random_log_probabilities: tuple[float, ...] = ()
    """What such nodes do to the log-probability of the answer, in nats; empty with a base model, and for a long prompt
    with a counterfactual."""
    changes: ExplainedChanges | None = None
    """With a base model: what its changed weights caused."""
    stages: Stages | None = None
    """How the answer is computed, if there is a counterfactual."""
    what_if: WhatIf | None = None
    """The exchanges of the words of a prompt that was given alone."""
    transfers: tuple[tuple[str, StageShares], ...] = ()
    """Other prompts, and what the heads and neurons of the stages give there."""

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Every token with its relevance and, as a note, ``sink`` or ``template``."""
        prompt = self.relevance.prompt
        notes = dict.fromkeys(prompt.sinks, "sink") | dict.fromkeys(prompt.template, "template")
        return [
            {"position": position, "token": text, "relevance": value, "note": notes.get(position, "")}
            for position, (text, value) in enumerate(zip(prompt.strings, self.relevance.tokens.tolist(), strict=True))
        ]

    @property
    def random_effect(self) -> float:
        """The largest effect of a random node, of either sign."""
        return max(map(abs, self.random_effects), default=0.0)

    @property
    def meanings(self) -> list[AutomaticLabel]:
        """The significant automatic labels of the nodes."""
        return list({(m.neuron, m.polarity): m for m in (node.meaning for node in self.nodes) if m}.values())

    @property
    def projections(self) -> list[Projection]:
        """The vocabulary projections of the neurons."""
        return list({p.neuron: p for p in (node.projection for node in self.nodes) if p}.values())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict of everything that was measured."""
        optional = {
            "stages": self.stages and self.stages.to_dict(),
            "transfers": [{"paraphrase": text, **transfer.to_dict()} for text, transfer in self.transfers],
            "meanings": [meaning.to_dict() for meaning in self.meanings],
            "ablation": [vars(row) for row in self.ablations],
            "removal_control": self.removal_control and self.removal_control.to_dict(),
            "patch_controls": [control.to_dict() for control in self.patch_controls],
            "image_heads": self.image_heads and self.image_heads.to_dict(),
            "image_shares": self.image_shares and vars(self.image_shares),
            "silencing_control": self.silencing_control and self.silencing_control.to_dict(),
            "cards": [card.to_dict() for card in self.cards],
            "effects": self.effects and self.effects.to_dict(),
            "random_effects": list(self.random_effects),
            "random_log_probabilities": list(self.random_log_probabilities),
            "restored": self.changes and self.changes.to_dict(),
        }
        return {
            **self.relevance.to_dict(0),
            "position": self.ranking.position,
            "by": self.ranking.by,
            "ranking": [node.to_dict() for node in self.nodes],
            **{name: value for name, value in optional.items() if value},
            **(self.what_if.to_dict() if self.what_if else {}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)

    def to_frame(self) -> pandas.DataFrame:
        """Return the nodes as a pandas table. `to_arrow` returns an Arrow table."""
        import pandas

        columns = ["neuron", "position", "polarity", "activation"]
        columns += ["counterfactual"] if self.relevance.counterfactual else []
        columns += ["relevance", "log_probability", "token", "raises", "lowers", "promotes", "label"]
        return pandas.DataFrame([node.to_dict() for node in self.nodes], columns=columns)
