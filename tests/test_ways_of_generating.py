"""Monitors and edits in every way in which transformers generates: values and acts belong to the tokens that stay."""

import pytest
import torch
from conftest import LLAMA, random_model
from few import few_of
from letters import Letters
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from icebear import Model, Monitor, Neuron, steer, watching
from icebear.errors import InputError
from icebear.steering.concept.detectors import ConceptNeuron, contributions

PROMPT, OTHER = "The ice bear lives in the far north and the ice bear", "A camel"
NEW = 10
PLACES = ["@all", "@prompt", "@last", "@generated", "@answer", "@position:2,5", "@step:0", "@step:1-3", "@answer~0.5"]


@pytest.fixture(scope="module")
def model():
    net = random_model(LLAMA, dtype=torch.float32).net
    net.generation_config.eos_token_id = None
    return Model(net, Letters(), "letters")


@pytest.fixture(scope="module")
def draft():
    """A model that writes other letters, so that drafts are rejected."""
    return random_model(LLAMA, dtype=torch.float32, seed=3).net


class Stream:
    """Takes tokens as they are written."""

    def put(self, tokens): ...

    def end(self): ...


WAYS = {
    "plain": lambda draft: {},
    "no cache": lambda draft: {"use_cache": False},
    "prompt lookup": lambda draft: {"prompt_lookup_num_tokens": 4},
    "assisted": lambda draft: {"assistant_model": draft},
    "assisted, sampled": lambda draft: {"assistant_model": draft, "do_sample": True},
    "static cache": lambda draft: {"cache_implementation": "static"},
    "chunked prefill": lambda draft: {"prefill_chunk_size": 3},
    "sampled": lambda draft: {"do_sample": True},
    "padded batch": lambda draft: {},
    "streamed": lambda draft: {"streamer": Stream()},
}


def generated(model, draft, way, new=NEW):
    """The prompts and the new ids of each."""
    texts = [PROMPT, OTHER] if way == "padded batch" else [PROMPT]
    rows = [model.ids(text) for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(0)
    options = {"do_sample": False, **WAYS[way](draft)}
    new_ids = model.net.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **options)
    return rows, new_ids[:, longest:].tolist()


def monitor_of(model):
    neurons = (ConceptNeuron(Neuron.parse("L1.ffn.3"), "+", 1.0, 0.0, 1.0, 5.0),)
    return Monitor("x", "token", 1.0, 0.05, 20, 0, neurons, None, "letters", model.fingerprint)


@pytest.mark.parametrize("way", WAYS)
def test_a_monitor_reads_each_written_token_once_and_no_draft(model, draft, way):
    """As one plain pass over the whole text reads them; the last token of a generation is not read."""
    monitor, flagged = monitor_of(model), []
    with watching(model, monitor, on_flag=lambda name, passage: flagged.append(passage.text)) as log:
        rows, new = generated(model, draft, way)
    assert len(log.texts) == len(rows)
    said = []
    for text, prompt, ids in zip(log.texts, rows, new, strict=True):
        (every,) = contributions(model, [monitor.detector], [prompt + ids])[0]
        right = every.sum(-1)[len(prompt) : len(prompt) + NEW - 1]
        assert len(text["x"].values) == NEW - 1
        assert text["x"].values == pytest.approx(right.tolist(), abs=1e-4)
        said += [flag.text for flag in text["x"].flags]
    assert sorted(flagged) == sorted(said)


@pytest.mark.parametrize(
    "way", few_of((way for way in WAYS if "sampled" not in way), "assisted", "static cache", "chunked prefill")
)
def test_an_edit_acts_at_its_tokens_once(model, draft, way):
    usual = "padded batch" if way == "padded batch" else "plain"
    for place in PLACES:
        with steer(model, f"L1.ffn.3=9{place}", trace=True) as acts:
            result = generated(model, draft, way, 6)
        with steer(model, f"L1.ffn.3=9{place}", trace=True) as plain_acts:
            assert generated(model, draft, usual, 6) == result, place
        assert [act[:4] for act in seen(acts)] == [act[:4] for act in seen(plain_acts)], place


def seen(acts):
    return sorted((act.row, act.position, act.token, str(act.edit)) for act in acts)


@pytest.mark.parametrize("way", ["assisted, sampled", "sampled"])
def test_acts_of_sampled_texts_are_those_of_written_tokens(model, draft, way):
    with steer(model, "L1.ffn.3+1@answer", trace=True) as acts:
        (prompt,), (new,) = generated(model, draft, way)
    written = (prompt + new)[:-1]
    at = range(len(prompt) - 1, len(written))
    assert [(act.position, act.token) for act in acts] == [(position, written[position]) for position in at]


@pytest.mark.parametrize("option", [{"num_beams": 2}, {"generation_config": GenerationConfig(num_beams=2)}], ids=str)
def test_beams_are_refused_however_they_are_asked_for(model, option):
    ids = torch.tensor([model.ids(OTHER)])
    with watching(model, monitor_of(model)), pytest.raises(InputError, match="beam"):
        model.net.generate(ids, max_new_tokens=2, **option)
    with pytest.raises(InputError, match="beam"):
        model.answer(OTHER, 2, **option)


def test_edits_at_some_tokens_need_one_text(model):
    """With guidance a second text is read, whose positions are others."""
    with steer(model, "L1.ffn.3=9@last"), pytest.raises(InputError, match="guidance_scale"):
        model.generate(OTHER, 2, guidance_scale=1.5)
    with steer(model, "L1.ffn.3=9"):
        model.generate(OTHER, 2, guidance_scale=1.5)


def test_passes_outside_of_a_generation_are_not_read(model):
    with watching(model, monitor_of(model)) as log:
        model.next_logits(PROMPT)
        model.generate(OTHER, 4)
    assert [len(text["x"].values) for text in log.texts] == [3]


@pytest.mark.parametrize("place", PLACES[1:])
def test_an_edit_that_never_acts_is_named_wherever_it_is_placed(model, caplog, place):
    with steer(model, f"L1.ffn.3=9{place}", rows=[1]):  # there is one row
        model.generate(OTHER, 2)
    assert f"L1.ffn.3=9{place}" in caplog.text


def test_embeddings_beside_no_ids_are_a_prompt(model):
    """Positions are those of the embeddings; the ids of a list are the new ones."""
    ids = torch.tensor([model.ids(OTHER)])
    embeddings, none = model.net.get_input_embeddings()(ids), torch.zeros(1, 0, dtype=torch.long)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    acted = []
    for prompt in ({"input_ids": ids}, {"inputs_embeds": embeddings, "input_ids": none}):
        with steer(model, "L1.ffn.3=9@last", trace=True) as acts, watching(model, monitor_of(model)) as log:
            model.net.generate(**prompt, **options)
        acted.append(([act.position for act in acts], log.texts[0]["x"].values))
    assert acted[0][0] == acted[1][0] == [len(OTHER) - 1]
    assert acted[0][1] == pytest.approx(acted[1][1], abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
def test_padding_without_a_mask_is_padding(model, options):
    """As transformers reads it: ids of padding at the beginning."""
    rows = [[7, 3, 12, 44, 5, 3, 21, 9], [7, 3, 12]]
    ids = torch.tensor([[0] * (8 - len(row)) + row for row in rows])
    found = []
    for mask in ({}, {"attention_mask": (ids != 0).long()}):
        with steer(model, "L1.ffn.3=9@position:0", trace=True) as acts:
            new = model.net.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, **mask, **options)
        found.append((seen(acts), new.tolist()))
    assert found[0] == found[1]


def test_what_follows_the_end_of_a_text_is_not_read(model):
    """Padding of a row of a batch that ended before the others."""
    _, new = generated(model, None, "padded batch")
    end = new[1][2]  # the third token of the second text
    assert end not in new[0]
    model.net.generation_config.eos_token_id = end
    try:
        with watching(model, monitor_of(model)) as log:
            generated(model, None, "padded batch")
    finally:
        model.net.generation_config.eos_token_id = None
    assert [len(text["x"].values) for text in log.texts] == [NEW - 1, new[1].index(end) + 1]


def test_other_loops_of_generation_are_refused(model):
    with watching(model, monitor_of(model)), pytest.raises(InputError, match="custom_generate"):
        model.net.generate(torch.tensor([model.ids(OTHER)]), custom_generate=lambda *_, **__: None)


def test_tokens_that_a_decoder_is_given_are_its_prompt():
    config = T5Config(
        **{"vocab_size": 50, "d_model": 24, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4},
        **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None},
    )
    torch.manual_seed(0)
    model = Model(T5ForConditionalGeneration(config).eval(), Letters(), "t5")
    for given, before in (([[0, 7, 8, 9]], 4), ([[7, 8, 9]], 4)):
        with steer(model, ["L3.ffn.3=9@generated", "L3.ffn.5=9@last"], trace=True) as acts:
            ids = torch.tensor([model.ids(OTHER)])
            model.net.generate(ids, decoder_input_ids=torch.tensor(given), max_new_tokens=4, do_sample=False)
        assert {act.position for act in acts if act.edit.where == "last"} == {before - 1}
        assert {act.position for act in acts if act.edit.where == "generated"} == {before, before + 1, before + 2}
