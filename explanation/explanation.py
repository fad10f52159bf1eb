"""The explanation of a prediction that command line, app, MCP server and report render.

There are three ways to make one: `explain` starts from a prompt; `explain_relevance` starts from a relevance, and
measures its stages too; `Explanation.of` starts from a relevance, and explains its nodes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from icebear.actmax.card import Card, card_fragment
from icebear.actmax.page import STYLE, vocabulary_html
from icebear.concepts.answers.restoring import ExplainedChanges
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.method import Method
from icebear.concepts.nodes.controls import ablation
from icebear.concepts.nodes.image_heads import image_heads
from icebear.concepts.nodes.image_shares import image_shares
from icebear.concepts.nodes.patch_controls import patch_controls
from icebear.concepts.nodes.random_controls import effects_on_answer, random_effects, token_removal_control
from icebear.concepts.passes.prompt import PromptTokens
from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.results.diff import Diff
from icebear.concepts.results.effects import Effects, NodeEffects
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_picture import stage_fragment
from icebear.concepts.stages.stage_records import StageRecord
from icebear.concepts.stages.stage_sentences import leading_swap
from icebear.concepts.stages.stages import Stages, stage_sites, stages_of, why_no_stages
from icebear.concepts.vocabulary.lens import mean_lens
from icebear.concepts.vocabulary.projection import projections
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.explanation import sentences
from icebear.explanation.record import ExplainedNode, ExplainedPrediction
from icebear.explanation.saved import SavedExplanation
from icebear.models.model import Model
from icebear.models.objective import Token
from icebear.models.text.answer import Span
from icebear.models.text.prompts import PromptLike, Prompts, prompt_json
from icebear.paths import write_file
from icebear.records import WRITERS, Neuron, RandomControl, Ranked
from icebear.render import page, render
from icebear.steering.random_edits import random_edit_control
from icebear.steps import OnProgress, unwatched
from icebear.values import typed

if TYPE_CHECKING:  # a run without a store imports neither it nor cards
    from icebear.db.store import Store

LOOK = files("icebear.explanation").joinpath("templates", "explanation.css").read_text(encoding="utf-8")
PROJECTED_WORDS = 8
"""The number of words of a vocabulary projection."""
CARDS = 4
"""The number of neurons with a card."""
CARD_EXAMPLES = 4
"""The number of examples on a card."""


def ablation_sizes(site: str | None, top: int) -> list[int]:
    """Return the numbers of nodes that a ranking of `top` nodes of a site is ablated by: a model has few heads."""
    return sorted({top, *((1, 2, 5, 10) if site == "head" else (100, 1000))})


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(ExplainedPrediction):
    """The explanation of a prediction: tokens, nodes, and controls of both."""

    @classmethod
    def of(
        cls,
        model: Model,
        relevance: Relevance,
        ranking: Ranking | None = None,
        *,
        store: Store | None = None,
        sizes: Sequence[int] = (),
        removal_control: RandomControl | None = None,
        cards: int = 0,
        with_nodes: bool = True,
        named: Sequence[Neuron] = (),
    ) -> Explanation:
        """Explain an existing relevance.

        sizes: the numbers of nodes to ablate, of each site apart. cards: the number of neurons with a card from the
            store, those in `named` before the ranked ones. with_nodes: whether nodes are ranked, and what each does to
            the next word is measured.

        Raises `InputError` as `Relevance.top` and `ablation` do.
        """
        ranking = ranking or Ranking(site=model.main_site)
        if ranking.position is None:
            everywhere = relevance.counterfactual or relevance.prompt.is_image
            ranking = replace(ranking, position="all" if everywhere else "last")
        rows = relevance.neurons.top(ranking, relevance.prompt) if relevance.sites and with_nodes else []
        measured = [row for row in rows if relevance.counterfactual or neuron_site(row.neuron.site) in WRITERS]
        patched = NodeEffects(model, relevance) if measured else None
        each = patched.measure(measured) if patched else None
        compared = relevance.counterfactual
        random = random_effects(patched, measured) if patched and patched.reads_others else None
        nodes = explained_nodes(model, relevance, store, rows, each)
        neurons = list(dict.fromkeys((*named, *(row.neuron for row in rows))))[:cards]
        shows_crops = store is not None and store.is_of_images
        reading = model if shows_crops or mean_lens(model) else None  # a lens would take longer than all the rest
        return cls(
            relevance,
            ranking,
            nodes,
            tuple(
                ablation(model, relevance, size, site, by=ranking.by)
                for site in ([ranking.site] if ranking.site else relevance.sites)
                if _can_ablate(model, relevance, site)
                for size in sizes
            ),
            removal_control=removal_control,
            cards=described(store, neurons, reading) if store else (),
            effects=each,
            random_effects=_of_answer(random, relevance) if random and not compared else (),
            random_log_probabilities=_log_probabilities(random) if random else (),
        )

    def __str__(self) -> str:
        return sentences.screen(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, whose style leaves the notebook alone."""
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a self-contained HTML page. path: also write it to this file."""
        relevance = self.relevance
        against = f", not {relevance.contrast_text!r}" if relevance.contrast_text else ""
        title = f"Why {relevance.target_text!r}{against}?"
        cards = [(str(card.neuron), card_fragment(card)) for card in self.cards]
        details = cards or [(str(row.neuron), vocabulary_html(row)) for row in self.projections[:CARDS]]
        known = {name for name, _ in details}
        body = render(
            "icebear.explanation/explanation.html",
            explanation=self,
            sentences=sentences,
            stages=stage_fragment(self.stages, sentences.stage_notes(self), known) if self.stages else "",
            title=title,
            details=details,
            linked=known,
        )
        html = page(title, body, STYLE + LOOK)
        if path is not None:
            write_file(path, html)
        return html


def described(store: Store, neurons: Sequence[Neuron], model: Model | None) -> tuple[Card, ...]:
    from icebear.actmax.describe import describe
    from icebear.actmax.writes import PAGE_SENTENCES

    return tuple(describe(store, n, model, CARD_EXAMPLES, effect_sentences=PAGE_SENTENCES) for n in neurons)


def explained_nodes(
    model: Model,
    relevance: Relevance,
    store: Store | None,
    rows: Sequence[Ranked],
    effects: Effects | None,
) -> tuple[ExplainedNode, ...]:
    """Return ranked nodes with all that is known of them. effects: of those that were measured."""
    words = projections(model, (row.neuron for row in rows), PROJECTED_WORDS)
    known = store.labels.automatic(dict.fromkeys(row.neuron for row in rows)) if store else {}
    significant = {pair: meaning for pair, meaning in known.items() if meaning.significant}
    numbers = {row: number for number, row in enumerate(effects.nodes if effects else ())}
    answer = effects_on_answer(effects, relevance) if effects else []
    log_probabilities = _log_probabilities(effects) if effects else ()
    nodes = []
    for row in rows:
        label = store.labels.shown(row.neuron, row.polarity) if store else None
        meaning = significant.get((row.neuron, row.polarity))
        about: tuple[Any, ...] = (words.get(row.neuron), label, meaning)
        if effects and row in numbers:
            number = numbers[row]
            change = log_probabilities[number] if log_probabilities else None
            about = (*about, *map(tuple, effects.words(number)), answer[number], change)
        nodes.append(ExplainedNode(row, relevance.prompt.strings[row.position], *about))
    return tuple(nodes)


def _of_answer(effects: Effects, relevance: Relevance) -> tuple[float, ...]:
    return tuple(effect for effect in effects_on_answer(effects, relevance) if effect is not None)


def _log_probabilities(effects: Effects) -> tuple[float, ...]:
    return () if effects.log_probability is None else tuple(effects.log_probability.tolist())


@typed
def explain(
    model: Model,
    prompt: PromptLike | Relevance,
    *,
    target: Token | None = None,
    contrast: Token | None = None,
    counterfactual: PromptLike | Prompts | None = None,
    base_model: Model | None = None,
    span: Span | None = None,
    top: int = 10,
    site: str | None = "ffn",
    store: Store | None = None,
) -> Explanation:
    """Explain a prediction: how the answer is computed (its stages), and the relevance of tokens and nodes.

    Parameters
    ----------
    model, prompt, target, contrast, counterfactual, base_model, span
        See `attribute`. In place of a prompt, its relevance explains what other arguments of `attribute` choose, such
        as a method or a position.
    top : int
        The number of nodes.
    site : str, optional
        The site of the nodes; None for every site. In place of ``ffn`` a model of attention only has heads, and one of
        scans only ``mixer``.
    store : Store, optional
        An index of the model, for labels and cards.

    Returns
    -------
    Explanation
        With a counterfactual it has stages, where they can be measured.

    Raises
    ------
    InputError
        If `attribute` raises it.
    """
    site = model.main_site if site == "ffn" else site
    ranking = Ranking(top, site)
    if isinstance(prompt, Relevance):
        chosen = (target, contrast, counterfactual, base_model, span)
        if any(value is not None for value in chosen):
            raise InputError(
                "A Relevance already has its target, counterfactual and method; pass only top, site and store with it."
            )
        model.check_made(prompt.made_with["model"], "The relevance")
        return explain_relevance(model, prompt, ranking, store=store)
    compared: dict[str, Any] = {"counterfactual": counterfactual, "base_model": base_model}
    pair = {"prompt": prompt, "target": target, "contrast": contrast, "span": span, **compared}
    relevance = relevance_of(model, site, **pair)
    if isinstance(relevance, list):
        raise InputError("explain takes one prompt, not several; call it for each of them.")
    return explain_relevance(model, relevance, ranking, store=store)


def relevance_of(model: Model, site: str | None, **arguments: Any) -> Relevance:
    """Return the relevance by `attribute` that explains the nodes of a site, with the sites that stages need.

    arguments: those of `attribute`, with the counterfactual and the base model. Raises `InputError`.
    """
    is_pair = arguments["counterfactual"] is not None or not model.task.reads_text
    is_pair = is_pair and arguments["base_model"] is None
    return attribute(model, **arguments, sites=_sites_of(model, site, is_pair, arguments.get("method")))


def _sites_of(
    model: Model, site: str | None, has_counterfactual: bool, method: Method | None
) -> tuple[str, ...] | None:
    """Return the sites to record for an explanation of the nodes of a site; None for the default."""
    if site is None or not model.has_family or (method and not method.scores_neurons):
        return None
    stages = stage_sites(model) if has_counterfactual else ()
    return tuple(dict.fromkeys((neuron_site(site), *stages)))


def explain_relevance(
    model: Model,
    relevance: Relevance,
    ranking: Ranking | None = None,
    *,
    store: Store | None = None,
    cards: int = CARDS,
    is_screen: bool = False,
    on_progress: OnProgress = unwatched,
) -> Explanation:
    """Explain a relevance by its stages, or by the effects of nodes and a control of the tokens. is_screen: only the
    screen is shown, which has stages without nodes. Raises `InputError`."""
    if isinstance(relevance, Diff):
        return with_changes(Explanation.of(model, relevance, ranking, store=store, cards=cards))
    stages = None if why_no_stages(model, relevance) else stages_of(model, relevance, on_progress)
    unstaged = relevance.counterfactual is not None and stages is None
    next_token = relevance.target is not None and relevance.prompt.answer_start is None and not relevance.image
    explanation = Explanation.of(
        model,
        relevance,
        ranking,
        store=store,
        removal_control=token_removal_control(model, relevance) if unstaged and next_token else None,
        cards=cards,
        with_nodes=stages is None or not is_screen,
        named=_named(stages, store) if stages and store else (),
    )
    return replace(
        explanation,
        stages=stages,
        patch_controls=patch_controls(model, relevance),
        image_heads=image_heads(model, relevance),
        image_shares=image_shares(model, relevance),
    )


def _named(stages: StageRecord, store: Store) -> list[Neuron]:
    """Return what the stages name and the store has read: the head of the headline, then the first neurons."""
    swap = leading_swap(stages)
    nodes = [*([swap.neuron] if swap else []), *(node.neuron for node in stages.neurons)]
    return [node for node in nodes if node.site in store.facts.all()["sites"]]


def with_changes(explanation: Explanation) -> Explanation:
    """Add what changed weights caused, and what restoring them undoes, if a base model gives another number."""
    diff = explanation.relevance
    if not isinstance(diff, Diff) or not diff.total or diff.contrast_phrase:
        return explanation
    return replace(explanation, changes=ExplainedChanges.of(diff, k=explanation.ranking.k))


def silencing_control(
    model: Model,
    relevance: Relevance,
    rows: Sequence[Ranked],
    on_progress: OnProgress = unwatched,
) -> RandomControl:
    """Set ranked nodes to 0, each at its token, or as many random ones of the same layers. Raises `InputError`."""
    target, contrast = (token.id if token else None for token in (relevance.target, relevance.contrast))
    at = relevance.predicted_at if model.task.takes_position else None
    edits = [Edit(row.neuron, "scale", 0.0, where=edited_at(relevance.prompt, row)) for row in rows]
    return random_edit_control(model, relevance.read, edits, target, contrast, position=at, on_progress=on_progress)


def edited_at(prompt: PromptTokens, row: Ranked) -> str:
    """Return where an edit of a node acts, as `Edit.where`: positions start anew in the decoder."""
    read = prompt.encoder_length
    return f"position:{row.position - read if row.position >= read else row.position}"


def _can_ablate(model: Model, relevance: Relevance, site: str) -> bool:
    if relevance.contrast_phrase or model.task.stacks == 2:
        return False
    known = site in ("ffn", "attn", "head") and neuron_site(site) in relevance.sites
    return known and len(relevance.neurons.recorded) == len(relevance.tokens)


# --- as plain values: the tokens at once, stages when they are measured --------------------------------------------


def saved_tokens(
    relevance: Relevance, prompt: PromptLike, counterfactual: PromptLike | None = None
) -> SavedExplanation:
    """Return what the relevance of tokens says. prompt, counterfactual: what it was computed for."""
    compared = relevance.counterfactual
    return SavedExplanation(
        prompt_json(prompt),
        None if counterfactual is None else prompt_json(counterfactual),
        relevance.target_text,
        relevance.contrast_text or None,
        relevance.predictions,
        compared.predictions if compared else (),
        relevance.prompt.strings,
        tuple(relevance.tokens.tolist()),
        relevance.prompt.sinks,
        relevance.prompt.template,
        sentences.tokens_sentence(relevance),
        sentences.margins_sentence(relevance),
        relevance.made_with,
    )


def saved_stages(
    begun: SavedExplanation,
    model: Model,
    relevance: Relevance,
    on_progress: OnProgress = unwatched,
) -> SavedExplanation:
    """Return the explanation with its stages; else with the effects of nodes, or why it has no stages."""
    reason = why_no_stages(model, relevance)
    if not reason:
        return replace(begun, stages=_saved_stages(stages_of(model, relevance, on_progress)))
    if relevance.counterfactual:
        return replace(begun, advice=reason)
    lines = sentences.effect_lines(explain_relevance(model, relevance))
    effects = tuple(line.text.strip() for line in lines if line.text)
    return replace(begun, effects=effects, advice=sentences.comparison_sentence(relevance))


def _saved_stages(stages: Stages) -> StageRecord:
    values = {field.name: getattr(stages, field.name) for field in fields(StageRecord)}
    controls = ("random_sets", "moved_random", "written_random")
    return StageRecord(**values | {name: values[name] and replace(values[name], sets=()) for name in controls})
