"""Claims under conditions: each cell is what a plain check of that model gives."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA

from icebear import Neuron, check, load_model
from icebear.app.cli.main import main
from icebear.claims.checked import CheckedClaims
from icebear.claims.checked_claim import CheckedClaim, ConditionRun, Repeats
from icebear.claims.claim import Claim, Provenance
from icebear.claims.claims_files import append_claims, read_claims_file, write_claims
from icebear.claims.conditions import CONDITIONS, TEMPLATES, Condition, conditions_of
from icebear.claims.kind import Measured
from icebear.claims.kinds.meanings import MonitorClaim
from icebear.claims.kinds.predictions import (
    AnswerClaim,
    ClaimedPair,
    RelevanceClaim,
    SwapClaim,
    TaskClaim,
    most_relevant,
    subject,
)
from icebear.claims.rephrasing import rephrased, same_token, texts_of, versions_of
from icebear.concepts.attribution.attribute import attribute
from icebear.errors import InputError, UnknownName
from icebear.steering.concept.detectors import ConceptNeuron
from icebear.steering.monitor.text_values import interval, text_values

PROMPT, OTHER = " Paris is", " Rome are"


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load_model(tiny_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def other_folder(tiny_folder, tmp_path_factory):
    """The tiny model with one layer less."""
    model, folder = load_model(tiny_folder, device="cpu"), tmp_path_factory.mktemp("shorter")
    del model.net.model.layers[-1]
    model.net.config.num_hidden_layers -= 1
    model.net.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def claims(tiny, other_folder):
    """An answer that the shorter model gives less often, and the relevance of a neuron."""
    relevance = attribute(tiny, PROMPT, counterfactual=OTHER, sites=("ffn",))
    (node,) = most_relevant(relevance, "ffn", 1)
    shorter, words = load_model(other_folder, device="cpu"), (" Paris", " Rome", " A", " B", " C", " is")
    value, lower = (
        {word: AnswerClaim(PROMPT, word).measured(model).value for word in words} for model in (tiny, shorter)
    )
    answer = AnswerClaim(PROMPT, max(words, key=lambda word: value[word] / lower[word]))
    value = value[answer.answer]
    holds = Claim(answer, 0.95 * value, 1.0, value=value, provenance=Provenance.of(tiny, 0))
    return [holds, Claim.of(tiny, RelevanceClaim(**subject(tiny, relevance), node=node))]


def numbers(rows):
    return [row.measured and row.measured.value for row in rows]


# --- conditions ---


def test_a_condition_is_its_text_and_once_in_a_list():
    for text in (
        "dtype=bfloat16",
        "bits=4",
        "attention=eager",
        "model=a/b=c",
        "threads=1",
        "seed=0",
        "url=http://a/v1",
    ):
        assert str(Condition.parse(text)) == text
    assert list(map(str, conditions_of(["seed=1", " bits = 8", Condition("seed", "1")]))) == ["seed=1", "bits=8"]
    assert Condition("model", "folder/of/it").label == "model=it"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "bfloat16",
            "dtype=",
            "dtype=int8",
            "bits=2",
            "attention=fast",
            "threads=0",
            "threads=-1",
            "seed=x",
            "seed=²",
        ),
        *("model=", "model= ", "url=localhost:8000", "url=file:///etc/passwd", "dtpye=float32", "seed=" + "9" * 30, 5),
    ],
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(InputError):
        Condition.parse(text)


@pytest.mark.parametrize(("host", "known"), [("localhost:8000", True), ("127.0.0.1", True), ("elsewhere.org", False)])
def test_a_file_of_claims_names_no_server_elsewhere(tmp_path, host, known):
    """Who wrote it must not be sent the key of who checks it."""
    file = tmp_path / "claims.json"
    file.write_text(json.dumps({"icebear_claims": 1, "claims": [], "under": [f"url=http://{host}/v1"]}))
    with nullcontext() if known else pytest.raises(InputError):
        assert [str(each) for each in read_claims_file(file)[1]] == [f"url=http://{host}/v1"]


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UnknownName, match="'dtype'"):
        Condition.parse("dtpye=float32")
    assert "dtype" in CONDITIONS


# --- check ---


def test_each_cell_is_what_a_plain_check_of_that_model_gives(tiny, tiny_folder, claims):
    result = check(tiny, claims, ["dtype=bfloat16", "attention=eager", "threads=1", "seed=3"])
    half = check(load_model(tiny_folder, device="cpu", dtype="bfloat16"), claims)
    eager = check(load_model(tiny_folder, device="cpu", dtype="float32", attention="eager"), claims)
    seeded = check(tiny, [replace(claim, provenance=replace(claim.provenance, seed=3)) for claim in claims])
    for run, reference in zip(result.under, (half, eager, check(tiny, claims), seeded), strict=True):
        assert numbers(run.rows) == pytest.approx(numbers(reference.rows), abs=1e-6), run.condition
        assert [row.verdict for row in run.rows] == [row.verdict for row in reference.rows]
        assert [row.measured.control for row in run.rows] == pytest.approx(
            [row.measured.control for row in reference.rows], abs=1e-6
        )
    assert result.rows == check(tiny, claims).rows
    assert result.passed


def test_the_seed_is_that_of_the_condition_in_its_column_only(tiny, claims, monkeypatch):
    seeds = []
    monkeypatch.setattr(AnswerClaim, "measured", lambda self, model, seed: seeds.append(seed) or Measured(1.0, 0.0))
    check(tiny, claims[:1], ["seed=3", "threads=1"])
    assert seeds == [0, 3, 0]


def test_a_model_is_loaded_once_a_condition_and_not_for_what_needs_no_other(tiny, tiny_folder, claims, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "icebear.models.loading.loading.load_model", lambda *a, **k: loaded.append(k["dtype"]) or load_model(*a, **k)
    )
    check(tiny, claims, ["threads=1", "seed=1", "dtype=float64", "dtype=bfloat16"])
    assert loaded == ["float64", "bfloat16"]


def test_threads_are_as_before_also_after_an_error(tiny, claims, monkeypatch):
    before, seen = torch.get_num_threads(), []
    measure = AnswerClaim.measured
    monkeypatch.setattr(AnswerClaim, "measured", lambda *a: seen.append(torch.get_num_threads()) or measure(*a))
    check(tiny, claims[:1], [f"threads={before + 1}"])
    assert seen == [before, before + 1]
    monkeypatch.setattr(AnswerClaim, "measured", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check(tiny, claims[:1], ["threads=1"])
    assert torch.get_num_threads() == before


def test_another_shape_measures_only_what_names_no_part(tiny, claims, other_folder):
    result = check(tiny, claims, [f"model={other_folder}"])
    answer, node = result.under[0].rows
    assert numbers([answer]) == pytest.approx(numbers(check(load_model(other_folder, device="cpu"), claims[:1]).rows))
    assert node.measured is None
    assert node.verdict == "cannot be measured here"
    assert tiny.name in node.why
    assert result.passed


def test_a_condition_that_does_not_run_says_why_and_the_others_run(tiny, claims, monkeypatch):
    def raises(self, model, seed):
        if model.dtype_name == "bfloat16":
            raise RuntimeError('"addmm" not implemented for this type')
        return Measured(1.0, 0.0)

    monkeypatch.setattr(AnswerClaim, "measured", raises)
    result = check(tiny, claims[:1], ["dtype=bfloat16", "model=no/such-folder-here", "seed=1"])
    rows = [run.rows[0] for run in result.under]
    assert [row.verdict for row in rows] == ["cannot be measured here", "cannot be measured here", "passed"]
    assert "addmm" in rows[0].why
    assert "no/such-folder-here" in rows[1].why


def test_a_model_that_was_changed_in_memory_is_not_loaded_again(tiny_folder, claims):
    model = load_model(tiny_folder, device="cpu", dtype="float32")
    with torch.no_grad():
        model.layer_modules[0].mlp.down_proj.weight.mul_(-1)
    result = check(model, claims, ["attention=eager"])
    assert {row.verdict for row in result.under[0].rows} == {"cannot be measured here"}
    assert "in memory" in result.under[0].rows[0].why


# --- the table ---


def made(verdicts):
    """A table of answers with these verdicts; the first column is the plain run."""

    def row(claim, verdict):
        measured = None if verdict == "cannot be measured here" else Measured(0.25, 0.0)
        return CheckedClaim(
            claim, "m", "f", measured, verdict, "" if verdict == "passed" else f"Why <b>{verdict}</b>|."
        )

    claims = [Claim(AnswerClaim(f"a|b <i>{number}</i>", "c"), 0.5, 0.5, value=0.75) for number in range(len(verdicts))]
    columns = [tuple(map(row, claims, column)) for column in zip(*verdicts, strict=True)]
    runs = tuple(ConditionRun(Condition("seed", str(number)), rows) for number, rows in enumerate(columns[1:]))
    return CheckedClaims(columns[0], runs)


TABLE = [
    ("passed", "passed", "passed"),
    ("passed", "broken", "passed"),
    ("passed", "cannot be measured here", "control passes too"),
    ("cannot be measured here", "cannot be measured here", "cannot be measured here"),
]


def test_the_summary_is_a_count_of_the_cells():
    assert made(TABLE).summary() == [
        "4 claims, in the plain run and under 2 conditions: 1 hold wherever they were measured, 2 do not.",
        "Hold: 1.",
        "Do not hold: 2 (seed=0), 3 (seed=1).",
        "Not measured: 3 (seed=0), 4 (the plain run, seed=0, seed=1).",
    ]
    assert made(TABLE).passed
    assert not made(TABLE).passed_everywhere
    assert made(TABLE[:1]).passed_everywhere


def test_equal_reasons_are_one_line():
    table = [("passed", "broken"), ("passed", "broken"), ("broken", "broken"), ("passed", "passed")]
    assert made(table).reasons() == [
        "1, 2, seed=0: broken. Why <b>broken</b>|.",
        "3, the plain run, seed=0: broken. Why <b>broken</b>|.",
    ]


def test_markdown_and_html_have_each_cell_and_no_markup_of_a_file():
    text, page = made(TABLE).to_markdown(), made(TABLE).to_html()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}
    assert lines[3].endswith("| 0.750 | 0.250 | **0.250 broken** | 0.250 |")
    assert lines[4].endswith("| 0.750 | 0.250 | - | **0.250 control** |")
    for markup in ("<i>", "<b>"):
        assert markup not in text.replace(f"\\{markup[:-1]}\\>", "")
        assert markup not in page
    assert page.count("<td") == 4 * 6
    assert page.count("background:rgba") == 2


def test_a_table_is_saved_and_read(tmp_path):
    made(TABLE).save(tmp_path / "t.safetensors")
    assert CheckedClaims.load(tmp_path / "t.safetensors") == made(TABLE)


# --- files and the verb ---


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_conditions_of_a_file_stay_when_claims_are_appended(claims, tmp_path, name):
    conditions = conditions_of(["seed=1", "model=a: b"])
    write_claims(tmp_path / name, claims[:1], conditions)
    append_claims(tmp_path / name, claims[1:])
    assert read_claims_file(tmp_path / name) == (tuple(claims), conditions)


@pytest.mark.parametrize("under", ["seed=1", {"seed": 1}, [1], ["seed"], None])
def test_conditions_of_a_file_that_are_none_are_refused(claims, tmp_path, under):
    write_claims(tmp_path / "c.json", claims)
    document = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**document, "under": under}))
    with pytest.raises(InputError, match=r"c\.json"):
        read_claims_file(tmp_path / "c.json")


def test_the_verb_writes_the_table_and_strict_counts_each_cell(tiny, claims, other_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_claims("c.yaml", claims, conditions_of(["seed=1"]))
    words = ["check", "c.yaml", "--device", "cpu", "--under", f"model={other_folder}"]
    files = ["--html", "t.html", "--markdown", "t.md"]
    done = CliRunner().invoke(main, [*words, *files, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [run["condition"] for run in document["conditions"]] == ["seed=1", f"model={other_folder}"]
    answer, node = document["conditions"][1]["claims"]
    assert (answer["verdict"], node["verdict"]) == ("broken", "cannot be measured here")
    assert document["passed"]
    assert not document["passed_everywhere"]
    assert "broken" in (tmp_path / "t.md").read_text()
    assert "broken" in (tmp_path / "t.html").read_text()
    strict = CliRunner().invoke(main, [*words, "--strict"])
    assert strict.exit_code == 1
    assert "Do not hold: 1" in strict.stdout
    assert CliRunner().invoke(main, ["check", "c.yaml", "--under", "bits=3"]).exit_code == 1


def test_options_of_a_table_need_conditions(claims, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_claims("c.yaml", claims)
    for words in (["--strict"], ["--html", "t.html"], ["--markdown", "t.md"]):
        done = CliRunner().invoke(main, ["check", "c.yaml", *words])
        assert done.exit_code == 2
        assert "--under" in done.stderr


def test_options_of_other_files_are_refused(claims, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_claims("c.yaml", claims)
    (tmp_path / "t.txt").write_text("a b")
    (tmp_path / "ledger.jsonl").write_text('{"icebear_ledger": 1}\n')
    ledger, texts = ["check", "ledger.jsonl"], ["--with", "t.txt", "--without", "t.txt"]
    for words in (
        [*ledger, "--under", "seed=1"],
        [*ledger, "--strict"],
        [*ledger, *texts],
        ["check", "c.yaml", *texts],
    ):
        assert CliRunner().invoke(main, words).exit_code == 2, words


# --- paraphrases ---


def test_a_template_rewords_both_prompts_and_nodes_stay_at_their_tokens(tiny, claims):
    what = claims[1].what
    for name, rewrite in versions_of("auto")([what.prompt]):
        new = rephrased(tiny, what, rewrite)
        assert new.prompt == TEMPLATES[name].replace("{}", PROMPT)
        assert new.counterfactual == TEMPLATES[name].replace("{}", OTHER)
        pieces = [tiny.pieces(tiny.ids(each.prompt)) for each in (what, new)]
        assert pieces[0][what.node.position].strip() == pieces[1][new.node.position].strip()
        assert replace(new, prompt=what.prompt, counterfactual=what.counterfactual, node=what.node) == what


def test_a_token_is_counted_from_the_end_among_equal_ones():
    before, after = (
        ["The", " bear", " and", " the", " bear", " in"],
        ["So", " the", " bear", ",", " the", " bear", " of"],
    )
    assert [same_token(before, after, position) for position in (1, 4, 5, 6)] == [2, 5, 6, 7]
    for position in (0, 2):  # case counts, and a missing one is refused
        with pytest.raises(InputError):
            same_token(before, after, position)


def test_a_claim_in_paraphrases_is_a_count_of_plain_checks(tiny, claims):
    row = check(tiny, claims[:1], ["paraphrases=auto"]).under[0].rows[0]
    whats = [AnswerClaim(template.replace("{}", PROMPT), claims[0].what.answer) for template in TEMPLATES.values()]
    reference = check(tiny, [replace(claims[0], what=what) for what in whats]).rows
    passed = sum(each.verdict == "passed" for each in reference)
    assert row.repeats == Repeats(passed, 4, interval(passed, 4))
    assert row.verdict == ("passed" if passed == 4 else "broken")
    assert row.measured.value == min(each.measured.value for each in reference)
    assert row.claim == claims[0]


def test_a_file_rewords_each_prompt_of_its_lines(tiny, claims, tmp_path):
    lines = [
        {"prompt": PROMPT, "paraphrase": "A is", "counterfactual": "B are"},
        {"prompt": "unused", "paraphrase": "x"},
        {"prompt": PROMPT, "paraphrase": PROMPT, "counterfactual": OTHER},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    answer, node = check(tiny, claims, [f"paraphrases={path}"]).under[0].rows
    assert (answer.repeats.measured, node.repeats.measured) == (2, 2)
    assert answer.repeats.passed >= 1  # the prompt itself
    path.write_text(json.dumps({"prompt": PROMPT, "paraphrase": "A is"}))
    answer, node = check(tiny, claims, [f"paraphrases={path}"]).under[0].rows
    assert (answer.repeats.measured, node.measured, node.repeats) == (1, None, None)
    assert "counterfactual" in node.why
    path.write_text(json.dumps({"prompt": "unused", "paraphrase": "A is"}))
    assert {row.measured for row in check(tiny, claims, [f"paraphrases={path}"]).under[0].rows} == {None}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"prompt": "a"}', '{"prompt": "a", "paraphrase": " "}', '{"prompt": 1, "paraphrase": "b"}']
)
def test_a_file_of_no_paraphrases_is_refused_before_the_work(tiny, claims, tmp_path, monkeypatch, text):
    monkeypatch.setattr(AnswerClaim, "measured", lambda *_: pytest.fail("measured"))
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"p\.jsonl"):
        check(tiny, claims, [f"paraphrases={tmp_path / 'p.jsonl'}"])
    with pytest.raises(InputError, match=r"q\.jsonl"):
        check(tiny, claims, [f"paraphrases={tmp_path / 'q.jsonl'}"])


def test_claims_of_texts_and_of_pairs_are_reworded_and_chats_are_not():
    monitor = MonitorClaim("m", "sentence", 1.0, 0.1, (), ("a b",), ("c d", "e f"))
    task = TaskClaim(nodes=(), pairs=(ClaimedPair(prompt="a", counterfactual="b", target="c"),) * 2)
    ((_, rewrite), *_) = versions_of("auto")(texts_of(monitor))
    start = TEMPLATES["declarative"].removesuffix("{}")
    assert rephrased(None, monitor, rewrite).others == (f"{start}c d", f"{start}e f")
    assert {(pair.prompt, pair.counterfactual) for pair in rephrased(None, task, rewrite).pairs} == {
        (f"{start}a", f"{start}b")
    }
    with pytest.raises(InputError):
        texts_of(AnswerClaim(({"role": "user", "content": "a"},), "b"))


# --- planted failures ---


@pytest.fixture(scope="module")
def four(tiny, claims):
    """Claims of four kinds with room below them: an answer, a neuron's relevance, a head's swap, a monitor."""
    swap = SwapClaim(prompt=PROMPT, counterfactual=OTHER, target=" A", contrast=" B", head=Neuron(2, "head", 0))
    neuron = claims[1].what.node.neuron
    texts = [" ".join(words) for words in product([" Paris", " Rome", " A"], [" is", " are"], [" B", " C"])]
    values = text_values(tiny, [(ConceptNeuron(neuron, "+", 1.0, 0.0, 1.0, 1.0),)], texts, "message")[0]
    order = np.argsort(values)
    others, examples = (tuple(texts[row] for row in rows) for rows in (order[:4], order[-4:]))
    middle = float((values[order[-5]] + values[order[-4]]) / 2)
    part = (ConceptNeuron(neuron, "+", 1.0, 0.0, 1.0, 1.0),)
    monitor = MonitorClaim("m", "message", middle, 0.5, part, examples, others)
    roomy = []
    for what in (claims[0].what, claims[1].what, swap, monitor):
        value = what.measured(tiny).value
        roomy.append(Claim(what, value - abs(value) / 2, 10.0, value=value))
    return roomy


def failures(result):
    """The cells that fail, as (claim, condition)."""
    return [
        (plain.claim.what.kind, name) for plain, cells in result.by_claim() for name, row in cells.items() if row.failed
    ]


def test_a_moved_threshold_fails_in_its_row_only(tiny, four):
    conditions = ["threads=1", "seed=1", "attention=eager", "dtype=float64"]
    assert check(tiny, four, conditions).passed_everywhere
    moved = replace(four[3], what=replace(four[3].what, threshold=four[3].what.threshold + 100))
    result = check(tiny, [*four[:3], moved], conditions)
    assert failures(result) == [("monitor", condition) for condition in conditions]
    assert [row.failed for row in result.rows] == [False, False, False, True]


def test_an_exchanged_head_fails_in_its_cell_only(tiny, tiny_folder, four, tmp_path):
    """Both heads read the same keys, so the model computes the same: only their names are exchanged."""
    model = load_model(tiny_folder, device="cpu", dtype="float32")
    attention, width = model.layer_modules[2].self_attn, LLAMA.hidden_size // LLAMA.num_attention_heads
    order = torch.arange(LLAMA.hidden_size).unflatten(0, (-1, width))[[1, 0, 2, 3]].flatten()
    with torch.no_grad():
        attention.q_proj.weight.copy_(attention.q_proj.weight[order].clone())
        attention.o_proj.weight.copy_(attention.o_proj.weight[:, order].clone())
    model.net.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert torch.allclose(model.next_logits(PROMPT), tiny.next_logits(PROMPT), atol=1e-4)
    swap = four[2]
    exchanged = replace(swap.what, head=Neuron(2, "head", 1)).measured(tiny).value
    strict = replace(swap, threshold=max(swap.value, exchanged) - 0.1 * abs(swap.value - exchanged))
    claimed = strict if swap.value > exchanged else replace(strict, what=replace(swap.what, head=Neuron(2, "head", 1)))
    result = check(tiny, [*four[:2], claimed, four[3]], [f"model={tmp_path}", "threads=1"])
    assert failures(result) == [("swap", f"model={tmp_path}")]
    assert result.passed


@pytest.mark.release
def test_four_bits_fail_in_their_cell_only(tiny, tiny_folder, four):
    quantized = load_model(tiny_folder, bits=4)
    words = (" Paris", " Rome", " A", " B", " C", " D", " is", " are")
    plain, rounded = ({word: AnswerClaim(PROMPT, word).measured(m).value for word in words} for m in (tiny, quantized))
    word = max(words, key=lambda word: plain[word] / rounded[word])
    tight = Claim(AnswerClaim(PROMPT, word), 0.99 * plain[word], 10.0, value=plain[word])
    loose = [replace(claim, threshold=-10.0) for claim in four]
    result = check(tiny, [tight, *loose], ["attention=eager", "bits=4", "threads=1"])
    assert failures(result) == [("answer", "bits=4")]
    assert result.under[1].rows[0].measured.value == pytest.approx(rounded[word], rel=1e-3)
    assert [row.measured is not None for row in result.under[1].rows] == [True] * 5
