"""What a neuron writes at its sentences, against hooks made by hand: one sentence at a time, read whole."""

from contextlib import nullcontext

import pytest
import torch
from conftest import CONFIGS, LLAMA, Letters, printed, random_model
from letters import LETTERS
from test_tasks import make
from transformers import GPT2Config

from icebear import Model, Neuron, build_index, describe, open_store, steer
from icebear.actmax import writes as module
from icebear.actmax.page import writes_verdict
from icebear.actmax.writes import mean_correlation, patched_logits, random_tokens, writes
from icebear.app.cli.tables.cards import card_report
from icebear.concepts.vocabulary.calibration import mean_activations
from icebear.errors import StoreError
from icebear.records import Writes

GPT2 = GPT2Config(vocab_size=50, n_embd=24, n_layer=3, n_head=4, n_inner=20, n_positions=64)
LIKELY = 7


class Doubled(Letters):
    """Its tokens are long enough to be words."""

    def decode(self, ids):
        return "".join(2 * LETTERS[i] for i in ids)


def made(config=LLAMA, tokenizer=None):
    return Model(random_model(config, dtype=torch.float32).net, tokenizer or Doubled(), "made")


def slow_logits(model, path, index, ids, value=None):
    """The logits after ids, with an input of a module set at the last token; also what that was."""
    seen = []

    def hook(part, args):
        x = args[0].clone()
        seen.append(x[0, -1, index].item())
        if value is not None:
            x[0, -1, index] = value
        return (x,)

    handle = model.net.get_submodule(path).register_forward_pre_hook(hook)
    with torch.no_grad():
        logits = model.net(torch.tensor([ids])).logits[0, -1]
    handle.remove()
    return logits, seen[0]


def slow_effects(model, path, index, rows, value):
    """likely tokens, centered effects (P, W), activations: token by token."""
    plain = [slow_logits(model, path, index, ids) for ids in rows]
    likely = sorted({i for logits, _ in plain for i in logits.argsort(descending=True)[:LIKELY].tolist()})
    effects = []
    for ids, (logits, _) in zip(rows, plain, strict=True):
        change = (logits - slow_logits(model, path, index, ids, value)[0])[likely]
        effects.append(change - change.mean())
    return likely, torch.stack(effects), [activation for _, activation in plain]


def slow_correlation(effects, activations, value):
    signs = torch.tensor([1.0 if activation > value else -1.0 for activation in activations])
    pairs = torch.corrcoef(effects * signs[:, None])
    count = len(effects)
    return (pairs.sum().item() - count) / (count * (count - 1))


def examples_of(store, neuron):
    return {sign: store.examples(neuron, sign) for sign in "+-"}


@pytest.mark.parametrize(
    ("config", "path"),
    [(LLAMA, "model.layers.1.mlp.down_proj"), (CONFIGS["gemma3"], "model.layers.1.mlp.down_proj")],
    ids=["llama", "gemma3, whose windows are shorter than sentences"],
)
def test_what_it_writes_is_what_hooks_measure(config, path, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("icebear.concepts.results.effects.LIKELY", LIKELY)
    monkeypatch.setattr(module, "PASS_ROWS", 3)
    model, neuron = made(config), Neuron(1, "ffn", 3)
    average = mean_activations(model)["ffn"][1, 3].item()
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=6)
        result = writes(model, store, neuron, examples_of(store, neuron), 5)
        chosen = {sign: [(one.sentence, one.token) for one in store.examples(neuron, sign, 5)] for sign in "+-"}
        control = random_tokens(store, 5)
    rows = {sign: [Letters()(s.text)["input_ids"][: t + 1] for s, t in one] for sign, one in chosen.items()}
    drawn = [Letters()(sentence.text)["input_ids"][: token + 1] for sentence, token in control]
    _, others, there = slow_effects(model, path, 3, drawn, average)
    assert set(result) == {"+", "-"}
    for sign, one in result.items():
        likely, effects, activations = slow_effects(model, path, 3, rows[sign], average)
        words = [2 * LETTERS[token] for token in likely]
        assert one.average == pytest.approx(average)
        assert one.correlation == pytest.approx(slow_correlation(effects, activations, average), abs=1e-4)
        assert one.random_correlation == pytest.approx(slow_correlation(others, there, average), abs=1e-4)
        assert [place.activation for place in one.places] == pytest.approx(activations, abs=1e-4)
        assert [place.text for place in one.places] == ["".join(s.tokens[: t + 1]) for s, t in chosen[sign]]
        sides = [
            (one.raises, one.lowers, effects.mean(0)),
            *((p.raises, p.lowers, e) for p, e in zip(one.places, effects, strict=True)),
        ]
        for raises, lowers, effect in sides:
            ordered = [words[at] for at in effect.argsort(descending=True).tolist()]
            ordered = [word for word in ordered if any(map(str.isalnum, word))]
            assert (raises[0], lowers[0]) == (ordered[0], ordered[-1])


@pytest.mark.parametrize("steered", [False, True])
def test_batches_behind_a_prefix_are_as_one_by_one(steered):
    """Also where a model is steered, and for a site of attention."""
    for config, paths in (
        (LLAMA, {"ffn": "model.layers.2.mlp.down_proj", "attn": "model.layers.2.self_attn.o_proj"}),
        (GPT2, {"ffn": "transformer.h.2.mlp.c_proj", "attn": "transformer.h.2.attn.c_proj"}),
    ):
        model = made(config)
        rows = [[7, 3, 12, 44, 5][:length] for length in (2, 5, 3, 4)]
        for site, path in paths.items():
            with steer(model, ["L0.ffn.0=3"]) if steered else nullcontext():
                plain, patched, activations = patched_logits(model, Neuron(2, site, 3), torch.tensor([1.5]), rows)
                for row, ids in enumerate(rows):
                    logits, activation = slow_logits(model, path, 3, ids)
                    assert torch.allclose(plain[row], logits, atol=1e-4)
                    assert torch.allclose(patched[row], slow_logits(model, path, 3, ids, 1.5)[0], atol=1e-4)
                    assert activations[row].item() == pytest.approx(activation, abs=1e-4)


def test_a_neuron_that_writes_the_same_everywhere_is_alike_everywhere(corpus, tmp_path):
    """Small vectors in the last layer: all effects are along one direction, also where the activation is below the
    average."""
    model = made()
    with torch.no_grad():
        model.layer_modules[-1].mlp.down_proj.weight *= 0.01
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=6)
        for one in writes(model, store, Neuron(2, "ffn", 3), examples_of(store, Neuron(2, "ffn", 3))).values():
            assert one.correlation > 0.9
            assert one.random_correlation > 0.9
            assert len(one.places) == 6
        assert random_tokens(store, 12) == random_tokens(store, 12)
        assert all(0 < token < len(sentence.tokens) for sentence, token in random_tokens(store, 12))


def test_a_single_place_is_like_no_other():
    assert mean_correlation(torch.ones(1, 3), torch.ones(1)) is None
    assert mean_correlation(torch.tensor([[1.0, -1], [-2, 2]]), torch.tensor([1.0, -3])) == pytest.approx(1)


def test_only_a_model_that_predicts_next_tokens_writes(model, corpus, tmp_path):
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=2, sites=("ffn", "q"))
        assert describe(store, Neuron(0, "ffn", 3)).writes == {}
        assert describe(store, Neuron(0, "ffn", 3), model, effect_sentences=0).writes == {}
        assert writes(model, store, Neuron(0, "q", 3), examples_of(store, Neuron(0, "q", 3))) == {}
        assert writes(make("bert"), store, Neuron(0, "ffn", 3), {}) == {}
        with pytest.raises(StoreError):
            describe(store, Neuron(0, "ffn", 3), Model(random_model(LLAMA, dtype=torch.float32, seed=1).net, Letters()))


def test_hostile_words_are_words(corpus, tmp_path):
    class Hostile(Letters):
        def decode(self, ids):
            return "".join(f"<img src=x onerror={LETTERS[i]}>[red]\u202e" for i in ids)

    model = made(tokenizer=Hostile())
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=3)
        card = describe(store, Neuron(1, "ffn", 3), model)
    assert card.writes["+"].raises[0].startswith("<img")
    html, text = card.to_html(), printed(card_report(card))
    assert "<img" not in html
    assert "&lt;img" in html
    assert "[red]" in text
    assert card.to_dict()["writes"]["+"]["places"][0]["activation"] == pytest.approx(card.examples["+"][0].activation)


def test_the_verdict_follows_the_correlation_of_the_sentences_and_names_a_like_one_of_random_ones():
    def verdict(alike, random):
        return writes_verdict(Writes(0.0, ("a",), ("b",), alike, random, ())).partition(" (")[0]

    assert verdict(None, 0.9) == ""
    assert verdict(0.3, 0.69) == verdict(0.3, 0.1) == verdict(0.3, None)
    assert verdict(0.93, 0.1) == verdict(0.93, None)
    assert len({verdict(0.3, 0.1), verdict(0.93, 0.1), verdict(0.93, 0.94)}) == 3
