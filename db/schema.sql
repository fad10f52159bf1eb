-- The tables of a store, and views that show them with readable ids (L29.ffn.860).

-- what the index was made of (model, corpus, k, ...); value: JSON
CREATE TABLE icebear (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

-- the parts of the corpus that were scanned
CREATE TABLE shards (
    number INTEGER PRIMARY KEY,
    sentences INTEGER NOT NULL
);

-- the running summary of a scan that is unfinished or may go on to a larger limit, packed
CREATE TABLE progress (
    part TEXT PRIMARY KEY,
    packed BLOB NOT NULL
);

-- start and end: offsets in the document; tokens: as the model splits the text, JSON; full-text search: sentences_fts
CREATE TABLE sentences (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL,
    title TEXT NOT NULL,
    "start" INTEGER NOT NULL,
    "end" INTEGER NOT NULL,
    tokens TEXT NOT NULL
);

-- the model's vector of the sentence (see actmax/index/scan.py): float16, little-endian
CREATE TABLE sentence_vectors (
    sentence INTEGER PRIMARY KEY REFERENCES sentences,
    vector BLOB NOT NULL
);

-- statistics of each neuron over the corpus (see actmax/index/activation_statistics.py)
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

-- polarity 0 is +, 1 is -; token: position; activation: of an index by relevance, the relevance
CREATE TABLE examples (
    neuron INTEGER NOT NULL REFERENCES neurons,
    polarity INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    sentence INTEGER NOT NULL REFERENCES sentences,
    token INTEGER NOT NULL,
    activation REAL NOT NULL,
    PRIMARY KEY (neuron, polarity, rank)
) WITHOUT ROWID;

-- relevance: of the tokens of an example, with its conservation, JSON
CREATE TABLE attributions (
    neuron INTEGER NOT NULL REFERENCES neurons,
    polarity INTEGER NOT NULL,
    sentence INTEGER NOT NULL REFERENCES sentences,
    method TEXT NOT NULL,
    relevance TEXT NOT NULL,
    PRIMARY KEY (neuron, polarity, sentence, method)
) WITHOUT ROWID;

-- dead, token detector, positional, other (see actmax/index/classes.py)
CREATE TABLE classes (
    neuron INTEGER NOT NULL REFERENCES neurons,
    polarity INTEGER NOT NULL,
    class TEXT NOT NULL,
    PRIMARY KEY (neuron, polarity)
) WITHOUT ROWID;

-- the norm of the neuron's W_out row, times the final norm's gain
CREATE TABLE w_out_norms (
    neuron INTEGER PRIMARY KEY REFERENCES neurons,
    norm REAL NOT NULL
);

-- the identity of each file of vectors beside the store (see db/vectors.py)
CREATE TABLE vectors (
    name TEXT PRIMARY KEY,
    identity TEXT NOT NULL
);

-- the model's vocabulary
CREATE TABLE tokens (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL
);

CREATE INDEX token_texts ON tokens (text);

-- text: what people called the neuron; scores: how well that holds, if it was measured, JSON
CREATE TABLE labels (
    neuron INTEGER PRIMARY KEY REFERENCES neurons,
    text TEXT NOT NULL,
    scores TEXT NOT NULL
);

-- automatic labels of neurons and heads; by: token or sentence; record: all that was measured, JSON (see actmax/labels/)
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

-- what chance gives, measured once, JSON
CREATE TABLE controls (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

-- JSON (see steering/concept/concept.py)
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
