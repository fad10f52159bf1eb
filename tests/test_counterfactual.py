"""Relevance compared with other prompts: what it is, whom tokens are partners of, and what is refused."""

import json
import shlex
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from configurations import dense, mixtures
from conftest import ICE_BEAR, IDS, LLAMA, Double, random_model
from few import third_of
from test_cli import RUN, run
from test_differences import OTHER, pair_of
from test_tasks import make

from icebear import ATTNLRP, CP_LRP, PA_LRP, Neuron, attribute, explain, load_model, steer
from icebear.app.cli.main import main
from icebear.concepts.answers.content_words import COMMON
from icebear.concepts.answers.counterfactuals import FAR_ENOUGH, suggest_counterfactuals
from icebear.concepts.answers.what_if import exchange_words_if_short
from icebear.concepts.methods.multipliers import alignment
from icebear.errors import InputError, SameAnswer
from icebear.evaluation.baselines import AttentionRollout
from icebear.explanation.sentences import tokens_sentence
from icebear.render import visible

SITES = ("ffn", "attn")


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


# --- what it is ---


@pytest.mark.parametrize("method", [ATTNLRP, CP_LRP], ids=repr)
def test_at_the_prompt_it_is_the_difference_times_the_prompts_coefficient(model, method):
    with Double():
        result = attribute(
            model, IDS, 11, 12, counterfactual=OTHER, method=replace(method, at="prompt"), sites=model.sites
        )
        alone = attribute(model, IDS, 11, 12, method=method, sites=model.sites)
        there = attribute(model, OTHER, 11, 12, method=method, sites=model.sites)
    for site in model.sites:
        a, b = alone.activation(site), there.activation(site)
        assert torch.allclose(result.of(site), (a - b) * alone.of(site) / a, rtol=1e-6, atol=1e-12)
        assert torch.equal(result.activation(site), a)
        assert torch.equal(result.neurons.counterfactual[site], b)
    assert result.conservation().target == pytest.approx(
        alone.conservation().target - there.conservation().target, rel=1e-9
    )


def test_at_the_midpoint_it_is_the_gradient_between_the_embeddings(model):
    """By autograd, without any of icebear's passes."""
    with Double():
        result = attribute(model, IDS, 11, 12, counterfactual=OTHER, method="gxi")
        x, y = (model.net.model.embed_tokens(torch.tensor([ids])).detach() for ids in (IDS, OTHER))
        middle = ((x + y) / 2).requires_grad_()
        neurons = {}
        hooks = [
            layer.mlp.down_proj.register_forward_pre_hook(
                lambda module, args, number=number: neurons.__setitem__(number, args[0])
            )
            for number, layer in enumerate(model.net.model.layers)
        ]
        logits = model.net(inputs_embeds=middle).logits[0, -1]
        gradients = torch.autograd.grad(logits[11] - logits[12], [middle, *neurons.values()])
        for hook in hooks:
            hook.remove()
    assert torch.allclose(result.tokens, ((x - y) * gradients[0])[0].sum(-1), rtol=1e-9, atol=1e-12)
    difference = result.activation("ffn") - result.neurons.counterfactual["ffn"]
    for layer, gradient in enumerate(gradients[1:]):
        assert torch.allclose(result.ffn[layer], difference[layer] * gradient[0], rtol=1e-9, atol=1e-12)


def test_the_path_is_the_mean_over_points_and_adds_up_with_many(model):
    with Double():
        result = attribute(model, IDS, 11, 12, counterfactual=OTHER, method="ig")
        assert result.counterfactual.at == "path"
        assert result.linear_share == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("method", ["difference", "cp-lrp"])
def test_several_others_are_their_mean_in_any_order(model, method):
    three = [OTHER, [*IDS[:-1], 30], [1, *IDS[1:]]]
    with Double():
        result = attribute(model, IDS, 11, 12, counterfactual=three, method=method)
        again = attribute(model, IDS, 11, 12, counterfactual=three[::-1], method=method)
        singles = [attribute(model, IDS, 11, 12, counterfactual=other, method=method) for other in three]
    assert torch.allclose(result.ffn, again.ffn, rtol=1e-9, atol=1e-12)
    assert torch.allclose(result.ffn, sum(one.ffn for one in singles) / 3, rtol=1e-9, atol=1e-12)
    assert torch.allclose(result.tokens, sum(one.tokens for one in singles) / 3, rtol=1e-9, atol=1e-12)
    assert result.conservation().target == pytest.approx(sum(one.conservation().target for one in singles) / 3)
    assert 0 <= result.counterfactual.overlap <= 1
    assert result.counterfactual.overlap == pytest.approx(again.counterfactual.overlap)
    assert singles[0].counterfactual.overlap is None


@pytest.mark.parametrize(
    "name", third_of(["llama", "gpt2", "gemma3", "bloom", "opt", "falcon", "mixtral", "t5", "bert", "vit", "siglip"])
)
def test_coefficients_between_prompts_for_every_kind_of_model(name):
    known = {**dense(), **mixtures()}
    model = random_model(known[name], "eager") if name in known else make(name, "eager")
    one, other = (IDS, OTHER) if name in known else pair_of(name)
    for method in ("cp-lrp@midpoint", "gxi@prompt"):
        with Double():
            result = attribute(model, one, 1, 2, counterfactual=other, method=method, sites=model.sites)
        assert all(torch.isfinite(result.of(site)).all() for site in model.sites)
        assert result.ffn.abs().sum() > 0


def test_what_is_the_same_in_both_has_no_part_in_the_difference(model):
    result = attribute(model, IDS, 11, 12, counterfactual=OTHER)
    assert not result.tokens[:2].any()
    assert not result.ffn[:, :2].any()
    edit = "L0.ffn.3=2"
    with steer(model, [edit]):
        steered = attribute(model, IDS, 11, 12, counterfactual=OTHER)
    assert not steered.ffn[0, :, 3].any()
    assert steered.linear_share == pytest.approx(1, abs=1e-3)
    assert not torch.allclose(steered.ffn, result.ffn)


def test_the_contrast_is_the_other_prompts_own_answer_unless_it_is_said(model):
    mine = model.predict(IDS, 1)[0].id
    other = next(ids for ids in ([*IDS[:-1], i] for i in range(50)) if model.predict(ids, 1)[0].id not in (mine, 11))
    result = attribute(model, IDS, counterfactual=other)
    answers = [model.predict(ids, 1)[0].id for ids in (IDS, other)]
    assert [result.target.id, result.contrast.id] == answers
    assert result.counterfactual.own_answers
    assert not attribute(model, IDS, 11, 12, counterfactual=OTHER).counterfactual.own_answers
    two = attribute(model, IDS, 11, counterfactual=[OTHER, other])
    assert len(two.counterfactual.contrasts) == 2


def test_ranks_by_what_changes_and_tells_both_activations(model):
    result = attribute(model, IDS, 11, 12, counterfactual=OTHER)
    for row in result.top(10, "ffn", position="all"):
        assert (
            row.counterfactual
            == result.neurons.counterfactual["ffn"][row.neuron.layer, row.position, row.neuron.index].item()
        )
        assert row.polarity == ("+" if row.activation > row.counterfactual else "-")
    less = result.top(10, "ffn", "-", "all")
    assert all(row.activation < row.counterfactual for row in less)
    last = attribute(model, IDS, 11, 12, counterfactual=OTHER, record="last")
    assert torch.allclose(last.ffn[:, 0], result.ffn[:, -1])
    assert last.of_neuron(Neuron(1, "ffn", 3)) == pytest.approx(result.of_neuron(Neuron(1, "ffn", 3)))


# --- who are partners ---


def test_alignment():
    def of(ids, other, sinks=(0,), other_sinks=(0,)):
        return alignment(ids, other, sinks, other_sinks).tolist()

    assert of([1, 2, 3], [1, 5, 6]) == torch.eye(3).tolist()
    assert of([1, 2, 9], [1, 5, 6, 9]) == [[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]]
    assert of([1, 2, 7, 9], [1, 5, 9]) == [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert of([1, 4, 2, 9], [1, 4, 9]) == [[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5], [0, 0, 1]]
    assert of([1, 2, 9], [1, 9]) == [[1, 0], [0, 1], [0, 1]]  # a sink stands for no other token
    assert of([2, 4, 9], [1, 9]) == [[1, 0], [0, 1], [0, 1]]
    assert of([1, 1, 1], [1, 1]) == [[1, 0], [0, 1], [0, 1]]
    with pytest.raises(InputError, match="1"):
        of([1, 2, 3], [1])


def test_prompts_of_different_lengths_say_how_they_are_compared(model):
    result = attribute(model, IDS, 11, 12, counterfactual=IDS[:3] + IDS[4:])
    assert result.counterfactual.at == "midpoint"
    assert "differ in length" in result.counterfactual.note
    assert result.counterfactual.alignments[0].shape == (8, 7)
    assert torch.allclose(result.counterfactual.alignments[0].sum(1), torch.ones(8))


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counterfactual": IDS}, "counterfactual"),
        ({"counterfactual": OTHER, "method": AttentionRollout()}, "AttentionRollout"),
        ({"counterfactual": OTHER, "method": PA_LRP}, "pa-lrp"),
        ({"counterfactual": OTHER[:5], "method": "difference"}, "5"),
        ({"counterfactual": torch.zeros(3, 8, 8)}, "image"),
        ({"method": "difference"}, "counterfactual"),
        ({"method": "gxi@midpoint"}, "counterfactual"),
    ],
)
def test_impossible_wishes_get_a_sentence(model, options, message):
    with pytest.raises(InputError, match=message):
        attribute(model, IDS, 11, 12, **options)


def test_prompts_that_are_answered_alike_have_nothing_to_compare(smol):
    with pytest.raises(InputError, match="' are'"):
        attribute(smol, "The keys near the cabinet", counterfactual="The keys near the house")
    assert attribute(
        smol, "The keys near the cabinet", contrast=" is", counterfactual="The keys near the house"
    ).counterfactual


def test_as_many_prompts_as_to_compare_with(model):
    with pytest.raises(InputError, match="3"):
        attribute(model, [IDS, OTHER, IDS[:4]], 11, 12, counterfactual=[OTHER, IDS])
    result = attribute(model, [IDS, [*IDS[:-1], 30]], 11, 12, counterfactual=OTHER)
    assert len(result) == 2


# --- suggestions ---


@pytest.fixture
def few_tried(monkeypatch):
    """Fewer prompts."""
    monkeypatch.setattr("icebear.concepts.answers.counterfactuals.RUNS", 32)


@pytest.mark.release
def test_of_a_chat_words_of_its_messages_are_exchanged(smol, few_tried):
    """Not those of its template, of which SmolLM2's has a sentence."""
    request = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital is"},
    ]
    ids = smol.ids(request)
    text = {place for turn in smol.turns(ids) for place in range(turn.text_start, turn.text_stop)}
    proposed = suggest_counterfactuals(smol, request)
    assert proposed
    for result in proposed:
        changed = [place for place, (a, b) in enumerate(zip(ids, result.ids, strict=True)) if a != b]
        assert changed
        assert set(changed) <= text


@pytest.mark.release
def test_a_suggestion_exchanges_one_content_word_for_another_answer(smol, few_tried):
    prompt = "The capital of France is"
    ids, old = smol.token_ids(prompt), smol.predict(prompt, 1)[0]
    result = suggest_counterfactuals(smol, prompt, 20)
    assert result == sorted(result, key=lambda one: -one.score)
    for one in result:
        changed = [place for place, (a, b) in enumerate(zip(ids, one.ids, strict=True)) if a != b]
        assert changed
        assert 0 < min(changed) <= max(changed) < len(ids) - 1
        assert one.instead_of in prompt.split()
        assert one.word.lower() not in COMMON
        logits = smol.next_logits(list(one.ids))
        new = int(logits.argmax())
        assert smol.answer_text(new) == one.answer
        assert logits.softmax(-1)[new].item() == pytest.approx(one.probability, rel=1e-3)
        assert (logits[new] - logits[old.id]).item() >= FAR_ENOUGH - 1e-3 > 0
    assert suggest_counterfactuals(smol, prompt, 2) == result[:2]
    first = attribute(smol, prompt, counterfactual=list(result[0].ids), sites=())
    assert first.linear_share == pytest.approx(1, abs=1e-3)


def test_no_suggestion_contains_the_answer(smol, few_tried):
    """A model hardly repeats a word, so it would lose the answer for that reason."""
    prompt = "The opposite of hot is"
    answer = smol.predict(prompt, 1)[0].text.strip()
    assert answer not in [result.word for result in suggest_counterfactuals(smol, prompt, 20)]


def test_where_nothing_can_be_exchanged_nothing_is_suggested(smol):
    assert suggest_counterfactuals(smol, "Bees make") == []
    assert exchange_words_if_short(smol, "Bees make").comparisons == ()


def test_words_of_a_long_text_are_not_exchanged_unasked(smol):
    assert exchange_words_if_short(smol, "The cat sat. " * 60) is None


@pytest.mark.parametrize(
    ("options", "looks"),
    [([], True), (["--no-counterfactual"], True), (["--target", "a"], False), (["--position", "0"], False)],
)
def test_words_are_exchanged_of_a_prompt_alone_only(tiny_folder, options, looks):
    assert ("exchanges" in json.loads(run("explain", "A is", "--model", tiny_folder, "--json", *options))) == looks


def test_the_commonest_words_are_two_hundred_or_so():
    assert 190 <= len(COMMON) <= 210


# --- in a terminal ---


@pytest.mark.release
@pytest.mark.real
@pytest.mark.usefixtures("smol", "few_contexts")
def test_the_commands_say_what_is_compared(tmp_path):
    """The words and numbers of the first one are those of docs/explain.md."""
    page = tmp_path / "page.html"
    camel = ["--counterfactual", "The wild camel lives in the"]
    text = run("explain", ICE_BEAR, *camel, "--html", str(page))
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 100
    assert "How is the answer computed?" in page.read_text()
    assert "Arctic" in page.read_text()
    assert "uggage" in run("rank", ICE_BEAR, *camel, "--words", "direct")


def test_the_commands_say_what_the_list_carries(tiny_folder, few_contexts):
    model, other = ["--model", tiny_folder], ["--counterfactual", "A are"]
    assert "Compared with 'A areB'" in run("explain", "B are", "--target-text", "BA", *other, *model)
    ranked = run("rank", "B are", *other, "--contrast", "C", "--site", "ffn", "--top", "3", "--ablate", *model)
    assert "counterfactual" in ranked
    assert "random" in ranked
    assert "Without a counterfactual" in run("rank", "B are", "--top", "2", *model)
    for arguments, message in (
        (["rank", "B are", "--site", "q", "--ablate"], "--ablate"),
        (["rank", "B are", "--counterfactual", "B are"], "prompt"),
    ):
        result = RUN.invoke(main, [*arguments, *model])
        assert result.exit_code in (1, 2)
        assert message in result.output


def test_the_same_answer_to_both_prompts_gives_both_lists_and_a_command(tiny_folder):
    """The command names an answer that the counterfactual makes more probable, and it works."""
    model = load_model(tiny_folder, device="cpu", dtype="float32")
    prompt, answer = ICE_BEAR, model.predict(ICE_BEAR, 1)[0]
    others = (f"{prompt[:-1]}{letter}" for letter in "abcdfghijklmnopqrstuvwxyz")
    other = next(text for text in others if model.predict(text, 1)[0].id == answer.id)
    lists = [model.predict(text, 5) for text in (prompt, other)]
    gains = model.next_logits(other).softmax(-1) - model.next_logits(prompt).softmax(-1)
    named = [t for tokens in lists for t in tokens if t.id != answer.id and t.text.isprintable()]
    named = [token for token in named if model.tokens_of(token.text) == [token.id]]
    best = max(named, key=lambda token: gains[token.id])
    for method in (None, "gxi@midpoint"):
        with pytest.raises(SameAnswer) as raised:
            attribute(model, prompt, counterfactual=other, method=method)
        assert raised.value.contrast == best.text
        listed = [f"{visible(repr(token.text))} {token.number}" for tokens in lists for token in tokens]
        assert all(token in str(raised.value) for token in listed)
    options = ["rank", prompt, "--counterfactual", other, "--model", tiny_folder, "--device", "cpu"]
    refused = CliRunner().invoke(main, options)
    assert refused.exit_code == 1
    _, _, *command = shlex.split(refused.stderr[refused.stderr.index("Try: ") :])
    assert command == [*options, "--contrast", best.text]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.stderr


def test_a_changed_first_token_is_said_not_to_be_ranked(llama):
    """Where the tokenizer has no start token, the first token is a sink."""
    changed = attribute(llama, IDS, 7, 8, counterfactual=[9, *IDS[1:]])
    assert 0 in changed.prompt.sinks
    assert repr(changed.prompt.strings[0]) in tokens_sentence(changed).partition(". ")[2]
    later = attribute(llama, IDS, 7, 8, counterfactual=[*IDS[:3], 9, *IDS[4:]])
    assert not tokens_sentence(later).partition(". ")[2]


def test_a_prompt_of_one_token_is_explained(tiny_folder):
    """Its token is the explained one, so that it is no sink; there is nothing to remove."""
    model = load_model(tiny_folder, device="cpu", dtype="float32")
    ids = model.ids("a")[:1]
    explanation = explain(model, ids)
    assert explanation.nodes
    assert explanation.relevance.prompt.sinks == ()
    result = CliRunner().invoke(main, ["rank", "a", "--position", "all", "--model", tiny_folder, "--device", "cpu"])
    assert result.exit_code == 0
    assert "ffn" in result.stdout
