"""The house: importing is quick, and what is installed is one package; `make lint` checks what may import what."""

import ast
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import icebear

ROOT = Path(__file__).parent.parent
ROOMS = ("icebear", "db", "concepts", "steering", "actmax", "app")


def room_files(room):
    return (ROOT / room).rglob("*.py")


def test_what_streamlit_runs_is_alone_in_its_folder():
    """Streamlit puts that folder first where Python looks, where other files would hide packages of their names."""
    assert {path.name for path in (ROOT / "app/web/script").glob("*.py")} == {"__init__.py", "main.py"}


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


def test_every_public_name_is_there_and_typed():
    tree = ast.parse((ROOT / "icebear" / "__init__.py").read_text())
    typed = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(icebear.__all__) <= typed
    for name in icebear.__all__:
        assert getattr(icebear, name) is not None
    with pytest.raises(AttributeError, match="'nonsense'"):
        _ = icebear.nonsense


@pytest.mark.parametrize("room", ["icebear", *(f"icebear.{name}" for name in ("concepts", "steering", "actmax", "db"))])
def test_a_public_name_is_typed_and_from_where_it_is_lazily(room):
    """What type checkers read (``import name as name``) and what Python does (`icebear.public`) are the same names."""
    package = import_module(room)
    typed = {}
    for node in ast.walk(ast.parse((ROOT / room.rpartition(".")[2] / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            typed |= {name.asname: node.module for name in node.names if name.asname == name.name}
    assert sorted(typed) == package.__all__ == dir(package)
    for name, home in typed.items():
        assert getattr(package, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'nonsense'"):
        _ = package.nonsense


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from icebear.app.cli.main import main; main(['-h'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'rich', 'sqlite_utils'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "explain" in output


def test_the_wheel_has_its_packages_and_their_files(tmp_path):
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # where setuptools keeps modules that are gone since
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"icebear"}
    data = "app/recipes/ice-bear-to-desert.json app/web/words.js app/web/words.css concepts/calibration.txt"
    templates = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).glob("templates/*")]
    assert templates
    assert {
        f"icebear/{name}" for name in (*data.split(), "concepts/attribution/common.txt", "py.typed", *templates)
    } <= set(names)
    ours = {str(path.relative_to(ROOT)).removeprefix("icebear/") for room in ROOMS for path in room_files(room)}
    assert {f"icebear/{name}" for name in ours} == {name for name in names if name.endswith(".py")}
