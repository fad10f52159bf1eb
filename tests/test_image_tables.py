"""The tables of images: errors by cluster, what is replaced, where objects are, maps from other papers."""

from copy import deepcopy

import numpy as np
import pytest
import test_tasks
import torch
from test_image_examples import animals, bare  # noqa: F401  fixtures

from benchmarks import images as tables
from benchmarks.image_baselines import legrad, rollout
from icebear import Model, by_examples
from icebear.concepts.passes.sites import eager
from icebear.models.text.counterfactual_images import counterfactual_image


@pytest.fixture(scope="module")
def model(animals, bare):  # noqa: F811
    return by_examples(bare, animals / "bears", animals / "ice")


def test_errors_of_single_values_are_ordinary_and_equal_values_of_a_cluster_count_once():
    values = np.random.default_rng(0).normal(size=12)
    mean, error = tables.mean_and_error(list(values), [str(n) for n in range(12)])
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 12**0.5)
    doubled = tables.mean_and_error([*values, *values], [str(n) for n in range(12)] * 2)
    assert doubled == pytest.approx((mean, error))


def test_the_first_patches_are_those_of_the_other_image(model):
    image, fill = torch.randn(3, 32, 32), torch.zeros(3, 32, 32)
    changed = tables.with_first_patches(model, image, fill, torch.arange(16.0).view(4, 4), 0.25)
    assert torch.equal(changed[:, :24], image[:, :24])
    assert not changed[:, 24:].any()


def test_deletion_and_insertion_are_by_how_much_the_number_falls_and_rises(model):
    case = tables.Case("a", "a", "b", torch.randn(3, 32, 32))
    scores = torch.randn(4, 4)
    row = tables.deletion(model, case)(scores)
    number = lambda pixels: tables.numbers(model, [pixels])[0]  # noqa: E731
    for fill in tables.FILLS:
        other = counterfactual_image(model, case.pixels, fill)
        falls = [
            number(case.pixels) - number(tables.with_first_patches(model, case.pixels, other, scores, share))
            for share in tables.SHARES
        ]
        rises = [
            number(tables.with_first_patches(model, other, case.pixels, scores, share)) - number(other)
            for share in tables.SHARES
        ]
        measures = tables.measures_of(row)
        assert measures[f"deletion, {fill}"] == pytest.approx(np.mean(falls), abs=1e-5)
        assert measures[f"insertion, {fill}"] == pytest.approx(np.mean(rises), abs=1e-5)


def test_the_centred_box_has_its_area_and_is_in_the_middle():
    box = tables.centred_box(None, torch.zeros(3, 224, 224), 0.25)
    assert box.shape == (16, 16)
    assert box.mean().item() == pytest.approx(0.25)
    assert box[8, 8] == 1
    assert box[0, 0] == 0
    assert torch.equal(box, box.flip(0))


def test_relevance_inside_a_mask(model):
    mask = torch.zeros(4, 4)
    mask[0, :2] = torch.tensor([1.0, 0.5])
    case, scores = tables.Case("a", "a", "b", torch.randn(3, 32, 32), mask), torch.zeros(4, 4)
    scores[0, :2], scores[1, :2] = 2.0, torch.tensor([4.0, -8.0])
    row = tables.objects(model, case)(scores)
    assert row["inside"] == pytest.approx(3 / 8)
    assert row["area"] == pytest.approx(1.5 / 16)
    assert row["blur"] == tables.deletion(model, case)(scores)["blur"]


def test_gaps_are_image_by_image():
    """Of the same images, which are of two clusters, a method that another one has not seen twice."""
    rows = [
        {"image": image, "cluster": image[0], "method": method, "inside": inside, "area": 0.5}
        | {"number": 0.0}
        | {fill: {"number": 0.0, "deleted": [0.0], "inserted": [0.0]} for fill in tables.FILLS}
        for method, each in {"a": {"p1": 0.5, "p2": 0.7, "q1": 0.3}, "b": {"p1": 0.4, "q1": 0.1}}.items()
        for image, inside in each.items()
    ]
    means, (gap,) = tables.tables(rows, "a")
    assert [(row["method"], row["images"], row["inside"]) for row in means] == [
        ("a", "2", "0.400"),
        ("b", "2", "0.250"),
    ]
    assert (gap["minus"], gap["inside"], gap["inside ±"]) == ("b", "0.150", "0.050")
    assert "area" not in gap


def test_a_rollout_is_the_product_of_attentions_half_of_which_passes_by(model):
    pixels = torch.randn(3, 32, 32)
    with torch.no_grad(), eager(model):
        maps = [x[0].mean(0).double().numpy() for x in model.net(pixels[None], output_attentions=True).attentions]
    joint = np.eye(17)
    for attention in maps:
        joint = (attention + np.eye(17)) / 2 @ joint
    assert rollout(model, pixels).flatten().numpy() == pytest.approx(joint[0, 1:], abs=1e-6)


def test_legrad_is_positive_where_more_attention_raises_the_label(model):
    """In the last layer, against differences of the label when attention is changed by hand."""
    pixels = torch.randn(3, 32, 32)
    scores = legrad(model, pixels)
    assert scores.shape == (4, 4)
    assert (scores >= 0).all()
    assert scores.any()
    changed = by_hand(model, pixels)
    assert scores.flatten().numpy() == pytest.approx(changed[1:], rel=0.05, abs=1e-4 * changed.max())


def by_hand(model, pixels, step=1e-3):
    """(T,) LeGrad by a change of each entry of each layer's attention, one at a time, in float64."""
    double = Model(deepcopy(model.net).double(), None, "double")
    streams = []
    hooks = [layer.register_forward_hook(lambda m, a, y: streams.append(y)) for layer in double.layer_modules]
    with torch.no_grad(), eager(double):
        maps = double.net(pixels[None].double(), output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    inputs = [None, *streams[:-1]]
    with torch.no_grad():
        inputs[0] = double.net.dinov2.embeddings(pixels[None].double())
        layers = [
            _of_layer(double, layer, x, maps[n][0], step)
            for n, (layer, x) in enumerate(zip(double.layer_modules, inputs, strict=False))
        ]
    return np.mean(layers, 0)


def _of_layer(model, layer, x, attention, step):
    heads, count, _ = attention.shape

    def label(weights):
        values = layer.attention.v_proj(layer.norm1(x)).view(count, heads, -1).transpose(0, 1)
        written = layer.attention.o_proj((weights @ values).transpose(0, 1).reshape(1, count, -1))
        y = x + layer.layer_scale1(written)
        y = y + layer.layer_scale2(layer.mlp(layer.norm2(y)))
        y = model.net.dinov2.layernorm(y)
        return model.net.classifier(torch.cat((y[:, 0], y[:, 1:].mean(1)), -1)).item()

    before, total = label(attention), np.zeros(count)
    for head in range(heads):
        for query in range(count):
            for key in range(count):
                changed = attention.clone()
                changed[head, query, key] += step
                total[key] += max(0, label(changed) - before) / step
    return total / (heads * count)


def test_the_pictures_and_objects_are_there():
    pytest.importorskip("skimage")
    cases = list(tables.crops())
    assert len(cases) >= 60
    assert {case.group for case in cases} == {"left", "right"}
    assert all(case.pixels.shape == (3, 168, 168) for case in cases)
    for case in tables.composites():
        assert 0.02 < case.mask.mean() < 0.4, case.name


def test_the_registers_are_no_patches():
    model = test_tasks.make("dinov2, registers")
    image = torch.ones(3, 16, 16)
    changed = tables.with_first_patches(model, image, 0 * image, torch.tensor([[1.0, 0], [0, 0]]), 0.25)
    assert not changed[:, :8, :8].any()
    assert changed.sum() == 3 * 256 * 0.75
