"""Laws of steering."""

import gc

import pytest
import torch
from conftest import ICE_BEAR, IDS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stages import OTHER, PROMPT, made

from icebear import Edit, Neuron, Recipe, attribute, steer
from icebear.app.recipes import EXAMPLE_RECIPE
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS
from icebear.edits import acts_at, parse_edits
from icebear.errors import InputError, RecipeError
from icebear.models.model import Model
from icebear.steering.apply import reading_sources_once
from icebear.steering.outcome import KL_DRAWS, SEED, answer_outcomes, outcome_of_steering
from icebear.steering.random_edits import random_edits

PROMPTS = ["ice bear", "in the cold far north"]
EDITS = ["L0.ffn.5=9", "L2.ffn.7=9"]
places = st.sampled_from(["all", "prompt", "last", "generated", "position:0,3-5", "step:0-2"])
numbers = st.floats(-3e38, 3e38)
edits = st.one_of(
    st.builds(
        Edit,
        st.builds(Neuron, st.integers(0, 99), st.sampled_from(["ffn", "attn", "q", "head"]), st.integers(0, 9999)),
        st.sampled_from(["set", "add"]),
        numbers,
        st.sampled_from(["", "max", "std"]),
        places,
        st.floats(0, 1),
    ),
    st.builds(Edit, st.just(Neuron(1, "ffn", 2)), st.just("scale"), numbers, st.just(""), places),
    st.builds(Edit.from_prompt, st.just("L1.head.2"), st.text(), places),
)


@settings(max_examples=30)
@given(edits)
def test_an_edit_reads_back(edit):
    assert Edit.parse(str(edit)) == edit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("L29.ffn.860*0", Edit(Neuron(29, "ffn", 860), "scale", 0)),
        ("L29.ffn.490=-6.2", Edit(Neuron(29, "ffn", 490), "set", -6.2)),
        ("L24.ffn.559+2std@last", Edit(Neuron(24, "ffn", 559), "add", 2, "std", "last")),
        ("L24.ffn.559-2max@step:0-3~0.5", Edit(Neuron(24, "ffn", 559), "add", -2, "max", "step:0-3", 0.5)),
        ("L4.head.3*-1e-3", Edit(Neuron(4, "head", 3), "scale", -1e-3)),
        ('L4.head.3<-"say \\"a@b\\""@last', Edit.from_prompt("L4.head.3", 'say "a@b"')),
        ('L4.head.3 <- "ice"^0.5', Edit("L4.head.3", "swap", 0, share=0.5, source="ice")),
    ],
)
def test_the_text_form(text, expected):
    assert Edit.parse(text) == expected


def test_where_an_edit_acts():
    """Against the definition: prompt of 4 tokens, positions 0 to 6."""
    expected = {
        "all": {0, 1, 2, 3, 4, 5, 6},
        "prompt": {0, 1, 2, 3},
        "last": {3},
        "generated": {4, 5, 6},
        "position:0,5-6": {0, 5, 6},
        "step:0,2": {3, 5},
    }
    for where, positions in expected.items():
        assert {p for p in range(7) if acts_at(where, p, 4)} == positions


def test_nothing_changes_nothing(model):
    plain = model.generate(PROMPTS[0], 12)
    logits = model.net(torch.tensor([IDS])).logits
    for none in ([], ["L2.ffn.3*1", "L1.head.2*1", "L1.q.7+0", "L0.ffn.9+0"]):
        with steer(model, none):
            assert model.generate(PROMPTS[0], 12) == plain
            assert torch.equal(model.net(torch.tensor([IDS])).logits, logits)
    assert torch.equal(model.net(torch.tensor([IDS])).logits, logits)


def test_the_recipe_turns_the_ice_bear(smol):
    recipe = Recipe.load(EXAMPLE_RECIPE)
    assert smol.predict(ICE_BEAR, 1)[0].text == " Arctic"
    with steer(smol, recipe):
        assert smol.predict(ICE_BEAR, 1)[0].text == " desert"
        assert smol.generate(ICE_BEAR, 3).startswith(" desert")
    assert smol.predict(ICE_BEAR, 1)[0].text == " Arctic"


@pytest.mark.parametrize("where", ["all", "prompt", "last", "generated", "step:1-3", "position:2,7"])
def test_same_text_with_and_without_cache_alone_and_padded(model, where):
    plain = model.generate(PROMPTS[0], 12)
    with steer(model, [f"{edit}@{where}~0.9" for edit in EDITS]):
        alone = model.generate(PROMPTS[0], 12)
        assert model.generate(PROMPTS[0], 12, use_cache=False) == alone != plain
        assert model.generate(PROMPTS, 12)[0] == alone
        assert model.generate(PROMPTS, 12, use_cache=False)[0] == alone
        assert model.generate(PROMPTS[:1], 12, num_beams=1) == [alone]


def test_edits_of_some_rows_leave_the_others(model):
    edits = ["L2.ffn.7=9@last", "L1.ffn.7+5@generated"]
    with steer(model, edits, rows=[1], trace=True) as acts:
        plain, edited = model.generate([PROMPTS[0], PROMPTS[0]], 12)
    with steer(model, edits):
        assert model.generate(PROMPTS[0], 12) == edited
    assert {act.row for act in acts} == {1}
    assert model.generate(PROMPTS[0], 12) == plain != edited


def test_what_edits_do_to_an_answer_is_what_steering_does(llama):
    """The answers' probabilities without and with edits, and under each draw; only then the side effects."""
    edits = parse_edits(["L1.ffn.3+9", "L2.ffn.5=-8@last"])
    draws = random_edits(llama, edits, RANDOM_DRAWS, SEED)

    def under(row):
        with steer(llama, row):
            return llama.next_logits(IDS).softmax(-1)

    rows = [under(row) for row in ([], edits, *draws)]
    tokens = [int(row.argmax()) for row in rows[:2]]
    first, second, third = answer_outcomes(llama, IDS, edits)
    assert tokens[0] != tokens[1]
    for control, token in zip((second.old, second.control), tokens, strict=True):
        assert [control.before, control.after, *control.drawn] == pytest.approx(
            [float(row[token]) for row in rows], 1e-4
        )
    assert (first.control.drawn, first.control.after) == ((), second.control.after)
    gain = second.control.after
    assert second.as_far == sum(value >= gain for value in second.control.drawn) < RANDOM_DRAWS
    assert second.off_target_kl is None
    assert third.off_target_kl > 0
    assert len(third.random_off_target_kl) == KL_DRAWS


def test_beam_search_with_and_without_cache(model):
    with steer(model, EDITS):
        cached = model.generate(PROMPTS[0], 12, num_beams=3)
        assert model.generate(PROMPTS[0], 12, use_cache=False, num_beams=3) == cached
        assert model.generate(PROMPTS, 12, num_beams=3)[0] == cached


def test_an_edit_does_what_it_says(llama):
    """Set, scale, add, on a neuron and on a head, read back where the next module gets them."""
    for text, site, change in [
        ("L1.ffn.3=7", "ffn", lambda x: x.index_fill(2, torch.tensor(3), 7)),
        ("L1.ffn.3*2@last", "ffn", None),
        ("L1.head.2*0", "attn", lambda x: torch.cat((x[..., :12], 0 * x[..., 12:18], x[..., 18:]), -1)),
        ("L1.v.4+1.5", "v", lambda x: x + 1.5 * (torch.arange(12) == 4)),
    ]:
        plain = attribute(llama, IDS, target=1, sites=("ffn", "attn", "v")).activation(site)[1]
        with steer(llama, [text]):
            steered = attribute(llama, IDS, target=1, sites=("ffn", "attn", "v")).activation(site)[1]
        if change is None:
            expected = plain.clone()
            expected[-1, 3] *= 2
        else:
            expected = change(plain[None])[0]
        assert torch.allclose(steered, expected), text


@pytest.fixture
def other(monkeypatch):
    """A prompt that models without a tokenizer read, too."""
    read = Model._read
    monkeypatch.setattr(Model, "_read", lambda model, p: OTHER if p.text == "other" else read(model, p))


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("site", ["head", "ffn"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "bert", "t5"])
def test_a_swap_is_the_activation_patched_by_hand(name, site):
    model = made(name)
    neuron = Neuron(model.layers - 1, site, 1)
    begin = {"decoder_input_ids": torch.tensor([[0]])} if name == "t5" else {}
    run = lambda ids: model.net(input_ids=torch.tensor([ids]), **begin).logits  # noqa: E731
    if name == "mixtral" and site == "ffn":  # an expert's neurons are no columns of one module
        values = attribute(model, OTHER, target=1, sites=("ffn",)).activation("ffn")[neuron.layer, -1, 1]
        with steer(model, Edit(neuron, "set", values.item(), where="last")):
            expected = run(PROMPT)
    else:
        module = model.site_module("attn" if site == "head" else "ffn", neuron.layer)
        width = model.head_dim if site == "head" else 1
        columns, seen = slice(width, 2 * width), []
        handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, -1, columns].clone()))
        run(OTHER)
        handle.remove()

        def patch(_, args):
            args[0][:, -1, columns] = seen[0]

        handle = module.register_forward_pre_hook(patch)
        expected = run(PROMPT)
        handle.remove()
    with steer(model, Edit.from_prompt(neuron, "other")):
        swapped = run(PROMPT)
    assert (swapped - expected).abs().max() < 1e-5
    assert (swapped - run(PROMPT)).abs().max() > 1e-4


@pytest.mark.usefixtures("other")
def test_a_swap_reads_tokens_of_its_prompt_without_edits(llama):
    """At positions, those of the prompt; else its last one, whatever else is edited, and in which row."""
    of = lambda ids: attribute(llama, ids, target=1, sites=("attn", "ffn"))  # noqa: E731
    here, there = of(IDS).activation("ffn")[2, :, 3], of(OTHER).activation("ffn")[2, :, 3]
    swap = Edit.from_prompt("L2.ffn.3", "other", "position:1,3-4")
    with steer(llama, swap):
        expected = here.clone()
        expected[[1, 3, 4]] = there[[1, 3, 4]]
        assert torch.allclose(of(IDS).activation("ffn")[2, :, 3], expected)
    with steer(llama, "L1.ffn.3=50"), steer(llama, Edit.from_prompt("L2.ffn.3", "other", "all")):
        assert torch.allclose(of(IDS).activation("ffn")[2, :, 3], there[-1].expand(len(IDS)))
    with pytest.raises(InputError), steer(llama, Edit.from_prompt("L2.ffn.3", "other", "position:9")):
        pass


@pytest.mark.usefixtures("other")
def test_a_prompt_of_swaps_is_read_once_where_nothing_changes(llama):
    swaps = [Edit.from_prompt("L2.ffn.3", "other"), Edit.from_prompt("L1.ffn.5", "other")]
    swaps.append(Edit.from_prompt("L2.ffn.3", (1, 2)))
    passes = []
    handle = llama.net.register_forward_hook(lambda *_: passes.append(0))

    def under_each():
        logits = []
        for swap in swaps:
            with steer(llama, "L0.ffn.1=7"), steer(llama, swap):
                logits.append(llama.next_logits(IDS))
        return torch.stack(logits)

    each, count = under_each(), len(passes)
    with reading_sources_once():
        once = under_each()
        with reading_sources_once():
            assert torch.equal(under_each(), each)
    handle.remove()
    assert torch.equal(once, each)
    assert (count, len(passes) - count) == (6, 5 + 3)  # a swap and its prompt; two have the same prompt
    assert (each[0] - each[1]).abs().max() > 1e-4


def test_decay_moves_part_of_the_way(llama):
    seen = []
    handle = llama.net.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda m, a: seen.append(a[0][0, :, 2].clone()), prepend=False
    )
    with steer(llama, ["L0.ffn.2=10@step:0-9~0.5"]):
        inner = llama.net.model.layers[0].mlp.down_proj.register_forward_pre_hook(
            lambda m, a: seen.append(a[0][0, :, 2].clone())
        )
        llama.net.generate(torch.tensor([IDS]), max_new_tokens=3, do_sample=False)
        inner.remove()
    handle.remove()
    before, after = seen[0::2], seen[1::2]
    assert after[0][-1] == 10
    assert torch.equal(after[0][:-1], before[0][:-1])
    assert torch.allclose(after[1], before[1] + 0.5 * (10 - before[1]))
    assert torch.allclose(after[2], before[2] + 0.25 * (10 - before[2]))


def test_units_need_an_index_and_use_it(llama):
    with pytest.raises(InputError, match="icebear index"), steer(llama, ["L0.ffn.2=1max"]):
        pass
    with steer(llama, ["L0.ffn.2=2max"], statistic=lambda neuron, unit: {"max": 3.0}[unit]):
        result = attribute(llama, IDS)
    assert result.activation("ffn")[0, :, 2].tolist() == [6.0] * len(IDS)


def test_after_an_exception_the_model_is_as_before(llama):
    before = {name: set(module.__dict__) for name, module in llama.net.named_modules()}
    logits = llama.net(torch.tensor([IDS])).logits
    with pytest.raises(ZeroDivisionError), steer(llama, ["L0.ffn.2=100"]):
        assert not torch.equal(llama.net(torch.tensor([IDS])).logits, logits)
        1 / 0  # noqa: B018
    assert torch.equal(llama.net(torch.tensor([IDS])).logits, logits)
    assert {name: set(module.__dict__) for name, module in llama.net.named_modules()} == before


def test_a_recipe_reads_back_and_fits_one_model(llama, smol, tmp_path):
    recipe = Recipe.for_model(llama, "né <b>", [Edit.parse("L1.ffn.3=0.1@last")], prompt="p")
    recipe.save(tmp_path / "r.json")
    assert Recipe.load(tmp_path / "r.json") == recipe
    with pytest.raises(RecipeError, match="random llama"), steer(smol, recipe):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "'icebear_recipe'"),
        ('{"icebear_recipe": 2}', "'name'"),
        (
            '{"icebear_recipe": 2, "name": "x", "model_name": "", "model_fingerprint": "", "edits": [3]}',
            r"\b3\b",
        ),
        (
            '{"icebear_recipe": 2, "name": "x", "model_name": "", "model_fingerprint": "", "edits": ["L1.ffn.2=nan"]}',
            "nan",
        ),
        (
            '{"icebear_recipe": 2, "name": "x", "model_name": "", "model_fingerprint": "", "edits": ["L1.ffn.2=1"], '
            '"provenance": 3}',
            "'int'",
        ),
    ],
)
def test_a_bad_recipe_says_what_is_wrong(text, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "L1.ffn.2",
        "L1.ffn.2=",
        "L1.ffn.2=x",
        "L1.ffn.2=1@nowhere",
        "L1.mlp.2=1",
        "L1.ffn.2=inf",
        "L1.ffn.2*2max",
        "L1.ffn.2=1~x",
        "ffn.2=1",
        "L1.head.2<-ice",
        'L1.head.2<-"ice"max',
        'L1.head.2<-"\\x"',
        'L1.head.2<-"\\ud800"',
    ],
)
def test_a_bad_edit_says_so(text):
    with pytest.raises(InputError):
        Edit.parse(text)


@pytest.mark.parametrize(
    ("op", "value", "source"), [("swap", 0, None), ("set", 1, "ice"), ("swap", 1, "ice"), ("swap", 0, 3)]
)
def test_a_swap_has_a_prompt_and_no_value(op, value, source):
    with pytest.raises(InputError):
        Edit("L1.head.2", op, value, source=source)


def test_an_edit_that_is_never_reached_is_named(model, caplog):
    for where, reached in (("position:50", False), ("step:9", False), ("position:1", True), ("last", True)):
        caplog.clear()
        edit = Edit("L1.ffn.3", "set", 5.0, where=where)
        with steer(model, edit):
            pass
        assert not caplog.records  # nothing was run
        with steer(model, edit):
            model.generate("abc", max_new_tokens=3)
        assert (str(edit) in caplog.text) is not reached


@pytest.mark.parametrize("enters", [True, False])
def test_a_steer_that_is_never_entered_warns(model, caplog, enters):
    context = steer(model, "L1.ffn.3*1")
    if enters:
        with context:
            pass
    del context
    gc.collect()
    assert ("L1.ffn.3*1" in caplog.text) is not enters
    assert [record.levelname for record in caplog.records] == ([] if enters else ["WARNING"])


def test_the_control_of_steering_is_random_edits(model):
    edits = parse_edits(["L1.ffn.3=9"])
    outcome = outcome_of_steering(model, PROMPTS[0], edits)

    def probabilities(each):
        with steer(model, each):
            return model.next_logits(PROMPTS[0]).softmax(-1)

    token = int(probabilities(edits).argmax())
    draws = random_edits(model, edits, RANDOM_DRAWS, SEED)
    expected = [probabilities(each)[token].item() for each in ([], edits, *draws)]
    control = outcome.control
    assert [control.before, control.after, *control.drawn] == pytest.approx(expected, abs=1e-6)
