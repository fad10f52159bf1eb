"""Lenses of other software, in the formats in which TransformerLens 4.3 and tuned-lens save them."""

import json

import pytest
import torch
from click.testing import CliRunner
from configurations import dense
from conftest import GEMMA3, LLAMA, Letters, random_model

from icebear import Model, Neuron, Projection, project
from icebear.app.cli.main import main
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.concepts.vocabulary.lens_files import LensFile
from icebear.concepts.vocabulary.weight_rows import unembed
from icebear.errors import InputError

CONFIGS = {"llama": LLAMA, "gpt2": dense()["gpt2"], "gemma3": GEMMA3}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "cache"))


def lettered(name):
    return Model(random_model(CONFIGS[name], "sdpa", torch.float32).net, Letters(), "letters")


@pytest.fixture
def model():
    return lettered("llama")


def save_jacobians(path, jacobians, width, dtype=torch.float16):
    """As `JacobianLens.save` of TransformerLens 4.3."""
    named = {layer: matrix.to(dtype) for layer, matrix in jacobians.items()}
    about = {"n_prompts": 3, "source_layers": sorted(named), "d_model": width, "metadata": {"corpus": "texts"}}
    torch.save({"J": named, **about}, path)
    return path


def save_tuned(folder, weights, layers):
    """As `TunedLens.save` of tuned-lens 0.2."""
    folder.mkdir()
    state = {f"{number}.weight": matrix for number, matrix in enumerate(weights)}
    state |= {f"{number}.bias": torch.ones(len(matrix)) for number, matrix in enumerate(weights)}
    torch.save(state, folder / "params.pt")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "d_model": len(weights[0])}))
    return folder


def words(projection):
    return [(token.text, round(token.z, 4)) for token in (*projection.promoted, *projection.suppressed)]


def matrices(count, width):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(count)]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_identity_is_the_direct_path(name, tmp_path):
    model = lettered(name)
    width, neuron = model.config.hidden_size, Neuron(0, "ffn", 3)
    file = save_jacobians(tmp_path / "j.pt", {0: torch.eye(width)}, width)
    folder = save_tuned(tmp_path / "tuned", [torch.zeros(width, width)] * model.layers, model.layers)
    direct = project(model, neuron, k=5)
    for lens in (file, folder, folder / "params.pt"):
        projection = project(model, neuron, 5, lens)
        assert words(projection) == words(direct)
        assert projection.reliability.correlation == pytest.approx(projection.direct_correlation, abs=1e-5)
        assert not projection.has_logits


def test_a_jacobian_lens_is_what_it_says(model, tmp_path):
    width, layer = model.config.hidden_size, 1
    (jacobian,) = matrices(1, width)
    path = save_jacobians(tmp_path / "j.pt", {layer: jacobian}, width, torch.float32)
    row = model.net.model.layers[layer].mlp.down_proj.weight[:, 4].detach()
    (_, divisor, _) = calibrate(model).divisors["model.norm"]
    logits = unembed(model, model.net.model.norm.weight.detach() * (jacobian @ row) / divisor)
    projection = project(model, f"L{layer}.ffn.4", 5, path)
    assert [token.id for token in projection.promoted] == logits.topk(5).indices.tolist()
    expected = (logits - logits.mean()) / logits.std()
    assert [token.z for token in projection.suppressed] == pytest.approx(expected.sort().values[:5].tolist(), abs=1e-4)
    assert -1 <= projection.reliability.correlation <= 1


def test_a_checkpoint_of_a_fit_is_its_mean(model, tmp_path):
    width = model.config.hidden_size
    (total,) = matrices(1, width)
    torch.save({"jacobian_sum": {0: total}, "n_done": 4, "source_layers": [0]}, tmp_path / "c.pt")
    save_jacobians(tmp_path / "j.pt", {0: total / 4}, width, torch.float32)
    both = [LensFile.read(tmp_path / name, model).jacobian(model, "ffn", 0) for name in ("c.pt", "j.pt")]
    assert torch.equal(*both)


def test_a_translator_reads_what_the_layer_before_it_wrote(model, tmp_path):
    """The hidden state 0 is the embeddings."""
    width = model.config.hidden_size
    weights = [matrix if number == 2 else torch.zeros(width, width) for number, matrix in enumerate(matrices(3, width))]
    folder = save_tuned(tmp_path / "tuned", weights, model.layers)
    lens = LensFile.read(folder, model)
    maps = [lens.maps[layer] - torch.eye(width) for layer in (0, 1)]
    assert torch.equal(maps[0], torch.zeros(width, width))
    assert torch.allclose(maps[1], weights[2], atol=1e-6)


def test_the_last_layer_needs_no_map(model, tmp_path):
    width, neuron = model.config.hidden_size, Neuron(model.layers - 1, "ffn", 2)
    path = save_jacobians(tmp_path / "j.pt", dict(enumerate(matrices(1, width))), width)
    assert words(project(model, neuron, 5, path)) == words(project(model, neuron, 5))


class Python:
    pass


REFUSED = {
    "no such file": lambda path, width: None,
    "a text": lambda path, width: path.write_text("no"),
    "Python objects": lambda path, width: torch.save({"J": Python()}, path),
    "a list": lambda path, width: torch.save([1], path),
    "another width": lambda path, width: save_jacobians(path, {0: torch.eye(width + 1)}, width),
    "a layer too many": lambda path, width: save_jacobians(path, {99: torch.eye(width)}, width),
    "another layer": lambda path, width: save_jacobians(path, {1: torch.eye(width)}, width),
    "no layers": lambda path, width: save_jacobians(path, {}, width),
    "no finite number": lambda path, width: save_jacobians(path, {0: torch.full((width, width), torch.nan)}, width),
    "a checkpoint without prompts": lambda path, width: torch.save(
        {"jacobian_sum": {0: torch.eye(width)}, "n_done": 0}, path
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_lens_of_the_model_is_refused(fault, model, tmp_path):
    REFUSED[fault](tmp_path / "j.pt", model.config.hidden_size)
    with pytest.raises(InputError) as refused:
        project(model, "L0.ffn.3", 5, tmp_path / "j.pt")
    assert "j.pt" in str(refused.value)


def test_a_tuned_lens_of_another_depth_is_refused(model, tmp_path):
    width = model.config.hidden_size
    folder = save_tuned(tmp_path / "tuned", [torch.zeros(width, width)] * 2, model.layers + 1)
    with pytest.raises(InputError):
        project(model, "L0.ffn.3", 5, folder)


@pytest.mark.parametrize("site", ["attn", "q"])
def test_a_site_inside_the_layer_is_refused(site, model, tmp_path):
    path = save_jacobians(tmp_path / "j.pt", {0: torch.eye(model.config.hidden_size)}, model.config.hidden_size)
    with pytest.raises(InputError):
        project(model, f"L0.{site}.3", 5, path)


def test_a_text_is_a_name_of_a_lens_only(model, tmp_path):
    path = save_jacobians(tmp_path / "j.pt", {0: torch.eye(model.config.hidden_size)}, model.config.hidden_size)
    with pytest.raises(InputError):
        project(model, "L0.ffn.3", 5, str(path))


def test_a_projection_through_a_file_is_saved(model, tmp_path):
    path = save_jacobians(tmp_path / "j.pt", {0: torch.eye(model.config.hidden_size)}, model.config.hidden_size)
    projection = project(model, "L0.ffn.3", 5, path)
    projection.save(tmp_path / "p.safetensors")
    assert Projection.load(tmp_path / "p.safetensors") == projection
    assert "j.pt" in projection.about


@pytest.mark.parametrize("option", ["--html a.html", "--base-model x", "--effects", "--annotate", "--more 3"])
def test_options_that_a_lens_file_does_not_use_are_refused(option):
    words = ["neuron", "L0.ffn.1", "--lens-file", "lens.pt", *option.split()]
    assert CliRunner().invoke(main, words).exit_code == 2
    assert CliRunner().invoke(main, ["neuron", "--significant", "--lens-file", "lens.pt"]).exit_code == 2
