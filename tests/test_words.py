"""The field's words: no old one is a name, an option, a key or a column, and no old phrase is in help or on pages."""

import ast
import re

import click
import nbformat
import pytest
from click.testing import CliRunner
from pages import NOTEBOOKS, PAGES, ROOT

from icebear.app.cli.main import main

FOLDERS = "app claims explanation evaluation actmax steering concepts lrp models db icebear benchmarks".split()
CODE = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
WHOLE = {"found", "told", "said", "asked", "given", "kept", "like", "away", "beyond", "turned", "turn_up", "turn_down"}
"""Names that say nothing, or that the field calls otherwise."""
PARTS = re.compile(r"versus|beside_chance|left_without|furthest|neutral|twin|price")
PRODUCT = [path for path in CODE if "benchmarks" not in path.parts]
VAGUE = set("place places here there one some own made item single first whole".split())
"""Names that do not say what they are, in any case and with underscores around them."""
COUNTS = set("ROWS DRAWS COLUMNS TOKENS WORDS NODES EDGES FEW".split())
"""Constants that do not say what they count."""
SAVED = {
    ("icebear/records.py", "places"),
    ("models/text/chat.py", "first"),
    ("concepts/stages/stage_records.py", "whole"),
}
"""Fields that stay, because cards and saved results have them in their JSON, or because they are public."""
PHRASES = re.compile(
    r"\b(versus|drives (it|them|each neuron) furthest|twins?|neutral places|left without|is left of it|(are|is) told"
    r"|so often|read on|those that|that of the|what is longer|as they are there)\b",
    re.IGNORECASE,
)


def identifiers(tree):
    """The names that a module gives: to variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def names(tree):
    """The identifiers, keyword arguments, keys of dictionaries and options of a module, with their lines."""
    yield from identifiers(tree)
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=str(name)):
                yield name, node.value.lineno
            case ast.Dict(keys=keys):
                yield from ((key.value, key.lineno) for key in keys if isinstance(key, ast.Constant))
            case ast.Constant(value=str(text)) if text.startswith("--"):
                yield text.strip("-").split("/")[0].replace("-", "_"), node.lineno


def old(name):
    return isinstance(name, str) and (name in WHOLE or bool(PARTS.search(name.lower())))


def test_no_old_word_is_a_name():
    lines = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in CODE
        for name, line in names(ast.parse(path.read_text()))
        if old(name)
    ]
    assert not lines, "\n".join(lines)


def test_no_old_word_is_a_column():
    schema = (ROOT / "db" / "schema.sql").read_text()
    assert not [word for word in re.findall(r"\w+", re.sub(r"--.*", "", schema)) if old(word)]


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.stem)
def test_no_old_phrase_is_on_a_page(path):
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells)
    assert not [match[0] for match in PHRASES.finditer(" ".join(text.split()))]


def helps(command, path=()):
    yield " ".join(path), CliRunner().invoke(main, [*path, "-h"]).stdout
    if isinstance(command, click.Group):
        for name in command.list_commands(None):
            yield from helps(command.get_command(None, name), (*path, name))


def test_no_old_phrase_is_in_a_help_text():
    result = [(verb, match[0]) for verb, text in helps(main) for match in PHRASES.finditer(" ".join(text.split()))]
    assert not result


def vague(name):
    return name.strip("_").lower() in VAGUE or name.strip("_") in COUNTS


def constants_in_a_tuple(tree):
    """The lines of a module that assign several constants at once, so that they share one docstring."""
    tuples = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple))
    return [node.lineno for node in tuples if all(name.id.isupper() for name in node.targets[0].elts)]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_inside_say_what_they_are(path):
    tree, file = ast.parse(path.read_text()), str(path.relative_to(ROOT))
    assert not [(line, name) for name, line in identifiers(tree) if vague(name) and (file, name) not in SAVED]
    assert not constants_in_a_tuple(tree)


def test_vague_names_are_seen():
    code = "ROWS, KEYS = 1, 2\nclass Place:\n    def run(self, own):\n        self._here = [one for one in own]\n"
    tree = ast.parse(code + "import numpy as there\nfirst_row = one_of(own=1, rows=2)\nrows = {'place': 1}")
    assert sorted(name for name, _ in identifiers(tree) if vague(name)) == sorted(
        "ROWS Place own _here one there".split()
    )
    assert constants_in_a_tuple(tree) == [1]


def test_old_words_are_seen():
    tree = ast.parse("def flip(to, *, away=False):\n    found = {'price': 1}\n    option('--versus-model')")
    assert [name for name, _ in names(tree) if old(name)] == ["away", "found", "price", "versus_model"]
    assert PHRASES.search("Sentences that drives it furthest")
