"""Rotations of positions that depend on the length of a text: an answer is explained only as it was written."""

import pytest
import torch
from conftest import IDS, random_model
from transformers import Phi3Config

from icebear import Model, Prompt, attribute
from icebear.errors import InputError

SIZE = {
    **{"vocab_size": 50, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "pad_token_id": 0},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [4.0] * 3},
    "original_max_position_embeddings": 16,
}
CONFIG = Phi3Config(**SIZE, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONG)


@pytest.fixture
def longrope():
    made = random_model(CONFIG, "eager", torch.float32)
    made.net.generation_config.eos_token_id = None

    class Numbers:
        all_special_ids = ()
        pad_token_id = eos_token_id = None

        def decode(self, ids):
            return " ".join(map(str, ids))

    return Model(made.net, Numbers(), "long")


def test_spans_that_end_before_the_length_are_those_that_were_written(longrope):
    answer = longrope.answer(Prompt(ids=tuple(IDS)), 20)
    first = 16 - len(IDS) + 1  # written after 17 tokens
    for span in ((0, 1), (0, first), (first - 2, first)):
        result = attribute(longrope, answer, span=span, sites=(), method="cp-lrp", number="logit")
        written = 0.0
        for number in range(*span):
            with torch.no_grad():
                logits = longrope.net(torch.tensor([[*IDS, *answer.ids[:number]]]), use_cache=False).logits[0, -1]
            written += logits[answer.ids[number]].item()
        assert result.conservation().target == pytest.approx(written, abs=1e-3)
    for span in ((0, first + 1), (first, first + 1), None):
        with pytest.raises(InputError, match=str(first)):
            attribute(longrope, answer, span=span, sites=())


def test_a_phrase_that_crosses_the_length_is_refused_too(longrope):
    for phrase, fits in ((IDS[:8], True), ([*IDS, 5, 6], False)):
        if fits:
            attribute(longrope, IDS, target_text=phrase, sites=())
        else:
            with pytest.raises(InputError):
                attribute(longrope, IDS, target_text=phrase, sites=())


def test_texts_that_begin_beyond_it_are_explained(longrope):
    answer = longrope.answer(Prompt(ids=tuple(IDS * 3)), 6)
    assert attribute(longrope, answer, sites=()).tokens.isfinite().all()
