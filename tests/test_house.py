"""The house: importing is quick, and what is installed is one package; `make lint` checks what may import what."""

import ast
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import icebear

ROOT = Path(__file__).parent.parent
ROOMS = "icebear db models lrp concepts steering actmax evaluation explanation claims app".split()


def room_files(room):
    return (ROOT / room).rglob("*.py")


def test_what_streamlit_runs_is_alone_in_its_folder():
    """Streamlit puts that folder first where Python looks, where other files would hide packages of their names."""
    assert {path.name for path in (ROOT / "app/web/script").glob("*.py")} == {"__init__.py", "main.py", "server.py"}


def test_importing_is_quick():
    code = (
        "import sys, icebear\n"
        "rooms = {'icebear.concepts', 'icebear.db', 'icebear.app'}\n"
        "assert not rooms & set(sys.modules), 'icebear imports its folders'\n"
        "import icebear.concepts, icebear.steering, icebear.db, icebear.actmax, icebear.app.cli.main\n"
        "from icebear import ATTNLRP, Neuron, Edit, Recipe\n"
        "assert not {'torch', 'transformers', 'pandas', 'rich'} & set(sys.modules), 'a heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_public_name_is_typed_and_from_where_it_is_lazily():
    """What type checkers read (``import name as name``) and what Python does are the same names."""
    typed = {}
    for node in ast.walk(ast.parse((ROOT / "icebear/__init__.pyi").read_text())):
        if isinstance(node, ast.ImportFrom):
            typed |= {name.asname: f"icebear.{node.module}" for name in node.names if name.asname == name.name}
    assert sorted(typed) == icebear.__all__ == dir(icebear)
    for name, home in typed.items():
        assert getattr(icebear, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = icebear.nonsense


def functions():
    """Each function of the product with where it is."""
    for room in ROOMS:
        for path in sorted(room_files(room)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_no_function_has_many_parameters_or_is_longer_than_a_screen():
    for where, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        count = sum(one is not None and one.arg not in ("self", "cls") for one in arguments)
        assert count <= (12 if node.name in icebear.__all__ else 10), f"{where} has {count} parameters"
        words = ast.get_docstring(node, clean=False) or ""
        lines = node.end_lineno - node.lineno + 1 - (words.count("\n") + 1 if words else 0)
        assert lines <= 60, f"{where} has {lines} lines"


def test_a_class_in_concepts_has_its_name_alone():
    """Classes, and types that have a name."""
    homes = {}
    for path in room_files("concepts"):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]) if not name.isupper():
                    if name[0].isupper():
                        homes.setdefault(name, []).append(path.name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_the_way_of_explain_is_twenty_files_that_exist():
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", (ROOT / "docs" / "changing.md").read_text(), re.MULTILINE)
    assert 10 < len(steps) <= 20
    assert [step for step in steps if not (ROOT / step).is_file()] == []


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from icebear.app.cli.main import main; main(['-h'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'rich', 'sqlite_utils'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "explain" in output


READ_FIRST = """
icebear.actmax.atlas.audit icebear.claims.monitor_conditions icebear.concepts.stages.explained_task
""".split()
"""What checks a user's file before the model is loaded."""


def imported_before_loading(function):
    """The modules that a command imports above the line that loads its model."""
    loads = [node.lineno for node in ast.walk(function) if ast.unparse(node) == "options.model.load()"]
    imports = (node for node in ast.walk(function) if isinstance(node, ast.ImportFrom))
    return {node.module for node in imports if loads and node.lineno < min(loads)}


def test_a_command_says_that_it_loads_a_model_before_imports_that_take_seconds():
    trees = (ast.parse(path.read_text()) for path in (ROOT / "app/cli/verbs").glob("*.py"))
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    early = set().union(*map(imported_before_loading, functions)).difference(READ_FIRST)
    assert "icebear.app.cli.tables.explanations" in early
    code = f"import sys, {', '.join(early)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_first_page_of_the_app_is_drawn_without_torch():
    code = (
        "import sys, icebear.app.web.why.prediction, icebear.app.web.shared.gallery\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_wheel_has_its_packages_and_their_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"icebear"}
    data = "app/recipes/ice-bear-to-desert.json app/web/shared/words.js app/web/shared/words.css app/web/icon.svg "
    data += "app/web/steering/examples/music.txt app/web/steering/examples/not-music.txt "
    data += "app/web/steering/examples/everyday.txt __init__.pyi py.typed "
    data += "concepts/answers/common.txt db/schema.sql db/stop_words.txt concepts/vocabulary/calibration.txt "
    data += "steering/held_out.txt app/cli/options.json "
    data += "AGENTS.md evaluation/groundtruth.json"
    templates = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("templates/*")]
    assert templates
    wanted = (*data.split(), *(str(path).removeprefix("icebear/") for path in templates))
    assert {f"icebear/{name}" for name in wanted} <= set(names)
    ours = {str(path.relative_to(ROOT)).removeprefix("icebear/") for room in ROOMS for path in room_files(room)}
    assert {f"icebear/{name}" for name in ours} == {name for name in names if name.endswith(".py")}
