"""The house: imports go down only, importing is quick, the wheel has five packages."""

import ast
import os
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import icebear
from icebear import rooms

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "icebear": set(),
    "db": {"icebear"},
    "concepts": {"db", "icebear"},
    "actmax": {"steering", "concepts", "db", "icebear"},
    "steering": {"concepts", "db", "icebear"},
    "app": {"actmax", "steering", "concepts", "db", "icebear"},
}
DOORS = {"icebear/__init__.py", "icebear/command.py"}
"""They name what is above them, and import it when it is asked for."""


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_down_only(package):
    for path in (ROOT / package).rglob("*.py"):
        if str(path.relative_to(ROOT)) in DOORS:
            continue
        above = set(imports(path)) & set(ALLOWED) - ALLOWED[package] - {package}
        assert not above, f"{path} imports {above}"


def test_imports_have_no_circles():
    """Inside the rooms too, and inside functions; what is only for types does not count."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for room in ALLOWED
        for path in (ROOT / room).rglob("*.py")
        if path.name != "__init__.py"
    }
    below = {name: set(modules(path)) & set(files) - {name} for name, path in files.items()}
    left = set(below)
    while free := {name for name in left if not below[name] & left}:
        left -= free
    assert not left, f"these import one another: {sorted(left)}"


def modules(path):
    """What a file imports, as modules of ours."""
    tree = ast.parse(path.read_text())
    types = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in types:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_db_never_imports_torch_and_app_has_no_maths_or_sql():
    for room in ("icebear", "db"):
        assert not any("torch" in set(imports(path)) for path in (ROOT / room).rglob("*.py"))
    for path in (ROOT / "app").rglob("*.py"):
        assert not {"torch", "numpy", "sqlite3", "sqlite_utils", "faiss"} & set(imports(path)), path
        assert "SELECT " not in path.read_text()


def test_no_file_is_named_like_a_package():
    """A script's folder comes first where Python looks."""
    assert not [p for room in ("app", "benchmarks") for p in (ROOT / room).rglob("*.py") if p.stem in ALLOWED]


def test_importing_is_quick():
    code = (
        "import sys, icebear\n"
        "assert not {'concepts', 'db', 'app'} & set(sys.modules), 'icebear imports its rooms'\n"
        "import concepts, steering, db, actmax, app.cli\n"
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
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = icebear.nonsense


@pytest.mark.parametrize("room", ["icebear", "concepts", "steering", "actmax", "db"])
def test_a_public_name_is_typed_and_from_where_it_is_lazily(room):
    """What type checkers read (``import name as name``) and what Python does (`icebear.public`) are the same names."""
    package = import_module(room)
    typed = {}
    for node in ast.walk(ast.parse((ROOT / room / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            typed |= {name.asname: node.module for name in node.names if name.asname == name.name}
    assert sorted(typed) == package.__all__ == dir(package)
    for name, home in typed.items():
        assert getattr(package, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'nonsense'"):
        _ = package.nonsense


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from app.cli import main; main(['-h'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'rich', 'sqlite_utils'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "attribute" in output


def test_the_wheel_has_its_packages_and_their_files(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == set(ALLOWED)
    data = "app/recipes/ice-bear-to-desert.json concepts/calibration.txt concepts/versus/common.txt icebear/py.typed"
    assert {*data.split(), "steering/counterfacts.json"} <= set(names)


@pytest.mark.parametrize("intruder", ["db.py", "app/__init__.py"])
def test_an_intruder_is_named(tmp_path, intruder):
    """By ``import icebear`` and by the command, in one sentence, before it can break anything."""
    (tmp_path / intruder).parent.mkdir(exist_ok=True)
    (tmp_path / intruder).write_text("raise SystemExit('the intruder runs')")
    command = "import sys; sys.argv[0] = '/bin/icebear'; from icebear.command import main; main()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    said = f"icebear is in {ROOT}, but Python finds {intruder.split('/')[0].removesuffix('.py')} from {tmp_path};"
    for code, begin in (("import icebear", "ImportError: "), (command, "icebear: ")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT.parent
        )
        *traceback, last = done.stderr.strip().splitlines()
        assert (done.returncode, last.startswith(begin + said)) == (1, True), done.stderr
        assert bool(traceback) is (code != command)
    assert rooms.intruders() == ""
