"""A fingerprint sees what a model is, its magnitudes too (FINDINGS A6); what earlier versions wrote is opened."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ICE_BEAR, LLAMA, random_model

from icebear.concepts import Model
from icebear.db import open_store
from icebear.errors import RecipeError
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
    with pytest.raises(RecipeError, match="was made for"):
        Recipe.from_json(recipe.to_json().replace(recipe.model_fingerprint, "0" * 16)).check(smol)


def test_a_store_of_version_250f754_opens(tmp_path, caplog):
    """Made there of the model below from three sentences; words without logits, which it did not know."""
    for file in OLD.glob("letters.db*"):
        shutil.copy(file, tmp_path)
    model = random_model(LLAMA, dtype=torch.float32)
    with open_store(tmp_path / "letters.db", create=False) as store:
        with caplog.at_level(logging.WARNING, "icebear"):
            store.check(model.fingerprint, model.name)
        assert "an earlier icebear" in caplog.text
        from icebear.records import Neuron

        neuron = Neuron(2, "ffn", 4)
        assert store.examples(neuron, "+")[0].activation == pytest.approx(store.statistics(neuron).max)
        word = store.vocabulary(neuron, 3).promoted[0]
        assert (word.logit, word.z > 0) == (None, True)
        assert json.dumps(store.facts())
