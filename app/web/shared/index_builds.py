"""Building an index in the background, with the time that it still takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from icebear.actmax.shipped.shipped_index import shipped_index, shipped_path
from icebear.app.web.shared.background_job import Job, importing
from icebear.cache import cache_folder
from icebear.db.sqlite import VERSION

if TYPE_CHECKING:
    from icebear.actmax.index.corpus import Corpus
    from icebear.models.model import Model
    from icebear.records import Sentence

SMALL_INDEX = 300
"""Summaries in the small index, which the app builds in the background."""
LARGE_INDEX = 3000
"""Summaries in the larger one, which the visitor starts; twice as many as are there, if those are more."""
APP_SITES = ("ffn", "attn", "head")
"""What the app indexes: all that it ranks and links to."""
BATCH = 4
"""Sentences that an index reads at once: between two batches it makes way for a person."""
LETTERS = 140
"""The fixed cost of reading a sentence, in letters, in a batch of four (smollm2-135m)."""
LETTERS_AFTER = 143_000
"""The cost of all steps after the reading of the small index, in letters (smollm2-135m)."""


def build(loading: Job, path: Path | None, documents: int, job: Job) -> Path:
    """Build an index of so many summaries at `path`, or the small one in the cache; or prepare the one that comes with
    icebear. Return its path."""
    job.doing = "waiting for the model"
    while loading.is_alive():
        job.step(0, 1)
        loading.join(0.2)
    if loading.error:
        raise loading.error
    with importing:
        from icebear.actmax.index.corpus import read_corpus
        from icebear.concepts.vocabulary.calibration import calibrate
    model: Model = loading.result
    job.doing = "calibrating the model, once"
    if model.has_family:
        calibrate(model)
    job.step(0, 1)
    if path is not None and path == shipped_path(model.name):
        job.doing = "preparing the sentences that come with icebear, once"
        shipped_index(model.name, lambda: model)
        return path
    job.doing = "fetching the summaries"
    corpus = read_corpus("wiki-summaries", limit=documents)
    name = f"summaries-{Path(model.name).name}-{model.dtype_name}-{model.fingerprint[:6]}-heads-v{VERSION}.db"
    path = path or cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    _scan(job, model, corpus, path)
    return path


def _scan(job: Job, model: Model, corpus: Corpus, path: Path) -> None:
    """Scan a corpus into an index; the job says by sentence how far it is, and how long it still takes."""
    from icebear.actmax.index import build as index
    from icebear.actmax.index.example_embedding import embed_examples
    from icebear.db.store import open_store
    from icebear.models.loading.encoder import default_encoder

    sentences = list(corpus.sentences())
    reading = Reading(job, len(sentences), letters(sentences))
    with open_store(path, create=True) as store:
        shards = store.scan.shards() if path.exists() else {}
        done = [number * index.SHARD for number, size in shards.items() if size == index.SHARD]
        reading.batch([sentence for start in done for sentence in sentences[start : start + index.SHARD]])
        job.clock = None  # what was read before took no time

        def on_shard(done: int, total: int) -> None:
            if done == total:
                job.doing = "writing the results"

        index.build_index(
            model, corpus, store, sites=APP_SITES, on_progress=on_shard, on_batch=reading.batch, batch_size=BATCH
        )
        job.doing = "encoding what the sentences are about"
        if encoder := default_encoder(logging.getLogger("icebear").warning):
            embed_examples(store, encoder, job.step)


@dataclass
class Reading:
    """How much of a corpus a job has read. Time goes by letters, because a scan reads short sentences first."""

    job: Job
    all_sentences: int
    all_letters: int
    sentences: int = 0
    letters: int = 0

    def batch(self, batch: Sequence[Sentence]) -> None:
        """Count the sentences of a batch, and say how long the others take."""
        self.sentences += len(batch)
        self.letters += letters(batch)
        self.job.step(
            self.letters,
            self.all_letters + LETTERS_AFTER,
            f"{self.sentences:,} of {self.all_sentences:,} sentences read",
        )


def letters(sentences: Sequence[Sentence]) -> int:
    """Return the cost of reading sentences, in letters."""
    return sum(LETTERS + len(sentence.text) for sentence in sentences)
