"""Corpora: files of every kind, and text that is no text."""

import collections
import json

import pytest

from actmax import read_corpus
from actmax.corpus import sentence_id
from db.errors import InputError


def test_files_of_every_kind(tmp_path):
    import pandas

    rows = [{"text": "One. Two is here.", "title": "T"}, {"text": "Dr. Who came \U0001f43b.", "title": "U"}]
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv")
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = {s: [(x.text, x.title) for x in read_corpus(str(tmp_path / f"a.{s}")).sentences()] for s in
            ("csv", "parquet", "jsonl")}  # fmt: skip
    assert read["csv"] == read["parquet"] == read["jsonl"]
    assert ("Two is here.", "T") in read["csv"]
    for sentence in read_corpus(str(tmp_path / "a.jsonl")).sentences():
        document = next(row["text"] for row in rows if row["title"] == sentence.title)
        assert document[sentence.start : sentence.end] == sentence.text
        assert sentence.id == sentence_id(sentence.text)


def test_rough_text_is_counted_never_fatal(tmp_path):
    path = tmp_path / "rough.txt"
    path.write_bytes(b"Fine here.\n\n\xff\xfe broken \xc3 bytes.\nFine here.\n" + b"word " * 100_000 + b"\n")
    counts = collections.Counter()
    texts = [s.text for s in read_corpus(str(path)).sentences(counts)]
    assert texts[0] == "Fine here."
    assert len(texts) == 2
    assert counts["duplicates"] == 1
    assert counts["too long"] == 1
    for bad, message in (("none.txt", "no file"), ("x.jsonl", "not JSON"), ("y.jsonl", "no text column")):
        if bad[0] != "n":
            (tmp_path / bad).write_text("{" if bad[0] == "x" else '{"a": 1}')
        with pytest.raises(InputError, match=message):
            list(read_corpus(str(tmp_path / bad)).sentences())
    with pytest.raises(InputError, match="at least 1 document"):
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
    (tmp_path / "n.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"n\.parquet cannot be read on"):
        list(read_corpus(str(tmp_path / "n.parquet")).sentences())
    french, english = (read_corpus(str(tmp_path / "n.csv"), language=code) for code in ("fr", "en"))
    assert french.fingerprint != english.fingerprint
