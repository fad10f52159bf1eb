"""The app's first view, and what all visitors share: with the real model and a small real index."""

import functools
import gc
import importlib.util
import itertools
import json
import re
import shlex
import signal
import threading
import time
import weakref
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen
from xml.etree import ElementTree

import altair as alt
import pandas
import pytest
import torch
from appview import fine, set_up, shown, text, visit
from conftest import ICE_BEAR
from few import FEW, few_of
from serving import serving, started

from icebear import attribute, explain, stages, steer
from icebear.app.web.shared import background_job, gallery, jobs, markdown, pictures, served
from icebear.app.web.shared import counterfactuals as boxes
from icebear.app.web.shared.all_visitors import ServerState
from icebear.app.web.shared.background_job import Job
from icebear.app.web.why import measuring
from icebear.concepts.answers import what_if
from icebear.concepts.answers.comparisons import Exchange
from icebear.concepts.answers.likely_words import LikelyWord
from icebear.concepts.stages.stage_picture import (
    APART,
    GRID,
    LINE_HEIGHT,
    TRACED,
    WIDTH,
    arrows,
    columns,
    on_paper,
    stage_part,
    stage_picture,
)
from icebear.concepts.stages.stage_records import RandomSwap
from icebear.concepts.stages.stage_sentences import headline, headline_control, leading_swap, probability_text
from icebear.errors import IcebearError
from icebear.explanation.explanation import saved_stages, saved_tokens
from icebear.explanation.saved import SavedExplanation
from icebear.explanation.sentences import chosen_sentence
from icebear.models.loading import loading
from icebear.models.lock import FairLock
from icebear.models.parts.families import FAMILIES
from icebear.records import Neuron
from icebear.render import heatmap, linked

ROOT = Path(__file__).parent.parent
FRANCE = "The capital of France is"
CAMEL = "The wild camel lives in the"


def test_a_first_visit_shows_an_example_before_the_model_is_there(environment, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(loading, "load_model", lambda *arguments, **options: waits.wait())
    jobs._load.clear()
    page = fine(visit())
    explanation = gallery.example(gallery.NAMES[0]).explanation
    assert page.get_by_key("prompt").value == explanation.prompt
    assert shapes(text(page)) == shapes(stage_picture(explanation.stages))
    page.get_by_key("example_2").click().run()
    assert fine(page).get_by_key("prompt").value == gallery.example(gallery.NAMES[2]).explanation.prompt
    waits.set()
    jobs._load.clear()


@pytest.mark.release
def test_examples_are_what_the_model_computes(smol, monkeypatch, desert):
    """But the flip is one that was found before, is measured with few draws, and is compared with nothing."""
    for name, value in FEW.items():
        if name.startswith("icebear.steering"):
            monkeypatch.setattr(name, value)
    spec = importlib.util.spec_from_file_location("examples", ROOT / "docs" / "examples.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert tuple(made.EXAMPLES) == gallery.NAMES
    monkeypatch.setattr(made, "flip", lambda *_: desert)
    record = json.loads(json.dumps(made.measure(smol, made.EXAMPLES["grammar"])))
    explanation = SavedExplanation.from_dict(record["explanation"])
    file = gallery.example("grammar").explanation
    assert explanation.relevance == pytest.approx(file.relevance, abs=1e-3)
    found, known = explanation.stages, file.stages
    assert [node.neuron for node in found.heads] == [node.neuron for node in known.heads]
    for name in ("alone", "without", "random"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), abs=1e-3)
    assert list(found.trace.shares) == [pytest.approx(row, abs=1e-3) for row in known.trace.shares]


def test_what_is_switched_off_takes_its_counterfactual_value(environment, smol, few_contexts):
    """In an example from a file, as its swap; and together, as with hooks in `Stages`."""
    saved = gallery.example("geography").explanation.stages
    page = visit()
    assert numbers(page) == []
    swap = saved.swaps[0]
    one(page.toggle, str(swap.neuron)).set_value(False).run()
    assert numbers(fine(page)) == list(map(probability_text, swap.after))
    _, verb, prompt, _, edit, *_ = shlex.split(page.code[0].value)
    with steer(smol, [edit]):
        after = smol.next_logits(prompt).softmax(-1)[smol.tokens_of(" Paris")[0]]
    assert (verb, after.item()) == ("steer", pytest.approx(swap.after[0], rel=0.01))
    for toggle in page.toggle[1:]:
        toggle.set_value(False)
    page.run()
    found = stages(smol, FRANCE, " Paris", " Rome", "The capital of Italy is")
    after = found.swapped([node.neuron for node in (*saved.heads, *saved.neurons)])
    assert numbers(fine(page)) == list(map(probability_text, after))


def shapes(html):
    """Those of the causal trace and of the heads, with their places and colors."""
    return re.findall(r"<(?:rect|path) .*?>", html)


def one(elements, label):
    (element,) = (element for element in elements if element.label == label)
    return element


def numbers(page):
    """The probabilities of the target and the contrast in the picture, where what is switched off has changed them."""
    answers = re.findall(r'<g class="answer">.*?</g>', text(page), re.DOTALL)
    return re.findall(r'font-weight="600">.*?→(.*?)</text>', "".join(answers))


@pytest.mark.release
def test_stages_of_an_own_prompt(environment, smol, few_contexts):
    page = fine(visit(prompt=ICE_BEAR, counterfactual=CAMEL))
    found = stages(smol, ICE_BEAR, counterfactual=CAMEL)
    assert shapes(text(page)) == shapes(stage_picture(found))
    assert [toggle.label for toggle in page.toggle][1:] == [
        f"{len(found.neurons)} FFN neurons",
        *(str(head.neuron) for head in found.heads),
    ]


def test_without_a_counterfactual_effects_are_shown(environment, smol):
    """Of the nodes above random ones; no stages."""
    prompt = "The polar bear lives in the"  # no other test's, whose counterfactual the app would have chosen
    page = fine(visit(prompt=prompt))
    explanation = explain(smol, prompt)
    above = [node for node in explanation.nodes if abs(node.effect) > explanation.random_effect]
    assert above
    for node in explanation.nodes:
        assert (f">{node.ranked.neuron}</a> at" in text(page)) == (node in above)
    assert not page.toggle


def words_to_click(relevance):
    """The tokens of the ice bear, whose content words can be exchanged."""
    picks = {1: "1-2", 2: "2-3", 3: "3-4"}
    return heatmap(list(relevance.prompt.strings), relevance.tokens.tolist(), relevance.prompt.sinks, picks=picks)


def test_an_own_prompt(environment, smol, no_stages):
    page = fine(visit(prompt=ICE_BEAR, counterfactual=CAMEL))
    relevance = attribute(smol, ICE_BEAR, counterfactual=CAMEL)
    assert words_to_click(relevance) in text(page)
    assert page.get_by_key("contrast").placeholder == "Arabian"
    contrast = page.get_by_key("contrast")
    contrast.set_value(next(option for option in contrast.options if option.startswith("desert"))).run()
    relevance = attribute(smol, ICE_BEAR, contrast=" desert", counterfactual=CAMEL)
    assert words_to_click(relevance) in text(page)
    assert visit(prompt=ICE_BEAR, counterfactual=CAMEL, contrast=" Arctic").error  # rather than Arctic
    page.get_by_key("target").set_value("New York City").run()
    assert markdown.word("New York City") in text(fine(page))  # of which only the first token is explained
    page.get_by_key("prompt").set_value("The opposite of hot is").run()
    assert fine(page).get_by_key("counterfactual").value == ""
    assert page.get_by_key("contrast").value is None


def test_a_long_prompt_asks_first(environment, no_stages, monkeypatch):
    monkeypatch.setattr(measuring, "LONG_TOKENS", 8)
    page = fine(visit(prompt="one two three four five six seven eight nine ten eleven"))
    assert page.info
    assert "heat answer" not in text(page)
    page.get_by_key("shorten").click().run()
    assert page.get_by_key("prompt").value.strip() == "four five six seven eight nine ten eleven"
    assert "heat answer" in text(fine(page))
    page.get_by_key("prompt").set_value("one two three four five six seven eight nine ten").run()
    page.get_by_key("whole_prompt").click().run()
    assert "heat answer" in text(fine(page))


@pytest.mark.parametrize("name", gallery.NAMES)
def test_arrows_and_names_of_heads_stand_apart_in_the_order_of_layers(name):
    drawn = arrows(gallery.example(name).explanation.stages)
    assert [arrow.name for arrow in drawn] == sorted(
        (arrow.name for arrow in drawn), key=lambda head: -Neuron.parse(head).layer
    )
    for upper, lower in itertools.pairwise(drawn):
        assert lower.y - upper.y > APART - 1e-6
        assert lower.name_y - upper.name_y > LINE_HEIGHT - 1e-6


def test_a_long_prompt_shows_the_tokens_that_matter_in_the_width_of_the_picture():
    stages = gallery.example("geography").explanation.stages
    shift = 56
    words = tuple(f" word{number}" for number in range(shift))

    def later(positions):
        return tuple(position + shift for position in positions)

    long = replace(
        stages,
        prompt=replace(stages.prompt, tokens=words + stages.prompt.tokens),
        counterfactual=replace(stages.counterfactual, tokens=words + stages.counterfactual.tokens),
        position=stages.position + shift,
        differing=later(stages.differing),
        trace=replace(stages.trace, positions=later(stages.trace.positions)),
        sources=tuple(replace(source, position=source.position + shift) for source in stages.sources),
    )
    drawn = columns(long)
    assert [position for column in drawn for position in column.positions] == list(range(len(long.prompt.tokens)))
    alone = {column.positions[0]: column for column in drawn if len(column.positions) == 1}
    assert {0, long.position, *long.differing, *long.trace.positions} <= set(alone)
    assert [alone[position].other for position in long.differing] == ["Italy"]
    assert sum(column.width for column in drawn) == pytest.approx(GRID)
    assert min(column.width for column in drawn if column.shares) >= TRACED
    assert arrows(long)[0].source == alone[long.differing[0]].middle
    assert columns(stages)[-1].text == "is"


def test_a_prompt_from_right_to_left_is_drawn_as_in_a_mirror():
    def places(drawn):
        return [float(x) for x in re.findall(r'class="token" x="([0-9.]+)"', drawn)]

    stages = gallery.example("geography").explanation.stages
    tokens = ("בירת", " של", " ארץ", " צרפת", " היא")
    hebrew = replace(stages, prompt=replace(stages.prompt, tokens=tokens))
    assert places(stage_picture(stages)) == sorted(places(stage_picture(stages)))
    assert places(stage_picture(hebrew)) == sorted(places(stage_picture(hebrew)), reverse=True)
    assert max(places(stage_picture(hebrew))) < WIDTH


def test_names_are_links_to_the_cards_that_a_page_has():
    text = "L1.ffn.2 & <b> L3.head.4, L1.ffn.20"
    assert linked(text) == "L1.ffn.2 &amp; &lt;b&gt; L3.head.4, L1.ffn.20"
    assert re.findall(r'href="#(.*?)"', linked(text, {"L3.head.4"})) == ["L3.head.4"]
    assert re.findall(r'data-neuron="(.*?)"', linked(text, None)) == ["L1.ffn.2", "L3.head.4", "L1.ffn.20"]
    assert "<b>" not in linked(text, None)
    stages = gallery.example("geography").explanation.stages
    names = {str(node.neuron) for node in (*stages.heads, *stages.neurons)}
    for part in (stage_picture(stages, None), stage_part("stage_finding", stages, None)):
        assert set(re.findall(r'data-neuron="(.*?)"', part)) <= names
    assert set(re.findall(r'data-neuron="(.*?)"', stage_part("stage_details", stages, None))) == names


def test_work_stops_between_two_operations():
    begun = threading.Event()

    def forever(job):
        while True:
            begun.set()
            torch.ones(1) + 1

    job = Job("Computing", forever)
    begun.wait(10)
    job.stop()
    job.join(10)
    assert isinstance(job.error, IcebearError)


def test_a_job_ends_when_nobody_waits_for_it():
    finish = threading.Event()
    job = Job("Computing", lambda job: finish.wait(10) and job.check())
    for visitor in ("one", "two", "three"):
        job.enter(visitor)
    for visitor in ("one", "two"):
        job.leave(visitor)
    job.enter("one")  # anew
    job.leave("three")
    assert (job.stopped, job.left) == (False, {"two", "three"})
    job.leave("one")
    finish.set()
    with pytest.raises(IcebearError):
        job.outcome()


def test_work_that_no_page_shows_ends_and_starts_anew():
    begun, done = [], threading.Event()

    def start():
        begun.append(Job("Computing", lambda job: done.wait(10) and job.check()))
        return begun[-1]

    cached = functools.cache(start)
    cached.clear = cached.cache_clear
    job = jobs.cached_job(cached)
    for visitor in ("one", "two"):
        job.enter(visitor)
    job.abandon("one")
    assert not job.stopped
    assert not job.left
    assert jobs.cached_job(cached) is job
    job.abandon("two")
    assert job.stopped
    assert not job.left  # nobody is told, since nobody looks
    assert jobs.cached_job(cached) is begun[1] is not job
    done.set()
    job.join(10)
    assert isinstance(job.error, IcebearError)
    assert begun[1].outcome() is None


def test_work_that_nobody_waits_for_makes_way_at_its_next_step():
    """For a page that is drawn, and for a job that a visitor waits for; then it goes on, or is stopped."""
    steps, entered, shown, done = [0], threading.Event(), threading.Event(), threading.Event()

    def read(job):
        while not done.is_set():
            steps[0] += 1
            job.step(0, 1)

    def watch(job):
        job.enter("one")
        entered.set()
        shown.wait(20)

    def at_most(count, seconds):
        before, deadline = steps[0], time.monotonic() + seconds
        while steps[0] - before <= count and time.monotonic() < deadline:
            time.sleep(0.01)
        return steps[0] - before <= count

    def wait_until(holds):
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    job = Job("Reading", read)
    assert not at_most(1, 10)
    with background_job.drawing():
        assert at_most(1, 0.3)
        wait_until(lambda: job.doing == background_job.PAUSED)
    assert not at_most(1, 10)
    assert job.doing == "Reading"
    Job("Explaining", watch)
    assert entered.wait(10)
    assert at_most(2, 0.3)
    job.enter("two")  # who waits for this one
    assert not at_most(2, 10)
    job.abandon("two")
    shown.set()
    with pytest.raises(IcebearError):
        job.outcome()


def test_work_that_has_the_model_goes_on(monkeypatch):
    """The page that it would make way for may wait for the model."""
    model = SimpleNamespace(lock=FairLock())
    monkeypatch.setattr(background_job, "loads", {"model": SimpleNamespace(result=model)})

    def read(job):
        with model.lock:
            job.step(1, 2)

    with background_job.drawing():
        job = Job("Reading", read)
        job.join(20)
        assert not job.is_alive()


def test_the_rest_is_said_to_take_as_long_as_the_steps_so_far_without_pauses(monkeypatch):
    now, ends = [0.0], threading.Event()

    def sleep(_):
        now[0] += 1000
        background_job.page_threads.clear()

    monkeypatch.setattr(background_job, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    job = Job("Reading", lambda _: ends.wait(20))
    now[0] = 500
    job.step(10, 100, "a tenth")
    assert job.doing == "a tenth"
    now[0] += 60
    background_job.page_threads.add(1)
    job.step(20, 100, "a fifth")
    assert job.doing == f"a fifth, about {background_job.duration(80 * 60 / 10)} left"
    assert now[0] > 1000
    now[0] += 60
    job.step(30, 100, "more")
    assert job.doing == f"more, about {background_job.duration(70 * 60 / 10)} left"
    ends.set()
    job.join(10)


@pytest.mark.parametrize("seconds", [10, 14, 44, 89, 90, 149, 400, 9000])
def test_times_are_said_within_a_factor_of_one_and_a_half(seconds):
    number, unit = background_job.duration(seconds).split()
    assert 1 / 1.5 < int(number) * {"seconds": 1, "minutes": 60}[unit] / seconds < 1.5


def test_a_page_that_is_drawn_is_waited_for(environment, monkeypatch):
    waits = []
    monkeypatch.setattr(gallery, "show", lambda: waits.append(background_job.anyone_waits()))
    fine(visit())
    assert waits == [True]
    assert not background_job.anyone_waits()


@pytest.mark.parametrize("name", gallery.NAMES)
def test_the_headline_is_one_sentence_of_at_most_25_words_with_its_control(name):
    stages = gallery.example(name).explanation.stages
    assert len(headline(stages).split()) <= 25
    assert headline(stages).count(". ") == 0
    swap = leading_swap(stages)
    assert bool(swap) == bool(headline_control(stages)) == (str(swap and swap.neuron) in headline(stages))


def test_the_headline_names_a_head_only_where_random_ones_change_less():
    stages = gallery.example("geography").explanation.stages
    swap = leading_swap(stages)
    assert swap.neuron == Neuron(23, "head", 4)
    assert f"{swap.after[0]:.1g}" in headline(stages)
    as_random = replace(stages, random_swaps=(RandomSwap(Neuron(1, "head", 1), (0.3, 0.2)),))
    weak = replace(stages, swaps=tuple(replace(swap, after=swap.before) for swap in stages.swaps))
    little = replace(stages, counterfactual=replace(stages.counterfactual, number=stages.prompt.number - 0.5))
    for other in (as_random, weak, little, replace(stages, alone=0.04, random=0.03), replace(stages, alone=None)):
        assert leading_swap(other) is None
        assert "L23.head.4" not in headline(other)
    assert headline(replace(stages, alone=None)) == ""
    assert headline(stages).startswith("Head")
    assert not headline(replace(stages, reached=False)).startswith("Head")
    spread = replace(stages, neurons=stages.neurons * 20)
    assert str(len(spread.heads) + len(spread.neurons)) in headline(spread)


def test_views_begin_with_the_question_of_the_first_example(environment):
    question = gallery.example(gallery.NAMES[0]).fields
    assert fine(visit("steer", section="edits")).get_by_key("prompt").value == question[0]
    page = fine(visit("steer"))
    assert tuple(page.get_by_key(name).value for name in ("prompt", "counterfactual")) == question


def test_a_job_that_waits_for_another_visitor_says_so(environment, smol):
    model = jobs.model()
    with model.lock:
        job = Job("Predicting", lambda job: model.predict("bear"))
        deadline = time.monotonic() + 10
        while jobs.doing(job) == "Predicting" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert jobs.doing(job) != "Predicting"
    job.join(10)
    assert job.result
    holds, ends = threading.Event(), threading.Event()

    def label(_):
        with model.lock:
            holds.set()
            ends.wait(10)

    Job("Labelling", label)
    holds.wait(10)
    job = Job("Predicting", lambda job: model.predict("bear"))
    while "Labelling" not in jobs.doing(job) and time.monotonic() < deadline + 20:
        time.sleep(0.01)
    assert "Labelling" in jobs.doing(job)
    ends.set()
    assert job.outcome()


def test_messages_leave_out_what_only_a_command_line_knows():
    assert markdown.message("It is one; two? Use --to or three.") == markdown.plain("It is one; two?")
    assert markdown.message("a.db does not have L1.ffn.2; run icebear index.") == markdown.plain(
        "a.db does not have L1.ffn.2."
    )
    assert markdown.message("Use --to.") == markdown.plain("Use --to.")


def test_details_and_method(environment, no_stages):
    page = fine(visit(prompt=ICE_BEAR, counterfactual=CAMEL, details_open="true", method_open="true"))
    assert len(page.dataframe[0].value) == 50
    assert len(set(page.dataframe[0].value["token"])) > 1  # ranked at every token
    page.get_by_key("site").set_value("attention heads").run()
    assert "head" in page.dataframe[0].value["neuron"][0]


def test_a_model_that_does_not_load_is_tried_again(first_visit, tmp_path, monkeypatch, no_stages):
    name = str(tmp_path / "none")
    set_up(monkeypatch, model=name)
    page = visit(prompt="Paris is")
    assert name in page.error[0].value.replace("\\", "")
    assert not page.exception
    failed = background_job.loads[json.dumps(served.model_settings())]
    assert jobs.model_job() is not failed


def test_what_was_typed_stays(environment, no_stages):
    page = fine(visit(prompt="The camel lives in the"))
    shown(page, "neurons").get_by_key("text").set_value("desert").run()
    assert shown(page, "circuit").get_by_key("prompt").value == "The camel lives in the"
    assert shown(page, "neurons").get_by_key("text").value == "desert"


def test_one_token_and_an_unknown_family(environment, no_stages):
    fine(visit(prompt="Hi"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(FAMILIES, "llama")
        jobs._load.clear()
        page = fine(visit(prompt="The camel"))
        assert page.info
        assert "heat answer" in text(page)
    jobs._load.clear()


@pytest.fixture
def chosen(environment, no_stages, monkeypatch):
    """The texts that icebear chooses by prompt; others have none. No prompt is chosen for twice in the tests."""
    texts = {}
    monkeypatch.setattr(jobs, "QUICK", 20)  # on any machine it is chosen before the page goes on

    def look(model, prompt):
        return exchanged(prompt, texts[prompt]) if prompt in texts else None

    monkeypatch.setattr(what_if, "exchange_words_if_short", look)
    return texts


def exchanged(prompt, *texts, after=""):
    """Exchanges of the second token of a prompt, all of which are comparisons."""
    word = LikelyWord(1, " Paris", " Paris", 0.5, ())
    likely = LikelyWord(5, " sand", " sand", 0.3, ())
    rows = [Exchange("bear", 1, 1, "camel", (2,), " sand", 0.3, -3.0, text, likely, 5, " sand", 1.0) for text in texts]
    return what_if.WhatIf(prompt, word, after, True, tuple(rows), {})


def typed(page, prompt):
    page.get_by_key("prompt").set_value(prompt).run()
    return fine(page).get_by_key("counterfactual").value


def test_recent_prompts_are_chosen_again(environment, no_stages, chosen):
    page = fine(visit())
    for prompt in ("The wild bear lives in the", "The ice bear ate the"):
        typed(page, prompt)
    assert page.get_by_key("again").options == ["The ice bear ate the", "The wild bear lives in the"]
    page.get_by_key("again").set_value("The wild bear lives in the").run()
    assert fine(page).get_by_key("prompt").value == "The wild bear lives in the"
    assert page.get_by_key("again").options[0] == "The wild bear lives in the"


def test_the_examples_stay_below_an_error(environment):
    page = visit(prompt="The ice bear", counterfactual="The ice bear")
    assert page.error
    assert page.get_by_key("example_0")


def says_chosen(page, counterfactual):
    return markdown.plain(chosen_sentence(counterfactual, boxes.WAYS)) in text(page)


@pytest.mark.release
def test_a_typed_prompt_is_compared_with_what_the_command_line_chooses(environment, smol, monkeypatch):
    monkeypatch.setattr("icebear.app.web.shared.explanations.saved_stages", lambda begun, *arguments: begun)
    page = fine(visit(prompt=ICE_BEAR))
    other = what_if.exchange_words(smol, FRANCE).comparisons[0].text
    typed(page, FRANCE)
    deadline = time.monotonic() + 20
    while not page.get_by_key("counterfactual").value and time.monotonic() < deadline:
        page.run()
    assert fine(page).get_by_key("counterfactual").value == other
    assert says_chosen(page, other)
    assert page.query_params["counterfactual"] == other


@pytest.mark.release
def test_an_emptied_field_stays_empty_until_the_prompt_changes(chosen):
    chosen |= {"The brown bear lives in the": CAMEL, "The black bear lives in the": "The black camel lives in the"}
    page = fine(visit(prompt=ICE_BEAR))
    assert page.get_by_key("counterfactual").value == ""  # of a link
    assert typed(page, "The brown bear lives in the") == CAMEL
    page.get_by_key("counterfactual").set_value("").run()
    assert fine(page.run()).get_by_key("counterfactual").value == ""
    assert not says_chosen(page, CAMEL)
    assert typed(page, "The black bear lives in the") == "The black camel lives in the"


def test_a_counterfactual_that_a_person_typed_is_never_replaced(chosen):
    """Not even if it was typed while icebear looked for one."""
    chosen["The grey bear lives in the"] = CAMEL
    page = fine(visit(prompt=ICE_BEAR))
    typed(page, "The grey bear lives in the")
    page.get_by_key("counterfactual").set_value("The grey camel lives in the").run()
    assert not says_chosen(page, CAMEL)
    page.session_state["typed"] = "The grey bear lives in the"
    assert fine(page.run()).get_by_key("counterfactual").value == "The grey camel lives in the"
    assert fine(shown(page, "why")).get_by_key("counterfactual").value == "The grey camel lives in the"


def test_without_a_good_counterfactual_the_field_stays_empty(chosen):
    page = fine(visit(prompt=ICE_BEAR))
    assert not says_chosen(page, None)
    assert typed(page, "The small bear lives in the") == ""
    assert says_chosen(page, None)
    assert "heat answer" in text(page)


def test_the_next_comparisons_stand_beside_the_chosen_one(chosen, monkeypatch):
    prompt, others = "The tall bear lives in the", ["The tall camel sat in the", "The tall lion sat in the"]
    looked = exchanged(prompt, CAMEL, *others, "The tall wolf sat in the")
    monkeypatch.setattr(what_if, "exchange_words_if_short", lambda *arguments: looked)
    page = fine(visit(prompt=ICE_BEAR))
    assert typed(page, prompt) == CAMEL
    assert {button.key for button in page.button if str(button.key).startswith("other_")} == {"other_0", "other_1"}
    page.get_by_key("other_1").click().run()
    assert fine(page).get_by_key("counterfactual").value == others[1]
    assert not says_chosen(page, others[1])
    page.get_by_key("other_0").click().run()
    assert fine(page).get_by_key("counterfactual").value == CAMEL


def test_a_click_on_a_word_offers_its_exchanges_and_ones_own(environment, smol, no_stages, monkeypatch):
    """Choosing one fills both prompts, with the words that the explained one comes after."""
    monkeypatch.undo()
    monkeypatch.setattr(jobs, "QUICK", 60)
    prompt = "The chef added salt to the"
    looked = what_if.exchange_words(smol, prompt)
    page = fine(visit(prompt=prompt))
    assert {row.text for row in looked.shown} == {looked_at(looked, button).text for button in offers(page, "shown")}
    page.session_state["word"] = (prompt, "1-2")
    of_chef = [row for row in looked.exchanges if row.position == 1]
    assert [looked_at(looked, button) for button in offers(fine(page.run()), "word")] == of_chef
    page.get_by_key("own_word").set_value("baker").run()
    offers(fine(page), "own")[0].click().run()
    baker = next(row for row in of_chef if row.instead == "baker")
    assert fine(page).get_by_key("counterfactual").value == baker.text
    assert page.get_by_key("contrast").value == baker.likely.token_text
    assert page.session_state["word"] is None


def test_what_was_added_to_the_prompt_can_be_taken_back(chosen, monkeypatch):
    prompt = "The keys of the bear"
    looked = exchanged(prompt, after=" were")
    monkeypatch.setattr(what_if, "exchange_words_if_short", lambda *arguments: looked)
    page = fine(visit(prompt=ICE_BEAR))
    page.get_by_key("prompt").set_value(prompt).run()
    assert fine(page).get_by_key("prompt").value == f"{prompt} were"
    page.get_by_key("next_token").click().run()
    assert fine(page).get_by_key("prompt").value == prompt
    assert "next_token" not in [button.key for button in page.button]


@pytest.mark.release
def test_a_word_of_other_length_is_replaced_by_the_nearest_that_fits(smol):
    prompt = "She speaks fluent French because she was born in"
    looked = what_if.exchange_words(smol, prompt)
    given = what_if.own_exchange(smol, looked, (3, 4), "Spanish")
    assert (given.instead, given.length, len(given.tokens)) == ("Spanish", 1, 1)
    logits = [smol.next_logits(text) for text in (prompt, given.text)]
    before, after = (what_if.log_odds(x.float(), looked.explained.token) for x in logits)
    assert given.change == pytest.approx(after - before, abs=1e-3)
    long = "Luxembourgish"
    assert len(smol.tokens_of(f" {long}")) > 1
    nearest = what_if.own_exchange(smol, looked, (3, 4), long)
    assert len(nearest.tokens) == 1
    assert nearest.instead not in (long, "French")


def offers(page, key):
    return [button for button in page.button if str(button.key).startswith(f"{key}_")]


def looked_at(looked, button):
    """The exchange that a button offers."""
    word, _, rest = button.label.partition(" → ")
    return next(row for row in looked.exchanges if row.word == word and row.instead == rest.partition(":")[0])


FIELDS = {"counterfactual": CAMEL, "target": " Arctic", "contrast": "desert", "switch": True, "word": (ICE_BEAR, "1-2")}


@pytest.mark.parametrize("view", ["why", "circuit", "steer"])
def test_nothing_outlives_its_prompt(environment, no_stages, view):
    """But edits that are of no other prompt, which are tried on several."""
    edits = f'L1.ffn.3+5\nL1.head.0<-"{CAMEL}"@last'
    page = fine(visit(view, prompt=ICE_BEAR))
    for name, value in (FIELDS | {"edits": edits}).items():
        page.session_state[name] = value
    page.get_by_key("prompt").set_value("The Roman Empire fell because of").run()
    assert not [name for name in FIELDS if page.session_state.get(name)]
    assert page.session_state["edits"] == "L1.ffn.3+5"


def test_a_conversation_gets_no_counterfactual(chosen):
    chat = json.dumps([{"role": "user", "content": "Where do bears live?"}])
    chosen[chat] = CAMEL
    assert typed(fine(visit(prompt=ICE_BEAR)), chat) == ""


def test_stages_are_forgotten_with_their_relevance(model):
    relevance, staged = attribute(model, "ice bear", contrast="z", counterfactual="big cats"), ServerState().staged
    staged[relevance] = saved_stages(saved_tokens(relevance, "ice bear", "big cats"), model, relevance)
    assert staged[relevance].stages
    forgotten = weakref.ref(relevance)
    del relevance
    gc.collect()
    assert forgotten() is None
    assert not staged


def test_explanations_are_kept_in_so_many_bytes(model):
    """Long prompts push the others out, however few they are; the last one stays in any case."""

    def alive(*prompts):
        result = [
            weakref.ref(kept_for_all.relevance((prompt,), lambda: attribute(model, prompt))) for prompt in prompts
        ]
        gc.collect()
        return [selected() is not None for selected in result]

    size = attribute(model, "bear").neurons.nbytes
    kept_for_all = ServerState(2 * size)
    assert alive("bear", "lion", "wolf", "hare") == [False, False, True, True]
    assert alive("wolf", "a polar bear") == [False, True]


def test_the_second_visitor_does_not_load_the_model_again(environment, no_stages, monkeypatch):
    loads = []
    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *args, **options: loads.append(1) or load(*args, **options))
    jobs._load.clear()
    fine(visit(prompt="Hi"))
    fine(visit("chat"))
    assert len(loads) == 1


def test_pictures_are_files_of_their_own():
    """SVG that needs no page, on white, and PNG; a chart as well."""
    stages = gallery.example("geography").explanation.stages
    chart = alt.Chart(pandas.DataFrame({"a": [1, 2], "b": [3, 4]})).mark_bar().encode(x="a:O", y="b:Q")
    for drawn in (on_paper(stages), pictures.converter().vegalite_to_svg(chart.to_json())):
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
        assert "currentColor" not in drawn
        assert pictures.converter().svg_to_png(drawn).startswith(b"\x89PNG")
    assert "Paris" in on_paper(stages)


def answer(address, host, upgrade):
    """The status and headers of a request whose browser was sent to `host`, or of a WebSocket from its page."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=20)
    keys = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw=="}
    socket = {"Connection": "Upgrade", "Upgrade": "websocket", "Origin": f"http://{host}", **keys}
    connection.request(
        "GET", "/_stcore/stream" if upgrade else "/", headers={"Host": host} | (socket if upgrade else {})
    )
    response = connection.getresponse()
    connection.close()
    return response.status, response.headers


def test_the_app_answers_to_no_other_host_and_in_no_frame(tmp_path):
    with serving(tmp_path / "none.db") as address:
        for host in ("localhost:8501", "127.0.0.1", "[::1]:8501", "LOCALHOST"):
            status, headers = answer(address, host, upgrade=False)
            assert (status, headers["X-Frame-Options"]) == (200, "DENY")
            assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
            assert answer(address, host, upgrade=True)[0] == 101
        for host in ("evil.com:8501", "localhost.evil.com", "127.0.0.1.evil.com", "evil.com:localhost", "", "[::2]"):
            assert answer(address, host, upgrade=False)[0] == 403
            assert answer(address, host, upgrade=True)[0] in (400, 403)


@pytest.mark.parametrize("sent", few_of([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_the_server_ends_with_the_command(tmp_path, sent):
    """A signal to the process that was started is enough, also from a supervisor that knows no other."""
    with started(tmp_path / "none.db") as (process, address):
        process.send_signal(sent)
        process.wait(20)
        with pytest.raises(URLError):
            for _ in range(20):
                urlopen(f"{address}/_stcore/health", timeout=2).read()
                time.sleep(0.5)
