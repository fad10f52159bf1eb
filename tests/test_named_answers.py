"""Answers of several tokens, a missing space, a prompt that ends in one, misspelt arguments, and what `print` shows."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from few import few
from rich.console import Console

from icebear import Chat, ablation, attribute, circuit, explain, flip, random_edit_control
from icebear.app.cli.console import SafeConsole
from icebear.app.cli.main import main
from icebear.app.cli.tables.explanations import explanation_screen
from icebear.app.cli.tables.grid import heatmap
from icebear.app.web.shared import markdown
from icebear.claims.kinds.predictions import RelevanceClaim
from icebear.concepts.attribution.cases import read_cases
from icebear.concepts.attribution.request import at_first_difference
from icebear.errors import InputError, UnknownName
from icebear.explanation.explanation import Explanation
from icebear.explanation.sentences import hardly_differs
from icebear.models.objective import likelier_form
from icebear.models.text.prompts import Prompt
from icebear.notes import say
from icebear.render import PART
from icebear.steering.provenance import FlipRecord

PROMPT, OTHER = "I live in", "I work in"
YORK, JERSEY = " New York City", " New Jersey"


ICE, WILD_CAMEL = "The ice bear lives in the", "The wild camel lives in the"


@pytest.fixture(scope="module")
def of_the_ice_bear(smol):
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        return explain(smol, ICE, counterfactual=WILD_CAMEL)


@pytest.fixture(autouse=True)
def _forgetful():
    say.cache_clear()


def test_the_first_token_in_which_two_answers_differ_is_explained(smol, caplog):
    """As if the user had written what they share into both prompts."""
    named = attribute(smol, PROMPT, YORK, JERSEY, counterfactual=OTHER, sites=())
    written = attribute(smol, f"{PROMPT} New", " York", " Jersey", counterfactual=f"{OTHER} New", sites=())
    assert named.prompt.ids == written.prompt.ids
    assert (named.target, named.contrast) == (written.target, written.contrast)
    assert named.tokens.equal(written.tokens)
    assert [word in caplog.text for word in ("' New'", "' York'", "' Jersey'")] == [True] * 3


def test_an_answer_alone_is_explained_at_its_first_token(smol, caplog):
    assert attribute(smol, PROMPT, YORK, sites=()).target.text == " New"
    assert "' New'" in caplog.text
    assert attribute(smol, PROMPT, " London", JERSEY, sites=()).contrast.text == " New"


def test_answers_of_single_tokens_stay_as_they_are(smol, caplog):
    for target, contrast in ((" Paris", " Rome"), (None, " Rome"), (7, None), (None, None)):
        assert at_first_difference(smol, PROMPT, target, contrast, OTHER) == (PROMPT, target, contrast, OTHER)
    assert not caplog.text


@pytest.mark.parametrize("answers", [(YORK, " New"), (" New", YORK), (" New York", YORK)])
def test_an_answer_that_begins_another_is_refused(smol, answers):
    with pytest.raises(InputError, match="begins with the other"):
        attribute(smol, PROMPT, *answers, sites=())


@pytest.mark.parametrize(
    ("prompt", "counterfactual"),
    [
        (PROMPT, [OTHER, "We live in"]),
        (Chat([{"role": "user", "content": PROMPT}]), Chat([{"role": "user", "content": OTHER}])),
        (Prompt(ids=(57, 2330, 281)), None),
    ],
    ids=["several", "chat", "ids"],
)
def test_what_two_answers_share_is_appended_to_prompts_of_every_kind(smol, prompt, counterfactual):
    longer, target, contrast, others = at_first_difference(smol, prompt, YORK, JERSEY, counterfactual)
    new = smol.answer_id(" New")
    assert smol.ids(longer) == [*smol.ids(prompt), new]
    assert (smol.text(target), smol.text(contrast)) == (" York", " Jersey")
    for before, after in zip(*((x if isinstance(x, list) else [x]) for x in (counterfactual, others)), strict=True):
        assert after is None or smol.ids(after) == [*smol.ids(before), new]


def test_an_explanation_and_a_circuit_read_the_same_prompts(model, few_contexts):
    names = {"target": "xy", "contrast": "xz", "counterfactual": "the wild camel"}
    why = explain(model, "the cold bears", **names)
    assert why.relevance.prompt.text.endswith("bearsx")
    assert why.stages.prompt.tokens[-1] == "x"
    graph = circuit(model, "the cold bears", **names, nodes=3)
    assert graph.relevance.prompt.ids == why.relevance.prompt.ids


FRANCE, JAPAN = "The capital of France is", "The capital of Japan is"


def likelier(model, prompt, word):
    """The form of a word with the larger product of the probabilities of its tokens, one pass a token."""

    def probability(text):
        ids, product = list(model.ids(prompt)), 1.0
        for token in model.continuation(text, prompt):
            product *= model.next_logits(ids).softmax(-1)[token].item()
            ids.append(token)
        return product

    return max(word, f" {word}", key=probability)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [(FRANCE, "Paris"), (FRANCE, "Tokyo"), (FRANCE, "Reykjavik"), ("The ice b", "ears"), ("2,", "3")],
)
def test_a_word_without_its_space_is_read_in_its_likelier_form(smol, caplog, prompt, word):
    form = likelier_form(smol, prompt, word)
    assert form == likelier(smol, prompt, word)
    assert (repr(f" {word}") in caplog.text) is (form != word)


def test_ids_and_texts_with_a_space_are_read_as_they_are(smol, caplog):
    for answer in (smol.answer_id("Paris"), " Paris", "  Paris", None, (7, 8), "", " "):
        assert likelier_form(smol, FRANCE, answer) == answer
    assert not caplog.text


@pytest.mark.release
def test_all_that_take_an_answer_read_the_word_with_its_space(smol, few_contexts):
    paris, rome = (smol.answer_id(word, after=FRANCE) for word in (" Paris", " Rome"))
    one = attribute(smol, FRANCE, "Paris", "Rome", counterfactual=JAPAN, sites=())
    assert (one.target.id, one.contrast.id) == (paris, rome)
    two = attribute(smol, [FRANCE, JAPAN], "Paris", sites=())
    assert [row.target.id for row in two] == [paris, paris]
    assert attribute(smol, FRANCE, target_text="Paris", contrast="Rome", sites=()).prompt.strings[-1] == " is"
    assert attribute(smol, f"{FRANCE} nice", "Paris", position=-2, sites=()).target.id == paris
    plain, spaced = (random_edit_control(smol, FRANCE, ["L29.ffn.860*0"], word) for word in ("Paris", " Paris"))
    assert plain == spaced
    assert FlipRecord.of(flip(smol, FRANCE, "Tokyo", JAPAN)).text == " Tokyo"


def test_an_answer_that_begins_with_a_space_token_is_explained_at_what_can_be_read(smol, caplog):
    space, four = smol.continuation(" 4", "2 + 2 =")
    one = attribute(smol, "2 + 2 =", "4", sites=())
    assert (one.target.id, list(one.prompt.ids)) == (four, [*smol.ids("2 + 2 ="), space])
    two = attribute(smol, "2 + 2 =", contrast=" 4", target=None, sites=())
    assert (two.contrast.id, two.prompt.ids) == (four, one.prompt.ids)
    assert attribute(smol, "2 + 2 =", " ", sites=()).target.text == " "


@pytest.mark.parametrize(("target", "shown"), [(" ", "'␣'"), ("  ", "'␣␣'"), ("\ufffd", PART), (" Rome", "' Rome'")])
def test_an_answer_that_cannot_be_read_is_named(model, target, shown):
    relevance = attribute(model, "abc", 3, 4, sites=())
    named = replace(relevance.prediction, target_text=target, target=replace(relevance.target, text=target))
    why = Explanation.of(model, replace(relevance, prediction=named))
    console = SafeConsole(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explanation_screen(why))
    screen = console.export_text()
    assert shown in screen
    assert "\ufffd" not in screen
    assert markdown.word(target) == markdown.plain(shown.strip("' "))


def test_a_claim_reads_the_token_that_is_written(smol):
    for target in ("Paris", " Paris", smol.answer_id("Paris")):
        explained = RelevanceClaim(prompt=FRANCE, target=target, token=0, text="The").relevance(smol)
        assert explained.target.id == smol.answer_id(target, after=FRANCE)


@pytest.mark.parametrize("end", ["", " "])
def test_a_prompt_that_ends_in_a_space_is_said_to(smol, caplog, end):
    attribute(smol, f"The capital of France is{end}", sites=())
    assert ("' Paris' (0.77)" in caplog.text) is bool(end)


@pytest.mark.parametrize("wrong", ["countrefactual", "methd", "sitse", "Strict"])
def test_a_misspelt_argument_names_the_nearest(model, wrong):
    right = {"countrefactual": "counterfactual", "methd": "method", "sitse": "sites", "Strict": "strict"}[wrong]
    with pytest.raises(UnknownName, match=f"Did you mean {right!r}"):
        attribute(model, "abc", **{wrong: None})


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "abc", "counterfactul": "cbc"}',
        '{"prompt": "abc", "prompt": "cbc"}',
        '{"prompt": "abc", "__class__": 1}',
        '{"target": "a"}',
    ],
)
def test_a_misspelt_key_of_a_file_is_refused(tmp_path, line):
    (tmp_path / "cases.jsonl").write_text(f'{{"prompt": "abc", "target": null}}\n{line}\n')
    with pytest.raises(InputError, match=r"[Ll]ine 2"):
        read_cases(tmp_path / "cases.jsonl")


def test_print_shows_the_screen(of_the_ice_bear):
    why = of_the_ice_bear
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explanation_screen(why))
    shown = [line.rstrip(" …") for line in console.export_text().splitlines()]
    assert all(own.startswith(line) for line, own in zip(shown, str(why).splitlines(), strict=True))
    assert max(map(len, str(why).splitlines())) <= 100
    assert why._repr_html_().startswith("<iframe srcdoc=")
    assert "<script" not in why._repr_html_()


@pytest.mark.release
def test_a_small_difference_has_no_shares(smol, few_contexts, of_the_ice_bear):
    """Two plus two equals: single nodes recover several times a difference of half a logit."""
    pair = "Two plus two equals", "Two plus three equals"
    why = explain(smol, pair[0], target=" four", contrast=" five", counterfactual=pair[1])
    large = of_the_ice_bear
    ablations = [ablation(smol, explanation.relevance, 3) for explanation in (why, large)]
    assert [bool(hardly_differs(row)) for row in ablations] == [True, False]
    assert ("%" in str(why.stages), "%" in str(large.stages)) == (False, True)


def test_heads_are_explained(tiny_folder):
    words = ["explain", "abc", "--counterfactual", "cbc", "--contrast", "b", "--site", "head"]
    result = CliRunner().invoke(main, [*words, "--model", tiny_folder, "--json"])
    assert result.exit_code == 0, result.output
    assert {row["neuron"].split(".")[1] for row in json.loads(result.stdout)["ranking"]} == {"head"}
    assert CliRunner().invoke(main, [*words[:-1], "nonsense", "--model", tiny_folder]).exit_code == 1


def test_the_first_bytes_of_a_character_take_no_room_in_the_prompt():
    assert heatmap(["", "東", "", "京"], [0.1, 0.2, 0.3, 0.4]).plain == "東京"
