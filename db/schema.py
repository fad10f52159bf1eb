"""The tables of a store.

    icebear     key, value: what the index was made of (model, corpus, k, ...), as JSON
    shards      the parts of the corpus that were scanned
    progress    the running summary of a scan that is unfinished or may go on to a larger limit, packed
    sentences   id, text, title, start, end (offsets in the document), tokens (as the model splits it, JSON), with
                full-text search in sentences_fts
    sentence_vectors  sentence, vector: what the model made of it, float16 (see actmax/index/scan.py)
    neurons     id, layer, site, idx, and statistics over the corpus (see actmax/index/activation_statistics.py)
    examples    neuron, polarity (0 is +, 1 is -), rank, sentence, token (position), activation (or relevance)
    classes     neuron, polarity, class: dead, token detector, positional, other (see actmax/index/classes.py)
    vectors     name, identity: of each file of vectors beside the store (see db/vectors.py)
    w2_norms    neuron, norm: of its W2 row, times the final norm's gain
    attributions  neuron, polarity, sentence, method, token relevances as JSON
    labels      neuron, text: what people called it; scores: how well that holds, if it was measured, JSON
    meanings    layer, site, idx (of a neuron or a head), polarity, kind and text of the automatic label, by (token or
                sentence), score, p, clear, record: all that was measured, JSON (see actmax/labels/)
    controls    name, record: what chance gives, measured once, JSON
    concepts    name, record: how it was found, JSON
    concept_parts  concept, layer, site, idx, polarity, weight, mean, std, furthest (see steering/concept/concept.py)
    tokens      id, text: the model's vocabulary

The views neuron_names and example_texts show them with readable ids.
"""

from __future__ import annotations

from sqlite_utils import Database

VERSION = 7
"""Of the tables; a store of another version is built anew."""

EXAMPLES_BY_SENTENCE = "CREATE INDEX examples_by_sentence ON examples (sentence)"

SCHEMA = (
    "CREATE TABLE icebear (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE shards (number INTEGER PRIMARY KEY, sentences INTEGER NOT NULL)",
    "CREATE TABLE progress (part TEXT PRIMARY KEY, packed BLOB NOT NULL)",
    "CREATE TABLE sentences (id INTEGER PRIMARY KEY, text TEXT NOT NULL, title TEXT NOT NULL, "
    '"start" INTEGER NOT NULL, "end" INTEGER NOT NULL, tokens TEXT NOT NULL)',
    # float16 numbers of the machine that wrote them (little-endian everywhere that runs PyTorch)
    "CREATE TABLE sentence_vectors (sentence INTEGER PRIMARY KEY REFERENCES sentences, vector BLOB NOT NULL)",
    "CREATE TABLE neurons (id INTEGER PRIMARY KEY, layer INTEGER NOT NULL, site TEXT NOT NULL, "
    "idx INTEGER NOT NULL, mean REAL NOT NULL, std REAL NOT NULL, min REAL NOT NULL, "
    "max REAL NOT NULL, positive REAL NOT NULL, histogram TEXT NOT NULL, UNIQUE (layer, site, idx))",
    "CREATE TABLE examples (neuron INTEGER NOT NULL REFERENCES neurons, polarity INTEGER NOT NULL, "
    "rank INTEGER NOT NULL, sentence INTEGER NOT NULL REFERENCES sentences, token INTEGER NOT NULL, "
    "activation REAL NOT NULL, PRIMARY KEY (neuron, polarity, rank)) WITHOUT ROWID",
    EXAMPLES_BY_SENTENCE,
    "CREATE TABLE attributions (neuron INTEGER NOT NULL REFERENCES neurons, polarity INTEGER NOT NULL, "
    "sentence INTEGER NOT NULL REFERENCES sentences, method TEXT NOT NULL, relevance TEXT NOT NULL, "
    "PRIMARY KEY (neuron, polarity, sentence, method)) WITHOUT ROWID",
    "CREATE TABLE classes (neuron INTEGER NOT NULL REFERENCES neurons, polarity INTEGER NOT NULL, "
    "class TEXT NOT NULL, PRIMARY KEY (neuron, polarity)) WITHOUT ROWID",
    "CREATE TABLE w2_norms (neuron INTEGER PRIMARY KEY REFERENCES neurons, norm REAL NOT NULL)",
    "CREATE TABLE vectors (name TEXT PRIMARY KEY, identity TEXT NOT NULL)",
    "CREATE TABLE tokens (id INTEGER PRIMARY KEY, text TEXT NOT NULL)",
    "CREATE INDEX token_texts ON tokens (text)",
    "CREATE TABLE labels (neuron INTEGER PRIMARY KEY REFERENCES neurons, text TEXT NOT NULL, scores TEXT NOT NULL)",
    "CREATE TABLE meanings (layer INTEGER NOT NULL, site TEXT NOT NULL, idx INTEGER NOT NULL, "
    "polarity INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, by TEXT NOT NULL, score REAL NOT NULL, "
    "p REAL NOT NULL, clear INTEGER NOT NULL, record TEXT NOT NULL, "
    "PRIMARY KEY (layer, site, idx, polarity)) WITHOUT ROWID",
    "CREATE TABLE controls (name TEXT PRIMARY KEY, record TEXT NOT NULL)",
    "CREATE TABLE concepts (name TEXT PRIMARY KEY, record TEXT NOT NULL)",
    "CREATE TABLE concept_parts (concept TEXT NOT NULL REFERENCES concepts, layer INTEGER NOT NULL, "
    "site TEXT NOT NULL, idx INTEGER NOT NULL, polarity INTEGER NOT NULL, weight REAL NOT NULL, "
    "mean REAL NOT NULL, std REAL NOT NULL, furthest REAL NOT NULL, "
    "PRIMARY KEY (concept, layer, site, idx)) WITHOUT ROWID",
    "CREATE VIEW neuron_names AS SELECT 'L' || layer || '.' || site || '.' || idx AS name, * FROM neurons",
    "CREATE VIEW example_texts AS SELECT name, CASE polarity WHEN 0 THEN '+' ELSE '-' END AS sign, rank, "
    "activation, token, text, title FROM examples JOIN neuron_names ON neuron = neuron_names.id "
    "JOIN sentences ON sentence = sentences.id",
)


def create(database: Database) -> None:
    """The tables, in a file that has none."""
    for statement in SCHEMA:
        database.execute(statement)
    database["sentences"].enable_fts(["text"], create_triggers=True)  # type: ignore[union-attr]
    database.execute(f"PRAGMA user_version = {VERSION}")
