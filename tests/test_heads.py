"""Heads in the index and on a card: scores against hooks made by hand, interrupted scans, induction, search."""

import shlex
from collections import Counter

import pytest
import torch
from conftest import LLAMA, Letters, printed, random_model
from markupsafe import escape
from test_families import make as family

from icebear import Model, Neuron, annotate, build_index, describe, open_store, read_corpus
from icebear.actmax import measure_heads
from icebear.actmax.card import attended_line, head_marks
from icebear.actmax.head_attention import HeadAttention, attended_text
from icebear.actmax.index import build as index
from icebear.actmax.index.head_norms import HeadNorms
from icebear.actmax.writes import effect_sizes, likely_effects, patched_logits, writes
from icebear.app.cli.tables.cards import card_report
from icebear.concepts.vocabulary.calibration import mean_activations
from icebear.db.search import by_words
from icebear.edits import parse_edits
from icebear.errors import InputError

K = 5
HEAD = Neuron(1, "head", 2)


def projections(model, ids):
    """layer -> the output projection of attention and its input (T, A), by a hook on each."""
    seen, handles = {}, []
    for layer in model.layers_with("attn"):
        part = model.site_module("attn", layer)
        handles.append(
            part.register_forward_pre_hook(lambda part, args, n=layer: seen.update({n: (part, args[0].detach())}))
        )
    with torch.no_grad():
        model.net(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return {layer: (part, z.reshape(-1, z.shape[-1])) for layer, (part, z) in seen.items()}


def slow_norms(model, part, z, means):
    """The norm (T, H) of what each head writes: the projection itself of this head alone, less that of nothing."""
    width = z.shape[-1] // model.heads
    norms = []
    for head in range(model.heads):
        alone = torch.zeros_like(z)
        own = slice(head * width, (head + 1) * width)
        alone[:, own] = (z - means.to(z))[:, own]
        norms.append((part(alone) - part(torch.zeros_like(z))).norm(dim=-1))
    return torch.stack(norms, -1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen3", "phi", "gpt_neox", "opt", "falcon"])
def test_the_score_of_a_head_is_the_norm_of_what_it_alone_writes(name):
    model = family(name)
    read = projections(model, list(range(3, 12)))
    means = torch.randn(model.layers, model.width("attn"))
    norms = HeadNorms.of(model, means)
    for layer, (part, z) in read.items():
        with torch.no_grad():
            expected = slow_norms(model, part, z, means[layer])
        assert torch.allclose(norms(layer, z[None])[0].double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_an_index_has_for_each_token_the_sentence_in_which_a_head_writes_most(model, corpus, tmp_path):
    sentences = [s for s in corpus.sentences() if len(s.text) > 1]
    means = mean_activations(model)["attn"]
    best = {}
    for sentence in sentences:
        for layer, (part, z) in projections(model, model.token_ids(sentence.text)).items():
            with torch.no_grad():
                norms = slow_norms(model, part, z, means[layer])[1:]  # the first token does not count
            for head, (value, token) in enumerate(zip(*norms.max(0), strict=True)):
                row = (value.item(), sentence.id, token.item() + 1, sentence.text[token + 1])  # a letter is a token
                best.setdefault(Neuron(layer, "head", head), []).append(row)
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        assert store.facts.get("sites") == ["ffn", "head"]
        assert store.neurons.count_without_heads() == 60
        assert store.count("neurons") == 72
        assert not any(neuron.site == "head" for neuron in store.neurons.all_without_heads())
        for head, rows in best.items():
            expected = {}
            for row in sorted(rows, key=lambda row: (-row[0], row[1])):
                expected.setdefault(row[3], row)
            examples = store.examples(head)
            assert [e.activation for e in examples] == pytest.approx(
                [row[0] for row in expected.values()][:K], rel=1e-4
            )
            for example in examples:
                (value, token) = next((v, t) for v, identity, t, _ in rows if identity == example.sentence.id)
                assert (example.activation, example.token) == (pytest.approx(value, rel=1e-4), token)
            assert store.examples(head, "-") == []


def test_an_interrupted_scan_keeps_its_means(model, corpus, tmp_path, monkeypatch):
    """To the bit, also if the calibration gives other means when the scan goes on."""
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)
    checksums = set()
    with open_store(tmp_path / "one.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        checksums.add(store.checksum())
        expected = [e.activation for e in store.examples(HEAD)]

    class Stop(Exception):
        pass

    def stop(done, total):
        if done > 33:
            raise Stop

    with open_store(tmp_path / "two.db", create=True) as store:
        with pytest.raises(Stop):
            build_index(model, corpus, store, k=K, on_progress=stop)
        monkeypatch.setattr(index, "head_means", lambda model: torch.full((3, 24), 9.0))
        build_index(model, corpus, store, k=K)
        checksums.add(store.checksum())
        assert [e.activation for e in store.examples(HEAD)] == expected
    assert len(checksums) == 1


def test_an_index_of_named_sites_has_those(model, corpus, tmp_path):
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, read_corpus(corpus.facts["corpus"], 20), store, k=2, sites=["head", "attn"])
        assert store.facts.get("sites") == ["attn", "head"]
        assert store.neurons.id("L0.head.0") == store.neurons.count_without_heads() == 72
        with pytest.raises(InputError):
            build_index(model, corpus, store, sites=["heads"])


def maps(**heads_at):
    """Attention (1, 1, H, T, T) of heads that attend to one position each: name -> token -> position."""
    size = 1 + 2 * measure_heads.PERIOD
    made = torch.zeros(1, 1, len(heads_at), size, size)
    for head, where in enumerate(heads_at.values()):
        for token in range(size):
            made[0, 0, head, token, max(0, min(token, where(token)))] = 1
    return made


def test_an_induction_head_looks_behind_the_repetition_and_no_other_does():
    period = measure_heads.PERIOD
    fixed = {"previous": lambda token: token - 1, "itself": lambda token: token, "even": lambda token: token // 2}
    repeating = {"induction": lambda token: token - period + 1, "duplicate": lambda token: token - period}
    nothing = dict.fromkeys(repeating, lambda token: 0)
    share, null = measure_heads.induction_shares(maps(**repeating, **fixed), maps(**nothing, **fixed))
    assert (share[0] > null).tolist() == [True, False, False, False, False]


def test_a_head_that_looks_back_by_position_is_no_induction_head():
    far = {"far": lambda token: token - measure_heads.PERIOD + 1}
    share, null = measure_heads.induction_shares(maps(**far), maps(**far))
    assert share.item() == 1
    assert not share.item() > null
    assert HeadAttention({}, (share.item(), null)).lines[1].startswith("Not an induction head")


def test_random_tokens_repeat_where_they_should(model):
    repeated, plain = measure_heads.random_sequences(model)
    period = measure_heads.PERIOD
    for row, other in zip(repeated, plain, strict=True):
        assert row[1 : 1 + period] == row[1 + period :] == other[1 + period :]
        assert other[1 : 1 + period] != other[1 + period :]
        assert row[0] == other[0]


def test_shares_of_attention_are_means_over_tokens(model):
    rows = [[3, 4, 5, 6, 7], [8, 9, 10]]
    texts = measure_heads.text_shares([(rows, measure_heads._stacked(model, rows))])
    sums = dict.fromkeys(texts, 0.0)
    for ids in rows:
        weights = model_maps(model, ids)[HEAD.layer][0, HEAD.index]
        for token in range(1, len(ids)):
            for name, to in (("first", 0), ("previous", token - 1), ("itself", token)):
                sums[name] += weights[token, to].item()
    for name, (share, even) in texts.items():
        assert share[HEAD.layer, HEAD.index].item() == pytest.approx(sums[name] / 6, abs=1e-6)
        assert even == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 2 + 1 / 3) / 6)


def model_maps(model, ids):
    model.net.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model.net(torch.tensor([ids]), output_attentions=True).attentions
    model.net.set_attn_implementation("sdpa")
    return weights


@pytest.fixture
def store(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as made:
        build_index(model, corpus, made, k=K)
        yield made


def test_a_card_has_the_token_that_the_head_attends_to(model, store):
    assert [e.relevance for e in store.examples(HEAD, "+", 3)] == [None] * 3
    card = describe(store, HEAD, model, 3)
    saved_examples = store.examples(HEAD, "+")
    attended = [
        "".join(e.sentence.tokens)[max(range(e.token + 1), key=e.relevance.__getitem__)] for e in saved_examples
    ]
    assert card.attends_to == Counter(attended)
    expected = [saved_examples[attended.index(letter)] for letter in dict.fromkeys(attended)]
    assert [e.sentence.id for e in card.examples["+"]] == [e.sentence.id for e in expected][:3]
    for example in card.examples["+"]:
        saved = next(e for e in saved_examples if e.sentence.id == example.sentence.id)
        ids = model.token_ids(example.sentence.text)
        weights = model_maps(model, ids)[HEAD.layer][0, HEAD.index, example.token]
        assert list(example.relevance) == pytest.approx(weights.tolist(), abs=1e-5)
        assert list(saved.relevance) == pytest.approx(weights.tolist(), abs=1e-5)
    rows = card.to_dict()["examples"]["+"]
    assert [row["attends_to"] for row in rows] == [
        max(range(len(e.relevance)), key=e.relevance.__getitem__) for e in card.examples["+"]
    ]
    assert set(card.examples) == {"+"}
    assert card.projections == []
    other = Neuron(2, "head", 0)
    annotate(model, store, other, k=2)
    assert [e.relevance is None for e in store.examples(other, "+", 3)] == [False, False, True]


def test_the_swap_of_a_card_is_an_edit_of_two_of_its_sentences(model, store):
    card = describe(store, HEAD)
    _, verb, prompt, _, edit = shlex.split(card.swap)
    (parsed,) = parse_edits([edit])
    first, *others = ("".join(e.sentence.tokens[: e.token + 1]) for e in card.examples["+"])
    assert (verb, prompt, parsed.neuron, parsed.where) == ("steer", first, HEAD, "last")
    assert parsed.source in others
    assert describe(store, Neuron(1, "ffn", 2)).swap == ""


def test_the_page_of_a_card_names_where_a_head_writes_and_what_it_attends_to(model, store):
    card = describe(store, HEAD, model)
    html = card.to_html()
    for example in card.examples["+"]:
        assert str(escape(f"writes at {example.token_text!r}, attends to {attended_text(example)}")) in html
    assert str(escape(head_marks(card))) in html
    assert attended_line(card) in " ".join(printed(card_report(card)).split())
    assert head_marks(describe(store, Neuron(1, "ffn", 2))) == ""


def test_a_card_names_shares_with_their_controls(model, store):
    card = describe(store, HEAD)
    measured = measure_heads.measured_heads(model)
    for part, pairs in (("shares", card.attention.shares), ("kinds", {"induction": card.attention.induction})):
        assert pairs
        for name, (share, control) in pairs.items():
            row = measured[part][name]
            assert (share, control) == (row["heads"][HEAD.layer][HEAD.index], row["control"])
    share, null = card.attention.induction
    assert card.to_dict()["attention"]["induction"] == {"share": share, "null": null}
    assert describe(store, Neuron(1, "ffn", 2)).attention is None
    assert all(line in " ".join(printed(card_report(card)).split()) for line in card.attention.lines)
    assert all(line in card.to_html() for line in card.attention.lines)


def test_a_head_has_words_only_where_its_effect_is_above_random_tokens(corpus, tmp_path):
    class Doubled(Letters):
        def decode(self, ids):
            return 2 * super().decode(ids)

    model = Model(random_model(LLAMA, dtype=torch.float32).net, Doubled(), "made")
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        value = mean_activations(model)["attn"][HEAD.layer, 12:18]
        examples = store.examples(HEAD, "+", K)
        written = writes(model, store, HEAD, {"+": examples}, K)["+"]
        rows = [model.token_ids(e.sentence.text)[: e.token + 1] for e in examples]
        plain, patched, activations = patched_logits(model, HEAD, value, rows)
        assert activations.tolist() == pytest.approx([e.activation for e in examples], rel=1e-4)
        random = [model.token_ids(s.text)[: t + 1] for s, t in heads_random(store)]
        least = effect_sizes(likely_effects(*patched_logits(model, HEAD, value, random)[:2])[1]).max()
        sizes = effect_sizes(likely_effects(plain, patched)[1])
        have = [bool(place.raises or place.lowers) for place in written.places]
        assert have == (sizes > least).tolist()
        assert bool(written.raises) == (written.correlation > written.random_correlation)


def heads_random(store):
    from icebear.actmax.writes import random_tokens

    return random_tokens(store, K)


def test_search_finds_a_head_by_its_sentences(store):
    hits = [hit for hit in by_words(store, "camel", 144) if hit.neuron.site == "head"]
    assert hits
    for hit in hits:
        count = sum("camel" in e.sentence.text.lower() for e in store.examples(hit.neuron))
        assert (hit.polarity, hit.by) == ("+", "sentences")
        assert hit.why[0].startswith(f"{count} of {K} examples")
    wanted = {
        Neuron(layer, "head", n)
        for layer in range(3)
        for n in range(4)
        if any("camel" in e.sentence.text.lower() for e in store.examples(Neuron(layer, "head", n)))
    }
    assert {hit.neuron for hit in hits} == wanted
