"""The words of the command line: one meaning a name, a document on every verb, a store that may be missing."""

import inspect
import json
import re
from collections import defaultdict

import click
import pytest
from click.testing import CliRunner

from icebear import Edit, Recipe, load_model, open_store
from icebear.app.cli import verbs as folder
from icebear.app.cli.main import add_verbs, main
from icebear.app.cli.options import OPTIONS, ModelOptions
from icebear.concepts.methods.registry import METHODS
from icebear.errors import ModelError

RUN = CliRunner()
OWN_VALUES = {"--tokens", "--site", "--words", "--task", "--max-tokens", "--max-neurons", "--top", "--store", "--port"}
"""What these may be, and are by default, is a verb's own."""
OWN_HELP = {"--tokens", "--site", "--samples", "--suppress", "--words", "--top", "--no-heads", "--out", "--target"}
"""The help of these differs: verbs take different sites, count, suppress, resume and explain different things."""


def verbs(group=main, before=""):
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if isinstance(command, click.Group):
            yield from verbs(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


VERBS = dict(verbs())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_and_json(verb):
    command = VERBS[verb]
    assert f"  icebear {verb}" in command.help.partition("Example:")[2]
    flags = {flag for option in command.params for flag in option.opts}
    if verb not in ("app", "mcp", "serve", "shell"):  # which print no result
        assert "--json" in flags


def test_an_option_means_the_same_wherever_it_is():
    result = defaultdict(list)
    for verb, command in VERBS.items():
        for option in command.params:
            if isinstance(option, click.Option):
                values = () if option.opts[0] in OWN_VALUES else (option.default, repr(option.type), option.multiple)
                help = option.opts[0] in OWN_HELP or option.help
                result[option.opts[0]].append((verb, (help, option.is_flag, *values)))
    shared = {name: output for name, output in result.items() if len(output) > 1}
    assert {"--top", "--store", "--seed", "--out", "--save", "--target-text", "--checkpoint"} <= set(shared)
    assert set(OPTIONS) <= set(shared), "the table has options of more than one verb only"
    for name, output in shared.items():
        assert len({meaning for _, meaning in output}) == 1, f"{name}: {output}"


def test_a_model_is_loaded_as_python_loads_it():
    """Every argument of load_model is an option of every verb that loads a model."""
    wanted = {"--model"} | {
        f"--{name.replace('_', '-')}" for name in list(inspect.signature(load_model).parameters)[1:]
    }
    for verb, command in VERBS.items():
        flags = {flag for option in command.params for flag in option.opts}
        assert wanted <= flags or not wanted & flags, verb


def test_the_options_of_a_model_reach_it(tiny_folder):
    loading = ModelOptions(
        model=tiny_folder,
        device="cpu",
        device_map=None,
        bits=None,
        dtype="float64",
        attention="eager",
        trust_remote_code=False,
        accept_terms=False,
        config=None,
    )
    with click.Context(main):
        model = loading.load()
    assert (model.net.config._attn_implementation, str(model.dtype)) == ("eager", "torch.float64")


def test_a_verb_is_one_file(tmp_path, monkeypatch):
    """A file of the folder is a command, with shared options and its own."""
    (tmp_path / "echo.py").write_text(
        "from icebear.app.cli.options import argument, option, record, verb\n"
        "@record\n"
        "class Options:\n"
        "    text: str = argument()\n"
        "    loud: bool = option('In capitals.', False, is_flag=True, advanced=True)\n"
        "    top: int\n"
        "@verb(Options)\n"
        "def echo(options):\n"
        "    'Print TEXT.'\n"
        "    print((options.text.upper() if options.loud else options.text) * options.top)\n"
    )
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    group = click.Group()
    add_verbs(group)
    assert list(group.commands) == [*main.commands, "echo"]
    assert RUN.invoke(group, ["echo", "a", "--top", "3", "--loud"]).stdout == "AAA\n"
    shown = RUN.invoke(group, ["echo", "--help"]).stdout
    assert 0 < shown.index("--top") < shown.index("Advanced:") < shown.index("--loud")


@pytest.mark.parametrize("verb", ["explain", "rank"])
def test_what_most_need_fits_a_screen(verb):
    """And the two share how they are asked."""
    shown, advanced = RUN.invoke(main, [verb, "-h"]).stdout.split("\nAdvanced:\n")
    assert len(shown.splitlines()) <= 50
    words = "target contrast counterfactual base-model method site position top json html"
    assert {f"--{word}" for word in words.split()} <= set(shown.split())
    assert "--device" in advanced


@pytest.fixture
def output(tiny_folder, tmp_path, monkeypatch):
    """Runs a verb on the tiny model in a folder of its own; its JSON document."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.txt").write_text("Rome is a city. Paris is one too.\nAre the cities far apart? They are.\n")

    def run(*words, model=True):
        done = RUN.invoke(main, [*words, *(["--model", tiny_folder] if model else []), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return run


def test_what_is_made_is_told_in_a_document(output, tmp_path):
    made = output("index", "--corpus", "c.txt", "--k", "2")
    assert made["store"] == "icebear.db"  # the default
    assert made["counts"]["sentences"] == 4
    assert made["index"]["k"] == 2
    done = output("index", "--annotate", "L1.ffn.3", "--k", "2")
    assert done["attributed"] == 4
    assert output("index", "--annotate", "L1.ffn.3", "--k", "2")["attributed"] == 0  # they are kept
    assert output("index", "--annotate", "--prompt", "Rome is", "--top", "3", "--k", "1")["neurons"]
    assert output("label", "L1.ffn.3", "cities", model=False)["label"] == "cities"
    assert output("label", "L1.ffn.3", "", model=False)["label"] is None
    assert output("search", "Rome", model=False)["hits"]
    assert output("doctor")["store"] == "icebear.db fits the model"


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.needs_counterfactual])
def test_every_method_explains_and_ranks_what_it_scores(output, tiny_folder, name):
    if name == "alti":
        pytest.skip("of encoders")
    document = output("explain", "Rome is", "--method", name)
    assert len(document["tokens"]) > 1
    assert bool(document["ranking"]) is METHODS[name].scores_neurons
    ranked = RUN.invoke(main, ["rank", "Rome is", "--method", name, "--model", tiny_folder])
    assert ranked.exit_code == (not METHODS[name].scores_neurons), ranked.output


def test_recipes_told_in_a_document(output, tmp_path, tiny_folder):
    model = load_model(tiny_folder)
    for name, edit in (("a.json", "L1.ffn.3*0.5"), ("b.json", "L0.ffn.2=1")):
        Recipe.for_model(model, name, [Edit.parse(edit)]).save(tmp_path / name)
    both = output("recipe", "combine", "a.json", "b.json", "--save", "both.json", model=False)
    assert both == json.loads((tmp_path / "both.json").read_text())


def test_a_store_that_is_not_needed_may_be_missing_or_of_another_model(output, tmp_path, tiny_folder):
    edited = ("steer", "Rome is", "--max-new-tokens", "2", "--edit")
    assert output(*edited, "L1.ffn.3*0")["edits"] == ["L1.ffn.3*0"]
    assert output("doctor")["store"] == "none"
    missing = RUN.invoke(main, [*edited, "L1.ffn.3*0", "--model", tiny_folder, "--store", "wiki.db"])
    assert (missing.exit_code, "There is no store wiki.db;" in missing.stderr) == (1, True)
    (tmp_path / "icebear.db").write_text("not a database, but long enough to look at" * 50)
    for words in ((*edited, "L1.ffn.3*0"), ("doctor",)):
        done = RUN.invoke(main, [*words, "--model", tiny_folder])
        assert (
            done.exit_code,
            "Continuing without a store: icebear.db is damaged or not a SQLite file" in done.stderr,
        ) == (0, True)
    (tmp_path / "icebear.db").unlink()
    output("index", "--corpus", "c.txt")
    with open_store(tmp_path / "icebear.db") as store:
        std = store.neurons.statistic(store.search("Rome", 1)[0].neuron, "std")
        name = str(store.search("Rome", 1)[0].neuron)
    assert std > 0
    in_units = output(*edited, f"{name}=2std")["steered"]["next"]
    raw = output(*edited, f"{name}={2 * std!r}")["steered"]["next"]
    assert [token["logit"] for token in in_units] == pytest.approx([token["logit"] for token in raw])


def test_ranking_takes_what_attributing_takes(output):
    request = ("Rome is", "--target-text", " are", "--method", "cp-lrp")
    expected = output("explain", *request)["conservation"]
    assert output("rank", *request)["conservation"] == pytest.approx(expected)
    checkpointed = output("rank", *request, "--checkpoint")["ranking"]
    assert [row["neuron"] for row in checkpointed] == [row["neuron"] for row in output("rank", *request)["ranking"]]
    neither = RUN.invoke(main, ["rank"])
    assert (neither.exit_code, "a PROMPT" in neither.stderr) == (2, True)


def test_the_home_folder_is_written_as_a_tilde(output, tmp_path, tiny_folder, monkeypatch):
    """Also where no shell reads it: a model, a store, a recipe, and what is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model").symlink_to(tiny_folder)
    model = load_model("~/model")
    Recipe.for_model(model, "r", [Edit.parse("L1.ffn.3*0.5")]).save("~/r.json")
    assert Recipe.load("~/r.json").name == "r"
    home = ("--model", "~/model", "--store", "~/i.db")
    output("index", "--corpus", "~/c.txt", *home, model=False)
    assert (tmp_path / "i.db").is_file()
    assert (
        output("steer", "Rome is", "--recipe", "~/r.json", "--max-new-tokens", "1", *home, model=False)["recipe"] == "r"
    )
    done = RUN.invoke(main, ["explain", "Rome is", "--html=~/page.html", "--model", "~/model"])
    assert (done.exit_code, (tmp_path / "page.html").is_file()) == (0, True)
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path}/none.GGUF")):
        load_model("~/none.GGUF")
