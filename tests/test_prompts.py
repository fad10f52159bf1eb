"""What stands for a prompt, and that ids stay what they are."""

from pathlib import Path

import pytest
import torch
from conftest import IDS, LLAMA, Letters, random_model

from icebear import Model, attribute
from icebear.errors import InputError
from icebear.models.text.prompts import Prompt

ASKED = [{"role": "user", "content": "Where do ice bears live?"}]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("a cab", "text"),
        (Path("x.png"), "text"),
        (IDS, "ids"),
        (torch.tensor(IDS), "ids"),
        (torch.tensor(IDS).numpy(), "ids"),
        (ASKED, "chat"),
        (torch.tensor([IDS]), "ids"),
        (torch.zeros(3, 4, 4), "image"),
    ],
)
def test_each_kind_is_one_field(arguments, field):
    result = Prompt.of(arguments)
    assert [name for name in ("text", "ids", "chat", "image") if getattr(result, name) is not None] == [field]
    assert Prompt.of(result) is result


@pytest.mark.parametrize("arguments", [3, None, [[1, 2]], ["a", 1], b"ice", 2.5])
def test_anything_else_is_refused(arguments):
    with pytest.raises(InputError):
        Prompt.of(arguments)


def test_ids_are_never_tokenised_again():
    """They are read as given, also where the tokenizer would have split their text otherwise."""

    class Merging(Letters):
        def __call__(self, text, add_special_tokens=True):
            ids = super().__call__(text)["input_ids"]
            return {"input_ids": [49 if i == 1 else i for i in ids]}

    model = Model(random_model(LLAMA).net, Merging())
    assert attribute(model, [1, 2, 1]).prompt.ids == (1, 2, 1)
    assert attribute(model, Prompt(ids=(1, 2, 1)), target_text="a").prompt.ids[:3] == (1, 2, 1)


@pytest.mark.release
def test_messages_are_rendered_by_the_models_own_template(smol):
    """Once, with no second start token, up to where the model answers; what it has begun to answer is gone on with."""
    ids = smol.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert attribute(smol, ASKED, sites=()).prompt.ids == tuple(ids)
    assert smol.predict(ASKED, 3) == smol.predict(Prompt(ids=tuple(ids)), 3)
    begun = smol.ids([*ASKED, {"role": "assistant", "content": "In the"}])
    assert begun == [*ids, *smol.tokens_of("In the")]
    assert attribute(smol, [ASKED, "Hello"], sites=())[0].prompt.ids == tuple(ids)


def test_messages_without_a_template_or_for_no_reader_are_refused(smol):
    with pytest.raises(InputError):
        Model(random_model(LLAMA).net, Letters()).ids(ASKED)
    with pytest.raises(InputError):
        smol.ids([{"role": "user"}])
    with pytest.raises(InputError):
        smol.ids(torch.zeros(3, 4, 4))
