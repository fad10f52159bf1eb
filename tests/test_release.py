"""What goes out: frozen names, one version, and files that install and work where nothing else is."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import icebear

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FROZEN = ROOT / "tests" / "data" / "public_names.txt"


def test_public_names_are_frozen():
    """A change is on purpose, and in the changelog."""
    assert icebear.__all__ == FROZEN.read_text().split()


def test_the_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert PROJECT["version"] == citation["version"] == newest
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files of `make dist`, of a copy of what git has."""
    folder = tmp_path_factory.mktemp("dist")
    copy, out = folder / "icebear", folder / "out"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    subprocess.run(build, check=True, capture_output=True)
    return sorted(out.iterdir())


@pytest.mark.release
@pytest.mark.network
def test_the_files_of_a_release_are_as_the_package_index_wants_them(made):
    assert [path.name for path in made] == [
        f"icebear-{PROJECT['version']}-py3-none-any.whl",
        f"icebear-{PROJECT['version']}.tar.gz",
    ]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], check=True)
    names = zipfile.ZipFile(made[0]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"icebear"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(made[1]) as source:
        assert {Path(name).name for name in source.getnames()} >= {"README.md", "LICENSE", "pyproject.toml", "graph.js"}


USED = """
import icebear
from pathlib import Path

assert "site-packages" in icebear.__file__
model = icebear.load_model()
found = icebear.attribute(model, "The ice bear lives in the", contrast=" desert")
assert "desert" in found.to_html()
print(found.top(1)[0].neuron)
"""


@pytest.mark.release
@pytest.mark.network
def test_the_wheel_works_in_an_empty_environment(made, tmp_path):
    """Installed by pip with what it asks for, and nothing of this checkout; run by `make dist`, as it takes long."""
    venv.create(tmp_path / "empty", with_pip=True)
    binaries = tmp_path / "empty" / "bin"
    pip = [binaries / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", made[0]], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert PROJECT["version"] in run(binaries / "icebear", "--version")
    assert re.fullmatch(r"L\d+\.\w+\.\d+\n", run(binaries / "python", "-c", USED))
    assert "' Arctic'" in run(binaries / "icebear", "explain", "The ice bear lives in the", "--html", "why.html")
    assert (tmp_path / "why.html").stat().st_size > 1000
