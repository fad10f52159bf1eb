"""Control vectors: what llama.cpp adds after its layers equals steering, or is refused by name."""

import pytest
import torch
from click.testing import CliRunner
from configurations import dense, mixtures
from conftest import IDS, Letters, random_model
from gguf import GGUFReader

from icebear import Concept, Edit, Recipe, load_model, steer
from icebear.app.cli.main import main
from icebear.errors import RecipeError
from icebear.steering.control_vector import control_vectors, difference, save_control_vectors

EDITS = ("L1.ffn.3+2", "L1.ffn.7-1.5", "L1.ffn.3+0.5^0.5")


def recipe_of(model, *edits):
    return Recipe.for_model(model, "r", [Edit.parse(edit) for edit in edits])


def directions(path):
    """The file as `gguf` reads it."""
    reader = GGUFReader(str(path))
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.layer_count").contents() == len(reader.tensors)
    assert all(tensor.tensor_type.name == "F32" and len(tensor.shape) == 1 for tensor in reader.tensors)
    return reader, {int(tensor.name.removeprefix("direction.")): torch.tensor(tensor.data) for tensor in reader.tensors}


def with_directions(net, layers, added):
    """The logits of the plain network with vectors added to the outputs of its layers."""

    def add(vector):
        def hook(module, args, output):
            return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

        return hook

    hooks = [layers[layer].register_forward_hook(add(vector)) for layer, vector in added.items()]
    try:
        return net(torch.tensor([IDS])).logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gpt_neox, serial", "granite", "cohere", "falcon"])
def test_added_vectors_are_steering(family, tmp_path):
    model = random_model(dense(layers=4)[family], dtype=torch.float32)
    model.tokenizer = Letters()
    recipe = recipe_of(model, *EDITS, "L3.ffn.1+1")
    vectors = control_vectors(model, recipe)
    save_control_vectors(model, vectors, tmp_path / "v.gguf")
    reader, added = directions(tmp_path / "v.gguf")
    assert reader.get_field("controlvector.model_hint").contents() == model.config.model_type
    assert sorted(added) == [1, 3]
    ids = torch.tensor([IDS])
    with torch.no_grad(), steer(model, recipe):
        steered = model.net(ids).logits
    with torch.no_grad():
        plain, changed = model.net(ids).logits, with_directions(model.net, model.layer_modules, added)
    scale = steered.abs().max()
    assert (steered - plain).abs().max() > 0.01 * scale
    assert (changed - steered).abs().max() < 1e-4 * scale
    assert difference(model, recipe, vectors, "the ice bear") < 1e-4


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ("L1.ffn.3=2", "sets or scales"),
        ("L1.ffn.3*2", "sets or scales"),
        ("L1.ffn.3+2@last", "@all"),
        ("L1.ffn.3+2~0.5", "decay"),
        ("L1.ffn.3+2std", "std"),
        ("L1.attn.3+2", "attn"),
        ("L1.head.1+2", "head"),
        ("L1.q.1+2", "q"),
        ("L0.ffn.3+2", "layer 0"),
    ],
)
def test_what_is_no_constant_vector_is_refused_by_name(edit, named):
    model = random_model(dense()["llama"])
    with pytest.raises(RecipeError, match=named) as error:
        control_vectors(model, recipe_of(model, "L1.ffn.1+1", edit))
    assert str(Edit.parse(edit)) in str(error.value)


@pytest.mark.parametrize("name", ["gemma3", "olmo2", "glm4", "opt, norms behind", "mixtral"])
def test_a_model_in_which_it_is_no_constant_vector_is_refused(name):
    model = random_model({**dense(), **mixtures()}[name])
    with pytest.raises(RecipeError, match=r"L1\.ffn\.3"):
        control_vectors(model, recipe_of(model, "L1.ffn.3+2"))
    with pytest.raises(RecipeError, match="no edits"):
        control_vectors(model, recipe_of(model))


def test_the_verb_exports_a_recipe_and_a_concept(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = load_model(tiny_folder, device="cpu")
    concept = Concept.of(model, "x", {("L1.ffn.3", "+"): 1.0, ("L2.ffn.4", "-"): 0.5})
    concept.recipe(model, strength=0.5).save("c.json")
    recipe_of(model, *EDITS).save("r.json")
    recipe_of(model, "L1.ffn.3=2").save("set.json")

    def run(*words):
        return CliRunner().invoke(main, ["recipe", "export", *words, "--model", tiny_folder, "--device", "cpu"])

    for name, layers in (("c", [1, 2]), ("r", [1])):
        done = run(f"{name}.json", "--gguf", f"{name}.gguf")
        assert done.exit_code == 0, done.output
        assert sorted(directions(f"{name}.gguf")[1]) == layers
    refused = run("set.json", "--gguf", "set.gguf")
    assert refused.exit_code == 1
    assert "L1.ffn.3=2" in refused.stderr
    assert not (tmp_path / "set.gguf").exists()
    assert run("r.json").exit_code == 2
    assert run("r.json", "--gguf", "a.gguf", "--patch", "a.safetensors").exit_code == 2
    assert run("r.json", "--gguf", "none/a.gguf").exit_code == 1
