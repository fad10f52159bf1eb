"""`Kind`: what a claim says and how it is measured. A new kind is a class in a file of `kinds/`."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.circuits.records import Node
from icebear.concepts.methods.registry import name_of
from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.results.ranking import By
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.prompts import prompt_json
from icebear.records import Neuron, TokenScore
from icebear.values import shown

PromptText = str | tuple[dict[str, str], ...]
"""A text, or the messages of a chat."""
TokenName = str | int
DRAWS = 20
"""Random neurons that a claim about one neuron is compared with."""

_NODE = re.compile(r"(.+)@(\d{1,9})")


@dataclass(frozen=True, order=True)
class NodeId:
    """A neuron or head at a token, written ``L29.ffn.860@5``."""

    neuron: Neuron
    position: int

    def __str__(self) -> str:
        return f"{self.neuron}@{self.position}"

    @classmethod
    def of(cls, node: Node) -> NodeId:
        """Return the name of a circuit's node."""
        return cls(node.neuron, node.position)

    @classmethod
    def parse(cls, text: str) -> NodeId:
        """Parse the name of a node. Raises `InputError` for any other text."""
        match = _NODE.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise InputError(f"{shown(text)} is not a node; write it like L29.ffn.860@5.")
        return cls(Neuron.parse(match[1]), int(match[2]))


@dataclass(frozen=True)
class Measured:
    """A claim, measured."""

    value: float
    control: float
    """The same number of what the claim is compared with."""
    error: float = 0.0
    """The standard error of the value."""
    broken_by: str = ""
    """What breaks the claim whatever the value is, in a sentence; empty if nothing does."""


@dataclass(frozen=True)
class Kind:
    """What a claim says. Its fields are read from a file of claims, and its docstring is in the schema."""

    kind: ClassVar[str]
    value_is: ClassVar[str]
    control_is: ClassVar[str]

    def measure(self, model: Model, seed: int = 0) -> Measured:
        """Measure it in a model. seed: of random controls. Raises `IcebearError` where it cannot be measured."""
        raise NotImplementedError


Draft = tuple[Kind, Measured | None]
"""What is claimed, and what it measures if that is known."""


@dataclass(frozen=True, kw_only=True)
class Explained(Kind):
    """A claim about the relevance of what is predicted after a prompt."""

    prompt: PromptText
    target: TokenName | None = None
    contrast: TokenName | None = None
    counterfactual: PromptText | None = None
    method: str | None = None
    number: Literal["log-odds", "logit"] | None = None

    def relevance(self, model: Model, *sites: str) -> Relevance:
        """Compute the relevance of the tokens and of these sites."""
        how: Any = {"counterfactual": self.counterfactual, "method": self.method, "number": self.number}
        wanted = tuple(dict.fromkeys(map(neuron_site, sites)))
        return attribute(model, self.prompt, self.target, self.contrast, **how, sites=wanted)


def scores_of(relevance: Relevance, site: str) -> Tensor:
    """Return (L, T, W) the relevance of the neurons, or heads, of a site."""
    return relevance.heads() if site == "head" else relevance.of(site)


def mask_of(model: Model, relevance: Relevance, nodes: tuple[NodeId, ...]) -> Tensor:
    """Return nodes of one site as a mask (L, T, W). Raises `InputError` for a node that the model does not have."""
    chosen = torch.zeros_like(scores_of(relevance, site_of(nodes)), dtype=torch.bool)
    for node in nodes:
        check_node(model, relevance, node)
        chosen[node.neuron.layer, node.position, node.neuron.index] = True
    return chosen


def most_relevant(relevance: Relevance, site: str, count: int, by: By = "positive") -> tuple[NodeId, ...]:
    """Return the nodes that `Relevance.top` ranks first at all tokens."""
    ranked = relevance.top(count, site, position="all", by=by)
    return tuple(NodeId(row.neuron, row.position) for row in ranked)


def site_of(nodes: tuple[NodeId, ...]) -> str:
    """Return the site of nodes. Raises `InputError` if they have several, or if there are none."""
    sites = sorted({node.neuron.site for node in nodes})
    if len(sites) != 1:
        raise InputError(
            f"The nodes of a claim must be of one site, not of {', '.join(sites) or 'none'}; write a claim for each "
            "site."
        )
    return sites[0]


def check_node(model: Model, relevance: Relevance, node: NodeId) -> None:
    """Raise `InputError` unless the model has the neuron and the prompt has the token."""
    model.check(node.neuron)
    if node.position >= len(relevance.tokens):
        raise InputError(
            f"{node} is past the end of the prompt, which has {len(relevance.tokens)} tokens in {model.name}; name a "
            f"token from 0 to {len(relevance.tokens) - 1}."
        )


def others_of(model: Model, neuron: Neuron, seed: int, count: int = DRAWS) -> list[Neuron]:
    """Return random other neurons of the same layer and site."""
    free = [index for index in range(model.width(neuron.site)) if index != neuron.index]
    drawn = random.Random(seed).sample(free, min(count, len(free)))
    return [replace(neuron, index=index) for index in drawn]


def subject(model: Model, relevance: Relevance) -> dict[str, Any]:
    """Return the fields that a claim of a relevance has (`Explained`). Raises `InputError` for what claims lack."""
    other, request = relevance.counterfactual, relevance.run and relevance.run.request
    special = relevance.image or relevance.target is None or (other and (other.model or len(other.pairs) != 1))
    if (
        not request
        or special
        or relevance.prompt.answer_start is not None
        or relevance.predicted_at != len(relevance.prompt.ids) - 1
    ):
        raise InputError(
            "A claim is about the next token of a text or a chat, compared with at most one counterfactual prompt; "
            "leave out --claim."
        )
    prompt, others = request.prompt, request.counterfactuals
    own = relevance.contrast.text if relevance.contrast else None
    contrast = _token(model, relevance.contrast, prompt) if own else (other.contrasts[0] if other else None)
    return {
        "prompt": text_of(prompt),
        "target": _token(model, relevance.target, prompt),
        "contrast": contrast or None,
        "counterfactual": text_of(others[0]) if others else None,
        "method": name_of(relevance.method),
        "number": relevance.prediction.objective if relevance.prediction.objective in ("log-odds", "logit") else None,
    }


def text_of(prompt: Any) -> Any:
    """Return a prompt as a claim has it. Raises `InputError` for token ids."""
    plain = prompt_json(prompt)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, list) and plain and isinstance(plain[0], dict):
        return tuple({key: str(value) for key, value in message.items()} for message in plain)
    raise InputError("A claim is about a text or a chat, not about token ids; leave out --claim.")


def _token(model: Model, token: TokenScore | None, prompt: Any) -> str | int:
    """Return the text of a token, or its id if the text is not read as that token."""
    assert token is not None
    try:
        same = model.answer_id(token.text, after=prompt) == token.id
    except InputError:
        same = False
    return token.text if same else token.id
