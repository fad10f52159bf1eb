"""Folders of models that are broken in one place: each is refused with a sentence, or works."""

import json
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from icebear import attribute, load_model
from icebear.errors import IcebearError, InputError, ModelError
from icebear.models.loading.conversion import read_gguf

VALUES = (None, "many", [], {"a": [1]}, -3, 0, 2.5, True, 7)
"""Taken in turn, three for each field of a configuration."""
FILES = {
    "config.json": (b"", b"{", b"[1, 2]", b"null", b'{"model_type": 3}', b"\xff\xfe", b'{"model_type": "lama"}'),
    "tokenizer.json": (b"", b"{}", b'{"model": {}}', b'{"model": {"type": "BPE"}}', b"[]", b"\x00" * 9),
    "tokenizer_config.json": (b"[]", b'{"tokenizer_class": "None"}', b'{"chat_template": "{% for %}"}', b"3"),
    "generation_config.json": (b"[]", b'{"max_length": "a"}', b'{"eos_token_id": {}}'),
    "model.safetensors": (b"", b"\x08", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"),
}


@pytest.fixture(autouse=True)
def quiet():
    logging.set_verbosity_error()


def copied(folder, to, **changes):
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def refused(folder):
    """Whether a model is refused, with one line; else it is explained."""
    try:
        attribute(load_model(str(folder), device="cpu"), "a bear")
    except IcebearError as error:
        return "\n" not in str(error)
    return False


@pytest.mark.parametrize("turn", range(3))
def test_a_field_of_the_configuration_has_another_type(tiny_folder, tmp_path, turn):
    fields = sorted(json.loads((Path(tiny_folder) / "config.json").read_text()))
    changes = [{field: VALUES[(number + 3 * turn) % len(VALUES)]} for number, field in enumerate(fields)]
    assert sum(refused(copied(tiny_folder, tmp_path / str(change)[:40], **change)) for change in changes) > 9


@pytest.mark.parametrize("huge", [10**30, -(10**30), 10**400])
def test_a_huge_integer_in_any_field_of_the_configuration_is_refused(tiny_folder, tmp_path, huge):
    """torch has no such integers; as a number of layers it would never end."""
    fields = json.loads((Path(tiny_folder) / "config.json").read_text())
    numbers = [name for name, value in fields.items() if type(value) in (int, float)]
    assert {"rms_norm_eps", "num_hidden_layers", "vocab_size"} <= {*numbers}
    for name in numbers:
        with pytest.raises(ModelError):
            load_model(str(copied(tiny_folder, tmp_path / name, **{name: huge})), device="cpu")


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_broken(tiny_folder, tmp_path, name):
    for number, content in enumerate(FILES[name]):
        folder = copied(tiny_folder, tmp_path / str(number))
        (folder / name).write_bytes(content)
        assert refused(folder) or name in ("tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_a_model_without_a_weight_is_refused_by_its_name(tiny_folder, tmp_path, lost):
    """transformers would explain random weights in its place."""
    folder = copied(tiny_folder, tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=lost):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"model_type": "gpt2"},
        {"model_type": "mixtral"},
        {"architectures": ["LlamaForSequenceClassification"]},
    ],
    ids=str,
)
def test_weights_of_another_kind_of_model_are_refused(tiny_folder, tmp_path, changes):
    assert refused(copied(tiny_folder, tmp_path / "other", **changes))


def test_a_folder_that_cannot_be_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("icebear.models.loading.loading.hub_reachable", lambda: pytest.fail("asked the hub"))
    for name in (str(tmp_path / "none"), "./none", "../none/"):
        with pytest.raises(ModelError, match="no folder"):
            load_model(name)


@pytest.mark.parametrize("device", ["cuda", "gpu", "mps"])
def test_a_device_that_this_machine_lacks_is_said_to_be_absent(device, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(InputError) as error:
        load_model("smollm2-135m", device=device)
    assert ("cuda" if device == "gpu" else f"no {device} device") in str(error.value)


def test_a_gguf_file_that_promises_more_than_it_has_is_refused_at_once(tmp_path):
    """An array of 2^60 items would be read for years, one after the other."""
    key = b"general.name"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    (tmp_path / "long.gguf").write_bytes(header + struct.pack("<IIQ", 9, 4, 2**60) + b"\0" * 64)
    with pytest.raises(ValueError, match="cut short"):
        read_gguf(tmp_path / "long.gguf")
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    for name in ("long", "short"):
        assert refused(tmp_path / f"{name}.gguf")
