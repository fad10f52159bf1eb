"""Vectors added to the residual stream: as hooks by hand add them, saved, drawn at random, and read by llama.cpp."""

import json
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from configurations import dense
from conftest import IDS, LLAMA, random_model
from gguf import GGUFReader
from test_passes import made
from test_writers import largest_file

from icebear import Edit, IcebearError, InputError, Recipe, RecipeError, VectorEdit, attribute, load_model, steer
from icebear.app.cli.main import main
from icebear.edits import acts_at
from icebear.records import RandomControl
from icebear.steering.control_vector import read_control_vector, save_control_vector
from icebear.steering.dose import dose
from icebear.steering.outcome import concept_outcome
from icebear.steering.random_edits import random_edits, random_edits_text

DRAW = torch.Generator().manual_seed(0)


def vector(model, layer=1, size=2.0, **how):
    numbers = torch.randn(model.config.hidden_size, generator=DRAW, dtype=torch.float64)
    return VectorEdit(layer, (size * numbers / numbers.norm()).tolist(), **how)


def by_hand(model, ids, prompt_length, *edits):
    """The logits (T, V) of one pass without a cache, in which hooks add what each edit adds to each token."""

    def adding(edit):
        def hook(module, args, output):
            x = output[0] if isinstance(output, tuple) else output
            for position in range(len(ids)):
                if acts_at(edit.where, position, prompt_length):
                    strength = edit.share * edit.decay ** max(position - (prompt_length - 1), 0)
                    x[:, position] += strength * torch.tensor(edit.vector, dtype=x.dtype)
            return (x, *output[1:]) if isinstance(output, tuple) else x

        return hook

    hooks = [model.layer_modules[edit.layer].register_forward_hook(adding(edit)) for edit in edits]
    try:
        with torch.no_grad():
            return model.net(torch.tensor([ids])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "granite", "gemma3", "falcon"])
def test_it_is_added_after_its_layer(family):
    model = random_model(dense(layers=4)[family], dtype=torch.float32)
    edits = vector(model), vector(model, 2, share=0.5)
    plain = by_hand(model, IDS, len(IDS))
    with steer(model, edits), torch.no_grad():
        steered = model.net(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(steered, by_hand(model, IDS, len(IDS), *edits), rtol=1e-4, atol=1e-4)
    assert (steered - plain).abs().max() > 1e-2 * plain.abs().max()
    torch.testing.assert_close(by_hand(model, IDS, len(IDS)), plain, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["all", "prompt", "last", "generated", "answer", "position:0,2", "step:1-2"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_tokens_are_those_of_a_pass_without_a_cache(llama, where, decay):
    edit = vector(llama, size=20.0, where=where, decay=decay)
    ids = list(IDS)
    for _ in range(4):
        ids.append(int(by_hand(llama, ids, len(IDS), edit)[-1].argmax()))
    with steer(llama, edit):
        written = llama.net.generate(torch.tensor([IDS]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert written[0].tolist() == ids


def test_one_row_of_a_batch(llama):
    edit, ids = vector(llama), torch.tensor([IDS, IDS])
    with steer(llama, edit, rows=[1]) as _, torch.no_grad():
        steered = llama.net(ids).logits
    torch.testing.assert_close(steered[0], by_hand(llama, IDS, len(IDS)))
    torch.testing.assert_close(steered[1], by_hand(llama, IDS, len(IDS), edit))


def test_relevance_of_a_steered_pass_adds_up(llama):
    edit = vector(llama, where="last")
    with steer(llama, edit):
        result = attribute(llama, IDS, target=3, number="logit")
    logit = by_hand(llama, IDS, len(IDS), edit)[-1, 3].item()
    balance = result.conservation()
    assert balance.target == pytest.approx(logit, rel=1e-4)
    assert abs(balance.remainder) < 1e-3 * abs(balance.target)


def test_a_trace_has_each_token(llama):
    with steer(llama, vector(llama, where="position:1-2"), trace=True) as acts, torch.no_grad():
        llama.net(torch.tensor([IDS]))
    assert [(act.row, act.position, act.token) for act in acts] == [(0, at, IDS[at]) for at in (1, 2)]
    assert all(act.before != act.after for act in acts)


def test_a_recipe_keeps_it_to_the_bit(llama, tmp_path):
    recipe = Recipe.for_model(llama, "r", [vector(llama, where="last", decay=0.5), Edit.parse("L1.ffn.3*0")])
    recipe.save(tmp_path / "r.json")
    assert Recipe.load(tmp_path / "r.json") == recipe
    assert [edit.share for edit in recipe * 0.25] == [0.25, 0.25]
    with pytest.raises(RecipeError):
        recipe + recipe
    more = Recipe.for_model(llama, "s", [vector(llama), Edit.parse("L1.ffn.10*0"), Edit.parse("L1.ffn.9*0")])
    assert (recipe + more).edits == (more + recipe).edits
    assert [str(edit) for edit in recipe + more if isinstance(edit, Edit)] == [f"L1.ffn.{n}*0" for n in (3, 9, 10)]
    with pytest.raises(RecipeError, match="neurons"):
        recipe.neuron_edits()
    record = json.loads(recipe.to_json())
    for bad in ({"layer": 1}, {"layer": 1, "vector": "abc"}, {"layer": -1, "vector": [1.0]}, {"layer": 1, "x": []}, 3):
        with pytest.raises(RecipeError):
            Recipe.from_dict({**record, "edits": [bad]})


def test_another_layer_or_size_is_refused(llama, tmp_path):
    for edit in (vector(llama, 99), VectorEdit(1, [1.0, 2.0])):
        with pytest.raises(InputError), steer(llama, edit):
            llama.net(torch.tensor([IDS]))
        with pytest.raises(IcebearError):
            save_control_vector(llama, Recipe.for_model(llama, "r", [edit]), tmp_path / "v.gguf")
    half = random_model(LLAMA, dtype=torch.float16)
    with pytest.raises(InputError), steer(half, VectorEdit(1, [1e5] * LLAMA.hidden_size)):
        pass


def test_its_text_has_its_direction_and_tokens(llama):
    edit = vector(llama, where="last")
    others = [VectorEdit(1, [-x for x in edit.vector], "last"), VectorEdit(1, edit.vector), VectorEdit(2, edit.vector)]
    assert len({str(edit), *map(str, others)}) == 4


def test_random_vectors_have_the_same_length_and_other_directions(llama):
    edit = vector(llama, where="last")
    draws = random_edits(llama, [edit], 20, seed=3)
    assert draws == random_edits(llama, [edit], 20, seed=3) != random_edits(llama, [edit], 20, seed=4)
    vectors = torch.tensor([drawn.vector for (drawn,) in draws])
    assert len(vectors) == len(torch.unique(vectors, dim=0)) == 20
    torch.testing.assert_close(vectors.norm(dim=1), torch.full((20,), math.hypot(*edit.vector)))
    assert (vectors @ torch.tensor(edit.vector)).abs().max() < 0.9 * math.hypot(*edit.vector) ** 2
    assert {(drawn.layer, drawn.where) for (drawn,) in draws} == {(1, "last")}
    assert random_edits_text([edit]) != random_edits_text([Edit.parse("L1.ffn.3*0")])


# --- llama.cpp ------------------------------------------------------------------------------------------


def directions(path):
    """The file as `gguf` reads it."""
    reader = GGUFReader(str(path))
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.layer_count").contents() == len(reader.tensors)
    assert all(tensor.tensor_type.name == "F32" and len(tensor.shape) == 1 for tensor in reader.tensors)
    return {int(tensor.name.removeprefix("direction.")): tensor.data.tolist() for tensor in reader.tensors}


def test_what_llama_cpp_adds_is_steering(llama, tmp_path):
    recipe = Recipe.for_model(llama, "r", [vector(llama), vector(llama, 2, share=0.5), vector(llama, 2)])
    assert save_control_vector(llama, recipe, tmp_path / "v.gguf") == [1, 2]
    added = [VectorEdit(layer, numbers) for layer, numbers in directions(tmp_path / "v.gguf").items()]
    with steer(llama, recipe), torch.no_grad():
        steered = llama.net(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(by_hand(llama, IDS, len(IDS), *added), steered, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "edit",
    [
        Edit.parse("L1.ffn.3+2"),
        VectorEdit(0, [1.0] * LLAMA.hidden_size),
        VectorEdit(1, [1.0] * LLAMA.hidden_size, "last"),
        VectorEdit(1, [1.0] * LLAMA.hidden_size, decay=0.5),
    ],
    ids=str,
)
def test_what_llama_cpp_cannot_add_is_refused(llama, edit, tmp_path):
    for edits in ([edit], [vector(llama), edit], []):
        with pytest.raises(RecipeError):
            save_control_vector(llama, Recipe.for_model(llama, "r", edits), tmp_path / "v.gguf")
    assert list(tmp_path.iterdir()) == []


# --- files of other software ------------------------------------------------------------------------------


def as_hotwire_reads(path):
    """`SteerState.load_store` of hotwire-vllm 0.1.2: (layers, D)."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return next(v for v in saved.values() if isinstance(v, torch.Tensor)) if isinstance(saved, dict) else saved


def test_what_hotwire_adds_is_steering(llama, tmp_path):
    recipe = Recipe.for_model(llama, "r", [vector(llama, 0), vector(llama, 2, share=0.5), vector(llama, 2)])
    assert save_control_vector(llama, recipe, tmp_path / "v.pt") == [0, 2]
    rows = as_hotwire_reads(tmp_path / "v.pt")
    assert rows.shape == (llama.layers, llama.config.hidden_size)
    assert [layer for layer, row in enumerate(rows) if row.any()] == [0, 2]
    with steer(llama, recipe), torch.no_grad():
        steered = llama.net(torch.tensor([IDS])).logits[0]
    added = [VectorEdit(layer, rows[layer].tolist()) for layer in (0, 2)]
    torch.testing.assert_close(by_hand(llama, IDS, len(IDS), *added), steered, rtol=1e-4, atol=1e-4)


def test_a_gguf_comes_back(llama, tmp_path):
    edits = [vector(llama), vector(llama, 2)]
    save_control_vector(llama, Recipe.for_model(llama, "r", edits), tmp_path / "v.gguf")
    recipe = read_control_vector(llama, tmp_path / "v.gguf")
    assert [edit.layer for edit in recipe] == [1, 2]
    for edit, before in zip(recipe, edits, strict=True):
        assert edit.vector == pytest.approx(before.vector, rel=1e-6)
    (one,) = read_control_vector(llama, tmp_path / "v.gguf", layer=2)
    assert one == recipe.edits[1]


@pytest.mark.parametrize("form", ["a tensor", "a dict", "a vector", "a parameter"])
def test_a_vector_of_hotwire_comes_back(form, llama, tmp_path):
    rows = torch.randn(llama.layers, llama.config.hidden_size, generator=DRAW)
    forms = {"a tensor": rows, "a dict": {"name": "x", "directions": rows.half().float()}, "a vector": rows[1]}
    torch.save({**forms, "a parameter": torch.nn.Parameter(rows)}[form], tmp_path / "v.pt")
    (edit,) = read_control_vector(llama, tmp_path / "v.pt", layer=1)
    assert (edit.layer, edit.where) == (1, "all")
    assert edit.vector == pytest.approx(rows[1].tolist(), rel=1e-2)
    with pytest.raises(InputError):
        read_control_vector(llama, tmp_path / "v.pt")  # which layer?


class Python:
    pass


BAD = {
    "missing.pt": None,
    "objects.pt": Python(),
    "text.pt": "no",
    "three.pt": torch.ones(1, 2, 3),
    "whole.pt": torch.ones(3, 4, dtype=torch.int64),
    "layers.pt": torch.ones(LLAMA.num_hidden_layers + 1, LLAMA.hidden_size),
    "width.pt": torch.ones(LLAMA.num_hidden_layers, LLAMA.hidden_size + 1),
    "infinite.pt": torch.full((LLAMA.num_hidden_layers, LLAMA.hidden_size), torch.inf),
    "zero.pt": torch.zeros(LLAMA.num_hidden_layers, LLAMA.hidden_size),
    "missing.gguf": None,
    "text.gguf": "no",
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_control_vector_is_refused(name, llama, tmp_path):
    path = tmp_path / name
    if name.endswith(".pt") and BAD[name] is not None:
        torch.save(BAD[name], path)
    elif BAD[name]:
        path.write_text(BAD[name])
    with pytest.raises(InputError):
        read_control_vector(llama, path, layer=1)


def test_a_folder_is_refused_as_one(llama, tmp_path):
    (tmp_path / "v.pt").mkdir()
    with pytest.raises(InputError, match="folder"):
        read_control_vector(llama, tmp_path / "v.pt", layer=1)


def test_a_full_disk_leaves_no_vector(llama, tmp_path):
    with largest_file(1500), pytest.raises(RecipeError):
        save_control_vector(llama, Recipe.for_model(llama, "r", [vector(llama)]), tmp_path / "v.pt")
    assert list(tmp_path.iterdir()) == []


def stream_norms(model, ids):
    """By transformers, without the first token, which is a sink; (L,), the last layer left out: it is normalized."""
    with torch.no_grad():
        states = model.net(torch.tensor([ids]), output_hidden_states=True).hidden_states[1:-1]
    return [state[0, 1:].norm(dim=-1).mean().item() for state in states]


def test_the_dose_is_the_share_of_the_stream_s_norm(llama):
    norms = stream_norms(llama, IDS)
    assert dose(llama, [vector(llama, 1, 3.0, share=0.5)], IDS) == pytest.approx(1.5 / norms[1], rel=1e-4)
    both = [vector(llama, 0), vector(llama, 1)]
    total = torch.tensor(both[0].vector) + torch.tensor(both[1].vector)
    assert dose(llama, both, IDS) == pytest.approx(max(2 / norms[0], total.norm().item() / norms[1]), rel=1e-4)


def hooked_norms(model, layer, ids):
    """The norm at each token of the layer's own stack but the first, a sink, of the pass that `dose` makes."""
    norms = []
    hook = lambda module, args, output: norms.append(output[0].norm(dim=-1)[0])  # noqa: E731
    with model.layer_modules[layer].register_forward_hook(hook):
        number = dose(model, [vector(model, layer, 3.0)], ids)
    return norms[-1][1:], number


def test_the_dose_in_each_stack_is_of_its_own_tokens():
    model = made("t5")
    for layer in range(model.layers):
        norms, number = hooked_norms(model, layer, IDS)
        assert number == pytest.approx(3 / norms.mean().item(), rel=1e-4)
    encoder, decoder = vector(model, 0, 1.0), vector(model, model.layers - 1, 3.0)
    doses = [dose(model, edits, IDS) for edits in ([encoder], [decoder], [encoder, decoder])]
    assert doses[2] == max(doses[:2]), "what the encoder adds is not in the decoder's stream"


def test_a_stream_that_is_not_found_has_no_dose(llama, monkeypatch):
    monkeypatch.setattr("icebear.concepts.passes.inputs.Stream._read", lambda *_: None)
    assert dose(llama, [vector(llama)], IDS) is None


def test_the_dose_of_a_neuron_is_that_of_its_vector(llama):
    row = llama.net.model.layers[1].mlp.down_proj.weight[:, 3].detach()
    as_vector = VectorEdit(1, (2 * row).tolist())
    assert dose(llama, [Edit.parse("L1.ffn.3+2")], IDS) == pytest.approx(dose(llama, [as_vector], IDS), rel=1e-5)


@pytest.mark.parametrize("edits", [[], ["L1.ffn.3*0"], ["L1.ffn.3=2"], ["L1.ffn.3+2", "L1.ffn.4=2"], ["L1.q.3+2"]])
def test_other_edits_have_no_dose(edits, llama):
    assert dose(llama, [Edit.parse(text) for text in edits], IDS) is None


@pytest.mark.parametrize(("size", "warns"), [(0.5, False), (1.5, True)])
def test_a_dose_above_1_is_a_warning(size, warns):
    control = RandomControl("1 edit", "others", "x in the text", 0.0, 1.0, (0.1, 0.2))
    outcome = replace(concept_outcome("x", control, False, 48, ("a", "b")), dose=size)
    assert bool(outcome.warning) is warns
    assert outcome.to_dict()["dose"] == size


def test_the_commands(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = load_model(tiny_folder, device="cpu")
    recipe = Recipe.for_model(model, "r", [vector(model, size=9.0)])
    recipe.save("r.json")

    def run(*words):
        return CliRunner().invoke(main, [*words, "--model", tiny_folder, "--device", "cpu"])

    assert run("recipe", "export", "r.json", "r.gguf").exit_code == 0
    assert directions("r.gguf")[1] == pytest.approx(recipe.edits[0].vector, rel=1e-6)
    done = run("steer", "the ice", "--recipe", "r.json", "--max-new-tokens", "4", "--json")
    assert done.exit_code == 0, done.output
    with steer(model, recipe):
        assert json.loads(done.stdout)["steered"]["text"] == model.generate("the ice", max_new_tokens=4)
    assert run("recipe", "export", "r.json", "none/r.gguf").exit_code == 1
    assert run("recipe", "import", "r.gguf", "again.json").exit_code == 0
    assert Recipe.load("again.json").edits[0].vector == pytest.approx(recipe.edits[0].vector, rel=1e-6)
    assert run("recipe", "export", "r.json", "r.pt").exit_code == 0
    assert run("recipe", "import", "r.pt", "from_pt.json").exit_code == 0
    assert Recipe.load("from_pt.json").edits == Recipe.load("again.json").edits
    assert run("recipe", "import", "r.pt", "from_pt.json").exit_code == 1, "it is not overwritten"
