"""Models in TransformerLens' format: their logits are TransformerLens' own, and everything works on them."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from few import third_of
from hooked_models import IDS, RECORDED, VARIANTS, config_of, folder_of, lens_logits, state_of
from safetensors.torch import save_file
from test_cli import run

from benchmarks.truth.judge.evaluation import judged
from benchmarks.truth.judge.judged_pairs import Pair
from benchmarks.truth.judge.judging import sites_of
from benchmarks.truth.programs.compiler import Compiled
from icebear import (
    ATTNLRP,
    CP_LRP,
    DIFFERENCE,
    Neuron,
    Prompt,
    ablation,
    attribute,
    build_index,
    circuit,
    explain,
    flip,
    load_model,
    open_store,
    project,
    read_corpus,
    steer,
)
from icebear.concepts.nodes.controls import nodes_of
from icebear.concepts.selftest import selftest
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import InputError, ModelError
from icebear.evaluation.baselines import methods_of
from icebear.steering.flipping import flip as search
from icebear.steering.side_effects import HeldOutContexts

OTHER = [7, 3, 1, 4, 6, 3, 2, 9]
CAUSAL = [name for name in VARIANTS if "bidirectional" not in name and name != "one number"]
DIFFERENT = ["plain", "LN, final RMS", "RMS", "gated", "attention only", "parallel", "shared keys", "scale by layer"]
DIFFERENT += ["rotary, a part, neighbors", "bidirectional, outputs", "outputs", "one number"]
"""Variants that differ in more than an activation function; all have equal logits and exact difference rules."""
DYCK = [folder for parent in Path(__file__).parents for folder in parent.glob("shared/truth/dyck16")]


@pytest.fixture
def made(tmp_path):
    return lambda name, **more: load_model(folder_of(name, tmp_path / "model", **more), dtype="float64")


@pytest.mark.parametrize("name", third_of(VARIANTS, "relu2"))
def test_the_logits_are_those_of_transformer_lens(name, tmp_path):
    recorded = torch.tensor(json.loads(RECORDED.read_text())[name])
    folder = folder_of(name, tmp_path / "model")
    for dtype, close in ((None, 1e-5), ("float64", 1e-6)):
        model = load_model(folder, dtype=dtype, device="cpu")
        with torch.no_grad():
            logits = model.net(torch.tensor([IDS])).logits[0]
        assert (logits - recorded).abs().max() < close


def test_the_recorded_logits_are_those_of_the_installed_transformer_lens():
    lens = pytest.importorskip("transformer_lens")
    if "HookedTransformer" not in vars(lens):
        pytest.skip("TransformerLens 4 has no HookedTransformer.")
    for name, recorded in json.loads(RECORDED.read_text()).items():
        assert (lens_logits(name) - torch.tensor(recorded)).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("name", "position"), third_of([*((name, 3) for name in VARIANTS), ("plain", -1), ("RMS", -1)], ("one number", 3))
)
def test_difference_rules_are_exact_and_relevance_is_conserved(name, position, made):
    model = made(name)
    contrast = {"contrast": 1} if model.output_size > 1 else {}
    with torch.no_grad():
        here, there = model.net(torch.tensor([IDS, OTHER])).logits[:, position, [0, 1 % model.output_size]]
    result = attribute(model, IDS, 0, **contrast, counterfactual=OTHER, position=position, sites=model.sites)
    number = (lambda x: x[0] - x[1]) if contrast else (lambda x: x[0])
    assert result.method == DIFFERENCE
    assert result.conservation().target == pytest.approx((number(here) - number(there)).item(), abs=1e-9)
    assert result.tokens.sum().item() == pytest.approx(result.conservation().target, abs=1e-9)
    assert result.prompt.target_positions == (position % len(IDS),)
    for method in (CP_LRP, ATTNLRP):
        result = attribute(model, IDS, 0, **contrast, method=method, position=position, sites=model.sites)
        assert result.conservation().target == pytest.approx(number(here).item(), abs=1e-9)
        assert abs(result.conservation().remainder) < 1e-9


@pytest.mark.parametrize("name", [name for name in DIFFERENT if name in CAUSAL])
def test_a_position_of_a_causal_model_is_the_end_of_a_shorter_prompt(name, made):
    model = made(name)
    one, short = attribute(model, IDS, 0, position=4, number="logit"), attribute(model, IDS[:5], 0, number="logit")
    assert torch.allclose(one.tokens[:5], short.tokens)
    assert not one.tokens[5:].any()
    assert torch.allclose(one.attn[:, :5], short.attn)


@pytest.mark.parametrize("name", third_of(DIFFERENT))
def test_a_batch_of_prompts_equals_single_ones(name, made):
    model = made(name)
    prompts = [IDS, IDS[:3], OTHER[:5]]
    for prompt, result in zip(prompts, attribute(model, prompts, 0, position=-1, sites=model.sites), strict=True):
        alone = attribute(model, prompt, 0, position=-1, sites=model.sites)
        assert torch.allclose(alone.tokens, result.tokens)
        for site in model.sites:
            assert torch.allclose(alone.of(site), result.of(site)), site


def test_sites_are_tensors_of_transformer_lens(made):
    """Written out from its weights: neurons after the activation, queries, keys and values by head."""
    name = "LN"
    model, state = made(name), {key: x.double() for key, x in state_of(config_of(name)).items()}
    seen = attribute(model, IDS, 0, sites=model.sites)
    x = state["embed.W_E"][IDS] + state["pos_embed.W_pos"][: len(IDS)]
    read = torch.nn.functional.layer_norm(x, x.shape[-1:], state["blocks.0.ln1.w"], state["blocks.0.ln1.b"])
    for site in "qkv":
        own = torch.einsum("td,hdk->thk", read, state[f"blocks.0.attn.W_{site.upper()}"])
        own = own + state[f"blocks.0.attn.b_{site.upper()}"]
        assert torch.allclose(seen.activation(site)[0], own.flatten(1))
    z = seen.activation("attn")[0].unflatten(-1, (3, 4))
    x = x + torch.einsum("thk,hkd->td", z, state["blocks.0.attn.W_O"]) + state["blocks.0.attn.b_O"]
    read = torch.nn.functional.layer_norm(x, x.shape[-1:], state["blocks.0.ln2.w"], state["blocks.0.ln2.b"])
    neurons = (read @ state["blocks.0.mlp.W_in"] + state["blocks.0.mlp.b_in"]).relu()
    assert torch.allclose(seen.activation("ffn")[0], neurons)


def test_the_first_token_is_ranked_where_it_is_no_sink(made):
    result = attribute(made("bidirectional"), IDS, 0, position=0)
    assert 0 not in result.prompt.sinks
    assert result.top(1, site="ffn", position="all")[0].position == 0


@pytest.mark.parametrize("name", ["plain", "bidirectional, outputs", "attention only"])
def test_the_self_test_and_an_index(name, made, tmp_path):
    model = made(name)
    assert selftest(model).verdict == "fine"
    model = load_model(write_words(folder_of(name, tmp_path / "model"), **{f"w{n}": n for n in range(11)}))
    (tmp_path / "corpus.txt").write_text("w1 w2 w3\nw4 w5 w6 w7\nw8 w9")
    site = model.sites[0]
    with open_store(tmp_path / "store.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "corpus.txt")), store, k=2, sites=(site,))
        best = {n: rows[0] for n in range(10) if (rows := store.examples(Neuron(1, site, n), "+"))}
    assert best
    for index, example in best.items():
        seen = attribute(model, example.sentence.text, 0, position=-1, sites=(site,)).activation(site)[1, :, index]
        assert seen[1:].max().item() == pytest.approx(example.activation, rel=1e-3)  # an index skips the first token


# --- positions, edits, ablation, circuits ---------------------------------------------------------------


def test_a_bidirectional_model_asks_for_the_position(made):
    model = made("bidirectional, outputs")
    with pytest.raises(InputError, match="position"):
        attribute(model, IDS, 0)
    with pytest.raises(InputError, match="-8 to 7"):
        attribute(model, IDS, 0, position=8)
    early = attribute(model, IDS, 0, position=0)
    assert early.tokens[1:].abs().sum() > 0


@pytest.mark.parametrize("name", ["bidirectional, outputs", "LN", "outputs"])
def test_ablation_sets_all_other_nodes_to_their_counterfactual_values(name, made):
    """A node's sufficiency and necessity, by a forward pass that is written out with hooks."""
    model = made(name)
    result = attribute(model, IDS, 0, 1, counterfactual=OTHER, position=5)
    nodes = nodes_of(model, result)
    chosen = result.mask(result.top(3, "ffn", position="all"), "ffn")
    there = result.neurons.counterfactual["ffn"]

    def number(kept):
        def before(layer):
            return lambda module, args: (torch.where(kept[layer], args[0], there[layer].to(args[0])),)

        handles = [b.mlp.out.register_forward_pre_hook(before(n)) for n, b in enumerate(model.net.model.blocks)]
        with torch.no_grad():
            logits = model.net(torch.tensor([IDS])).logits[0, 5]
        for handle in handles:
            handle.remove()
        return (logits[0] - logits[1]).item()

    own = number(chosen), number(~chosen)
    assert nodes.numbers([chosen, ~chosen]) == pytest.approx(own, abs=1e-9)
    with torch.no_grad():
        logits = model.net(torch.tensor([IDS, OTHER])).logits[:, 5]
    at_x, at_c = (logits[:, 0] - logits[:, 1]).tolist()
    measured = ablation(model, result, 3)
    assert measured.sufficiency == pytest.approx((own[0] - at_c) / (at_x - at_c), abs=1e-6)
    assert measured.necessity == pytest.approx(1 - (own[1] - at_c) / (at_x - at_c), abs=1e-6)
    empty = number(torch.zeros_like(chosen))
    assert measured.empty_sufficiency == pytest.approx((empty - at_c) / (at_x - at_c), abs=1e-6)


@pytest.mark.parametrize("name", ["plain", "bidirectional, outputs", "outputs", "gated", "rotary"])
def test_effects_and_edits_are_interventions(name, made):
    model = made(name)
    result = attribute(model, IDS, 0, 1, counterfactual=OTHER, position=5)
    effects = result.effects(4)
    for row, node in enumerate(effects.nodes):
        with steer(model, [f"{node.neuron}={node.counterfactual}@position:{node.position}"]), torch.no_grad():
            changed = model.logits(model.read_ids([IDS]), [5])[0, 0]
        with torch.no_grad():
            difference = (model.logits(model.read_ids([IDS]), [5])[0, 0] - changed)[list(effects.token_ids)]
        assert torch.allclose(effects.matrix[row], (difference - difference.mean()).float(), atol=1e-5)


@pytest.mark.parametrize("name", third_of(DIFFERENT))
def test_circuits_of_variants(name, made):
    model = made(name)
    contrast = {"contrast": 1} if model.output_size > 1 else {}
    graph = circuit(model, IDS, 0, **contrast, counterfactual=OTHER, position=5, nodes=8, heads=True)
    assert torch.allclose(graph.contribution.sum(1), graph.difference, atol=1e-6)
    assert 0 < len(graph.nodes) <= 8
    if name in CAUSAL:
        assert all(node.position <= 5 for node in graph.nodes)
    assert graph.ablation().nodes == len(graph.nodes)


@pytest.mark.parametrize("name", ["plain", "LN", "gated", "rotary", "shared keys", "parallel"])
def test_generation_with_cached_keys_is_greedy(name, made):
    model = made(name)
    ids = list(IDS[:3])
    for _ in range(4):
        with torch.no_grad():
            ids.append(model.net(torch.tensor([ids])).logits[0, -1].argmax().item())
    assert model.continuations([IDS[:3]], 4) == [ids[3:]]
    assert list(model.answer(IDS[:3], 4).ids) == ids[3:]
    left = model.continuations([IDS[:3], IDS[:2]], 4)  # padded on the left
    assert left == [ids[3:], model.continuations([IDS[:2]], 4)[0]]


@pytest.mark.parametrize("name", ["plain", "RMS", "outputs", "bidirectional", "bidirectional, outputs"])
def test_flips_at_the_last_token_hold(name, made):
    model = made(name)
    order = model.next_logits(IDS, -1).argsort(descending=True).tolist()
    recipe = flip(model, IDS, order[1], unbounded=True, source=OTHER)
    with steer(model, recipe):
        assert model.predict(IDS, 1, position=-1)[0].id == order[1]
    assert {edit.where for edit in recipe} == {"last"}
    assert HeldOutContexts(model).off_target_kl(list(recipe)) >= 0


def test_words_that_neurons_of_a_model_with_outputs_promote(made):
    model = made("outputs")
    row = project(model, Neuron(1, "ffn", 3), 4)
    state = state_of(config_of("outputs"))
    logits = state["blocks.1.mlp.W_out"][3] @ state["unembed.W_U"]
    assert [one.id for one in row.promoted] == logits.argsort(descending=True).tolist()
    assert [one.text for one in row.promoted] == [str(one.id) for one in row.promoted]


# --- folders, tokens, conversion ------------------------------------------------------------------------


def write_words(folder, **vocabulary):
    (Path(folder) / "vocab.json").write_text(json.dumps(vocabulary))
    return folder


def test_a_vocabulary_names_tokens_and_outputs(tmp_path):
    words = ["BOS", "a", "b", "ab", "(", ")", "1", "2", "12", "c", "d"]
    outputs = ["no", "yes", "a", "b"]
    folder = folder_of("bidirectional, outputs", tmp_path)
    numbered = {word: number for number, word in enumerate(words)}
    model = load_model(write_words(folder, input=numbered, output={word: n for n, word in enumerate(outputs)}))
    tokens = Prompt(tokens=["BOS", "a", "b", "(", "1", "2"])
    assert model.ids(tokens) == [0, 1, 2, 4, 6, 7]
    assert model.ids("BOS a b (12") == [0, 1, 2, 4, 8]
    assert model.ids("ab 1 2") == [3, 6, 7]
    with pytest.raises(InputError, match="'x y' does not begin"):
        model.ids("a x y")
    with pytest.raises(InputError):
        model.ids(Prompt(tokens=["a", "ba"]))
    result = attribute(model, tokens, "yes", "no", position=2)
    assert result.prompt.strings == ("BOS", "a", "b", "(", "1", "2")
    assert (result.target.id, result.contrast.id) == (1, 0)
    batch = attribute(model, ["a b", "b a"], 0, position=-1)
    assert [one.prompt.ids for one in batch] == [(1, 2), (2, 1)]
    other = Prompt(tokens=["BOS", "a", "b", "(", "2", "2"])
    explanation = explain(model, attribute(model, tokens, "yes", "no", counterfactual=other, position=3))
    assert explanation.stages.prompt.tokens[explanation.stages.position] == "("
    assert "yes" in explanation.to_html()


def test_token_strings_of_a_transformers_tokenizer(tiny_folder):
    model = load_model(tiny_folder)
    ids = model.ids(" Paris is A")
    assert model.ids(Prompt(tokens=model.pieces(ids))) == ids


def test_a_folder_without_a_tokenizer_loads(llama, tmp_path):
    llama.net.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert model.tokenizer is None
    assert attribute(model, IDS).tokens.shape == (len(IDS),)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"act_fn": "xielu"}, "act_fn"),
        ({"positional_embedding_type": "alibi"}, "positional_embedding_type"),
        ({"use_local_attn": True}, "use_local_attn"),
        ({"normalization_type": "other"}, "normalization_type"),
        ({"gated_mlp": True, "act_fn": "solu_ln"}, "gated"),
    ],
)
def test_what_is_not_computed_is_refused(change, named, tmp_path):
    with pytest.raises(ModelError, match=named):
        load_model(folder_of("plain", tmp_path, **change))


def test_weights_and_configuration_must_agree(tmp_path):
    folder = Path(folder_of("LN", tmp_path))
    config = config_of("LN")
    for change, named in (
        ({"normalization_type": "LNPre"}, "ln1"),
        ({"gated_mlp": True}, "gate"),
        ({"d_mlp": 9}, "W_in"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=named):
            load_model(str(folder))
    (folder / "config.json").write_text(json.dumps({key: x for key, x in config.items() if key != "n_ctx"}))
    with pytest.raises(ModelError):
        load_model(str(folder))


def test_biases_and_positions_may_be_absent(tmp_path):
    config = {**config_of("plain"), "positional_embedding_type": None}
    state = {name: x for name, x in state_of(config).items() if ".b_" not in name and "pos" not in name}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    zeros = {name: torch.zeros_like(x) for name, x in state_of(config).items() if name not in state}
    other = tmp_path / "zeros"
    other.mkdir()
    save_file(state | zeros, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps({**config, "positional_embedding_type": "standard"}))
    with torch.no_grad():
        one, two = (load_model(str(folder)).net(torch.tensor([IDS])).logits for folder in (tmp_path, other))
    assert torch.equal(one, two)


@pytest.mark.skipif(not DYCK, reason="The certified model is beside the repository, not in it.")
def test_the_certified_dyck_model_answers_as_its_certificate_says():
    """All balanced words of 16 brackets, some others, and the word with the smallest margin."""
    model = load_model(str(DYCK[0]), device="cpu")
    certificate = json.loads(next(DYCK[0].glob("*.cert.json")).read_text())
    words = torch.tensor(list(product((0, 1), repeat=16)))
    depth = (1 - 2 * words).cumsum(1)
    valid = (depth.amin(1) >= 0) & (depth[:, -1] == 0)
    assert valid.sum() == certificate["per_class"]["circuit_valid"]
    least = torch.tensor([[int(sign) for sign in certificate["min_margin_input"]]])
    chosen = torch.cat((words[valid], words[::97], least))
    ids = torch.cat((chosen, torch.full((len(chosen), 1), 2)), 1)
    with torch.no_grad():
        logits = model.net(ids).logits[:, -1]
    depth = (1 - 2 * chosen).cumsum(1)
    expected = ((depth.amin(1) >= 0) & (depth[:, -1] == 0)).long()
    margins = (logits[:, 1] - logits[:, 0]) * (2 * expected - 1)
    assert margins[-1] == margins.min() == pytest.approx(certificate["min_margin_lower_bound"]["float"], abs=1e-4)
    assert model.predict(Prompt(tokens=[*"(())()((()))()()", "END"]), 1)[0].text == "valid"
    result = attribute(model, "(())()((()))()() END", counterfactual="(())())(()))()() END")
    assert result.tokens.sum().item() == pytest.approx(result.conservation().target, abs=1e-4)
    assert result.conservation().target > 8


def test_files_that_cannot_be_read_are_refused_in_a_sentence(tmp_path):
    folder = Path(folder_of("plain", tmp_path / "model"))
    (folder / "vocab.json").write_text("{")
    with pytest.raises(ModelError, match=r"vocab\.json is not JSON"):
        load_model(str(folder))
    (folder / "vocab.json").unlink()
    (folder / "second.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="2 files"):
        load_model(str(folder))
    (folder / "second.safetensors").unlink()
    with pytest.raises(InputError, match="TransformerLens"):
        load_model(str(folder), device_map="auto")
    with pytest.raises(InputError):
        load_model(str(folder)).ids(Prompt(tokens=["1", "2"]))


def test_an_index_names_the_outputs_of_a_vocabulary_of_their_own(tmp_path):
    """Tracr's histogram reads BOS, a, b and c, and writes the numbers 0 to 5."""
    model = load_model(str(Path(__file__).parent / "data" / "tracr" / "hist"), device="cpu")
    (tmp_path / "words.txt").write_text("\n".join(f"BOS {' '.join(words)}" for words in product("abc", repeat=3)))
    with open_store(tmp_path / "words.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "words.txt")), store, k=2)
        rows = {row.text: row.logit for row in store.vocabulary("L0.ffn.0", 6).promoted}
    expected = {row.text: row.logit for row in project(model, "L0.ffn.0", 6).promoted}
    assert set(rows) == set("012345")
    assert rows == pytest.approx(expected, abs=1e-3)  # a store has float16


# --- small vocabularies, one layer, attention alone ----------------------------------------------------


LETTERS = {letter: number for number, letter in enumerate("abcdefghijk")}


@pytest.fixture
def spelled(tmp_path):
    """A folder of a variant whose tokens are these words."""

    def folder(name="LN", words=LETTERS, **more):
        made = folder_of(name, tmp_path / f"{name} {len(list(tmp_path.iterdir()))}", **more)
        return str(write_words(made, input=words) if words else made)

    return folder


def test_the_explained_token_is_no_sink_and_lists_have_no_zeros(spelled):
    """In one layer, only the last token's neurons have relevance; its residual stream may be the longest."""
    model = load_model(spelled(n_layers=1), dtype="float64")
    with torch.no_grad():
        model.net.get_input_embeddings().weight[LETTERS["d"]] *= 50
    for prompt, method in product(("abcd", "d"), ("attnlrp", "cp-lrp", "gxi")):
        result = attribute(model, prompt, method=method)
        last = len(result.tokens) - 1
        assert last not in result.prompt.sinks
        rows = result.top(50, position="all", by="absolute")
        assert rows
        assert all(row.relevance for row in rows)
        assert all(row.relevance > 0 for row in result.top(50, position="all"))
        assert {row.position for row in rows if row.neuron.site == "ffn"} == {last}
    compared = attribute(model, "abcd", counterfactual="abce", contrast="k")
    assert {row.position for row in compared.top(5, "ffn", position="all")} == {3}
    assert compared.effects(3).matrix.abs().max() > 0


def test_words_of_one_character_are_shown_where_all_are(spelled):
    model = load_model(spelled())
    raises, lowers = attribute(model, "abcd", counterfactual="abed", contrast="k").effects(1).words(0)
    assert raises
    assert lowers
    assert {*raises, *lowers} <= LETTERS.keys()


def test_decoded_tokens_are_read_back(spelled):
    words = ["a", "b", "ab", "abc", "c", "-1", "1", "-", "+2", "x y", "d"]
    model = load_model(spelled(words={word: number for number, word in enumerate(words)}))
    for ids in product(range(len(words)), repeat=3):
        assert model.ids(model.tokenizer.decode(ids)) == list(ids)
    assert model.tokenizer.decode([0, 4]) == "ac"


def test_suggested_counterfactuals_take_a_small_vocabulary(spelled):
    words = ["the", " bear", " cat", " lives", " in", " sea", " a", " dog", " sees", " to", " ran"]
    folder = spelled(words={word: number for number, word in enumerate(words)})
    for prompt in ("the bear sees a cat", "the dog ran to sea"):
        assert run("explain", prompt, "--model", folder)


def test_a_model_of_attention_alone_is_explained_by_its_heads(spelled):
    folder = spelled("attention only")
    model = load_model(folder, device="cpu")
    assert model.main_site == "head"
    nodes = explain(model, "abcd", contrast="k", counterfactual="aecd").nodes
    assert {node.ranked.neuron.site for node in nodes} == {"head"}
    assert "head" in run("explain", "abcd", "--contrast", "k", "--counterfactual", "aecd", "--model", folder)
    assert sites_of(model) == ["heads"]
    pair = Pair(tuple(model.ids("abcd")), tuple(model.ids("aecd")), 3, LETTERS["b"], LETTERS["k"])
    (row,) = judged(Compiled(model), pair, methods_of("difference"), torch.Generator().manual_seed(0))
    assert row["methods"]["difference"]["at_2k"] > 0.5


def test_prompts_of_unequal_length_are_compared_at_their_ends(spelled):
    """Where outputs are not tokens; in a bidirectional model the position has to be named."""
    model = load_model(spelled("outputs"), dtype="float64")
    result = attribute(model, "abcd", 0, 1, counterfactual="ke", sites=())
    with torch.no_grad():
        at_x, at_c = (model.net(torch.tensor([model.ids(text)])).logits[0, -1] for text in ("abcd", "ke"))
    assert result.conservation().target == pytest.approx(((at_x - at_c)[0] - (at_x - at_c)[1]).item())
    with pytest.raises(InputError, match="position"):
        attribute(load_model(spelled("bidirectional, outputs")), "abcd", 0, 1, counterfactual="ke")


def test_a_flip_says_where_it_reads_a_bidirectional_model(spelled, caplog):
    model = load_model(spelled("bidirectional"))
    answer = model.predict("abcd", 2, position=-1)[1].text
    flip(model, "abcd", to=answer, unbounded=True)
    assert model.name in caplog.text


def test_a_flip_may_go_to_the_values_of_the_source_prompt(spelled, monkeypatch):
    """The activation ranges of a model that cannot read the calibration texts come from random ids."""
    model = load_model(spelled(), dtype="float64")
    calibrated = calibrate(model)
    narrow = replace(calibrated, low=torch.zeros_like(calibrated.low), high=torch.zeros_like(calibrated.high))
    monkeypatch.setattr(search, "calibrate", lambda model: narrow)
    state = search._start(search.FlipRequest(model, "abcd", source="kkkk"), [1])
    assert (state.low <= state.goal).all()
    assert (state.high >= state.goal).all()


def test_token_ids_are_tokens_of_a_prompt(spelled):
    model = load_model(spelled())
    assert model.ids(Prompt(tokens=[1, "c", 3])) == [1, 2, 3]
    for wrong in (-1, 11, 2.5, None, True):
        with pytest.raises(InputError):
            model.ids(Prompt(tokens=[1, wrong]))
