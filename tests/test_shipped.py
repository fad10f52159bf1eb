"""The index that comes with icebear: what is packed is what is unpacked, and what the model computes."""

import pytest
import torch
from conftest import LLAMA, random_model

from benchmarks import pack_index
from icebear import Model, Neuron, build_index, open_store, read_corpus
from icebear.actmax.index import shipped_index as module
from icebear.actmax.index.head_norms import HeadNorms, head_means
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.errors import StoreError

MOST_BYTES = 4_000_000


@pytest.fixture
def packed(model, corpus, tmp_path):
    """A packed index of a small model, beside the store that it is of. Its tokenizer reads no capitals."""
    (tmp_path / "lower.txt").write_text((tmp_path / "c.txt").read_text().lower())
    corpus = read_corpus(str(tmp_path / "lower.txt"))
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=pack_index.EXAMPLES + 3)
        pack_index.pack(store, tmp_path / "a.npz")
    return tmp_path / "a.npz"


def test_the_strongest_sentences_and_the_statistics_come_back(model, packed, tmp_path):
    module.unpack(packed, model, tmp_path / "b.db")
    with open_store(tmp_path / "a.db") as store, open_store(tmp_path / "b.db") as again:
        assert again.is_complete
        assert again.made_with()["index"]["shipped"]
        for row in store.database.execute("SELECT layer, site, idx FROM neurons").fetchall():
            neuron = Neuron(*row)
            kept = None if neuron.site == "head" else pack_index.EXAMPLES
            for polarity in "+-":
                before, after = store.examples(neuron, polarity, kept), again.examples(neuron, polarity)
                assert [(e.sentence, e.token) for e in after] == [(e.sentence, e.token) for e in before]
                assert [e.activation for e in after] == pytest.approx([e.activation for e in before], rel=1e-3)
            before, after = (s.neurons.statistics(neuron) for s in (store, again))
            assert after.histogram == before.histogram
            assert [after.mean, after.std, after.max] == pytest.approx(
                [before.mean, before.std, before.max], 1e-3, 1e-4
            )
        assert again.controls.get("kurtosis") == store.controls.get("kurtosis")
        assert again.similar(Neuron(0, "ffn", 3)) == store.similar(Neuron(0, "ffn", 3))
        assert {hit.by for hit in again.search("bear", 60)} <= {"sentences", "weights"}
        assert again.similar(Neuron(0, "ffn", 3), by="examples") == []


def test_other_texts_and_another_model_are_refused(model, packed, tmp_path):
    with pytest.raises(StoreError):
        module.unpack(
            packed, Model(random_model(LLAMA, dtype=torch.float32, seed=1).net, model.tokenizer), tmp_path / "b.db"
        )
    (tmp_path / "lower.txt").write_text("Other texts.\n" * 40)
    with pytest.raises(StoreError):
        module.unpack(packed, model, tmp_path / "c.db")


def test_a_model_of_another_name_has_none(model):
    for name in ("smollm2-136m", "/models/smollm2-135m"):
        assert module.shipped_index(name, lambda: model) is None
    with pytest.raises(StoreError):
        module.shipped_store(model)


def test_the_shipped_values_are_those_of_the_model(smol, generator):
    path = module.FOLDER / "smollm2-135m.npz"
    assert path.stat().st_size <= MOST_BYTES
    norms = HeadNorms.of(smol, head_means(smol))
    with module.shipped_store(smol) as store:
        assert store.facts.get("fingerprint") == smol.fingerprint
        for _ in range(6):
            site = generator.choice(("ffn", "head"))
            neuron = Neuron(generator.randrange(smol.layers), site, generator.randrange(smol.width(site)))
            example = generator.choice(store.examples(neuron))
            ids, read = smol.token_ids(example.sentence.text, 256), {}
            assert smol.pieces(ids) == example.sentence.tokens
            with torch.no_grad(), hooks(smol, [(neuron_site(site), neuron.layer)], lambda s, n, x: read.update({s: x})):
                smol.final_stream(smol.read([ids]))
            (x,) = read.values()
            value = (x if site == "ffn" else norms(neuron.layer, x))[0, example.token, neuron.index].item()
            assert value == pytest.approx(example.activation, rel=1e-3, abs=1e-3)
