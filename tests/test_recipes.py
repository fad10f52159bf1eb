"""Recipes combined, scaled and made permanent."""

import pytest
import torch
from click.testing import CliRunner
from configurations import dense
from conftest import ICE_BEAR, IDS, LLAMA, Letters, random_model
from safetensors import safe_open

from icebear import Edit, Recipe, apply_patch, load_model, steer
from icebear.app.cli.main import main
from icebear.errors import RecipeError
from icebear.steering.provenance import FlipRecord
from icebear.steering.weight_patch import difference, patch, patched, save_patch


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


@pytest.mark.parametrize(
    ("edits", "new"),
    [
        ("L1.ffn.7=3 L0.attn.2+1 L2.head.1*0.5", ["layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"]),
        ("L1.ffn.7*0.3", []),
    ],
)
def test_a_saved_patch_is_steering_in_plain_transformers(edits, new, tiny_folder, tmp_path):
    """With a bias that a Llama lacks, for edits by = and +; the file and the verb say so."""
    from transformers import AutoModelForCausalLM

    model = load_model(tiny_folder, device="cpu")
    recipe = Recipe.for_model(model, "r", [Edit.parse(text) for text in edits.split()])
    recipe.save(tmp_path / "r.json")
    file = tmp_path / "p.safetensors"
    words = ["recipe", "export", str(tmp_path / "r.json"), "--patch", str(file), "--model", tiny_folder]
    made = CliRunner().invoke(main, [*words, "--device", "cpu"])
    assert made.exit_code == 0, made.stderr
    new = [f"model.{path}.bias" for path in new]
    with safe_open(file, "pt") as opened:
        output = opened.metadata() or {}
    assert (output.get("fingerprint"), output.get("new_biases", "nothing").split()) == (model.fingerprint, new)
    assert (f"The model has no {', '.join(new)}" in made.stderr) == bool(new)
    assert ("icebear.apply_patch(net, file)" in made.stderr) == bool(new)
    ids = torch.tensor([IDS])
    with steer(model, recipe):
        steered = model.net(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    before = plain(ids).logits
    apply_patch(plain, file)
    assert (before - steered).abs().max() > 0.01
    assert (plain(ids).logits - steered).abs().max() < 1e-4


def test_a_patch_of_another_model_changes_nothing(tmp_path):
    one, other = random_model(LLAMA), random_model(dense()["gpt2"])
    save_patch(one, patch(one, Recipe.for_model(one, "r", [Edit.parse("L1.ffn.7=3")])), tmp_path / "p.safetensors")
    for net in (other.net, random_model(type(LLAMA)(**{**LLAMA.to_dict(), "hidden_size": 32})).net):
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with pytest.raises(RecipeError, match=r"p\.safetensors"):
            apply_patch(net, tmp_path / "p.safetensors")
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(RecipeError, match=r"none\.safetensors"):
        apply_patch(one.net, tmp_path / "none.safetensors")


def test_what_no_weight_expresses_is_refused(smol, desert, tmp_path):
    with pytest.raises(RecipeError, match="@all"):
        patch(smol, desert)
    with pytest.raises(RecipeError):
        patch(smol, Recipe.for_model(smol, "r", [Edit.parse("L3.q.1*0")]))
    with pytest.raises(RecipeError, match="prompt"):
        patch(smol, Recipe.for_model(smol, "r", [Edit.from_prompt("L3.head.1", "ice", "all")]))
    with pytest.raises(RecipeError, match="max"):
        patch(smol, Recipe.for_model(smol, "r", [Edit.parse("L3.ffn.1=2max")]))
    with pytest.raises(RecipeError):
        save_patch(smol, {"a": torch.ones(2)}, tmp_path / "no" / "p.safetensors")


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
