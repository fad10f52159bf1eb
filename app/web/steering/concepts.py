"""Concepts: found from examples, tested on held-out texts, measured in a text, and steered."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

import pandas
import streamlit as st

from icebear.app.example import PROMPT
from icebear.app.web.shared import counterfactuals, jobs, links, markdown, pictures, question, served, tables
from icebear.app.web.shared.background_job import Job
from icebear.app.web.shared.bars import Bar, bars
from icebear.app.web.steering import flips, monitor_section
from icebear.app.web.steering.edit_neurons import download, result_on_press
from icebear.db.search import with_and_without
from icebear.errors import IcebearError, InputError
from icebear.models.model import Model
from icebear.recipe import Recipe
from icebear.render import heatmap
from icebear.steering.comparison import Comparison
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import find_concept
from icebear.steering.concept.texts import FEWEST_TEXTS
from icebear.steering.outcome import CONCEPT_TOKENS, steer_concept
from icebear.steering.provenance import Outcome, chosen_by_words, score_of
from icebear.steering.side_effects import HeldOutContexts

KL_LIMITS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Nats of KL divergence in held-out contexts."""
EXAMPLE_SENTENCES = 60
"""Sentences of the index that have a word, at most, and as many others."""
SHOWN = 5
"""Neurons that are shown without scrolling."""
VECTOR_HELP = "Adds the difference of means to the residual stream instead of editing neurons; it often steers better."
EXAMPLE_FOLDER = files("icebear.app.web.steering").joinpath("examples")


def show() -> None:
    _choose()
    concept = _chosen()
    if concept is None:
        return
    concept.check(jobs.model())
    if _verdict(concept):
        left, right = st.columns(2)
        with left:
            _neurons(concept)
        with right:
            _measure(concept)
        _steer(concept)
        monitor_section.show(concept)
    else:
        with st.expander("The neurons that were tried"):
            _neurons(concept)


# --- which concept --------------------------------------------------------------------------------------


def _choose() -> None:
    """Choose a concept: found from examples, in a file, or of the index."""
    finding: Job | None = st.session_state.get("finding")
    if finding and finding.abandoned:
        del st.session_state["finding"]
    elif finding:
        try:
            _take(jobs.wait_for(finding, stops=True))
        finally:
            if not finding.is_alive():
                del st.session_state["finding"]
    with st.expander("Find a concept", expanded=not st.session_state.get("concept")):
        _examples()
        uploaded = st.file_uploader("Or a saved concept", "json", key="concept_file")
        if uploaded and st.button("Use it", key="use_concept"):
            _take(Concept.from_json(uploaded.getvalue().decode("utf-8", errors="replace")))
        names = _names()
        if names:
            st.pills(
                "Or one of the index", names, format_func=markdown.plain, key="stored_concept", on_change=_take_stored
            )


def _examples() -> None:
    """Draw the fields for examples, each with its counter, and the button that starts to find their concept."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button("Try an example: music", key="music", icon=":material/music_note:", on_click=_music)
        if served.has_readable_store():
            label = "Or words: sentences of the index with one of them, and others"
            st.text_input(label, placeholder="food bread soup meat fruit", key="concept_words", on_change=_from_words)
    left, right = st.columns(2)
    positive = monitor_section.texts_field(left, "Positive examples (one a line)", "concept_with", FEWEST_TEXTS)
    negative = monitor_section.texts_field(
        right, "Negative examples, otherwise similar (one a line)", "concept_without", FEWEST_TEXTS
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        name = st.text_input("Name", "my concept", key="concept_name", width=240)
        most = st.number_input("Neurons at most", 1, 100, 20, key="concept_most", width=160)
        few = min(len(positive), len(negative)) < FEWEST_TEXTS
        why = f"Write at least {FEWEST_TEXTS} examples of each kind." if few else None
        start: dict[str, Any] = {
            "on_click": _find,
            "args": (positive, negative, name, most),
            "disabled": few,
            "help": why,
        }
        st.button("Find", type="primary", key="find_concept", **start)


def _music() -> None:
    names = {"concept_with": "music.txt", "concept_without": "not-music.txt"}
    texts = {key: EXAMPLE_FOLDER.joinpath(name).read_text(encoding="utf-8") for key, name in names.items()}
    positive, negative = (text.splitlines() for text in texts.values())
    st.session_state.update(texts, concept_name="music")
    links.fill(measured="She played an old song on the piano.", prompt="Yesterday I")
    _find(positive, negative, "music", 20)


def _from_words() -> None:
    """Find the concept of sentences with words, if the index has enough of them; a callback."""
    words = st.session_state["concept_words"]
    try:
        with served.store() as opened:
            having, lacking = with_and_without(opened, words, EXAMPLE_SENTENCES)
    except IcebearError as error:
        st.session_state["trouble"] = str(error)
        return
    lists = {"concept_with": "\n".join(having), "concept_without": "\n".join(lacking)}
    name = name_of(words)
    st.session_state.update(lists, concept_name=name)
    if min(len(having), len(lacking)) >= FEWEST_TEXTS:
        _find(having, lacking, name, st.session_state["concept_most"], words)
    else:
        st.session_state["trouble"] = f"The index has {len(having)} sentences with these words; add words or examples."


def name_of(words: str) -> str:
    """Return the name of the concept of these words: the first one, without a comma."""
    return next(filter(None, re.split(r"[\s,;]+", words)), "my concept")


def _find(positive: list[str], negative: list[str], name: str, most: int, words: str = "") -> None:
    """Start to find a concept. words: by which the examples were chosen."""
    loading = jobs.model_job()

    def work(job: Job) -> Concept:
        result = find_concept(loading.outcome(), positive, negative, name, max_neurons=most, on_progress=job.step)
        return replace(result, provenance={**result.provenance, "chosen_by_words": words}) if words else result

    st.session_state["finding"] = Job("Reading the examples", work)


def of_neurons(sides: Sequence[tuple[str, str]], name: str) -> None:
    """Show the concept of these neurons, each at the first of its polarities, all of the same weight."""
    loading = jobs.model_job()
    polarities: dict[str, str] = {}
    for neuron, polarity in sides:
        polarities.setdefault(neuron, polarity)
    weights = dict.fromkeys(polarities.items(), 1 / len(polarities))

    def work(job: Job) -> Concept:
        return Concept.of(loading.outcome(), name, weights, job.step)

    st.session_state["finding"] = Job("Reading texts with these neurons", work)
    links.go("steer", section="concepts")


def _names() -> list[str]:
    if not served.has_readable_store():
        return []
    with served.store() as opened:
        return list(opened.concepts.all())


def _take_stored() -> None:
    name = st.session_state["stored_concept"]
    if name:
        with served.store() as opened:
            _take(Concept.from_dict(opened.concepts.get(name)), name)


def _take(concept: Concept, name: str | None = None) -> None:
    """Put a concept into the URL, without what only a monitor needs, and without its search if it is long; the session
    keeps all of it. name: its name in the index, for the URL if it is longer."""
    record = replace(concept, vectors=(), texts=None, controls=()).to_dict()
    text = _json(record)
    if len(text) > links.LONGEST_URL_VALUE:
        short = ("auroc", "error", "tested_on", "means", "found_by")
        record["provenance"] = {key: record["provenance"].get(key) for key in short}
        text = _json(record)
    text = text if len(text) <= links.LONGEST_URL_VALUE or name is None else name
    st.session_state.setdefault("concepts", {})[text] = concept
    links.to_url(concept=text)


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _chosen() -> Concept | None:
    """Return the concept of the URL, or of this session."""
    text = links.from_url("concept")
    if not text:
        return None
    known = st.session_state.get("concepts", {})
    if text in known:
        return known[text]
    if text.startswith("{"):
        return Concept.from_json(text)
    if text not in _names():
        raise InputError(f"The index of this server has no concept {text!r}; make it again from its examples.")
    with served.store() as opened:
        return Concept.from_dict(opened.concepts.get(text))


# --- what it is -----------------------------------------------------------------------------------------


def _verdict(concept: Concept) -> bool:
    """Show how well the concept separates held-out texts. Return whether it may be used: it beats chance, or was not
    tested."""
    headline = f"## {markdown.plain(concept.name)}: {len(concept)} neuron{'' if len(concept) == 1 else 's'}"
    score = score_of(concept.provenance)
    if score is None:
        st.markdown(headline)
        st.caption("Not tested on held-out texts.")
        return True
    circular = chosen_by_words(concept.provenance)
    text = (
        f"AUROC {score.auroc:.2f} on {score.positive} positive and {score.negative} negative held-out texts; chance is "
        f"0.50, and 95 % of random guesses stay below {min(score.by_chance, 1):.2f}. {circular}"
    )
    if score.auroc < score.by_chance:
        st.error(
            f"**Not found: no better than chance on held-out texts.** {markdown.plain(text)} Add examples, or make the "
            "two kinds differ in nothing but the concept."
        )
        return False
    st.markdown(headline)
    st.caption(markdown.plain(text))
    return True


def _neurons(concept: Concept) -> None:
    rows = [{"neuron": str(part.neuron), "sign": part.polarity, "weight": part.weight} for part in concept.parts]
    weight = {"weight": st.column_config.NumberColumn(format="%.3f")}
    tables.neuron_table(pandas.DataFrame(rows), "concept_neurons", labels=True, column_config=weight, rows=SHOWN)
    with st.container(horizontal=True):
        pictures.downloads("concept", {"json": concept.to_json})
        path = concept.provenance.get("path")
        if path:
            with st.popover("How many neurons"):
                st.caption("AUROC on the validation texts; the fewest neurons within 0.01 of the best are chosen.")
                tables.data_table(pandas.DataFrame(path).drop_duplicates())


def _measure(concept: Concept) -> None:
    text = links.bound(st.text_area, "Measure a text", "measured", value=PROMPT, height=80)
    if text.strip():
        try:
            result = concept.measure(jobs.model(), text)
        except InputError as error:  # of a text of a single token; the rest of the page stays
            st.error(markdown.message(error))
            return
        st.html(markdown.HEAT.format(heatmap(list(result.tokens), list(result.values), template=result.excluded)))
        match concept.provenance.get("means"):
            case [float() as positive, float() as negative]:
                named = [("positive", positive), ("negative", negative)]
            case _:
                named = []
        marks = [Bar(f"{name} held-out examples (mean)", value, f"{value:+.2f}", True) for name, value in named]
        st.html(bars([Bar("this text", result.value, f"{result.value:+.2f}"), *marks]))
        st.caption("In standard deviations of the negative examples; a text has its tokens' mean.")


# --- steering -------------------------------------------------------------------------------------------


def _steer(concept: Concept) -> None:
    st.markdown("## Steer")
    prompt = links.bound(
        st.text_input, "Continue this text", "prompt", value=question.PROMPT, on_change=counterfactuals.forget
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        help_text = "Mean KL divergence of the next-word probabilities in unrelated texts, in nats. More is stronger."
        kl = links.bound(
            st.select_slider, "Side effects allowed (nats)", "kl", KL_LIMITS, 0.25, help=help_text, width=320
        )
        suppress = links.bound(st.toggle, "Suppress instead", "suppress")
        by_vector = links.bound(st.toggle, "By its vector", "by_vector", help=VECTOR_HELP)
        pressed = st.button("Generate", type="primary", icon=":material/play_arrow:", key="steer_concept")
    settings = (concept, prompt, kl, suppress, by_vector)
    job = result_on_press("concepts", settings, pressed, partial(_steering, jobs.model(), *settings))
    if job is None or job.abandoned:
        return
    comparison, recipe = jobs.wait_for(job, stops=True)
    with st.container(key="steered"):
        outcome = Outcome.of(recipe)
        assert outcome
        if outcome.warning:
            st.warning(markdown.plain(outcome.warning))
        st.caption(markdown.plain(f"{outcome.control_text} {outcome.side_effects_text} {outcome.dose_text}".strip()))
        flips.both_texts(comparison.prompt, comparison.plain.text, comparison.steered.text)
    markdown.into_view("steered", settings[1:])
    with st.container(horizontal=True):
        if recipe.provenance["detector"] == "neurons":
            st.button("Edit these", icon=":material/tune:", key="concept_edit", on_click=flips.edit, args=(recipe,))
        download(comparison, recipe)


def _steering(model: Model, concept: Concept, prompt: str, kl: float, suppress: bool, by_vector: bool) -> Job:
    """Return the job that finds the strength and generates; its result has both texts, and the recipe with its
    outcome."""

    def work(job: Job) -> tuple[Comparison, Recipe]:
        contexts = HeldOutContexts(model)
        detector = "means" if by_vector else "neurons"
        recipe = concept.recipe(model, kl=kl, suppress=suppress, held_out=contexts, detector=detector)
        recipe = recipe.noting(prompt=prompt)
        job.doing, read = "Generating, also with random edits", markdown.read_prompt(prompt)
        options: dict[str, Any] = {"contexts": contexts, "on_progress": job.step}
        comparison, outcome = steer_concept(model, concept, read, recipe, CONCEPT_TOKENS, **options)
        return comparison, recipe.noting(**outcome.provenance())

    return Job("Finding the strength", work)
