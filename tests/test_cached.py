"""Measured tensors in the cache: they say who made them, and a damaged file is not believed."""

import json

import pytest
import torch
from conftest import LLAMA, WRITE_CALIBRATION, random_model
from safetensors.torch import load_file, save_file

from icebear import Neuron, steer
from icebear.concepts.cached import Damaged, read_tensors, save_tensors
from icebear.concepts.vocabulary import calibration, lens
from icebear.errors import ModelError
from icebear.models.model import Model


@pytest.fixture
def cached(model, tmp_path, monkeypatch):
    """A model whose calibration is cached."""
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "_write", WRITE_CALIBRATION)
    return model


def flipped(file):
    """Yield the file with one bit of its tensors flipped, at several places."""
    sound = file.read_bytes()
    first = 8 + int.from_bytes(sound[:8], "little")
    for place in range(first, len(sound), max(1, (len(sound) - first) // 7)):
        damaged = bytearray(sound)
        damaged[place] ^= 64
        file.write_bytes(damaged)
        yield file
    file.write_bytes(sound)


def test_tensors_come_back_bit_for_bit_or_not_at_all(tmp_path):
    file, tensors = tmp_path / "x" / "t.safetensors", {"a": torch.randn(3, 4), "b": torch.arange(5)}
    with pytest.raises(FileNotFoundError):
        read_tensors(file)
    save_tensors(file, tensors, {"threads": 2})
    read, made_with = read_tensors(file)
    assert made_with == {"threads": 2}
    assert all(torch.equal(read[name], x) for name, x in tensors.items())
    for _ in flipped(file):
        with pytest.raises(Damaged):
            read_tensors(file)
    for data in (b"", b"x" * 50, file.read_bytes()[:-1]):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(Damaged):
            read_tensors(tmp_path / "bad")


def test_a_damaged_calibration_is_measured_again(cached, tmp_path, caplog):
    first = calibration.calibrate(cached)
    file = calibration._file(cached)
    sound = file.read_bytes()
    for _ in flipped(file):
        calibration._MEASURED.clear()
        caplog.clear()
        again = calibration.calibrate(cached)
        assert torch.equal(again.high, first.high)
        assert torch.equal(again.low, first.low)
        assert str(file) in caplog.text
        assert file.read_bytes() == sound
    tensors = {name: 3 * x for name, x in load_file(file).items()}
    save_file(tensors, file)  # of an older icebear, or changed by hand
    calibration._MEASURED.clear()
    assert torch.equal(calibration.calibrate(cached).high, first.high)


def test_a_calibration_that_is_said_to_be_cached_is(cached, tmp_path, caplog, monkeypatch):
    """Also of a small model: the next process reads it. What is not cached is not said to be."""
    caplog.set_level("INFO", "icebear")
    calibration.calibrate(cached)
    assert len([line for line in caplog.messages if "cached" in line]) == 1
    calibration._MEASURED.clear()
    caplog.clear()
    calibration.calibrate(Model(cached.net, cached.tokenizer, cached.name))
    assert not caplog.messages
    with steer(cached, ["L0.ffn.0=5"]):
        calibration.mean_activations(cached)
    assert "not cached" in caplog.text
    caplog.clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "file"))
    calibration.calibrate(Model(cached.net, cached.tokenizer, cached.name))
    assert "not cached" in caplog.text


def test_a_calibration_says_who_made_it(cached):
    made = calibration.calibrate(cached)
    calibration._MEASURED.clear()
    read = calibration.cached_calibration(cached)
    assert read.made_with == made.made_with == json.loads(json.dumps(made.made_with))
    assert read.made_with["threads"] == torch.get_num_threads()
    assert read.made_with["versions"]["torch"] == torch.__version__
    assert all(part in read.about for part in ("icebear", "transformers", "float32 on cpu"))


def test_a_damaged_lens_is_refused(cached):
    built = lens.build_mean_lens(cached)
    rows = built.rows(cached, [Neuron(1, "ffn", 3)])
    sound = built.file.read_bytes()
    x = load_file(built.file)["ffn.1"].numpy().tobytes()
    damaged = bytearray(sound)
    damaged[sound.index(x)] ^= 1
    built.file.write_bytes(damaged)
    with pytest.raises(ModelError, match="lens"):
        lens.mean_lens(cached).rows(cached, [Neuron(1, "ffn", 3)])
    built.file.write_bytes(sound[:-5])
    assert lens.mean_lens(cached) is None
    built.file.write_bytes(sound)
    assert torch.equal(lens.mean_lens(cached).rows(cached, [Neuron(1, "ffn", 3)]), rows)


def test_a_vocabulary_without_our_words_is_calibrated():
    """Its tokenizer makes one special token of each word, which does not count."""
    model = random_model(LLAMA, dtype=torch.float32)

    class Unknown:
        all_special_ids = (0,)

        def __call__(self, text, **_):
            return {"input_ids": [0] * len(text.split())}

    assert calibration.calibrate(Model(model.net, Unknown(), "unknown")).high.any()
