"""When edits act: conditions on tokens, with and without a cache; every act in the trace."""

import pytest
import torch
from conftest import ICE_BEAR, IDS, LLAMA, random_model
from test_chat import ASKED, MODELS, TALK
from test_tasks import make

from icebear import Chat, Edit, steer
from icebear.concepts.passes.sites import hooks
from icebear.errors import InputError

PROMPTS = [ICE_BEAR, "In winter the lakes of the far north"]
STRONG = "L29.ffn.860=-20"
LETTERS, SHIFT = ["ice bear", "in the cold far north"], "L0.ffn.15=5"
"""Prompts and an edit of the made model, in which it writes other letters."""


@pytest.mark.parametrize("text", ['L3.ffn.7=2@seen:" desert"', 'L3.ffn.7*0@unseen:"a\\"@~^b"~0.5^0.25'])
def test_conditions_are_written_and_read(text):
    assert str(Edit.parse(text)) == text
    assert Edit.parse(str(Edit.parse(text))) == Edit.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "L3.ffn.7=2@seen",
        "L3.ffn.7=2@seen:desert",
        'L3.ffn.7=2@seen:""',
        'L3.ffn.7=2@all:"x"',
        'L3.ffn.7=2@seen: "x"',
        r'L3.ffn.7=2@seen:"\ud800"',
        "L3.ffn.7=2@position:" + "9" * 5000,
    ],
)
def test_bad_conditions_say_how_they_are_written(text):
    with pytest.raises(InputError):
        Edit.parse(text)


def test_a_condition_on_the_prompt_is_a_range_of_positions(model):
    place = LETTERS[0].index("b")
    for letter, positions in (("b", f"{place}-99"), ("x", None)):
        with steer(model, [f'{SHIFT}@seen:"{letter}"']):
            result = model.generate(LETTERS[0], max_new_tokens=12)
        with steer(model, [f"{SHIFT}@position:{positions}"] if positions else []):
            assert model.generate(LETTERS[0], max_new_tokens=12) == result
    with steer(model, [f'{SHIFT}@unseen:"b"']):
        result = model.generate(LETTERS[0], max_new_tokens=12)
    with steer(model, [f"{SHIFT}@position:0-{place - 1}"]):
        assert model.generate(LETTERS[0], max_new_tokens=12) == result


@pytest.mark.parametrize("kind", ["seen", "unseen"])
def test_a_condition_on_what_was_written(model, kind):
    """Against a loop without a cache, whose positions come from looking at the ids."""
    token = model.tokens_of(model.generate(LETTERS[0], max_new_tokens=4))[1]
    ids = list(model.token_ids(LETTERS[0]))
    for _ in range(12):
        first = ids.index(token) if token in ids else len(ids)
        where = f"position:{first}-999" if kind == "seen" else f"position:0-{first - 1}"
        with steer(model, [f"{SHIFT}@{where}"]), torch.no_grad():
            ids.append(int(model.net(torch.tensor([ids])).logits[0, -1].argmax()))
    with steer(model, [Edit.parse(SHIFT + f'@{kind}:"{model.text(token)}"')]):
        result = model.tokens_of(model.generate(LETTERS[0], max_new_tokens=12))
    assert result == ids[-12:]
    assert token in ids[len(LETTERS[0]) + 1 : -1]  # the condition changed on the way


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_conditions_need_no_cache_and_no_order_of_beams(model, options):
    edits = [f'{SHIFT}@seen:"V"', 'L2.ffn.7=9@unseen:"e"']
    plain = model.generate(LETTERS, max_new_tokens=8, **options)
    with steer(model, edits):
        cached = model.generate(LETTERS, max_new_tokens=8, **options)
        assert model.generate(LETTERS, max_new_tokens=8, use_cache=False, **options) == cached != plain
        if not options:
            assert [model.generate(prompt, max_new_tokens=8) for prompt in LETTERS] == cached


def test_a_condition_that_cannot_be_known_is_refused(smol):
    with pytest.raises(InputError, match="polar bears"), steer(smol, [f'{STRONG}@seen:" polar bears"']):
        pass
    with steer(smol, [f'{STRONG}@seen:" bear"']), pytest.raises(InputError, match="bear"):
        smol.net(inputs_embeds=torch.zeros(1, 3, 576))


def test_a_decoder_s_condition_is_about_what_it_writes():
    model = make("t5")
    layer = model.layers - 1
    ids = torch.tensor([IDS])
    start = torch.tensor([[0, 5, 9]])
    plain = model.net(input_ids=ids, decoder_input_ids=start).logits
    model.tokenizer = type("One", (), {"__call__": lambda self, text, **_: {"input_ids": [5]}})()
    with steer(model, [f'L{layer}.ffn.3=9@seen:"x"'], trace=True) as acts:
        steered = model.net(input_ids=ids, decoder_input_ids=start).logits
    assert [(act.position, act.token) for act in acts] == [(1, 5), (2, 9)]
    assert torch.allclose(plain[:, :1], steered[:, :1])
    assert not torch.allclose(plain[:, 1], steered[:, 1])


def test_what_an_older_cache_holds_is_not_taken_for_what_was_read_since(smol):
    ids = torch.tensor([smol.token_ids("The ice bear lives")])
    with steer(smol, [f'{STRONG}@seen:" lamp"']), torch.no_grad():
        cache = smol.net(ids, use_cache=True).past_key_values
        smol.net(torch.tensor([smol.token_ids("The old lamp is")]))
        with pytest.raises(InputError, match="lamp"):
            smol.net(ids[:, :1], past_key_values=cache)


def test_padding_is_known_under_a_static_cache(smol):
    edits = ["L29.ffn.860=-20@last", "L24.ffn.559=9@generated", "L3.ffn.7=5@position:1"]
    with steer(smol, edits, trace=True) as acts:
        result = smol.generate(PROMPTS, max_new_tokens=4, cache_implementation="static")
    with steer(smol, edits, trace=True) as usual:
        assert smol.generate(PROMPTS, max_new_tokens=4) == result
    assert [(act.row, act.position, act.edit) for act in acts] == [(act.row, act.position, act.edit) for act in usual]


def test_steering_inside_steering(model):
    """Both act, at their own tokens, also under `generate`; afterwards the model is as before."""
    outer, inner = "L0.ffn.5=9@last", "L2.ffn.7=9@generated"
    before = dict(model.net.__dict__)
    with steer(model, [outer, inner]):
        both = model.generate(LETTERS[0], max_new_tokens=12)
    with steer(model, [outer]):
        one = model.generate(LETTERS[0], max_new_tokens=12)
        with steer(model, [inner]):
            assert model.generate(LETTERS[0], max_new_tokens=12) == both != one
        assert model.generate(LETTERS[0], max_new_tokens=12) == one
    assert model.net.__dict__ == before


def test_generate_takes_what_transformers_takes(smol):
    from transformers import GenerationConfig

    ids = torch.tensor([smol.token_ids(ICE_BEAR)])
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    embeddings = smol.net.get_input_embeddings()(ids)
    with steer(smol, [f"{STRONG}@last"]), torch.no_grad():
        result = smol.net.generate(ids, settings)[0, ids.shape[1] :].tolist()
        assert smol.net.generate(inputs_embeds=embeddings, generation_config=settings)[0].tolist() == result
        with pytest.raises(InputError, match="input_ids"):
            smol.net.generate(generation_config=settings)


# --- the trace ---


def test_without_trace_nothing_is_listed():
    model = random_model(LLAMA)
    with steer(model, ["L0.ffn.3=7"]) as acts:
        model.net(torch.tensor([IDS]))
    assert acts == []


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 3}], ids=str)
def test_every_act_is_in_the_trace(smol, options):
    """What the activations say, pass by pass, against what the trace says."""
    edits = ["L5.ffn.3=7@last", "L5.ffn.4=5@generated", "L7.ffn.9=3@step:1-2", "L8.head.2*0@prompt"]
    seen = []

    def visit(site, layer, x):
        seen.append(
            (
                layer,
                (x[..., 3] == 7).sum().item() if layer == 5 else (x[..., 9] == 3).sum().item(),
                (x[..., 4] == 5).sum().item() if layer == 5 else 0,
            )
        )

    with steer(smol, edits, trace=True) as trace, hooks(smol, [("ffn", 5), ("ffn", 7)], visit):
        texts = smol.generate(PROMPTS, max_new_tokens=4, **options)
    by_edit = {text: [act for act in trace if str(act.edit) == text] for text in edits}
    assert len(by_edit[edits[0]]) == sum(count for layer, count, _ in seen if layer == 5)
    assert len(by_edit[edits[1]]) == sum(count for layer, _, count in seen if layer == 5)
    assert len(by_edit[edits[2]]) == sum(count for layer, count, _ in seen if layer == 7)
    ids = [smol.token_ids(prompt) for prompt in PROMPTS]
    if not options:
        assert [(act.row, act.position) for act in by_edit[edits[0]]] == [(0, len(ids[0]) - 1), (1, len(ids[1]) - 1)]
        assert {act.position for act in by_edit[edits[2]] if act.row == 0} == {len(ids[0]), len(ids[0]) + 1}
        assert len(by_edit[edits[3]]) == sum(map(len, ids))
        whole = [prompt + smol.tokens_of(text) for prompt, text in zip(ids, texts, strict=True)]
        assert all(act.token == whole[act.row][act.position] for act in trace)
    assert all(act.after == 7 for act in by_edit[edits[0]])


# --- messages of a chat ---------------------------------------------------------------------------------


def places(model, messages, where, **options):
    with steer(model, [f"L1.ffn.3=2@{where}"], trace=True) as acts:
        text = model.answer(messages, max_new_tokens=3, **options)
    return {act.position for act in acts}, model.turns(text.before(2))


@pytest.mark.parametrize(
    ("where", "named"),
    [("turn:last-user", [2]), ("turn:user", [0, 2]), ("turn:1", [1]), ("turn:0", [0])],
)
def test_edits_in_messages_of_a_chat(where, named):
    """At the tokens of messages, not at the template's; the message that is being written grows."""
    result, turns = places(MODELS["qwen"], TALK, where)
    assert result == {place for turn in named for place in range(turns[turn].first, turns[turn].last)}
    grows, turns = places(MODELS["qwen"], TALK, "turn:last-assistant")
    assert grows >= set(range(turns[-1].first, turns[-1].last))


def test_messages_are_numbered_without_the_templates_own():
    model = MODELS["llama 3"]
    with steer(model, ["L1.ffn.3=2@turn:0"], trace=True) as acts:
        model.next_logits(ASKED)
    turn = next(turn for turn in model.turns(model.ids(ASKED)) if turn.role == "user")
    assert {act.position for act in acts} == set(range(turn.first, turn.last))
    for where in ("turn:system", "turn:7", "turn:last-system"):
        with steer(model, [f"L1.ffn.3=2@{where}"]), pytest.raises(InputError, match=where):
            model.next_logits(ASKED)


def test_edits_in_messages_of_a_padded_batch():
    model = MODELS["qwen"]
    for messages in (ASKED, TALK):
        with steer(model, ["L1.ffn.3=2@turn:last-user"], trace=True) as acts:
            model.generate([Chat(ASKED), Chat(TALK)], max_new_tokens=1)
        row = (ASKED, TALK).index(messages)
        turn = [turn for turn in model.turns(model.ids(messages)) if turn.role == "user"][-1]
        assert {act.position for act in acts if act.row == row} == set(range(turn.first, turn.last))


def test_an_edit_where_the_answer_is_made():
    model = MODELS["qwen"]
    result, _ = places(model, TALK, "answer")
    last = len(model.ids(TALK)) - 1
    assert result == {last, last + 1, last + 2}
    with pytest.raises(InputError, match="turn:nobody"):
        Edit.parse("L1.ffn.3=2@turn:nobody")
    assert str(Edit.parse("L1.ffn.3=2@turn:last-user~0.5")) == "L1.ffn.3=2@turn:last-user~0.5"
