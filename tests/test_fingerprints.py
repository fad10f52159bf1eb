"""A fingerprint sees what a model is, its magnitudes too (FINDINGS A6); what earlier versions wrote is opened."""

import logging
from pathlib import Path

import pytest
import torch
from conftest import ICE_BEAR, LLAMA, random_model

from icebear.concepts import Model
from icebear.db import open_store
from icebear.errors import RecipeError, StoreError
from icebear.steering import Recipe, steer

OLD = Path(__file__).parent / "data" / "250f754"


def another(model: Model) -> Model:
    """The same net under a new handle: a fingerprint is kept by its handle."""
    return Model(model.net, model.tokenizer, model.name)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_in_both_precisions_and_another_one_for_changed_sizes(seed):
    model = random_model(LLAMA, dtype=torch.float32, seed=seed)
    plain = model.fingerprint
    half = another(random_model(LLAMA, dtype=torch.float32, seed=seed))
    half.net.bfloat16()
    assert half.fingerprint == plain
    w2 = model.net.model.layers[1].mlp.down_proj.weight
    columns = w2[:, seed % 9 :: 9].clone()
    w2[:, seed % 9 :: 9] = 0  # two or three neurons that write nothing
    assert another(model).fingerprint != plain
    w2[:, seed % 9 :: 9] = columns
    assert another(model).fingerprint == plain
    for layer in model.net.model.layers:
        layer.mlp.down_proj.weight.mul_(0.1)
    assert another(model).fingerprint != plain


def test_a_recipe_of_version_250f754_runs_with_a_warning(smol, caplog):
    recipe = Recipe.load(OLD / "ice-bear-to-desert.json")
    assert "-" not in recipe.model_fingerprint
    with caplog.at_level(logging.WARNING, "icebear"), steer(smol, recipe):
        assert smol.predict(ICE_BEAR, 1)[0].text == " desert"
    assert "an earlier icebear" in caplog.text
    with pytest.raises(RecipeError):
        Recipe.from_json(recipe.to_json().replace(recipe.model_fingerprint, "0" * 16)).check(smol)


def test_a_store_of_another_version_is_refused_and_left_as_it_is():
    before = (OLD / "letters.db").read_bytes()
    with (
        pytest.raises(StoreError, match=r"letters\.db"),
        open_store(OLD / "letters.db"),
    ):
        pass
    assert (OLD / "letters.db").read_bytes() == before
