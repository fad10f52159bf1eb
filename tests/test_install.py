"""A plain installation, and what it says about the parts that it lacks."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from icebear.app.cli.main import main
from icebear.errors import EXTRAS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]


FOLDERS = "app claims explanation evaluation actmax steering concepts lrp models db".split()
"""Of this repository; installed they are parts of `icebear`."""


def test_lower_bounds_are_what_is_tested():
    """Each is there, and the versions of constraints.txt are above it."""
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    users = [*PROJECT["dependencies"], *(name for part, names in OPTIONAL.items() if part != "dev" for name in names)]
    for wanted in map(Requirement, users):
        if wanted.name not in ("pip", "icebear"):
            assert wanted.specifier, f"{wanted} has no lower bound"
            assert wanted.specifier.contains(tested[wanted.name]), wanted


BROUGHT = {
    "app": {"starlette"},
    "mcp": {"anyio", "pydantic"},
    "serve": {"anyio", "pydantic", "starlette"},
}
"""What icebear imports too of the packages that another package of the part brings."""


APART = {
    "ray": "200 MB, of use where there are several machines",
    "benchmarks": "photographs of our tables",
    "servers": "of use to the test of a real server only",
}
"""What `all` leaves out, and why."""


def test_the_parts_are_those_that_errors_name():
    for part, packages in EXTRAS.items():
        assert {Requirement(name).name for name in OPTIONAL[part]} == set(packages.values()) | BROUGHT.get(part, set())
    assert set(re.findall(r"\w+", OPTIONAL["all"][0])) == {"icebear", *OPTIONAL} - {"all", "dev"} - APART.keys()
    assert OPTIONAL["dev"][0] == "icebear[all]"  # make install installs everything


HIDDEN = [module for modules in EXTRAS.values() for module in modules]
PLAIN = f"""
import sys
sys.modules.update(dict.fromkeys({HIDDEN}))  # as if they were not installed
from icebear.app.cli.main import main
for words in (
    ["explain", "Rome is"],
    ["rank", "Rome is", "--top", "3"],
    ["neuron", "L1.ffn.3"],
    ["steer", "Rome is", "--edit", "L1.ffn.3*0", "--max-new-tokens", "2"],
    ["flip", "Rome is", "--suppress", "--top-k", "1", "--unbounded"],
):
    main([*words, "--json", "--model", sys.argv[1]], standalone_mode=False)
main(["index"], standalone_mode=False)
"""


def output_of(part):
    packages = list(EXTRAS[part].values())
    return (
        f"icebear: This feature needs the missing package{'s' * (len(packages) > 1)} {', '.join(packages)}; install "
        f"with: pip install {' '.join(packages)} (or, in a checkout of icebear: pip install -e '.[{part}]')."
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("index", ["index"]),
        ("index", ["demo"]),
        ("app", ["app"]),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else part,
)
def test_what_is_missing_is_said_before_anything_is_done(part, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for module in HIDDEN:
        monkeypatch.setitem(sys.modules, module, None)
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.stderr) == (1, f"{output_of(part)}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.release
def test_a_wheel_explains_and_steers_in_a_plain_installation(wheel, tmp_path, tiny_folder):
    """Installed in an empty environment that sees our dependencies, used there without the optional ones."""
    home = tmp_path / "venv"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command, code=0):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == code, done.stderr
        return done

    run(sys.executable, "-m", "venv", "--without-pip", home)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home]
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
    bin = next(path for path in (home / "bin", home / "Scripts") if path.is_dir())
    packages = Path(run(bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read then
    for name in FOLDERS:  # a user's own files, beside which everything below runs
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not ours')")
    where = run(bin / "python", "-c", "import icebear.app; print(icebear.__file__, icebear.app.__file__)").stdout
    assert all(Path(path).is_relative_to(packages) for path in where.split())
    assert "neuron" in run(bin / "python", "-m", "icebear", "-h").stdout
    assert "neuron" in run(bin / "icebear", "-h").stdout
    done = run(bin / "python", "-c", PLAIN, tiny_folder, code=1)
    assert done.stdout.count("\n}\n") == 5, done.stderr
    assert done.stderr.splitlines()[-1] == output_of("index")
