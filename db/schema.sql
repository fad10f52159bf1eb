-- The tables of a store, and views with readable ids (L29.ffn.860).

-- Facts of the index: model, corpus, k, ... The value is JSON.
CREATE TABLE icebear (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

-- The shards of the corpus that were scanned.
CREATE TABLE shards (
    number INTEGER PRIMARY KEY,
    sentences INTEGER NOT NULL
);

-- The running summary of a scan that is unfinished or may continue to a larger limit, as safetensors.
CREATE TABLE progress (
    part TEXT PRIMARY KEY,
    packed BLOB NOT NULL
);

-- start and end are offsets in the document; tokens is JSON. The table sentences_fts has their terms
-- (db/terms.py), for full-text search.
CREATE TABLE sentences (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL,
    title TEXT NOT NULL,
    "start" INTEGER NOT NULL,
    "end" INTEGER NOT NULL,
    tokens TEXT NOT NULL
);

-- The vector of each sentence (actmax/index/scan.py), as float16, little-endian.
CREATE TABLE sentence_vectors (
    sentence INTEGER PRIMARY KEY REFERENCES sentences,
    vector BLOB NOT NULL
);

-- The vector of each example by a sentence encoder (actmax/index/example_embedding.py), as float16, little-endian.
CREATE TABLE embeddings (
    sentence INTEGER PRIMARY KEY REFERENCES sentences,
    encoder TEXT NOT NULL,
    vector BLOB NOT NULL
);

-- Statistics of the activations of each neuron (actmax/index/activation_statistics.py).
CREATE TABLE neurons (
    id INTEGER PRIMARY KEY,
    layer INTEGER NOT NULL,
    site TEXT NOT NULL,
    idx INTEGER NOT NULL,
    mean REAL NOT NULL,
    std REAL NOT NULL,
    min REAL NOT NULL,
    max REAL NOT NULL,
    positive REAL NOT NULL,
    histogram TEXT NOT NULL,
    UNIQUE (layer, site, idx)
);

-- Polarity 0 is +, 1 is -. token is a position.
CREATE TABLE examples (
    neuron INTEGER NOT NULL REFERENCES neurons,
    polarity INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    sentence INTEGER NOT NULL REFERENCES sentences,
    token INTEGER NOT NULL,
    activation REAL NOT NULL,
    PRIMARY KEY (neuron, polarity, rank)
) WITHOUT ROWID;

-- The relevance of each token of an example, and its conservation, as JSON.
CREATE TABLE attributions (
    neuron INTEGER NOT NULL REFERENCES neurons,
    polarity INTEGER NOT NULL,
    sentence INTEGER NOT NULL REFERENCES sentences,
    method TEXT NOT NULL,
    relevance TEXT NOT NULL,
    PRIMARY KEY (neuron, polarity, sentence, method)
) WITHOUT ROWID;

-- The norm of the W_out row times the gain of the final norm.
CREATE TABLE w_out_norms (
    neuron INTEGER PRIMARY KEY REFERENCES neurons,
    norm REAL NOT NULL
);

-- The digest of each vector index next to the store (db/vectors.py).
CREATE TABLE vectors (
    name TEXT PRIMARY KEY,
    identity TEXT NOT NULL
);

-- The null of a vector index: mean and standard deviation of each row's cosines with random directions, as float32.
CREATE TABLE vectors_null (
    name TEXT PRIMARY KEY,
    mean BLOB NOT NULL,
    std BLOB NOT NULL
);

-- The vocabulary of the model.
CREATE TABLE tokens (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL
);

CREATE INDEX token_texts ON tokens (text);

-- Labels that people wrote, with their scores as JSON, if they were scored.
CREATE TABLE labels (
    neuron INTEGER PRIMARY KEY REFERENCES neurons,
    text TEXT NOT NULL,
    scores TEXT NOT NULL
);

-- Automatic labels of neurons and heads (actmax/labels/). by is token, sentence or pattern; record has all scores, as JSON.
CREATE TABLE meanings (
    layer INTEGER NOT NULL,
    site TEXT NOT NULL,
    idx INTEGER NOT NULL,
    polarity INTEGER NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,
    by TEXT NOT NULL,
    score REAL NOT NULL,
    p REAL NOT NULL,
    significant INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (layer, site, idx, polarity)
) WITHOUT ROWID;

-- Nulls and controls, measured once, as JSON.
CREATE TABLE controls (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

-- Concepts (steering/concept/concept.py), as JSON.
CREATE TABLE concepts (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE VIEW neuron_names AS
    SELECT 'L' || layer || '.' || site || '.' || idx AS name, *
    FROM neurons;

CREATE VIEW example_texts AS
    SELECT name, CASE polarity WHEN 0 THEN '+' ELSE '-' END AS sign, rank, activation, token, text, title
    FROM examples
    JOIN neuron_names ON neuron = neuron_names.id
    JOIN sentences ON sentence = sentences.id;
