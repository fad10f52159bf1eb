"""A fingerprint sees what a model is, its magnitudes too."""

import pytest
import torch
from conftest import LLAMA, random_model

from icebear import Model, Recipe
from icebear.edits import Edit
from icebear.errors import RecipeError


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


def test_a_recipe_fits_the_whole_fingerprint_or_not():
    model = random_model(LLAMA)
    recipe = Recipe("still", (Edit("L0.ffn.3", "scale", 0),), model.name, model.fingerprint)
    recipe.check(model)
    for other in (model.fingerprint.partition("-")[0], "0" * 16, ""):
        with pytest.raises(RecipeError, match=model.fingerprint):
            Recipe("still", recipe.edits, model.name, other).check(model)
