"""Flips over paraphrases, and edits measured as edits of knowledge."""

import pytest
import torch
from conftest import LLAMA, random_model

from icebear import flip, steer
from icebear.concepts.methods.attnlrp import ATTNLRP
from icebear.errors import InputError
from icebear.steering.flipping.last_token import LastToken, Paraphrases
from icebear.steering.provenance import FlipRecord

BEARS = ["ice bear", "an ice bear", "a bear of ice"]


@pytest.mark.parametrize("method", [None, ATTNLRP])
def test_paraphrases_are_their_prompts(method):
    model = random_model(LLAMA, dtype=torch.float64)
    rows, edits = [[1, 2, 3, 4], [5, 6, 7]], {(1, 3, 0): 0.5}
    together, each = Paraphrases(model, rows), [LastToken(model, ids) for ids in rows]
    logits = together.logits([edits, {}])
    assert torch.equal(logits, torch.cat([one.logits([edits, {}]) for one in each], 1))
    result = together.gradients(edits, lambda x: x[0, 7] * 2 - x[1, 9], method)
    first = each[0].gradients(edits, lambda x: 2 * x[0, 7], method)
    second = each[1].gradients(edits, lambda x: x[0, 9], method)
    torch.testing.assert_close(result, first - second)
    assert [together.before(number) for number in range(2)] == rows


def test_a_flip_does_it_for_all_paraphrases(model):
    plain = [model.predict(prompt, 1)[0].text for prompt in BEARS]
    alone, together = flip(model, BEARS[0], "e", "camel"), flip(model, BEARS[0], "e", "camel", paraphrases=BEARS[1:])
    with steer(model, alone):
        assert "".join(model.predict(prompt, 1)[0].text for prompt in BEARS) != "eee"
    with steer(model, together):
        assert "".join(model.predict(prompt, 1)[0].text for prompt in BEARS) == "eee"
    assert list(FlipRecord.of(together).paraphrases) == BEARS[1:]
    assert FlipRecord.of(alone).paraphrases == ()
    assert [model.predict(prompt, 1)[0].text for prompt in BEARS] == plain


def test_paraphrases_are_for_one_token(model):
    for options in ({"to": "a cold desert"}, {"suppress": True}):
        with pytest.raises(InputError, match="`to`"):
            flip(model, BEARS[0], paraphrases=BEARS[1:], **options)
