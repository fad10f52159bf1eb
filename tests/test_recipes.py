"""Recipes combined, scaled and made permanent."""

import pytest
import torch
from conftest import ICE_BEAR, IDS, LLAMA, Letters, random_model
from families import dense

from db.errors import RecipeError
from steering import Edit, Recipe, steer
from steering.permanent import difference, patch, patched, save_patch


def test_recipes_combine_in_any_order_and_scale_to_nothing(smol, desert):
    other = Recipe.for_model(smol, "other", [Edit.parse("L3.ffn.7*0.5"), Edit.parse("L4.head.3*0")], to="x")
    assert (desert + other).edits == (other + desert).edits
    assert (desert + other).to_json() == (other + desert).to_json()
    with pytest.raises(RecipeError, match="both edit L"):
        desert + desert
    text = smol.generate(ICE_BEAR, max_new_tokens=6)
    half = desert * 0.5
    assert Recipe.from_json(half.to_json()).edits == half.edits
    assert {"price", "after"} & set((desert.noting(price={}) * 0.5).provenance) == set()
    assert len((desert + other).provenance["neurons"]) == len(desert)
    with steer(smol, desert * 0):
        assert smol.generate(ICE_BEAR, max_new_tokens=6) == text
    with steer(smol, desert * 1):
        whole = smol.predict(ICE_BEAR, 1)[0]
    with steer(smol, desert):
        assert smol.predict(ICE_BEAR, 1)[0] == whole
    with pytest.raises(RecipeError, match="different models"):
        desert + Recipe("x", (), "y", "z")


@pytest.mark.parametrize("op", ["=3", "*0.3", "+2", "=3^0.25", "*0^0.5"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_permanent_patch_is_steering(op, family):
    model = random_model(LLAMA if family == "llama" else dense()["gpt2"])
    model.tokenizer = Letters()
    recipe = Recipe.for_model(
        model,
        "r",
        [Edit.parse(f"{place}{op}") for place in ("L0.ffn.3", "L1.ffn.7", "L1.attn.2", "L0.head.1", "L1.ffn.8")]
        + [Edit.parse(text) for text in ("L0.ffn.3+2", "L0.ffn.3*0.5", "L0.attn.1+1", "L0.head.0*0.3")],
    )
    weights = patch(model, recipe)
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    assert difference(model, recipe, weights, "the ice bear") < 1e-5
    plain = model.net(torch.tensor([IDS])).logits
    with patched(model, weights):
        assert not torch.allclose(model.net(torch.tensor([IDS])).logits, plain)
    after = model.net.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_no_weight_expresses_is_refused(smol, desert, tmp_path):
    with pytest.raises(RecipeError, match="some tokens only"):
        patch(smol, desert)
    with pytest.raises(RecipeError, match="not read by one linear map"):
        patch(smol, Recipe.for_model(smol, "r", [Edit.parse("L3.q.1*0")]))
    with pytest.raises(RecipeError, match="units of an index"):
        patch(smol, Recipe.for_model(smol, "r", [Edit.parse("L3.ffn.1=2max")]))
    save_patch({"a": torch.ones(2)}, tmp_path / "p.safetensors")
    with pytest.raises(RecipeError, match="cannot be written"):
        save_patch({"a": torch.ones(2)}, tmp_path / "no" / "p.safetensors")


def test_a_recipe_s_file_may_be_anything(desert, tmp_path):
    text = desert.to_json()
    for bad in ("[" * 10**5, text.replace("flip", r"\ud800", 1), "{", "[]"):
        with pytest.raises(RecipeError, match=r"is not JSON|is not an icebear recipe"):
            Recipe.from_json(bad)
    with pytest.raises(RecipeError, match="cannot be written"):
        desert.save(tmp_path / "no" / "x.json")
