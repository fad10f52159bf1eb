"""What people pass in notebooks: tensors of one number or of a tokenizer, other modes of autograd, wrapped networks."""

import re

import numpy as np
import pytest
import torch
from conftest import IDS, LLAMA, Letters, random_model
from transformers import LlamaConfig

from icebear import Model, attribute, steer
from icebear.errors import InputError, MissingRule, ModelError

OTHER = [*IDS[:2], 9, *IDS[3:]]


@pytest.fixture
def model():
    return Model(random_model(LLAMA, dtype=torch.float32).net, Letters())


def test_a_tensor_or_array_of_one_number_is_that_number(model):
    expected = attribute(model, IDS, 7, 8)
    for kind in (torch.tensor, np.int64, np.array):
        result = attribute(model, IDS, kind(7), kind(8))
        assert torch.equal(result.tokens, expected.tokens)
        assert torch.equal(
            attribute(model, [IDS, OTHER], kind(7), [kind(8)] * 2)[0].ffn.argmax(), expected.ffn.argmax()
        )
    logits = model.next_logits(IDS)
    assert attribute(model, IDS, logits.argmax()).target.id == model.predict(IDS, 1)[0].id
    assert len(model.predict(IDS, 2, also=torch.tensor(3))) >= 2
    assert len(expected.top(torch.tensor(3))) == 3
    for wrong in (torch.tensor(7.5), torch.tensor(True), np.array(2.5)):
        with pytest.raises(InputError):
            attribute(model, IDS, wrong)


def test_ids_as_a_tokenizer_returns_them_are_one_prompt(model):
    for prompt in (torch.tensor([IDS]), np.array([IDS])):
        assert model.ids(prompt) == IDS
        assert torch.equal(attribute(model, prompt, 7).tokens, attribute(model, IDS, 7).tokens)
    with pytest.raises(InputError):
        model.ids(torch.tensor([IDS, OTHER]))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_numbers_are_the_same_in_every_mode_of_autograd(mode):
    outside, inside = (Model(random_model(LLAMA).net, Letters()) for _ in range(2))
    with mode():
        result = attribute(inside, IDS, 7, 8, counterfactual=OTHER)
        effects = result.effects(3)
        with steer(inside, "L1.ffn.3=5"):
            steered, text = inside.next_logits(IDS), inside.generate("abc", max_new_tokens=3)
    expected = attribute(outside, IDS, 7, 8, counterfactual=OTHER)
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(effects.matrix, expected.effects(3).matrix)
    with steer(outside, "L1.ffn.3=5"):
        assert torch.equal(steered, outside.next_logits(IDS))
        assert text == outside.generate("abc", max_new_tokens=3)
    assert torch.equal(attribute(inside, IDS, 7).ffn, attribute(outside, IDS, 7).ffn)


def test_networks_that_cannot_be_used_as_they_are_are_refused(model):
    with torch.inference_mode():
        net = type(model.net)(LLAMA)
    with pytest.raises(ModelError, match="inference_mode"):
        Model(net)
    with pytest.raises(ModelError, match=r"net\.module"):
        Model(torch.nn.DataParallel(model.net))
    tuples = random_model(LlamaConfig(**LLAMA.to_dict())).net
    tuples.config.return_dict = False
    with pytest.raises(ModelError, match="return_dict"):
        Model(tuples)


def test_a_backward_hook_is_named(model):
    handle = model.net.model.layers[1].register_full_backward_hook(lambda module, above, below: None)
    with pytest.raises(MissingRule, match="backward hook"):
        attribute(model, IDS, 7)
    handle.remove()
    attribute(model, IDS, 7)


class Extended(Letters):
    """A tokenizer with a token that the model lacks, and one that is unknown."""

    unk_token_id, unk_token = 49, "<unk>"

    def __call__(self, text, add_special_tokens=True):
        known = {"<new>": 50, "日": 49, "<unk>": 49}
        parts = re.split("(<new>|日|<unk>)", text)
        ids = ([known[part]] if part in known else super(Extended, self).__call__(part)["input_ids"] for part in parts)
        return {"input_ids": [token for part in ids for token in part]}

    def convert_ids_to_tokens(self, token):
        return None if token > 50 else f"token {token}"

    def decode(self, ids):
        return "" if max(ids) > 50 else "<new>" if ids == [50] else super().decode([token % 49 for token in ids])


def test_answers_that_the_output_lacks_or_the_tokenizer_does_not_know_are_refused(model):
    extended = Model(model.net, Extended())
    for wrong in ("<new>", "日"):
        for ask in (
            lambda word: attribute(extended, IDS, word),
            lambda word: attribute(extended, IDS, 7, word),
            lambda word: attribute(extended, IDS, target_text=word),
            lambda word: extended.predict(IDS, also=[word]),
        ):
            with pytest.raises(InputError):
                ask(wrong)
    assert extended.answer_id("<unk>") == 49
    assert extended.text(51) == "<51>"


def test_a_text_of_spaces_is_a_prompt_where_it_has_tokens(model):
    assert model.ids(" ") == [ord(" ") % 50]
    with pytest.raises(InputError):
        model.ids("")
