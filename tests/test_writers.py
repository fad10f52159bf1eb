"""Every file that the product writes goes through `icebear.paths`, which keeps the old file until the new one is whole;
two processes at once lose nothing."""

import ast
import os
import random
import resource
import time
from contextlib import contextmanager
from functools import cache
from itertools import count

import pytest
import torch
from conftest import LLAMA, random_model, started_alone
from test_house import ROOMS, ROOT, room_files

from icebear import Recipe, VectorEdit, open_store
from icebear.app.session import Session
from icebear.claims.claim import Claim
from icebear.claims.claims_files import append_claims, read_claims, write_claims
from icebear.claims.kinds.predictions import AnswerClaim
from icebear.errors import IcebearError, InputError
from icebear.evaluation import report, runner
from icebear.evaluation.protocol import Evaluation, Part
from icebear.paths import locked, write_file, written
from icebear.steering.control_vector import save_control_vector

# --- who writes ---

WRITERS = """
write_text write_bytes touch save_file savefig tofile savetxt savez dump save_pretrained extractall write_index copy2
copyfile copyfileobj copytree rename replace truncate mkstemp NamedTemporaryFile TemporaryFile fdopen GGUFWriter
FileLock symlink_to hardlink_to savez_compressed to_csv to_parquet to_excel to_pickle to_feather to_file save_image
""".split()
"""Names of functions that make, change or move a file."""
MODULES = frozenset(("os", "shutil", "torch", "np", "numpy", "faiss", "json", "pickle", "yaml"))
ALLOWED = {
    "icebear/paths.py written": "the writer of all files",
    "icebear/paths.py write_file": "to the path of `written`",
    "icebear/paths.py new_folder": "a folder that is renamed when it is whole",
    "icebear/paths.py append": "samples and digests: cut back if they do not fit",
    "icebear/paths.py locked": "the lock",
    "icebear/__main__.py _opened": "/dev/null in the place of a stream that is closed",
    "icebear/cache.py ensure": "a folder that is renamed when it is whole, under a lock",
    "icebear/cache.py extract_from_wheels": "inside such a folder",
    "icebear/cache.py _write": "a manifest that is renamed; a broken one only costs hashing",
    "steering/control_vector.py save_control_vector": "torch, to the path of `written`",
    "steering/control_vector.py _write": "the temporary file of `written`, which is read back before it is renamed",
    "models/loading/conversion.py from_gguf": "inside such a folder",
    "models/loading/conversion.py make": "inside such a folder",
    "models/loading/onnx_files.py from_dinov2_onnx": "inside such a folder",
    "models/loading/conversion.py as_they_are": "inside such a folder",
    "actmax/index/corpus.py make": "inside such a folder",
    "evaluation/runner.py finished": "cuts a last line off that was only partly written",
    "db/sqlite.py rows": "asks whether the folder can be written; the file has no name",
    "actmax/atlas/saved_map.py save_map": "numpy, to the path of `written`",
    "db/vectors.py save": "faiss, to the path of `written`",
    "app/cli/main.py _unwritable": "/dev/null in the place of a stdout that nobody reads",
}
"""The functions of the product that write, and why they may."""


def is_writer(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    module = getattr(getattr(call.func, "value", None), "id", "")
    words = [*call.args, *(word.value for word in call.keywords)]
    texts = {word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)}
    if name == "open":
        flags = " ".join(map(ast.unparse, words))
        return any(set(text) <= set("rwxabt+") and set(text) & set("wxa+") for text in texts) or "O_" in flags
    if name.startswith("to_") or name == "dump":  # a text, unless it is given where to
        return name in WRITERS and bool(call.args)
    if name in ("replace", "rename", "save"):  # of texts, frames and records, too
        return module in MODULES or (name == "rename" and len(call.args) == 1 and not call.keywords)
    return name in WRITERS


def writers():
    """Yield file and innermost function of each call that writes."""

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and is_writer(node):
            yield function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    for room in ROOMS:
        for path in sorted(room_files(room)):
            for function in visit(ast.parse(path.read_text()), ""):
                yield f"{path.relative_to(ROOT)} {function}"


def test_every_writer_is_known():
    assert set(writers()) == set(ALLOWED)


@pytest.mark.parametrize(
    "line",
    [
        "open(p, 'w')",
        "p.open('ab')",
        "open(p, mode='x')",
        "os.open(p, os.O_WRONLY)",
        "p.write_text(t)",
        "frame.to_csv(p)",
        "figure.savefig(p)",
        "np.save(p, x)",
        "torch.save(x, p)",
        "os.replace(a, b)",
        "p.rename(q)",
        "save_file(w, p)",
        "json.dump(x, file)",
    ],
)
def test_a_line_that_writes_is_seen(line):
    assert is_writer(ast.parse(line).body[0].value)


@pytest.mark.parametrize("line", ["open(p)", "p.open('rb')", "t.replace('w', 'a')", "frame.to_csv(index=False)"])
def test_a_line_that_only_reads_is_not(line):
    assert not is_writer(ast.parse(line).body[0].value)


# --- a full disk ---


@contextmanager
def largest_file(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


CLAIM = Claim(AnswerClaim("a" * 3000, "b"), 0.5, 0.5)


@cache
def recipe():
    model = random_model(LLAMA, dtype=torch.float32)
    edits = [f"L{layer}.ffn.{number}+0.5" for layer in (1, 2) for number in range(20)]
    return model, Recipe("a recipe", tuple(edits), model.name, model.fingerprint)


def _control_vector(path):
    model, _ = recipe()
    save_control_vector(model, Recipe.for_model(model, "v", [VectorEdit(1, [0.5] * model.config.hidden_size)]), path)


def _report(path):
    samples = [{"methods": {"m": {"x": 1.0}}}] * 40
    report.write(path.parent, report.Results({"evaluation": "e", "methods": {"m": ""}}, {"x": ""}, [], {}, samples))


def _vectors(path):
    with open_store(path.with_name("s.db"), create=True) as store:
        store.vectors.save("tokens", [torch.ones(9999, 24).numpy()])


WRITES = {
    "v.gguf": _control_vector,
    "c.yaml": lambda path: write_claims(path, [CLAIM]),
    "r.json": lambda path: recipe()[1].noting(note="x" * 3000).save(path, overwrite=True),
    "results.json": _report,
    "s.db.tokens.faiss": _vectors,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_file_that_lacks_room_for_its_last_byte_leaves_the_old_one(name, tmp_path):
    old, complete = tmp_path / "old" / name, tmp_path / "complete" / name
    for path in (old, complete):
        path.parent.mkdir()
        WRITES[name](path)  # in both, because it may write more than one file
    old.write_text("what was there")
    before = set(old.parent.iterdir())
    with largest_file(complete.stat().st_size - 1), pytest.raises(IcebearError):
        WRITES[name](old)
    assert old.read_text() == "what was there"
    assert set(old.parent.iterdir()) == before


def test_claims_that_lack_room_leave_the_others(tmp_path):
    path = tmp_path / "c.yaml"
    write_claims(path, [CLAIM])
    before = path.read_bytes()
    with largest_file(len(before) + 99), pytest.raises(InputError):
        append_claims(path, [CLAIM])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_samples_that_lack_room_are_measured_again(tmp_path):
    part = Part({}, range(9), lambda number: {"text": f"{number}" * 500})
    lines = runner.resume(tmp_path / "complete", {}, part)
    complete = (tmp_path / "complete" / "samples.jsonl").read_bytes()
    with largest_file(len(complete) - 1), pytest.raises(InputError):
        runner.resume(tmp_path / "full", {}, part)
    rows = (tmp_path / "full" / "samples.jsonl").read_bytes()
    assert rows == b"".join(complete.splitlines(keepends=True)[:8])
    assert runner.resume(tmp_path / "full", {}, part) == lines
    assert (tmp_path / "full" / "samples.jsonl").read_bytes() == complete


def test_a_name_that_is_no_utf8_is_a_name(tmp_path):
    write_file(tmp_path / "a\udcff", "1")
    assert (tmp_path / "a\udcff").read_text() == "1"


def test_a_new_file_replaces_none(tmp_path):
    session = Session("m", folder=tmp_path)
    session.write("a.json", "1")
    with pytest.raises(InputError):
        session.write("a.json", "2")
    with largest_file(10), pytest.raises(InputError):
        session.write("b.json", "x" * 11)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "1")]


def test_an_exception_while_a_file_is_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "a"
    path.write_text("what was there")
    with pytest.raises(KeyboardInterrupt), written(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_of_a_killed_process_goes_with_the_next_write(tmp_path):
    """Not before an hour: another process may be writing it."""
    with pytest.raises(KeyboardInterrupt), written(tmp_path / "a") as part:
        name = part.name
        raise KeyboardInterrupt
    (tmp_path / name).write_text("half")
    write_file(tmp_path / "a", "1")
    assert {path.name for path in tmp_path.iterdir()} == {"a", name}
    os.utime(tmp_path / name, (0, 0))
    write_file(tmp_path / "b", "1")
    assert (tmp_path / name).exists()  # of another file
    write_file(tmp_path / "a", "1")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


# --- killed ---


def writing(folder, started):
    started.set()
    for number in count():
        write_file(folder / "a", str(number % 10) * 500_000)
        append_claims(folder / "c.yaml", [Claim(AnswerClaim(str(number), "b"), 0.5, 0.5)])


def test_a_killed_process_leaves_complete_files(tmp_path):
    """And no claim that was there is lost; the lock of a killed process keeps nobody out."""
    generator, before = random.Random(0), 0
    for _ in range(3):
        process = started_alone(writing, tmp_path)
        time.sleep(generator.uniform(0.1, 0.5))
        process.kill()
        process.join()
        text = (tmp_path / "a").read_text()
        assert text == text[0] * 500_000
        claims = len(read_claims(tmp_path / "c.yaml")) if (tmp_path / "c.yaml").exists() else 0
        assert claims >= before
        before = claims
    assert before
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"a", "c.yaml"}


# --- two processes at once ---


def appending(path, name, started):
    started.set()
    while not path.with_name("go").exists():  # both at once
        time.sleep(0.001)
    for number in range(6):
        append_claims(path, [Claim(AnswerClaim(f"{name} {number}", "b"), 0.5, 0.5)])


def test_two_processes_that_append_claims_lose_none(tmp_path):
    path = tmp_path / "c.yaml"
    processes = [started_alone(appending, path, name) for name in ("left", "right")]
    path.with_name("go").touch()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    prompts = [claim.what.prompt for claim in read_claims(path)]
    assert sorted(prompts) == sorted(f"{name} {number}" for name in ("left", "right") for number in range(6))
    assert {path.name for path in tmp_path.iterdir()} == {"c.yaml", "go"}


def holding(path, started):
    with locked(path):
        started.set()
        time.sleep(60)


class Counting(Evaluation):
    """Its samples are numbers."""

    name = "counting"

    def parts(self, model):
        yield Part({"x": ""}, range(3), lambda number: {"methods": {"m": {"x": float(number)}}}, methods={"m": ""})


def test_a_folder_has_one_evaluation_at_a_time(tmp_path):
    """Also after the other one was killed."""
    process = started_alone(holding, tmp_path)
    try:
        with pytest.raises(InputError, match="Another process"):
            list(runner.run(Counting(), None, tmp_path))
    finally:
        process.kill()
        process.join()
    (part,) = runner.run(Counting(), None, tmp_path)
    assert len(part.tables[""].samples) == 3
    assert not (tmp_path / ".lock").exists()


def test_a_sample_that_two_runs_measured_counts_once(tmp_path):
    part = Part({}, range(4), lambda number: {"x": number})
    lines = runner.resume(tmp_path, {}, part)
    path = tmp_path / "samples.jsonl"
    first, second, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, first, second, second, *rest[:-1]]))
    assert runner.resume(tmp_path, {}, part) == lines
    path.write_text(first.replace(": 0", ": 4"))  # a sample that there is not
    with pytest.raises(InputError):
        runner.resume(tmp_path, {}, part)


# --- twice ---


def test_an_evaluation_writes_the_same_bytes_twice(tmp_path):
    for name in ("a", "b"):
        list(runner.run(Counting(), None, tmp_path / name))
        time.sleep(1.1)  # the date has seconds
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
