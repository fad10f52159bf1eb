"""The card of one neuron."""

from __future__ import annotations

import json
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import altair as alt
import pandas
import streamlit as st
from markupsafe import Markup

from icebear.actmax import page
from icebear.actmax.card import CROPS, Card, head_marks, heading, meaning_html, statistics_line, writes_html
from icebear.actmax.describe import describe
from icebear.actmax.index.annotation import annotate
from icebear.actmax.labels.sample import SENTENCES
from icebear.actmax.more_examples import READ_AT_ONCE, MoreExamples, more_examples
from icebear.actmax.writes import PAGE_SENTENCES, writes
from icebear.app.web.shared import jobs, links, markdown, pictures, served
from icebear.app.web.shared.background_job import Job
from icebear.app.web.shared.header import no_store_yet, offer_small
from icebear.app.web.shared.index_builds import APP_SITES
from icebear.concepts.vocabulary.lens import mean_lens
from icebear.concepts.vocabulary.projection import both_projections
from icebear.db.search import vocabulary_projection
from icebear.db.store import Store, open_store
from icebear.db.vectors import LENS
from icebear.errors import IcebearError, InputError, ModelError, StoreError
from icebear.models.model import Model
from icebear.records import FEW_WORDS, HISTOGRAM_EDGES, WRITERS, Example, Neuron, NeuronStatistics, Projection, Writes
from icebear.render import NEGATIVE, POSITIVE, heatmap, hexadecimal
from icebear.steering.concept.reading import require_counted_positions, see_each

EXAMPLES = 8
"""The examples of each polarity, and the words of a vocabulary projection that stands alone."""
NOT_ALIKE = "Its effects at these sentences are no more alike than at random tokens, so they are not shown as words."
TOP_WORDS = 5
"""The words of a vocabulary projection above examples."""
STYLED = Markup('<style>{}</style><div class="card">{}</div>')
LATE = 2 / 3
"""Above this share of the layers the logit lens predicts effects in the default model (docs/limits.md)."""
SIDES = {"+": "positive activation (+)", "-": "negative activation (-)"}


def show(name: str) -> None:
    """Show the card of a neuron, or what the model alone says about it."""
    neuron = Neuron.parse(name, served.model_name())
    markdown.to_top(neuron)  # else the scroll of the search would stay
    st.markdown(f"## {neuron}")
    polarity = "+" if neuron.site == "head" else _polarity()
    if served.has_store(neuron.site):
        with served.store(neuron.site) as opened:
            check(opened, neuron)
            _card(opened, neuron, polarity)
        return
    vocabulary = st.container()
    if not served.has_store():
        no_store_yet("Sentences and statistics need")
    elif neuron.site in APP_SITES:
        offer_small(f"no sentences for {neuron.site} neurons")
    else:
        st.caption(f"The index has no sentences for {neuron.site} neurons.")
    with vocabulary, suppress(ModelError):  # last, because it waits for the model
        _vocabulary(neuron, polarity)


def _polarity() -> str:
    label = "High (+) or low (-) activation first"
    return links.bound(st.segmented_control, label, "polarity", list(SIDES), default="+", required=True)


def check(opened: Store, neuron: Neuron) -> None:
    """Raise `InputError` if the index has no such neuron, with those that there are."""
    try:
        opened.neurons.id(neuron)
    except StoreError:
        raise InputError(f"There is no {neuron}: {opened.neurons.why_not(neuron)}. Enter another neuron.") from None


def words(opened: Store, neuron: Neuron, k: int) -> Projection | None:
    """Return the vocabulary of a neuron in an index, if it can say what the neuron writes: as measured in its layer, or
    else in late layers; and if its words stand out."""
    if neuron.site not in WRITERS:
        return None
    ceilings = opened.facts.find("ceilings")
    ceiling = ceilings[neuron.layer] if ceilings and neuron.site == "ffn" else None
    late = neuron.layer >= LATE * opened.neurons.sizes()[neuron.site][0]
    if not late if ceiling is None else ceiling < FEW_WORDS:
        return None
    projection = opened.vocabulary(neuron, k) if ceiling is None else vocabulary_projection(opened, neuron, k, LENS)
    return projection if projection.has_words else None


def _vocabulary(neuron: Neuron, polarity: str) -> None:
    """Show the part of a card that needs no index."""
    model = jobs.model()
    model.check(neuron)
    if neuron.site in WRITERS:
        _styled(page.projections_html(both_projections(model, neuron, EXAMPLES), polarity))


def _card(opened: Store, neuron: Neuron, polarity: str) -> None:
    if opened.is_of_images:
        return _images(opened, neuron, polarity)
    model = jobs.model_if_loaded(opened)
    is_head = neuron.site == "head"
    reading = (
        model if model and (is_head or mean_lens(model)) else None
    )  # else the lens of the neuron would take seconds
    with served.beside(opened) as other:
        card = describe(opened, neuron, reading, EXAMPLES, effect_sentences=0, beside=other)
    key = (str(opened.path), str(neuron))
    more: MoreExamples | None = st.session_state.get("more_examples", {}).get(key)
    if card.left_out:
        size = f"{opened.vectors.size() / 1e9:.0f} GB"
        if st.button(f"Vocabulary (reads {size})", icon=":material/hub:", key="whole_card"):
            card = describe(opened, neuron, reading, EXAMPLES, search_vectors=True, effect_sentences=0)
    card = replace(card, beside=(*card.beside, *([more.beside] if more else [])))
    _title(card)
    worded = None if card.left_out else words(opened, neuron, EXAMPLES)
    sides = sorted(card.examples, key=lambda side: side != polarity)
    columns = zip(sides, st.columns(len(sides)), strict=True)
    slots = {side: _side(card, side, column) for side, column in columns}
    if any(e.relevance is None for rows in card.examples.values() for e in rows):
        _annotating(opened, neuron)
    _reading_more(opened, neuron, more)
    if not card.is_head:
        _own_text(card)
    if worded:
        without_model = [worded, *card.projections] if worded.lens == "mean" else card.projections
        projections = card.projections if card.other else without_model
        shown = [replace(p, promoted=p.promoted[:TOP_WORDS], suppressed=p.suppressed[:TOP_WORDS]) for p in projections]
        _styled(page.projections_html(shown, polarity))
    _about(opened, card, polarity, worded is not None)
    actions = st.container()
    if model:  # after all that is there at once
        with slots[polarity][0]:
            card = replace(card, writes=_writes(str(neuron), str(opened.path), opened.made_with(), opened, model, card))
        for side, (written, sentences) in slots.items():
            measured = card.writes.get(side)
            if measured and not card.is_head and not _stands_out(measured):
                written.caption(NOT_ALIKE)
                continue
            _styled(writes_html(card, side), written)
            effects = measured.places if measured else ()
            _styled(page.examples_html(card.examples[side], effects, card.is_head), sentences)
    with actions:
        _actions(card)


def _images(opened: Store, neuron: Neuron, polarity: str) -> None:
    """Show the card of a neuron in an index of images; the model cuts the crops."""
    kind = links.bound(st.segmented_control, "Crops", "crop", list(CROPS), default="patch", required=True)
    model, is_head = jobs.model_of_index(opened), neuron.site == "head"
    examples = [row for side in SIDES for row in opened.examples(neuron, side, EXAMPLES)]
    if kind == "relevance" and not is_head and any(row.relevance is None for row in examples):
        with jobs.progress("Measuring relevance; finished images are kept") as step:
            annotate(model, opened, [neuron], EXAMPLES, on_progress=step)
    card = describe(opened, neuron, model, EXAMPLES, effect_sentences=0, crop=kind)
    if card.title:
        st.markdown(f"**{markdown.plain(card.title)}**")
    st.caption(CROPS[kind])
    for side in sorted(card.examples, key=lambda side: side != polarity):
        st.markdown(f"### {heading(card, side)}")
        if card.examples[side]:
            _styled(page.images_html(card.examples[side], card.crops[side], is_head))
        else:
            st.caption("There is none.")
    with st.expander("Statistics and labels"):
        st.caption(markdown.plain(statistics_line(card)))
        histogram(card.statistics, "patch", "image")
        _styled(page.projections_html(card.projections, polarity))
    _actions(card)


def _title(card: Card) -> None:
    """Show the label of a neuron, and where a head looks."""
    if card.title:
        st.markdown(f"**{markdown.plain(card.title)}**")
    elif not card.meanings:
        _suggesting(card.neuron)
    for line in card.attention.lines if card.attention else ():
        st.markdown(markdown.plain(line))


def _about(opened: Store, card: Card, polarity: str, worded: bool) -> None:
    """Show the way to the neighbors, statistics, and the vocabulary if the card does not begin with it."""
    if not card.is_head:
        lit = {"lit": "neighbors of a neuron", "near": str(card.neuron), "near_polarity": polarity}
        st.button("Show its neighbors in the Atlas", key="to_atlas", on_click=links.go, args=("atlas",), kwargs=lit)
    with st.expander("Statistics" if worded or card.is_head else "Statistics and vocabulary"):
        st.caption(markdown.plain(statistics_line(card)))
        histogram(card.statistics)
        if not worded:
            _styled(page.projections_html(card.projections, polarity))


def histogram(statistics: NeuronStatistics, token: str = "token", sentence: str = "sentence") -> None:
    """Show how often each activation is, from the smallest to the largest one, which few tokens have."""
    pictures.chart(histogram_chart(statistics), f"activations of {statistics.neuron}")
    counted = f"The bars count one random {token} of each {sentence}; min and max are of all"
    st.caption(f"{counted}. Both axes are logarithmic.")


def histogram_chart(statistics: NeuronStatistics) -> alt.LayerChart:
    """Return the bins of a neuron, also those that only its smallest and its largest activation are in."""
    names = [f"{low:g} to {high:g}" for low, high in pairwise((-inf, *HISTOGRAM_EDGES, inf))]
    bins = {bisect_right(HISTOGRAM_EDGES, value): value for value in (statistics.min, statistics.max)}
    ends = [{"activation": names[bin], "end": f"{value:+z.2f}"} for bin, value in bins.items()]
    used = [*bins, *(bin for bin, count in enumerate(statistics.histogram) if count)]
    rows = [
        {"activation": names[bin], "sentences": statistics.histogram[bin], "negative": bin < len(names) // 2}
        for bin in range(min(used), max(used) + 1)
    ]
    x = alt.X("activation:O", sort=[row["activation"] for row in rows], axis=alt.Axis(labelAngle=-45))
    y = alt.Y("sentences:Q", scale=alt.Scale(type="symlog"), title="sentences")
    colors = alt.Scale(domain=[False, True], range=[hexadecimal(POSITIVE), hexadecimal(NEGATIVE)])
    color = alt.Color("negative:N", scale=colors, legend=None)
    bars = alt.Chart(pandas.DataFrame(rows), height=240).mark_bar()
    texts = alt.Chart(pandas.DataFrame(ends)).mark_text(angle=270, align="left", dx=4, color="#888")
    shown = bars.encode(x=x, y=y, color=color, tooltip=["activation", "sentences"])
    return shown + texts.encode(x=x, y=alt.datum(0), text="end:N")


def _side(card: Card, side: str, column: Any) -> tuple[Any, Any]:
    """Show a side of a card. Return the slots of what the neuron writes, and of its sentences."""
    with column:
        above = st.empty()
        st.markdown(f"### {heading(card, side)}")
        if card.is_head:
            st.caption(markdown.plain(head_marks(card)))
        elif words := peaks(card.examples[side]):
            st.markdown(words)
        if side in card.meanings:
            _styled(meaning_html(card, side))
        sentences, below = st.empty(), st.empty()
        if card.examples[side]:
            _styled(page.examples_html(card.examples[side], of_head=card.is_head), sentences)
        else:
            st.caption(markdown.plain(card.absence(side) or "There is none."))
        for above_index, other in zip((card.index_name, *(o.index for o in card.beside)), card.beside, strict=False):
            if other.examples.get(side):
                st.caption(markdown.plain(f"{above_index}. Below: {other.index}"))
                _styled(page.examples_html(other.examples[side], of_head=card.is_head))
    return (above if card.is_head else below), sentences


def peaks(examples: Sequence[Example]) -> str:
    """Say which token is the strongest of several sentences, and of how many, as Markdown; empty if there is none."""
    tokens = Counter(example.token_text.strip().lower() for example in examples)
    often = ", ".join(
        f"**{markdown.word(token)}** in {count} of {len(examples)} sentences"
        for token, count in tokens.most_common(2)
        if count > 1 and token
    )
    return often and f"Most often at {often}"


def _stands_out(effects: Writes) -> bool:
    """Return whether effects at a neuron's sentences are more alike than at random tokens."""
    alike, random = effects.correlation, effects.random_correlation
    return alike is None or random is None or alike > random


def _own_text(card: Card) -> None:
    """Show the neuron's activation at each token of a text that a person writes."""
    text = links.bound(st.text_input, "Try your own text", "own_text", placeholder="A text, of two words or more")
    if not text:
        return
    model, values = jobs.model(), dict[int, float]()
    ids = model.ids(text)
    try:
        positions = require_counted_positions(model, ids)
    except InputError as error:
        st.error(markdown.message(error))
        return

    def see(row: int, columns: Any, activations: Any) -> None:
        values.update(zip(positions, activations[:, 0].tolist(), strict=True))

    see_each(model, [ids], [card.neuron], see)
    left_out = tuple(position for position in range(len(ids)) if position not in values)
    shown = [values.get(position, 0.0) for position in range(len(ids))]
    st.html(markdown.HEAT.format(heatmap(list(model.pieces(ids)), shown, template=left_out)))
    top = max(values, key=lambda position: abs(values[position]))
    known = f"in the index it goes from {card.statistics.min:+z.2f} to {card.statistics.max:+z.2f}"
    st.caption(f"{values[top]:+z.2f} at {markdown.word(model.pieces(ids)[top])}; {markdown.plain(known)}.")


@st.cache_data(show_spinner="Measuring what it writes at its sentences ...", max_entries=1000)
def _writes(
    neuron: str, path: str, index: dict[str, Any], _opened: Store, _model: Model, _card: Card
) -> dict[str, Writes]:
    return writes(_model, _opened, _card.neuron, _card.examples, PAGE_SENTENCES)


def _styled(html: Markup, slot: Any = st) -> None:
    if html:
        slot.html(STYLED.format(Markup(page.STYLE), html))


def _annotating(opened: Store, neuron: Neuron) -> None:
    """Attribute the examples that are shown, on demand, and store the result."""
    what = "it attends to" if neuron.site == "head" else "activate it"
    if st.button(f"Color the tokens that {what}", icon=":material/palette:", key="annotate"):
        loaded = jobs.model_of_index(opened)
        with jobs.progress("Attributing; finished sentences are kept") as step:
            annotate(loaded, opened, [neuron], EXAMPLES, on_progress=step)
        st.rerun()


def _reading_more(opened: Store, neuron: Neuron, begin: MoreExamples | None) -> None:
    """Read more sentences of the corpus on demand, for this visit."""
    if st.button("More sentences", icon=":material/expand_more:", key="more_examples_button"):
        loaded = jobs.model_of_index(opened)
        with jobs.progress(f"Reading {READ_AT_ONCE} more sentences") as step:
            more = more_examples(loaded, opened, neuron, READ_AT_ONCE, EXAMPLES, begin, step)
        st.session_state["more_examples"] = {(str(opened.path), str(neuron)): more}
        st.rerun()


def _suggesting(neuron: Neuron) -> None:
    """Label both sides of a neuron on demand, in the background, and store the result."""
    request = (served.model_name(), str(served.store_path(neuron.site)), str(neuron))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("No label yet", width="content")
        if st.button("Suggest one", key="suggest_label", type="tertiary", icon=":material/label:"):
            if _labelling(*request).error:
                _labelling.clear(*request)
            _labelling(*request).left.discard(jobs.visitor())
            st.session_state["labelling"] = request
        st.caption(f"The model reads {sum(SENTENCES.values()):,} sentences.")
    if st.session_state.get("labelling") == request and jobs.show_until_done(jobs.cached_job(_labelling, *request)):
        st.caption("No label passed its test.")


@st.cache_resource(max_entries=64, show_spinner=False)
def _labelling(name: str, path: str, neuron: str) -> Job:
    """Return the job that labels a neuron, for all visitors."""
    loading = jobs.model_job()

    def work(job: Job) -> None:
        model = loading.outcome()
        from icebear.actmax.labels.auto import label_neurons

        with open_store(path) as opened:
            opened.check(model.index_fingerprint, model.name)
            label_neurons(model, opened, [Neuron.parse(neuron)], on_progress=job.step)

    return Job("Scoring labels on sentences that they were not made from", work)


def _swap(prompt: str, edit: str) -> None:
    """Show a swap of the head in the steering view, which measures it on a click; for callbacks."""
    st.session_state["counterfactual"] = ""  # of another prompt
    links.go("steer", section="edits", edits=edit, prompt=prompt)


def _switched_off(card: Card) -> str:
    """Return the command that shows what the labels of the neuron's first image are without it."""
    strongest = next((row for rows in card.examples.values() for row in rows), None)
    image = str(Path(card.made_with["index"]["corpus"], strongest.sentence.text)) if strongest else "IMAGE"
    asking = [] if jobs.model().labels else ["--examples", "FOLDER", "--others", "FOLDER"]
    edit = ["--edit", f"{card.neuron}*0", "--model", served.model_name()]
    return shlex.join(["icebear", "steer", "--image", image, *asking, *edit])


def _actions(card: Card) -> None:
    left, middle, right = st.columns([2, 3, 1], vertical_alignment="bottom")
    key = f"label {card.neuron} {card.label or ''}"  # another key, and so another text, when somebody changes it

    def write() -> None:
        try:
            with served.store(card.neuron.site) as opened:
                opened.labels.set_manual(card.neuron, st.session_state[key])
        except IcebearError as error:  # in a callback; the next run shows it
            st.session_state["trouble"] = str(error)

    left.text_input("Your label", card.label or "", key=key, on_change=write)
    _, prompt = st.session_state.get("card_from") or ("", None)
    off = partial(links.to_steer, card.neuron, **({"prompt": prompt} if prompt else {}))
    steering = links.VIEWS["steer"].title
    with middle.container(horizontal=True):
        if card.is_of_images:
            st.code(_switched_off(card), "bash", wrap_lines=True)
        else:
            st.button(f"Switch it off in {steering}", on_click=off, key="card_to_steer")
        if card.swap_edit:
            about = "At its first sentence, up to the underlined token, it takes its value in the next one."
            st.button(f"Swap it in {steering}", on_click=_swap, args=card.swap_edit, key="card_to_swap", help=about)
    with right:
        as_json = partial(json.dumps, card.to_dict(), ensure_ascii=False, indent=1)
        pictures.downloads(str(card.neuron), {"html": card.to_html, "json": as_json})
