"""Stores that somebody changed by hand: what a store reads is ours, or one sentence says that it is not."""

import json
import os
import resource
import shutil
import sqlite3
from contextlib import ExitStack, suppress

import pytest
import torch
from conftest import LLAMA, random_model
from letters import Letters

from icebear import Concept, Model, Store, annotate, build_index, describe, open_store, read_corpus
from icebear.app.cli.tables.cards import card_report
from icebear.concepts.vocabulary import calibration
from icebear.db.search import absent_words
from icebear.errors import IcebearError, InputError, StoreError
from icebear.records import AutomaticLabel, Neuron

NEURON = Neuron(1, "ffn", 3)
VALUES = ("'nope'", "'[1]'", "-7", "x'ff'")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a store with something in each table."""
    folder = tmp_path_factory.mktemp("store")
    model = Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")
    (folder / "c.txt").write_text(
        "\n".join(f"The {x} bear eats {y}." for x in "ice big old".split() for y in "abcdefgh")
    )
    with pytest.MonkeyPatch.context() as patch, open_store(folder / "i.db", create=True) as store:
        patch.setattr(calibration, "TEXTS", calibration.TEXTS[::8])
        build_index(model, read_corpus(str(folder / "c.txt")), store, k=4)
        annotate(model, store, [NEURON], 4)
        store.labels.set_manual(NEURON, "bears")
        store.labels.set_automatic([AutomaticLabel(NEURON, "+", "words", "ice", "token", 0.9, 0.001, True, {})])
        concept = Concept.of(model, "cold", {(NEURON, "+"): 1.0})
        store.concepts.set({concept.name: concept.to_dict()})
    return folder


@pytest.fixture
def path(built, tmp_path):
    """Of a copy of this store."""
    for file in built.glob("i.db*"):
        shutil.copy(file, tmp_path)
    return tmp_path / "i.db"


def card(store, model):
    described = describe(store, NEURON, model, 4)
    described.to_html(), described.to_frame(), described.to_dict(), card_report(described)


READERS = [
    card,
    lambda store, model: store.search("bear", 5),
    lambda store, model: absent_words(store, "bear"),
    lambda store, model: [store.similar(NEURON, 3, by) for by in ("writes", "reads", "examples")],
    lambda store, model: store.vocabulary(NEURON, 3),
    lambda store, model: (store.neurons.all_without_heads(), store.neurons.statistic(NEURON, "max")),
    lambda store, model: [store.labels.shown(NEURON, side) for side in "+-"],
    lambda store, model: (store.labels.manual(NEURON), store.labels.all_automatic(), store.labels.significant()),
    lambda store, model: (store.status(), store.made_with(), store.documents_phrase, store.checksum()),
    lambda store, model: [Concept.from_dict(row) for row in store.concepts.all().values()],
    lambda store, model: list(store.sentences.starting_at(0)),
]


def refusals(store, model):
    """How many of the readers refuse the store."""
    refused = 0
    for reader in READERS:
        try:
            reader(store, model)
        except IcebearError:
            refused += 1
    return refused


def changes(store):
    """Each column set to each value, and each table emptied."""
    for table in store.database.table_names():
        if not table.startswith("sentences_fts"):
            for column in store.database[table].columns:
                yield from (f'UPDATE OR REPLACE {table} SET "{column.name}" = {value}' for value in VALUES)
            yield f"DELETE FROM {table}"


def test_values_of_another_form_are_refused_in_a_sentence(model, path):
    refused = 0
    with open_store(path) as store:
        assert refusals(store, model) == 0
        for change in changes(store):
            store.database.execute("PRAGMA foreign_keys = OFF")
            store.database.execute("BEGIN")
            with suppress(sqlite3.IntegrityError):  # SQLite refuses the change
                store.database.execute(change)
            refused += refusals(store, model if "DELETE" in change else None)  # passes of the model take long
            store.database.execute("ROLLBACK")
        assert refusals(store, model) == 0
    assert refused > 200


RECORD = {
    "label": {"kind": "tokens", "items": ["ice"]},
    "thresholds": {"circular_shift": 0.6, "other_neuron": 0.7},
    "sentences": {"test": 300},
    "auroc": {"token": 0.9},
    **dict.fromkeys(["other_neuron", "train", "token_mean"], 0.5),
}


def records(record):
    """The record of a label, changed in one entry, at any depth."""
    for name, value in record.items():
        yield {key: record[key] for key in record if key != name}
        inner = value if isinstance(value, dict) else {}
        for wrong in ("nope", [1], {"a": "nope"}, {"hits": [7]}, *({**inner, key: "nope"} for key in inner)):
            yield {**record, name: wrong}


def test_records_of_labels_of_another_form_are_refused(path):
    with open_store(path) as store:

        def is_shown(record, by="token"):
            store.database.execute("UPDATE meanings SET by = ?, record = ?", (by, json.dumps(record)))
            try:
                card(store, None)
            except StoreError:
                return False
            return True

        number = next(iter(store.sentences.starting_at(0))).id
        record = {**RECORD, "examples": {"hits": [{"sentence": number, "token": 0, "value": 1.5}]}}
        assert is_shown(record)
        assert not is_shown(record, by="nope")
        assert not any(map(is_shown, (one for one in records(record) if one.get("label") == RECORD["label"])))


OBJECTS = {
    "view": "DROP TABLE w_out_norms; CREATE VIEW w_out_norms AS WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT "
    "x + 1 FROM r) SELECT x AS neuron, 0.0 AS norm FROM r",
    "one more view": "CREATE VIEW more AS SELECT 1",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON labels BEGIN DELETE FROM concepts; END",
    "other search": "DROP TABLE sentences_fts; CREATE VIRTUAL TABLE sentences_fts USING fts5(text, content=sentences)",
    "column": "ALTER TABLE labels ADD COLUMN more",
    "generated column": "ALTER TABLE neurons ADD COLUMN more AS (hex(zeroblob(1000000)))",
    "table": "DROP TABLE concepts",
    "index": "CREATE INDEX more ON labels (text)",
    "virtual table": "CREATE VIRTUAL TABLE more USING fts5(x)",
}


@pytest.mark.parametrize("change", OBJECTS)
def test_tables_that_are_not_ours_are_refused(path, change):
    with sqlite3.connect(path) as connection:
        connection.executescript("ANALYZE; PRAGMA optimize")
    with open_store(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.executescript(OBJECTS[change])
    with pytest.raises(StoreError), open_store(path):
        pass


def test_a_fact_is_read_alone_as_with_all_others(path, tmp_path):
    with open_store(path) as store:
        facts = store.facts.all()
        assert facts
        assert {name: store.facts.find(name) for name in facts} == facts
        assert store.facts.find("no such fact") is None
    with open_store(tmp_path / "new.db", create=True) as store:
        assert store.facts.find("model") is None
        assert not (tmp_path / "new.db").exists()


def test_a_store_that_is_closed_and_arguments_that_are_no_names(path):
    store = Store(path)
    for wrong in ([], None, 5):
        with pytest.raises(InputError):
            store.concepts.get(wrong)
    for wrong in ([], 5):
        with pytest.raises(InputError):
            store.examples(NEURON, method=wrong)
    store.close()
    for read in (lambda: store.examples(NEURON), lambda: store.facts.all(), store.status, lambda: store.search("bear")):
        with pytest.raises(StoreError):
            read()


def test_too_many_open_files_are_named(path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 512), limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull))
        with pytest.raises(StoreError, match="open"), open_store(path):
            pass


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC])
def test_a_full_quota_is_no_damage(path, code):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    with open_store(path) as store:
        explained = str(store.explain(error))
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        assert explained != str(store.explain(error))
    assert "full" in explained
