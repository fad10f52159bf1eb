"""Recipes combined, scaled and saved."""

import pytest
import torch
from conftest import ICE_BEAR, LLAMA, random_model

from icebear import Edit, Recipe, steer
from icebear.errors import RecipeError
from icebear.steering.provenance import FlipRecord


def test_recipes_combine_in_any_order_and_scale_to_nothing(smol, desert):
    other = Recipe.for_model(smol, "other", [Edit.parse("L3.ffn.7*0.5"), Edit.parse("L4.head.3*0")], to="x")
    assert (desert + other).edits == (other + desert).edits
    assert (desert + other).to_json() == (other + desert).to_json()
    with pytest.raises(RecipeError, match=r"L24\.ffn\.559"):
        desert + desert
    text = smol.generate(ICE_BEAR, max_new_tokens=6)
    half = desert * 0.5
    assert Recipe.from_json(half.to_json()).edits == half.edits
    assert {"outcome", "after"} & set((desert.noting(outcome={}) * 0.5).provenance) == set()
    assert len(FlipRecord.all_of(desert + other)[0].neurons) == len(desert)
    with steer(smol, desert * 0):
        assert smol.generate(ICE_BEAR, max_new_tokens=6) == text
    with steer(smol, desert * 1):
        whole = smol.predict(ICE_BEAR, 1)[0]
    with steer(smol, desert):
        assert smol.predict(ICE_BEAR, 1)[0] == whole
    with pytest.raises(RecipeError):
        desert + Recipe("x", (), "y", "z")


def test_a_recipe_with_a_swap_refuses_another_model(smol, tmp_path):
    recipe = Recipe.for_model(smol, "swap", [Edit.from_prompt("L0.head.1", ICE_BEAR)])
    recipe.save(tmp_path / "swap.json")
    read = Recipe.load(tmp_path / "swap.json")
    assert read == recipe
    with pytest.raises(RecipeError), steer(random_model(LLAMA, dtype=torch.float32), read):
        pass


def test_a_recipe_s_file_may_be_anything(desert, tmp_path):
    text = desert.to_json()
    for bad in ("[" * 10**5, text.replace("flip", r"\ud800", 1), "{", "[]"):
        with pytest.raises(RecipeError):
            Recipe.from_json(bad)
    with pytest.raises(RecipeError):
        desert.save(tmp_path / "no" / "x.json")


def test_a_recipe_replaces_no_file_unless_it_is_asked_to(tmp_path):
    path, recipe = tmp_path / "r.json", Recipe("r", (), "letters", "0")
    recipe.save(path)
    before = path.read_bytes()
    with pytest.raises(RecipeError):
        Recipe("other", (), "letters", "0").save(path)
    assert path.read_bytes() == before
    Recipe("other", (), "letters", "0").save(path, overwrite=True)
    assert Recipe.load(path).name == "other"
