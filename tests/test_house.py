"""The house: imports go down only, importing is quick, and what is installed is one package."""

import ast
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import icebear

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "icebear": set(),
    "db": {"icebear"},
    "concepts": {"db", "icebear"},
    "actmax": {"steering", "concepts", "db", "icebear"},
    "steering": {"concepts", "db", "icebear"},
    "app": {"actmax", "steering", "concepts", "db", "icebear"},
}
DOORS = {"icebear/__init__.py", "icebear/__main__.py"}
"""They name what is above them, and import it when it is asked for."""


def room_files(room):
    return (ROOT / room).rglob("*.py")


def imports(path):
    """Everything that a file imports, with plain ``import`` too: for ours the folder, for others the package."""
    for name in modules(ast.walk(ast.parse(path.read_text()))):
        parts = name.split(".")
        yield parts[1] if parts[0] == "icebear" and parts[1:2] and parts[1] in ALLOWED else parts[0]


def modules(nodes):
    """What ``import`` and ``from`` name, as modules; each name of a ``from`` may be one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def not_for_types(path):
    """The nodes of a file, less those that only type checkers read."""
    tree = ast.parse(path.read_text())
    types = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in ast.walk(node)
    }
    return [node for node in ast.walk(tree) if id(node) not in types]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_down_only(package):
    for path in room_files(package):
        if str(path.relative_to(ROOT)) in DOORS:
            continue
        above = set(imports(path)) & set(ALLOWED) - ALLOWED[package] - {package}
        assert not above, f"{path} imports {above}"


def test_imports_have_no_circles():
    """Inside the rooms too, and inside functions; what is only for types does not count."""
    files = {
        ".".join([*["icebear"][room == "icebear" :], *path.relative_to(ROOT).with_suffix("").parts]): path
        for room in ALLOWED
        for path in room_files(room)
        if path.name != "__init__.py"
    }
    below = {name: set(modules(not_for_types(path))) & set(files) - {name} for name, path in files.items()}
    left = set(below)
    while free := {name for name in left if not below[name] & left}:
        left -= free
    assert not left, f"these import one another: {sorted(left)}"


def test_db_never_imports_torch_and_app_has_no_maths_or_sql():
    for room in ("icebear", "db"):
        assert not any("torch" in set(imports(path)) for path in room_files(room))
    for path in room_files("app"):
        assert not {"torch", "numpy", "sqlite3", "sqlite_utils", "faiss"} & set(imports(path)), path
        assert "SELECT " not in path.read_text()


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
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
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
    assert "attribute" in output


def test_the_wheel_has_its_packages_and_their_files(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"icebear"}
    data = "app/recipes/ice-bear-to-desert.json concepts/calibration.txt concepts/attribution/common.txt py.typed"
    assert {f"icebear/{name}" for name in (*data.split(), "steering/counterfacts.json")} <= set(names)
    ours = {str(path.relative_to(ROOT)).removeprefix("icebear/") for room in ALLOWED for path in room_files(room)}
    assert {f"icebear/{name}" for name in ours} == {name for name in names if name.endswith(".py")}
