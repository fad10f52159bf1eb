"""`icebear story`: one page that tells how a prompt's answer comes about, and what is left of it without each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from icebear.actmax.card import Card, describe
from icebear.actmax.page import STYLE, card_fragment, vocabulary
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.controls import Ablation, ablation
from icebear.concepts.attribution.random_controls import BesideChance, removing
from icebear.concepts.attribution.result import Relevance, ranked_dict
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.drawing import fragment
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.records import Faithfulness, Without
from icebear.concepts.render import heatmap, page, said
from icebear.concepts.vocabulary import projections
from icebear.records import Neuron, Projection, Ranked, TokenScore

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model
    from icebear.concepts.models.prompts import PromptLike
    from icebear.db.store import Store

NEURONS, CARDS, GROUPS, WORDS = 10, 4, 6, 8
"""How many are told of."""
CARRIED = (10, 100, 1000)


@dataclass(frozen=True)
class Story:
    """What was found of one prompt, compared with another one."""

    alone: Relevance
    """Compared with nothing."""
    removed: BesideChance
    """The two words that speak most for the answer, in the comparison, removed; or others."""
    graph: Graph
    neurons: tuple[Ranked, ...]
    projections: dict[Neuron, Projection]
    carried: tuple[Ablation, ...]
    faithfulness: Faithfulness
    without: tuple[Without, ...]
    """Of the graph's first groups."""
    cards: tuple[Card, ...]
    """Of the first neurons, where there is a store."""

    @property
    def compared(self) -> Relevance:
        return self.graph.relevances[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "alone": self.alone.to_dict(0),
            "compared": self.compared.to_dict(0),
            "removed": str(self.removed),
            "ranking": [
                {**ranked_dict(row), "promotes": self.projections[row.neuron].words(row.polarity)}
                for row in self.neurons
            ],
            "ablation": [vars(row) for row in self.carried],
            "circuit": self.graph.to_dict(),
            "faithfulness": vars(self.faithfulness),
            "without": [
                {"group": group.name, **vars(found), "predictions": [vars(token) for token in found.predictions]}
                for group, found in zip(self.graph.groups, self.without, strict=False)
            ],
            "cards": [card.to_dict() for card in self.cards],
        }

    def to_html(self) -> str:
        """A self-contained page: nothing is fetched."""
        parts = (_prediction, _tokens, _neurons, _circuit, _groups, _cards)
        title = f"Why {self.graph.answer}?"
        foot = f"<footer><small>{escape(said(self.graph.made_with))}</small></footer>"
        body = f"<h1>{escape(title)}</h1>{''.join(part(self) for part in parts)}{foot}"
        return page(title, body, STYLE + LOOK)


def story(
    model: Model,
    prompt: PromptLike,
    counterfactual: PromptLike,
    target: str | None = None,
    contrast: str | None = None,
    nodes: int = 60,
    store: Store | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Story:
    """Everything that the page tells. store: an index of the model, for cards. Raises `InputError`."""
    graph = circuit(
        model, prompt, target, contrast, counterfactual=counterfactual, nodes=nodes, on_progress=on_progress
    )
    compared = graph.relevances[0]
    asked = [token.id if token else None for token in (compared.target, compared.contrast)]
    neurons = compared.top(NEURONS, "ffn", position="all")
    different = list(dict.fromkeys(row.neuron for row in neurons))
    return Story(
        attribute(model, prompt, *asked, sites=()),
        removing(model, prompt, compared),
        graph,
        tuple(neurons),
        projections(model, different, WORDS),
        tuple(ablation(model, compared, count) for count in CARRIED),
        graph.faithfulness(),
        tuple(graph.without(group) for group in graph.groups[:GROUPS]),
        tuple(describe(store, neuron, model, 4) for neuron in different[:CARDS]) if store else (),
    )


# --- the page: sections, each with a sentence that says what is to be seen ----------------------------------

LOOK = (
    "body{max-width:80rem}section{margin:2.5rem 0}h2{font-size:1.2rem}"
    ".wide{overflow-x:auto}.wide td,.wide th{white-space:nowrap}"
    ".dim,footer{color:color-mix(in srgb,currentColor 65%,transparent)}td.text,th.text{text-align:left}"
    ".bar{display:inline-block;height:.7rem;background:#4e79a7;border-radius:2px}"
)


def _section(title: str, about: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(about)}</p>{body}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML. A head that begins in capitals, or says nothing, is not of numbers."""
    classes = [' class="text"' if head == "" or head[0].isupper() else "" for head in heads]
    top = "".join(f"<th{look}>{escape(head.lower())}</th>" for look, head in zip(classes, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{look}>{cell}</td>' for look, cell in zip(classes, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _prediction(told: Story) -> str:
    def row(token: TokenScore) -> list[str]:
        share = token.probability or 0
        return [escape(repr(token.text)), token.number, f'<span class="bar" style="width:{12 * share:.2f}rem"></span>']

    table = _table(["Next", "probability", ""], [row(token) for token in told.alone.predictions[:5]])
    prompt = "".join(told.alone.token_strings)
    return _section("What does the model say?", f"After {prompt!r} come most probably:", table)


def _tokens(told: Story) -> str:
    parts = []
    for relevance in (told.alone, told.compared):
        drawn = heatmap(list(relevance.token_strings), relevance.tokens.tolist(), relevance.sinks, relevance.template)
        parts.append(f'<p class="dim">{escape(relevance.meaning())}</p>{drawn}')
        parts.append(f'<p class="dim">{escape(relevance.account())}</p>')
    about = "Red words spoke for the answer, blue ones against it; point at one for its number."
    parts.append(f"<p>{escape(str(told.removed))}</p>")
    return _section("Which words carried it?", about, "".join(parts))


def _neurons(told: Story) -> str:
    rows = [
        [
            _linked(told, row.neuron),
            escape(repr(told.compared.token_strings[row.position])),
            f"{row.activation:+.2f}",
            f"{row.counterfactual or 0:+.2f}",
            f"{row.relevance:+.3f}",
            escape(told.projections[row.neuron].words(row.polarity)),
        ]
        for row in told.neurons
    ]
    names = ["Neuron", "Token", "activation", "there", "relevance", "Promotes more here"]
    carried = [
        [f"{one.nodes:,}", *(f"{share:.0%}" for share in (one.left, one.matched_left, one.changed_left))]
        for one in told.carried
    ]
    heads = ["largest nodes", "left without", "without matched", "without most changed"]
    control = (
        '<p class="dim">How much of the difference is left when the largest (neuron, token) pairs take the other '
        "prompt's activations; beside it the same without as many others of the same layers and tokens, and without "
        "those whose activations change most.</p>"
    )
    about = "Neurons of the FFNs, at a token, that did most for the difference between both prompts."
    return _section("Which neurons did?", about, _table(names, rows) + control + _table(heads, carried))


def _linked(told: Story, neuron: Neuron) -> str:
    """To what is told of it below, where anything is."""
    name = f"<code>{neuron}</code>"
    return f'<a href="#{neuron}">{name}</a>' if neuron in list(told.projections)[:CARDS] else name


def _circuit(told: Story) -> str:
    found = told.faithfulness
    about = (
        f"What the neurons give each other; point at a box. Along these {found.edges:,} edges alone comes "
        f"{found.share:.0%} of the difference; along as many drawn into the same targets from the same layers "
        f"{found.matched:.0%}, along all between the nodes {found.nodes:.0%}."
    )
    return _section("How do they make it together?", about, fragment(told.graph))


def _groups(told: Story) -> str:
    rows = [
        [
            escape(group.name),
            f"{len(group.nodes)}",
            f"{group.score:+.2f}",
            f"{found.share:.0%}",
            f"{found.matched:.0%}",
            ", ".join(f"{escape(repr(token.text))} {token.number}" for token in found.predictions[:3]),
        ]
        for group, found in zip(told.graph.groups, told.without, strict=False)
    ]
    about = (
        "A group's neurons take the other prompt's activations, all else is computed as ever: what is left of the "
        "difference, beside the same with as many others of the same layers and tokens, and what comes next then."
    )
    heads = ["Group", "nodes", "score", "left", "left without matched", "Comes next then"]
    return _section("What if a group is switched off?", about, _table(heads, rows))


def _cards(told: Story) -> str:
    if told.cards:
        cards = "".join(f'<div id="{card.neuron}">{card_fragment(card)}</div>' for card in told.cards)
        return _section("What do these neurons mean elsewhere?", "The texts of an index that drive them most.", cards)
    rows = "".join(
        f'<div class="card" id="{neuron}"><h3><code>{neuron}</code></h3>{vocabulary(told.projections[neuron])}</div>'
        for neuron in list(told.projections)[:CARDS]
    )
    about = (
        "The words that they promote and suppress. With an index (icebear index, then --store) this page also has the "
        "texts that drive them."
    )
    return _section("What do these neurons write?", about, rows)
