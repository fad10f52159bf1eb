"""How much memory a pass takes, without weights: against sizes of what is really there."""

import json
from dataclasses import replace
from pathlib import Path

import pictured
import pytest
import torch
from configurations import PUBLISHED
from conftest import GEMMA3, LLAMA, random_model
from few import few_of
from PIL import Image
from test_cli import RUN, main, run
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    SmolLM3Config,
)

from icebear import load_model
from icebear.concepts import memory
from icebear.concepts.memory import COMPUTATIONS, Allocated, _are_alike, memory_needs
from icebear.concepts.passes.neuron_recorders import AllNeurons
from icebear.concepts.passes.storage import memory_at_hand
from icebear.errors import InputError, ModelError


def test_what_is_freed_does_not_count_any_more():
    with Allocated(set()) as allocated:
        x = torch.zeros(1000)
        y = x.view(10, 100)
        assert allocated.now == 4000
        z = y + 1
        assert allocated.now == 8000
        del z
        assert allocated.now == 4000
        del x, y
    assert (allocated.now, allocated.most) == (0, 8000)


def test_weights_and_results_are_those_of_the_model(tiny_folder):
    model = load_model(tiny_folder)
    weights, needs = memory_needs(tiny_folder, 24, torch.float32)
    sizes = {x.data_ptr(): x.numel() * 4 for x in model.net.parameters()}
    assert weights == sum(sizes.values())
    recorder = AllNeurons(model, model.padded([[1] * 24]), ("ffn", "attn"))
    kept = [*recorder.activation.values(), *recorder.relevance.values()]
    assert [need.what for need in needs] == [what for what, *_ in COMPUTATIONS]
    everything, largest, tokens, compared = needs
    assert everything.result == sum(x.numel() * 4 for x in kept)
    assert (largest.result, tokens.result) == (0, 0)
    assert compared.result == everything.result * 3 // 2
    assert tokens.in_pass < everything.in_pass < compared.in_pass
    _, twice = memory_needs(tiny_folder, 48, torch.float32)
    assert all(more.in_pass > need.in_pass for more, need in zip(twice, needs, strict=True))


@pytest.mark.release
@pytest.mark.parametrize("tied", [False, True])
def test_few_layers_say_what_all_take(tied, tmp_path, monkeypatch):
    config = LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 7, "vocab_size": 3000, "tie_word_embeddings": tied})
    config.save_pretrained(tmp_path)
    weights, few = memory_needs(str(tmp_path), 60, torch.float32)
    monkeypatch.setattr(memory, "_are_alike", lambda model: False)
    same, every = memory_needs(str(tmp_path), 60, torch.float32)
    assert weights == same == sum(x.numel() * 4 for x in AutoModelForCausalLM.from_config(config).parameters())
    for need, of_all in zip(few, every, strict=True):  # of the largest neurons, the most is at another time in 7 layers
        assert replace(need, in_pass=0) == replace(of_all, in_pass=0)
        assert need.in_pass == pytest.approx(of_all.in_pass, rel=0.05 if need is few[1] else 0), need.what


def test_layers_of_two_kinds_are_not_alike():
    turned = SmolLM3Config(**{**LLAMA.to_dict(), "model_type": "smollm3", "no_rope_layers": [1, 1, 0]})
    assert not _are_alike(random_model(turned))
    kinds = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6}
    alike, mixed = random_model(LLAMA), random_model(Gemma3TextConfig(**{**GEMMA3.to_dict(), **kinds}))
    assert _are_alike(alike)
    assert not _are_alike(mixed)
    alike.layer_modules[1].mlp.up_proj = torch.nn.Linear(24, 21)
    assert not _are_alike(alike)


@pytest.mark.release
def test_half_the_bytes_a_number_take_less(tiny_folder):
    (weights, needs), (half, smaller) = (memory_needs(tiny_folder, 24, x) for x in (torch.float32, torch.bfloat16))
    assert half == weights // 2
    assert smaller[2].in_pass < needs[2].in_pass


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama 3.1 8B", 8_030_261_248),
        ("Llama 3.1 70B", 70_553_706_496),
    ],
)
def test_the_table_of_large_models_is_computed(name, parameters, tmp_path):
    config = PUBLISHED[name]
    config.save_pretrained(tmp_path)
    weights, needs = memory_needs(str(tmp_path), 2048, torch.bfloat16)
    sizes = [size for need in needs for size in (need.in_pass, need.result)]
    assert weights == 2 * parameters
    neurons = config.num_hidden_layers * (config.intermediate_size + config.hidden_size)
    assert sizes[1] == 2 * 4 * 2048 * neurons
    shown = [f"{size / 1e9:.1f}" for size in (weights, *sizes)]
    row = f"| {name} | {shown[0]} | {shown[5]} | {shown[3]} | {', '.join(shown[1:3])} | {', '.join(shown[7:])} |"
    assert row in Path("docs/models.md").read_text().splitlines()


def test_it_fits_where_there_is_room(tiny_folder):
    weights, (need, *_) = memory_needs(tiny_folder, 24, torch.float32)
    assert need.fits(weights, torch.device("cpu"))
    assert not need.fits(2 * memory_at_hand(torch.device("cpu")), torch.device("cpu"))


def test_the_command_loads_no_weights(tiny_folder, tmp_path):
    document = json.loads(run("doctor", "--model", tiny_folder, "--tokens", "24", "--json"))
    assert document["tokens"] == 24
    assert [row["fits"] for row in document["needs"]] == [True] * len(COMPUTATIONS)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertConfig(**small, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        memory_needs(str(tmp_path), 8, torch.float32)
    assert RUN.invoke(main, ["doctor", "--model", str(tmp_path), "--tokens", "8"]).exit_code == 1


@pytest.mark.parametrize("kind", few_of(pictured.CONFIGS, "smolvlm"))
def test_the_tokens_and_the_tower_of_an_image_count(kind, tmp_path, monkeypatch):
    """An image takes what its tokens take, and its vision tower: against a text of as many tokens."""
    monkeypatch.setattr(memory, "COMPUTATIONS", (COMPUTATIONS[0], COMPUTATIONS[-1]))
    config = pictured.CONFIGS[kind]
    config.architectures = [AutoModelForImageTextToText._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    count, name = pictured.TOKENS[kind], str(tmp_path)
    weights, needs = memory_needs(name, 20, torch.float32, image=pictured.pixels(kind, dtype=torch.float32))
    same, of_text = memory_needs(name, 20 + count, torch.float32)
    assert weights == same
    assert {need.tokens for need in (*needs, *of_text)} == {20 + count}
    assert [need.result for need in needs] == [need.result for need in of_text]
    assert all(need.in_pass > text.in_pass for need, text in zip(needs, of_text, strict=True))


def test_the_command_counts_the_tokens_of_an_image(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "COMPUTATIONS", COMPUTATIONS[:1])
    folder = pictured.save("smolvlm", tmp_path)
    Image.new("RGB", (80, 40), "white").save(tmp_path / "white.png")
    options = ("doctor", "--model", str(folder), "--tokens", "20", "--image", str(tmp_path / "white.png"))
    document = json.loads(run(*options, "--json"))
    assert {row["tokens"] for row in document["needs"]} == {20 + 3 * pictured.TOKENS["smolvlm"]}  # two tiles, and all
    assert "20 tokens of text and 12 of the image" in run(*options)


def test_an_image_is_refused_where_none_is_read(tiny_folder):
    with pytest.raises(InputError, match="image"):
        memory_needs(tiny_folder, 8, torch.float32, image=torch.zeros(3, 8, 8))
    assert RUN.invoke(main, ["doctor", "--model", tiny_folder, "--image", "white.png"]).exit_code == 2
