"""Corpora: files of every kind, and text that is no text."""

import collections
import gzip
import itertools
import json
import os
import random
import re
import tracemalloc

import datasets
import pytest
import sentencex
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from icebear import build_index, open_store, read_corpus
from icebear.actmax.index import corpus as actmax_corpus
from icebear.actmax.index.corpus import sentence_id
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.app.cli.progress import indexing
from icebear.errors import InputError


def test_files_of_every_kind(tmp_path):
    import pandas

    rows = [{"text": "One. Two is here.", "title": "T"}, {"text": "Dr. Who came \U0001f43b.", "title": "U"}]
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv")
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = {
        s: [(x.text, x.title) for x in read_corpus(str(tmp_path / f"a.{s}")).sentences()]
        for s in ("csv", "parquet", "jsonl")
    }
    assert read["csv"] == read["parquet"] == read["jsonl"]
    assert ("Two is here.", "T") in read["csv"]
    for sentence in read_corpus(str(tmp_path / "a.jsonl")).sentences():
        document = next(row["text"] for row in rows if row["title"] == sentence.title)
        assert document[sentence.start : sentence.end] == sentence.text
        assert sentence.id == sentence_id(sentence.text)


def test_paths_as_people_write_them(tmp_path, monkeypatch):
    """At home, in capitals, compressed: the same documents."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    texts = ["One is here. Two is here.", "Three came late."]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    written = {
        "A.TXT": "\n".join(texts),
        "A.JSONL": lines,
        "A.JSON": json.dumps(texts),
        "b.json": json.dumps([{"text": t} for t in texts]),
        "A.CSV": "text\n" + "\n".join(texts),
    }
    for name, content in written.items():
        (tmp_path / name).write_text(content)
        (tmp_path / f"{name}.GZ").write_bytes(gzip.compress(content.encode()))
    for name in written:
        for spelled in (str(tmp_path / name), f"~/{name}", f"~/{name}.GZ"):
            corpus = read_corpus(spelled)
            assert [text for _, text in corpus.documents()] == texts
            assert corpus.facts["corpus"].startswith(str(tmp_path))  # the same index, however it is written
    for name, content, message in (
        ("notes.md", b"Text.", "notes.md"),
        ("cut.txt.gz", gzip.compress(b"Text. " * 99, mtime=0)[:-9], "cut.txt.gz"),
        ("no.txt.gz", b"Text.", "no.txt.gz"),
        ("object.json", b'{"a": 1}', "object.json"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=re.escape(message)):
            list(read_corpus(f"~/{name}").documents())


def test_rough_text_is_counted_never_fatal(tmp_path):
    path = tmp_path / "rough.txt"
    path.write_bytes(b"\xef\xbb\xbfFine here.\n\nHalf a pair.\nFine here.\n" + b"word " * 100_000 + b"\n")
    counts = collections.Counter()
    texts = [s.text for s in read_corpus(str(path)).sentences(counts)]
    assert texts[0] == "Fine here."
    assert len(texts) == 2
    assert counts["duplicates"] == 1
    assert counts["too long"] == 1
    for bad, message in (("none.txt", r"none\.txt"), ("x.jsonl", r"x\.jsonl"), ("y.jsonl", "'text'")):
        if bad[0] != "n":
            (tmp_path / bad).write_text("{" if bad[0] == "x" else '{"a": 1}')
        with pytest.raises(InputError, match=message):
            list(read_corpus(str(tmp_path / bad)).sentences())
    with pytest.raises(InputError, match="not 0"):
        read_corpus(str(path), limit=0)


def test_rows_without_text_are_counted(tmp_path):
    rows = [{"text": None}, {"text": "Here it is."}, {"text": "Half a \ud800pair."}]
    (tmp_path / "n.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "n.csv").write_text("title,text\nT,Here it is.\nU\n")
    counts = collections.Counter()
    texts = [s.text for s in read_corpus(str(tmp_path / "n.jsonl")).sentences(counts)]
    assert texts == ["Here it is.", "Half a ?pair."]
    assert counts["without text"] == 1
    assert [s.text for s in read_corpus(str(tmp_path / "n.csv")).sentences()] == ["Here it is."]
    french, english = (read_corpus(str(tmp_path / "n.csv"), language=code) for code in ("fr", "en"))
    assert french.facts != english.facts


@pytest.fixture
def hub(monkeypatch):
    """A data set without an end in the place of Hugging Face's hub; what was asked of it, and how many rows it gave."""
    request, arguments = [], []

    def rows():
        for number in itertools.count():
            arguments.append(number)
            yield {"text": f"Row {'abcdefghij'[number % 10]} of the ice. It is cold."}

    def load_dataset(name, config=None, *, split, revision=None, streaming):
        request.append((name, config, split, revision))
        assert streaming
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(actmax_corpus, "hub_reachable", lambda: True)
    return request, arguments


PROSE = "Der Eisbär lebt im Norden, „weit“ oben. Он живёт на льду.\n" * 20


@pytest.mark.parametrize(
    ("encoding", "output"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
        ("cp1252", "CP1252"),
        ("latin-1", "CP1252"),  # the same but for signs that a text does not have
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_another_encoding_is_named(tmp_path, encoding, output, packed):
    """And with it the file is read."""
    data = (PROSE if "utf" in encoding else "Der Eisbär lebt dort.\n").encode(encoding)
    path = tmp_path / ("t.txt.gz" if packed else "t.txt")
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(InputError, match=f"iconv -f {output} ") as caught:
        read_corpus(str(path))
    right = data.decode(re.search(r"iconv -f (\S+)", str(caught.value))[1])
    (tmp_path / "right.txt").write_text(right, encoding="utf-8")
    assert "".join(text for _, text in read_corpus(str(tmp_path / "right.txt")).documents()) in right.replace("\n", "")


@given(st.binary(min_size=200, max_size=400))
def test_bytes_are_a_text_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "b.txt"
    path.write_bytes(data)
    try:
        right = "\0" not in data.decode()
    except UnicodeDecodeError:
        right = False
    if right:
        assert sum(len(text) for _, text in read_corpus(str(path)).documents())
    else:
        with pytest.raises(InputError, match=r"b\.txt"):
            read_corpus(str(path))


def test_what_is_no_corpus_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(actmax_corpus, "hub_reachable", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", None)
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    for name in ("loop.txt", "loop", "pipe.txt", "folder.txt", "none.txt"):
        with pytest.raises(InputError, match=name):
            read_corpus(str(tmp_path / name))
    for name, why in (
        ("no/set", r"\bhub\b"),
        ("no set", r"\bid\b"),
        ("a/b/c", r"\bid\b"),
        ("n" * 200, r"\bid\b"),
    ):
        with pytest.raises(InputError, match=why):
            read_corpus(name)


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_json_that_is_nested_without_end(tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(InputError, match=name):
        list(read_corpus(str(tmp_path / name)).documents())


def test_a_damaged_parquet_file_is_said_once(tmp_path, capfd):
    (tmp_path / "n.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"n\.parquet"):
        list(read_corpus(str(tmp_path / "n.parquet")).documents())
    assert capfd.readouterr() == ("", "")


def test_a_streamed_data_set_is_read_once(model, hub, tmp_path):
    request, arguments = hub
    for _ in range(2):
        indexing(model, read_corpus("a/set", limit=7), str(tmp_path / "s.db"), None)
        assert request == [("a/set", None, "train", None)]
        assert len(arguments) == 7
    with open_store(tmp_path / "s.db") as store:
        assert store.count("sentences") == 8


def test_configuration_split_and_revision_of_a_data_set(model, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(ModelOptions, "load", lambda self, name=None: model)
    command = ["index", "--corpus", "a/set", "--limit", "3", "--store", str(tmp_path / "s.db")]
    named = ["--subset", "20231101.en", "--split", "test", "--revision", "v1"]
    done = CliRunner().invoke(main, [*command, *named])
    assert done.exit_code == 0, done.output
    assert hub[0][-1] == ("a/set", "20231101.en", "test", "v1")
    other = CliRunner().invoke(main, [*command, *named[:2]])
    assert "was built with split 'test', not None" in other.stderr
    with pytest.raises(InputError, match="wiki-summaries"):
        read_corpus("wiki-summaries", split="test")


@pytest.mark.release
def test_duplicates_are_found_in_little_room(monkeypatch, tmp_path):
    """As a set finds them, in less than half of its room."""
    monkeypatch.setattr(sentencex, "segment", lambda language, text: [text])
    seed = random.Random(0)
    path = tmp_path / "many.txt"
    path.write_text("\n".join(str(seed.randrange(40_000)) for _ in range(60_000)))
    expected = set(path.read_text().split())
    result = read_corpus(str(path)).sentences()
    tracemalloc.start()
    count = sum(1 for _ in result)
    room = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(expected)
    assert room < 40 * count


@pytest.mark.parametrize("value", [5, [1], {"a": "b"}, True])
def test_a_column_that_is_no_text_is_refused_and_leaves_no_store(model, tmp_path, value):
    path = tmp_path / "n.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("The ice bear.", None, value)))
    with pytest.raises(InputError, match="text"), open_store(tmp_path / "n.db", create=True) as store:
        build_index(model, read_corpus(str(path)), store)
    assert not (tmp_path / "n.db").exists()
    path.write_text('{"text": "a"}')
    with pytest.raises(InputError, match="one token"), open_store(tmp_path / "n.db", create=True) as store:
        build_index(model, read_corpus(str(path)), store)
    assert not (tmp_path / "n.db").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a" * 2001, "2000 characters (1 are longer)"),
        ("a" * 2001 + "\n" + "b" * 2002, "(2 are longer)"),
        ("\n\n", "empty"),
    ],
    ids=["too long", "two too long", "empty"],
)
def test_an_index_of_no_sentences_says_what_was_left_out(tmp_path, model, text, reason):
    (tmp_path / "a.txt").write_text(text)
    with open_store(tmp_path / "a.db", create=True) as store, pytest.raises(InputError, match=re.escape(reason)):
        build_index(model, read_corpus(str(tmp_path / "a.txt")), store, k=2)
