"""Text is greedy, or drawn from the model's own probabilities, whatever generation_config the model ships."""

import numpy as np
import pytest
import torch
from configurations import DIFFERENT, different
from conftest import random_model
from few import third_of
from transformers import GenerationConfig, LlamaConfig

from icebear import Model

CONFIG = LlamaConfig(
    vocab_size=200,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
HABITS = {
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 1,
    "min_length": 30,
    "suppress_tokens": [7],
    "forced_eos_token_id": 3,
    "top_k": 1,
    "top_p": 0.1,
}
PROMPTS = [[5, 9, 2], [4, 11, 4, 11], [150, 3]]


class Numbers:
    """A tokenizer that writes ids."""

    all_special_ids, pad_token_id, eos_token_id = (), 0, None

    def batch_decode(self, rows, skip_special_tokens=True):
        return [" ".join(map(str, row)) for row in rows.tolist()]


@pytest.fixture
def model():
    """One that repeats itself, and ships a generation_config against that."""
    net = random_model(CONFIG, dtype=torch.float32).net
    net.generation_config = GenerationConfig(do_sample=True, **HABITS)
    return Model(net, Numbers(), "habits")


@torch.no_grad()
def written(model, ids, count, choose):
    """The reference: one whole pass a token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(choose(model.net(torch.tensor([ids])).logits[0, -1]))
    return ids[-count:]


def greedy(logits):
    return int(logits.argmax())


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_greedy_and_ends_where_the_model_says(model, prompt):
    own, seen = model.net.generation_config, []
    expected = written(model, prompt, 8, greedy)
    text = model.generate([prompt], 8, on_token=lambda _: seen.append(model.net.generation_config))
    assert text == [" ".join(map(str, expected))]
    assert all(config is own for config in seen)  # others may generate between two tokens
    own.eos_token_id = expected[4]
    last = expected.index(expected[4])
    assert model.generate([prompt], 8) == [" ".join(map(str, expected[: last + 1]))]
    assert model.net.generation_config is own


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_temperature_draws_from_the_softmax_and_nothing_else(model, prompt):
    def draw(logits):
        return int(torch.multinomial((logits / 0.7).softmax(-1), 1))

    for seed in range(3):
        text = model.generate([prompt], 8, temperature=0.7, seed=seed)
        torch.manual_seed(seed)
        assert text == [" ".join(map(str, written(model, prompt, 8, draw)))]


@pytest.mark.parametrize("name", third_of(DIFFERENT))
def test_continuations_of_any_lengths_are_greedy_and_do_not_end(name):
    model = Model(random_model(different()[name], "eager", torch.float32).net, Numbers(), name)
    rows = [[5, 3], [7, 8, 9, 10, 11], [4, 6, 2]]
    expected = [written(model, row, 4, greedy) for row in rows]
    model.net.generation_config.eos_token_id = expected[1][1]
    assert model.continuations(rows, 4) == expected


def test_the_callers_own_options_count(model):
    plain = model.generate(PROMPTS, 8)
    assert model.generate(PROMPTS, 8, temperature=3, top_k=1) == plain
    assert model.generate(PROMPTS, 8, no_repeat_ngram_size=1) != plain


def test_token_ids_of_every_kind_are_one_prompt(model):
    text = model.generate(PROMPTS[0], 4)
    assert model.generate(np.array(PROMPTS[0]), 4) == text
    assert model.generate(torch.tensor(PROMPTS[0]), 4) == text
    assert model.generate(list(np.array(PROMPTS[0])), 4) == text
    assert model.generate(PROMPTS, 4) == [model.generate(prompt, 4) for prompt in PROMPTS]
    assert model.generate(PROMPTS[:1], 4) == [text]
