"""When edits act: with padding, a static cache and beams, inside each other; every act in the trace."""

import pytest
import torch
from configurations import dense, mixtures
from conftest import ICE_BEAR, IDS, LLAMA, random_model
from few import few_of
from test_chat import MODELS, TALK

from icebear import steer
from icebear.concepts.passes.sites import hooks
from icebear.errors import InputError

PROMPTS = [ICE_BEAR, "In winter the lakes of the far north"]
STRONG = "L29.ffn.860=-20"
LETTERS, SHIFT = ["ice bear", "in the cold far north"], "L0.ffn.15=5"
"""Prompts and an edit of the made model, in which it writes other letters."""


def test_padding_is_known_under_a_static_cache(smol):
    edits = ["L29.ffn.860=-20@last", "L24.ffn.559=9@generated", "L3.ffn.7=5@position:1"]
    with steer(smol, edits, trace=True) as acts:
        result = smol.generate(PROMPTS, max_new_tokens=4, cache_implementation="static")
    with steer(smol, edits, trace=True) as usual:
        assert smol.generate(PROMPTS, max_new_tokens=4) == result
    assert [(act.row, act.position, act.edit) for act in acts] == [(act.row, act.position, act.edit) for act in usual]


SLIDING = ["gemma2", "gemma3", "olmo3", "cohere2", "exaone4", "gpt_oss", "qwen2, sliding", "smollm3", "llama"]


@pytest.mark.parametrize("kind", SLIDING)
@pytest.mark.parametrize("place", few_of(["@last", "@position:2", "@generated"], "@last", "@generated"))
def test_a_static_cache_with_sliding_layers_edits_the_same_tokens(kind, place):
    """Such models give a pass one mask for each kind of layer."""
    each = {**dense(), **mixtures()}
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None}
    each["qwen2, sliding"] = type(each["qwen2"])(**{**each["qwen2"].to_dict(), **sliding})
    model = random_model(each[kind], "eager", torch.float32)
    rows = [IDS, IDS[:4]]
    ids = torch.tensor([row if len(row) == 8 else [0] * 4 + row for row in rows])
    mask = torch.tensor([[1] * 8, [0] * 4 + [1] * 4])
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with steer(model, f"L1.ffn.3=20{place}", trace=True) as acts:
        result = model.net.generate(ids, attention_mask=mask, cache_implementation="static", **options)
    with steer(model, f"L1.ffn.3=20{place}", trace=True) as usual:
        assert model.net.generate(ids, attention_mask=mask, **options).tolist() == result.tolist()
    assert [(act.row, act.position) for act in acts] == [(act.row, act.position) for act in usual] != []


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


def test_without_a_cache_each_token_is_in_the_trace_once(smol):
    """Every pass reads the whole text anew, and the edits act there again."""
    traces = []
    for options in ({}, {"use_cache": False}):
        with steer(smol, ["L5.ffn.3=7@last", "L5.ffn.4=5@generated", "L7.ffn.9=3@step:1-2"], trace=True) as trace:
            texts = smol.generate(PROMPTS, max_new_tokens=4, **options)
        traces.append((texts, sorted((act.row, act.position, act.token, str(act.edit), act.after) for act in trace)))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
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


def test_an_edit_where_the_answer_is_made():
    model = MODELS["qwen"]
    with steer(model, ["L1.ffn.3=2@answer"], trace=True) as acts:
        model.answer(TALK, max_new_tokens=3)
    last = len(model.ids(TALK)) - 1
    assert {act.position for act in acts} == {last, last + 1, last + 2}
