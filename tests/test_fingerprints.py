"""A fingerprint sees what a model is, its magnitudes too; what was computed with one model is not used with another."""

import pytest
import torch
from conftest import IDS, LLAMA, Letters, random_model
from few import third_of

import icebear
from icebear import (
    Concept,
    Model,
    Recipe,
    ablation,
    attribute,
    circuit,
    explain,
    matrix,
    random_edit_control,
    source_breakdown,
    sources,
    steer,
)
from icebear.concepts.nodes.random_controls import token_removal_control
from icebear.edits import Edit
from icebear.errors import InputError, RecipeError


@pytest.mark.parametrize("seed", third_of(range(20)))
def test_the_same_in_both_precisions_and_another_one_for_changed_sizes(seed):
    model = random_model(LLAMA, dtype=torch.float32, seed=seed)
    plain = model.fingerprint
    half = random_model(LLAMA, dtype=torch.float32, seed=seed)
    half.net.bfloat16()
    assert half.fingerprint == plain
    w2 = model.net.model.layers[1].mlp.down_proj.weight
    columns = w2[:, seed % 9 :: 9].clone()
    w2[:, seed % 9 :: 9] = 0  # two or three neurons that write nothing
    assert model.fingerprint != plain
    w2[:, seed % 9 :: 9] = columns
    assert model.fingerprint == plain
    for layer in model.net.model.layers:
        layer.mlp.down_proj.weight.mul_(0.1)
    assert model.fingerprint != plain


def test_weights_that_are_replaced_are_seen():
    model = random_model(LLAMA, dtype=torch.float32)
    plain = model.fingerprint
    state = {name: value.clone() for name, value in model.net.state_dict().items()}
    model.net.load_state_dict(random_model(LLAMA, dtype=torch.float32, seed=1).net.state_dict())
    assert model.fingerprint != plain
    model.net.load_state_dict(state, assign=True)
    assert model.fingerprint == plain


def test_a_recipe_fits_the_whole_fingerprint_or_not():
    model = random_model(LLAMA)
    recipe = Recipe("still", (Edit("L0.ffn.3", "scale", 0),), model.name, model.fingerprint)
    recipe.check(model)
    for other in (model.fingerprint.partition("-")[0], "0" * 16, ""):
        with pytest.raises(RecipeError, match=model.fingerprint):
            Recipe("still", recipe.edits, model.name, other).check(model)


# --- results of another model ---

OTHER = [*IDS[:-1], 11]


def letters(seed, dtype=torch.float32):
    return Model(random_model(LLAMA, dtype=dtype, seed=seed).net, Letters(), f"letters {seed}")


@pytest.fixture(scope="module")
def pair():
    return letters(0), letters(1)


USES = {
    "ablation": lambda m, own: ablation(m, own["relevance"], 3),
    "explain": lambda m, own: explain(m, own["relevance"], top=2),
    "attribute": lambda m, own: attribute(m, own["answer"], sites=()),
    "attribute, counterfactual": lambda m, own: attribute(
        m, own["answer"], counterfactual=OTHER, span=(0, 1), sites=("ffn",)
    ),
    "circuit": lambda m, own: circuit(m, own["answer"], counterfactual=OTHER, span=(0, 1), nodes=3),
    "matrix": lambda m, own: matrix(m, own["answer"], "token"),
    "source_breakdown": lambda m, own: source_breakdown(m, own["answer"]),
    "sources": lambda m, own: sources(m, own["answer"]),
    "token_removal_control": lambda m, own: token_removal_control(m, own["relevance"]),
    "steer": lambda m, own: steer(m, own["recipe"]).__enter__(),
    "random_edit_control": lambda m, own: random_edit_control(m, IDS, own["recipe"], draws=2),
    "Concept": lambda m, own: own["concept"].check(m),
}


@pytest.fixture(scope="module")
def own(pair):
    model, _ = pair
    return {
        "relevance": attribute(model, IDS, 7, 9, counterfactual=OTHER),
        "answer": model.answer(IDS, 4),
        "recipe": Recipe.for_model(model, "r", ["L1.ffn.3+2"]),
        "concept": Concept.of(model, "c", {("L1.ffn.3", "+"): 1.0}),
    }


@pytest.mark.parametrize("use", USES)
def test_a_result_of_another_model_is_refused(use, pair, own, few_contexts):
    with pytest.raises((InputError, RecipeError), match="letters 0"):
        USES[use](pair[1], own)


@pytest.mark.parametrize("use", ["ablation", "attribute", "matrix"])
def test_the_same_weights_under_another_handle_are_the_same_model(use, own, few_contexts):
    USES[use](letters(0), own)


def test_an_answer_may_be_compared_with_the_base_model(pair, own):
    model, base = pair
    assert attribute(model, own["answer"], span=(0, 1), base_model=base, sites=("ffn",)).counterfactual.model
    with pytest.raises(InputError):
        attribute(base, own["answer"], span=(0, 1), base_model=model, sites=("ffn",))


def test_every_public_function_of_a_model_and_a_result_is_tried():
    """Both are in its annotations."""
    computed = ("Relevance", "Answer", "Recipe", "Effects", "Graph", "Diff")
    names = set()
    for name, value in ((name, getattr(icebear, name)) for name in icebear.__all__):
        hints = {**getattr(value, "__annotations__", {}), "return": ""}
        if (
            "model" in hints
            and not isinstance(value, type)
            and any(word in hint for hint in hints.values() for word in computed)
        ):
            names.add(name)
    assert names >= {"ablation", "explain", "matrix", "random_edit_control", "source_breakdown", "steer"}
    assert names <= set(USES)
