"""One of a few words stands in the sentence: here or earlier, or (of a label by sentence) anywhere."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import SENTENCES, Evidence, common, top, words_until
from icebear.actmax.labels.kinds.base import LabelKind
from icebear.actmax.labels.label import Label, place_text
from icebear.actmax.labels.sample import Sample

SIZES = (1, 3, 5, 10)


class Words(LabelKind):
    """One of a few words stands earlier in the sentence, or anywhere in it."""

    name = "words"

    def candidates(self, evidence: Evidence) -> list[Label]:
        sample = evidence.sample
        background, total = sample.word_counts, sum(sample.word_counts.values())
        furthest = top(sample.means(evidence.values), np.ones(len(sample.ids), dtype=bool), SENTENCES)
        anywhere = [word for number in furthest for word in sample.sentence_words[number]]
        best = {
            "earlier": common(words_until(evidence.places), background, total, max(SIZES)),
            "sentence": common(anywhere, background, total, max(SIZES)),
        }
        labels = [
            Label.of(self.name, where, words[:size])
            for where, words in best.items()
            for size in SIZES
            if size <= len(words)
        ]
        if evidence.marked:
            labels.append(Label.of(self.name, "earlier", evidence.marked))
        return labels

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        here = sample.codes.chosen(sample.codes.words, label.texts)[sample.word]
        if label.where == "earlier":
            return sample.earlier(here)
        return np.repeat(np.add.reduceat(here, sample.starts) > 0, sample.ends - sample.starts)

    def text(self, label: Label) -> str:
        if label.where == "earlier":
            return place_text(label)
        return f"sentences with {', '.join(label.texts)}"
