"""Files are whole or not there: written beside their place and renamed; only files are read."""

import os
import resource
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icebear import Concept
from icebear.app.cli.output import write_page
from icebear.edits import parse_edits
from icebear.errors import InputError, ModelError, RecipeError
from icebear.paths import check_model_path, existing, local, read_text, write_file
from icebear.recipe import Recipe


@pytest.fixture
def full_disk():
    """No file can have more than 64 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


SAVERS = {
    "Recipe": lambda model, path: Recipe(
        "a recipe", parse_edits(["L1.ffn.3=2"]), model.name, model.fingerprint, {}
    ).save(path),
    "Concept": lambda model, path: Concept.of(model, "a concept", {("L1.ffn.3", "+"): 1.0}).save(path),
    "page": lambda model, path: write_page(str(path), lambda: "<p>page</p>" * 99),
    "picture": lambda model, path: write_page(str(path), lambda: b"\x89PNG" * 99),
}


@pytest.mark.parametrize("name", SAVERS)
def test_a_good_file_survives_a_full_disk(model, tmp_path, full_disk, name):
    good = tmp_path / "good.json"
    good.write_text("what was there")
    with pytest.raises((InputError, RecipeError), match=r"good\.json"):
        SAVERS[name](model, good)
    assert good.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [good]


@given(st.binary(max_size=300))
def test_what_is_written_is_there(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("w") / "f"
    write_file(path, data)
    assert path.read_bytes() == data
    assert list(path.parent.iterdir()) == [path]


def test_links_and_permissions_stay(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("a")
    real.chmod(0o640)
    link.symlink_to(real)
    write_file(link, "b")
    assert link.is_symlink()
    assert real.read_text() == "b"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_device_is_written_to_not_replaced(tmp_path):
    write_file("/dev/null", "a")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError):  # nobody reads it
        write_file(tmp_path / "pipe", "a")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    while not read:
        try:
            write_file(tmp_path / "pipe", "x" * 200_000)  # more than a pipe holds
        except InputError:  # not yet opened
            continue
        reader.join(10)
    assert read == [b"x" * 200_000]
    with pytest.raises(InputError):
        write_file("/dev/full", "a")


@pytest.mark.parametrize("make", ["mkfifo", "mkdir", "loop"])
def test_what_is_no_file_is_not_read(tmp_path, make):
    path = tmp_path / "x"
    {"mkfifo": os.mkfifo, "mkdir": os.mkdir, "loop": lambda at: at.symlink_to(at)}[make](path)
    with pytest.raises(InputError, match="x "):
        read_text(path)
    with pytest.raises(InputError, match="x "):
        existing(path)


def test_names_that_are_none():
    for name in ("", "a\0b", "n" * 300, 7, None):
        with pytest.raises(InputError):
            local(name)


def test_a_path_that_is_no_model_is_found_before_torch_is_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("missing", "empty", "file"):
        with pytest.raises(ModelError):
            check_model_path(str(tmp_path / name))
    (tmp_path / "empty" / "config.json").write_text("{}")
    for name in (str(tmp_path / "empty"), str(tmp_path / "missing.gguf"), "smollm2-135m", "org/name"):
        check_model_path(name)
