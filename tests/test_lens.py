"""The averaged Jacobian lens, against Jacobians taken one text at a time."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from configurations import dense, different
from conftest import GEMMA3, LLAMA, Letters, random_model
from few import third_of
from test_tasks import make

from icebear import Model, Neuron, build_index, describe, open_store, project, steer
from icebear.actmax.index.neuron_vectors import ensure_vectors
from icebear.app.cli.main import main
from icebear.concepts.vocabulary import calibration, lens
from icebear.concepts.vocabulary.lens import build_mean_lens, contexts_of, mean_lens, mean_rows
from icebear.concepts.vocabulary.weight_rows import direct_row, unembed
from icebear.errors import InputError
from icebear.models.parts.linear import Linear
from icebear.records import Reliability

SLOW = {"llama": LLAMA, "gpt2": dense()["gpt2"], "gemma3": GEMMA3}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))


def lettered(config, attention="sdpa"):
    return Model(random_model(config, attention, torch.float32).net, Letters(), "letters")


def reference(model, site, layer):
    """The mean of whole Jacobians of the final norm at a token with respect to what the module writes there."""
    contexts, rows = contexts_of(model), []
    for ids, place in zip(contexts.texts, contexts.positions, strict=True):
        norms = []

        def final_norm(output, ids=ids, place=place, norms=norms):
            def write(module, args, own):
                norms.append(own[0, place])
                return torch.cat((own[:, :place], output[None, None], own[:, place + 1 :]), 1)

            hooks = [model.site_module(site, layer).register_forward_hook(write)] if output is not None else []
            result = model.net.base_model(torch.tensor([ids]))[0][0, place]
            [hook.remove() for hook in hooks]
            return result

        final_norm(torch.zeros(model.config.hidden_size))  # to read what it writes
        rows.append(torch.autograd.functional.jacobian(final_norm, norms[0]))
    return torch.stack(rows).mean(0)


def assert_close(value, expected):
    assert (value - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())


@pytest.fixture
def four_texts(monkeypatch):
    """And a reliability of two neurons of each layer in two others, for tests that assert no number of it."""
    monkeypatch.setattr(lens, "LENS_TEXTS", 4)
    monkeypatch.setattr(lens, "RELIABILITY_SAMPLES", 2)


@pytest.mark.usefixtures("four_texts")
@pytest.mark.parametrize("name", third_of(SLOW))
def test_the_jacobians_are_the_means_of_slow_ones(name):
    model = lettered(SLOW[name])
    built = build_mean_lens(model)
    for site in ("ffn", "attn"):
        for layer in range(model.layers):
            assert_close(built.jacobian(site, layer), reference(model, site, layer))


OTHERS = {"bert": None, "t5": None, "bert, sequence": None}
FAMILIES = {**different(), **OTHERS}


@pytest.mark.usefixtures("four_texts", "few_texts")
@pytest.mark.parametrize("name", third_of(FAMILIES))
def test_a_row_alone_is_the_jacobian_times_the_written_vector(name):
    model = make(name, dtype=torch.float32) if name in OTHERS else lettered(FAMILIES[name], "eager")
    last = model.layers - 1
    neurons = [Neuron(layer, site, 3) for layer in (model.layers_with("ffn")[0], last) for site in ("ffn", "attn")]
    alone, built = mean_rows(model, neurons), build_mean_lens(model)
    assert_close(alone, built.rows(model, neurons))
    before = project(model, neurons[0], 50, lens="direct")
    assert project(model, neurons[0], 5, lens="mean").lens == "mean" != before.lens


@pytest.mark.usefixtures("four_texts")
@pytest.mark.parametrize("is_built", [False, True])
def test_a_projection_through_the_lens_is_the_unembedding_of_its_row(is_built):
    model, neuron = lettered(LLAMA), Neuron(0, "ffn", 7)
    w_out = Linear(model.site_module("ffn", 0)).columns(7)
    logits = unembed(model, reference(model, "ffn", 0) @ w_out)
    built = build_mean_lens(model) if is_built else None
    result = project(model, neuron, 50, lens="mean")
    assert_close(torch.tensor([word.logit for word in result.promoted]), logits.sort(descending=True).values)
    assert [word.id for word in result.promoted[:3]] == logits.topk(3).indices.tolist()
    assert result.reliability == (built.reliability[0] if built else None)
    assert project(model, neuron, 3) == project(model, neuron, 3, lens="direct")


@pytest.mark.usefixtures("four_texts")
def test_an_interrupted_build_continues_and_gives_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lens, "BLOCK", 5)
    whole = build_mean_lens(lettered(LLAMA)).file.read_bytes()
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "another"))
    model, rows = lettered(LLAMA), []

    def interrupt(done, total):
        rows.append(done)
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_mean_lens(model, interrupt)
    assert mean_lens(model) is None
    rows.clear()
    again = build_mean_lens(model, lambda done, total: rows.append(done))
    assert rows[0] == 10
    assert again.file.read_bytes() == whole
    assert mean_lens(model).file == again.file
    assert len(list(tmp_path.glob("another/lens/*"))) == 1


def test_in_the_last_layer_everything_is_known(monkeypatch):
    """After the last FFN is only the norm, so that small units are predicted by the words without context as well as by
    the lens, and by the direct path."""
    model = lettered(LLAMA)
    with torch.no_grad():
        for layer in model.layer_modules:
            layer.mlp.down_proj.weight *= 0.01
    built = build_mean_lens(model)
    assert all(0 < value <= 1 for one in (*built.reliability, *built.direct) for value in one[:2])
    mean = built.reliability[-1]
    assert mean.correlation == pytest.approx(mean.ceiling, abs=0.1)
    assert built.reliability[0].correlation > built.direct[0].correlation
    assert built.is_better(0)


@pytest.mark.usefixtures("four_texts")
def test_there_is_no_lens_of_edits_or_images():
    model = lettered(LLAMA)
    build_mean_lens(model)
    with steer(model, ["L0.ffn.0=5"]):
        assert mean_lens(model) is None
        with pytest.raises(InputError):
            build_mean_lens(model)
    with pytest.raises(InputError):
        mean_rows(make("vit"), [Neuron(0, "ffn", 0)])
    with pytest.raises(InputError):
        mean_rows(model, [Neuron(0, "q", 0)])


def test_contexts_are_seeded_and_end_before_special_tokens():
    model = make("bert", dtype=torch.float32)
    contexts, others = contexts_of(model), contexts_of(model, others=True)
    assert all(ids[place] not in (47, 48) for ids, place in zip(contexts.texts, contexts.positions, strict=True))
    assert not {tuple(ids) for ids in contexts.texts} & {tuple(ids) for ids in others.texts}
    assert len(contexts.texts) == min(48, len(calibration.token_rows(model)) * 2 // 3)


def test_a_card_shows_first_the_lens_that_predicts_better(model, corpus, tmp_path, monkeypatch):
    neuron = Neuron(0, "ffn", 3)
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store)
        assert describe(store, neuron).other is None
        card = describe(store, neuron, model)
        assert [one.lens for one in card.projections] == ["direct", "mean"]
        assert card.projection.reliability is None
        assert not store.vectors.has("lens")
        built = build_mean_lens(model)
        card = describe(store, neuron, model)
        first = ["mean", "direct"] if built.is_better(0) else ["direct", "mean"]
        assert [one.lens for one in card.projections] == first
        assert {one.lens: one.reliability for one in card.projections} == {
            "mean": built.reliability[0],
            "direct": built.direct[0],
        }
        shown = replace(card, projection=replace(card.projection, kurtosis=9.0, kurtosis_by_chance=3.0))
        assert "averaged Jacobian" in shown.to_html()
        ensure_vectors(model, store)  # the index of words that search reads
        row = built.rows(model, [neuron])[0] if built.is_better(0) else direct_row(model, neuron)
        stored = torch.from_numpy(store.vectors.get("lens").reconstruct(store.neurons.id(neuron)))
        assert torch.allclose(stored, row / row.norm(), atol=2e-3)
        before = store.search("a")
        monkeypatch.setattr(type(store.vectors), "has", lambda self, name: False)
        assert before != store.search("a")


def test_below_a_ceiling_there_are_no_fixed_words():
    assert "no fixed words" in str(Reliability(0.19, 0.5, 0.19))
    assert "no fixed words" not in str(Reliability(0.19, 0.5, 0.2))


@pytest.mark.usefixtures("four_texts")
def test_the_command_builds_the_lens_without_a_corpus(tiny_folder, monkeypatch):
    def result(*options):
        return CliRunner().invoke(main, ["index", "--lens", "--model", tiny_folder, *options])

    rows = json.loads(result("--json").stdout)["reliability"]
    assert [(row["layer"], row["lens"]) for row in rows] == [(n, name) for n in range(3) for name in ("direct", "mean")]
    monkeypatch.setattr(lens, "_jacobian_rows", None)  # it is not built again
    assert "averaged Jacobian" in result().stdout
    shown = CliRunner().invoke(main, ["neuron", "L0.ffn.3", "--model", tiny_folder, "--json"]).stdout
    assert {json.loads(shown)[key]["lens"] for key in ("vocabulary", "other_lens")} == {"direct", "mean"}
    monkeypatch.setattr(lens, "WIDEST", 8)
    monkeypatch.setenv("ICEBEAR_CACHE", "/nonexistent")
    assert result().exit_code == 1
