"""The real app, the real model, a small real index, in real Chromium."""

import json
from importlib.resources import files
from urllib.parse import quote

import pytest
from serving import open_view, serving, settled, started

from icebear import Neuron, Recipe, annotate, build_index, load_model, open_store, read_corpus

TALK = [
    {"role": "user", "content": "What is the capital of France? " + "wide" * 30},
    {"role": "assistant", "content": "The capital of France is Paris.\n\n" + "=" * 200 + "\nsupercalifragilistic " * 3},
]
VIEWS = (
    "?switch=true&details_open=true&method_open=true",
    f"chat?turn=1&span=5-6&rather=London&chat={quote(json.dumps(TALK))}",
    "circuit?nodes=20&prompt=The+ice+bear+lives+in+the&counterfactual=The+wild+camel+lives+in+the",
    "neurons?neuron=L29.ffn.860&polarity=-",
    "neurons",
    "atlas",
    "steer",
    "steer?section=concepts",
    "steer?section=edits&edits=L29.ffn.860%3D-20%0AL24.ffn.559*0@last",
)
# What is wider than its box and hidden there; tables scroll by themselves.
CUT_OFF = """() => [...document.querySelectorAll('[data-testid=stMain] :is(p, button, h4, label, .card, .heat, .row)')]
    .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != 'inline')
    .filter(e => !e.closest('[data-testid=stDataFrame]')).map(e => e.outerHTML.slice(0, 200))"""


AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
WCAG = """axe.run(document, {
    runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
    rules: {"heading-order": {enabled: true}, "page-has-heading-one": {enabled: true}},
}).then(({violations}) => violations.map(({id, nodes}) => [id, ...nodes.map(node => node.html.slice(0, 200))]))"""


def view(page, name):
    page.get_by_role("link", name=name, exact=True).click()
    return settled(page)


def continuations(page):
    """Both texts of a flip, as soon as they are there."""
    sides = page.locator("div[dir=auto]:has(mark)")
    sides.nth(1).wait_for(timeout=180_000)
    return sides.all_inner_texts()


def test_an_example_its_other_answer_and_a_card(chromium, address):
    """From files and the index, without the model."""
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 800}), address)
    page.locator("svg.stages").wait_for()
    page.get_by_text("Make it say").click()
    settled(page).get_by_text("draws, seed 0").first.wait_for()
    view(page, "Neurons")
    page.wait_for_url("**/neurons*")
    open_view(page, address, "neurons?neuron=L29.ffn.860")
    page.get_by_role("heading", name="L29.ffn.860", exact=True).wait_for()
    page.close()


@pytest.mark.release
def test_from_a_prompt_to_another_answer(chromium, address):
    """In a click, beside what icebear chose; stopped, and found again; the link shows it in another browser."""
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 800}), address)
    page.locator("svg.stages").wait_for()
    page.get_by_label("Prompt", exact=True).fill("The capital of Japan is")
    page.keyboard.press("Enter")
    page.get_by_text("chosen by icebear").wait_for(timeout=120_000)
    settled(page).get_by_text("Make it say").click(timeout=120_000)
    page.get_by_role("button", name="Stop").click()
    page.get_by_test_id("stAlert").wait_for(timeout=30_000)
    settled(page).get_by_text("Make it say").click()
    settled(page).get_by_text("Make it say").click()
    page.get_by_text("draws, seed 0").first.wait_for(timeout=180_000)
    other = open_view(chromium.new_context().new_page(), address, page.url.removeprefix(f"{address}/"))
    assert continuations(other) == continuations(page)
    other.close()
    page.locator(".st-key-flip_neurons button").first.click()
    page.wait_for_url("**/neurons?*")
    view(settled(page), "Why this word?")
    assert page.get_by_label("Prompt", exact=True).input_value() == "The capital of Japan is"
    page.get_by_role("button", name="Edit these").click()
    assert settled(page).get_by_label("Prompt", exact=True).input_value() == "The capital of Japan is"
    assert page.get_by_role("textbox", name="Edits, one a line").input_value().startswith("L")
    page.close()


@pytest.mark.release
def test_what_a_person_does_is_one_step_and_the_question_goes_along(chromium, address):
    """An example, its parts and its words from view to view; Back returns in as many steps, and keeps everything."""
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 800}), address)
    page.locator("svg.stages").wait_for()
    steps = page.evaluate("history.length")

    def done(act, *arguments, **options):
        nonlocal steps
        act(*arguments, **options)
        steps += 1
        page.wait_for_function(f"history.length >= {steps}")
        settled(page)
        assert page.evaluate("history.length") == steps
        return page

    def question():
        fields = ("Prompt", "Compared with (counterfactual prompt)", "Rather than")
        return [page.get_by_label(name, exact=True).input_value() for name in fields]

    scroll = "document.querySelector('[data-testid=stMain]').scrollTop"
    shown = page.get_by_role("button", name="Show: Grammar")
    shown.scroll_into_view_if_needed()
    assert page.evaluate(scroll) > 0
    done(shown.click)
    page.wait_for_function(f"{scroll} == 0")
    page.get_by_text("The verb agrees with the subject").first.wait_for()
    example = question()
    words = page.get_by_role("combobox", name="Rather than")
    words.fill("was")
    done(words.press, "Enter")
    page.wait_for_function(
        "[...document.querySelectorAll('textarea, input')].some(e => e.value.startsWith('The boy in'))"
    )
    chosen = question()
    assert chosen == [*example[:2], "was"]
    for name in ("How is it computed?", "Concepts & steering", "Neurons", "Chat", "Why this word?"):
        done(page.get_by_role("link", name=name, exact=True).click)
        if name.startswith(("How", "Why")):
            assert question() == chosen
    for path in ("chat", "neurons", "steer", "circuit", ""):
        page.go_back()
        page.wait_for_function(f"location.pathname == '/{path}'")
        settled(page)
        if path in ("circuit", ""):
            assert question() == chosen
    page.go_back()
    settled(page)
    assert question() == example
    page.get_by_role("button", name="Show: A chat").click()
    settled(page).get_by_role("heading", name="Why Arctic?").wait_for(timeout=60_000)
    page.close()


@pytest.mark.release
def test_a_first_visit_with_an_empty_cache_and_no_network(chromium, tmp_path):
    """The example is there; what needs the model says what is wrong; nothing is built unasked."""
    with started(tmp_path / "none.db", ICEBEAR_CACHE=str(tmp_path / "cache"), PIP_INDEX_URL="http://localhost:9") as (
        _,
        address,
    ):
        page = open_view(chromium.new_page(), address)
        page.locator("svg.stages").wait_for()
        page.get_by_text("Make it say").click()
        settled(page).get_by_text("draws, seed 0").first.wait_for()
        page.get_by_label("Prompt", exact=True).fill("The ice bear lives in the")
        page.keyboard.press("Enter")
        page.get_by_test_id("stAlert").wait_for(timeout=120_000)
        view(page, "Neurons").get_by_role("button", name="Build").first.wait_for()
        page.close()
    assert not list(tmp_path.rglob("*.db"))


@pytest.mark.release
def test_a_heatmap_has_keys_and_progress_is_said(chromium, address):
    """The first token is a stop of the Tab key, arrows go on from there; a live region follows the progress."""
    page = open_view(chromium.new_page(), address)
    tokens = page.locator(".answer .tokens span")
    assert tokens.first.get_attribute("tabindex") == "0"
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    focus = """(() => {
        let focused = document.activeElement;
        while (focused.shadowRoot) focused = focused.shadowRoot.activeElement;
        return focused.title;
    })()"""
    assert page.evaluate(focus) == tokens.nth(1).get_attribute("title")
    page.evaluate("""() => {
        const bar = Object.assign(document.createElement("div"), {textContent: "Reading"});
        document.body.append(bar);
        bar.dataset.testid = "stProgress";
    }""")
    page.wait_for_function("document.querySelector('[role=status]').textContent == 'Reading'")
    page.evaluate("document.querySelectorAll('[data-testid=stProgress]').forEach(bar => bar.remove())")
    page.wait_for_function("document.querySelector('[role=status]').textContent == 'Done.'")
    page.close()


@pytest.mark.release
def test_a_path_below_a_view_shows_the_view_and_a_word_of_pieces_its_piece(chromium, address):
    page = open_view(chromium.new_page(), address, "neurons/L29/ffn")
    assert page.url.removeprefix(address) == "/neurons"
    page.get_by_role("textbox", name="Words", exact=True).wait_for()
    open_view(page, address, "?target=New+York+City")
    page.get_by_text("the first token is explained: New.").wait_for(timeout=120_000)
    open_view(page, address, "foo/bar").locator("svg.stages").wait_for()
    page.close()


@pytest.mark.release
def test_two_tabs_at_once(chromium, address):
    pages = [chromium.new_page(), chromium.new_page()]
    for page, animal in zip(pages, ("lion", "shark"), strict=True):
        page.goto(f"{address}/?prompt=The+{animal}+lives+in+the&counterfactual=The+camel+lives+in+the")
    for page, animal in zip(pages, ("lion", "shark"), strict=True):
        page.locator("svg.stages").wait_for(timeout=120_000)
        assert animal in page.locator(".answer").first.inner_text()
        page.close()


@pytest.mark.release
def test_the_menu_of_a_narrow_page_has_a_name(chromium, address):
    page = open_view(chromium.new_page(viewport={"width": 400, "height": 800}), address)
    menu = page.get_by_role("button", name="Menu", exact=True)
    menu.wait_for()
    shown = "button => getComputedStyle(button, '::after').content"
    assert menu.evaluate(shown) == '"Menu"'
    menu.click()
    page.get_by_role("link", name="Neurons").first.wait_for()
    page.close()


@pytest.mark.release
def test_nothing_is_cut_off_and_nothing_scrolls_sideways(chromium, address):
    """On a phone by day, and in a window that is made large at night; each view passes axe's tests of WCAG AA and has a
    title, and none asks another host."""
    page, requests = chromium.new_page(), []
    page.on("request", lambda request: requests.append(request.url))
    for query in VIEWS:
        for width, scheme in ((390, "light"), (1280, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            if scheme == "light":
                open_view(page, address, query)
            color = "getComputedStyle(document.querySelector('[data-testid=stApp]')).colorScheme"
            page.wait_for_function(f"{color} == '{scheme}'")
            assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= width, query
            assert page.evaluate("document.documentElement.scrollWidth") <= width, query
            assert page.evaluate(CUT_OFF) == [], query
            assert page.locator("[data-testid=stAlert], [data-testid=stException]").count() == 0, query
            page.evaluate(AXE)
            assert page.evaluate(WCAG) == [], (query, scheme)
            assert page.title() == f"{page.locator('h1').inner_text()} - icebear"
            dark = page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
            assert (sum(map(int, dark[4:-1].split(","))) < 300) == (scheme == "dark"), dark
    assert [url for url in requests if not url.startswith((address, "blob:", "data:"))] == []
    assert requests
    page.close()


NASTY = (
    "<script>window.hacked=1;alert(1)</script> bears",
    '<img src=x onerror="window.hacked=1;alert(2)"> ice',
    "`code` **bold** ![p](http://localhost/x.png) [l](javascript:alert(3)) $x$ :red[r]",
    "\u202eright to left \u05d0\u05d1 \U0001f43b 'single' \"double\" </div></style>",
)


ASKING = ("neurons?neuron", "circuit?prompt")
"""The first is no neuron; the second has no counterfactual."""
# A card has a script of ours, which scrolls to its top.
FOREIGN = """() => [...document.querySelectorAll('[data-testid=stMain] :is(img, script)')]
    .filter(e => !e.textContent.startsWith("document.querySelector('[data-testid=stMain]').scrollTo(0, 0)")).length"""


@pytest.mark.release
def test_text_stays_text_everywhere(chromium, tiny_folder, tmp_path):
    model = load_model(tiny_folder)
    (tmp_path / "n.jsonl").write_text("\n".join(json.dumps({"text": t, "title": NASTY[1]}) for t in NASTY))
    neuron = Neuron(1, "ffn", 3)
    with open_store(tmp_path / "n.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "n.jsonl")), store, k=4)
        store.labels.set_manual(neuron, " ".join(NASTY))
        annotate(model, store, [neuron], 4)
    recipe = Recipe.for_model(model, " ".join(NASTY), [])
    recipe.save(tmp_path / "nasty.json")
    dialogs = []
    with serving(tmp_path / "n.db", "--model", tiny_folder, few=True) as address:
        page = chromium.new_page()
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))

        def harmless():
            assert not dialogs
            assert not page.evaluate("window.hacked")
            assert page.evaluate(FOREIGN) == 0
            assert page.locator("[data-testid=stMain] a[href^=javascript], [data-testid=stMain] .katex").count() == 0

        for polarity in "+-":
            open_view(page, address, f"neurons?neuron={neuron}&polarity={quote(polarity)}")
            harmless()
        shown = page.locator("[data-testid=stMain]").inner_text()
        assert "<script>window.hacked=1;alert(1)</script>" in shown
        assert "**bold** ![p](http://localhost/x.png)" in shown
        text = quote(" ".join(NASTY))
        open_view(page, address, f"?prompt={text}&counterfactual={text.replace('bears', 'bearz')}&contrast=D")
        page.locator(".place p").first.wait_for(timeout=60_000)
        harmless()
        for query in ("?prompt", "circuit?prompt", "steer?prompt", "neurons?text", "neurons?neuron"):
            open_view(page, address, f"{query}={text}")
            assert page.locator("[data-testid=stAlert]").count() == (query in ASKING), query
            harmless()
        open_view(page, address, "steer?section=edits")
        page.get_by_text("Recipes").click()
        page.locator("input[type=file]").set_input_files(tmp_path / "nasty.json")
        settled(page)
        page.get_by_role("button", name="Use").wait_for()
        harmless()
        assert "<script>" in page.get_by_role("button", name="Use").inner_text()
