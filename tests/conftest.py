"""Small random models from their configurations, and the real default model, loaded once a process."""

import copy
import functools
import gc
import io
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import types
from functools import cache, wraps
from pathlib import Path

import pytest
import tokenizers
import torch
from few import UNCOUNTED, few
from hypothesis import settings
from letters import Letters
from rich.console import Console
from serving import CHROMIUM, Tabs, browser, serving
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast

import icebear
from icebear import Model, Recipe, build_index, flip, open_store, read_corpus
from icebear.actmax.index import build as index
from icebear.cache import cache_folder, ensure
from icebear.concepts.vocabulary import calibration
from icebear.db import search
from icebear.errors import DownloadError
from icebear.models.loading import encoder, loading
from icebear.models.loading.presets import PRESETS

LLAMA = LlamaConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
LLAMA_BIASES = LlamaConfig(**{**LLAMA.to_dict(), "attention_bias": True, "mlp_bias": True})
GEMMA3 = Gemma3TextConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    sliding_window=4,
    query_pre_attn_scalar=6,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
CAMEL = "The camel lives in the"
os.environ.pop("COLUMNS", None)  # readline, which pytest imports, sets it for the processes that pytest-xdist starts

SEED = int(os.environ.get("ICEBEAR_TEST_SEED", "0"))
settings.register_profile("icebear", deadline=None, derandomize=not SEED)  # first passes of torch take long
settings.load_profile("icebear")
CONFIGS = {"llama": LLAMA, "llama with biases": LLAMA_BIASES, "gemma3": GEMMA3}


CACHE = cache_folder()
WRITE_CALIBRATION = calibration._write
_load_model = loading.load_model


@cache
def _kept(name, dtype):
    return _load_model(name, dtype=dtype, device="cpu")


@wraps(_load_model)
def _load_once(name="smollm2-135m", *, device="auto", dtype=None, **options):
    """In the place of `load_model`: whoever asks for a preset, a test, a command or a view, gets the one of this
    process. Tests leave it as it was. A test with a cache of its own loads for itself."""
    place = loading.device_of(device)
    if name in PRESETS and place.type == "cpu" and cache_folder() == CACHE and not any(options.values()):
        return _kept(name, loading.dtype_of(dtype, place))
    return _load_model(name, device=device, dtype=dtype, **options)


loading.load_model = _load_once


def pytest_collection_modifyitems(items):
    for item in items:
        for fixture, mark in (("smol", "real"), ("chromium", "browser")):
            if fixture in item.fixturenames:
                item.add_marker(mark)
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("long", "browser"))))
    gc.collect()
    gc.freeze()  # the collector would walk over all that torch, transformers and pytest hold, for minutes in all
    gc.set_threshold(7000)


@pytest.fixture(autouse=True)
def _seeded():
    """Whatever ran before, in this process or another."""
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed formats the stack, for each accelerator


def _offline(preset):
    raise DownloadError(f"{preset.name} is not downloaded in tests; mark this test real.")


@pytest.fixture(autouse=True)
def _small_unless_marked(request):
    """What needs a real model is marked so; the fixture `smol` does it. Made models, which are calibrated anew each
    time, read every eighth of the texts."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        if not request.node.get_closest_marker("real"):
            patch.setattr("conftest._kept", lambda *_: pytest.fail("Take the fixture smol, or mark this test real."))
            patch.setattr(calibration, "TEXTS", calibration.TEXTS[::8])
            patch.setattr(calibration, "_write", lambda *_: None)  # else tests would read what an earlier run measured
            patch.setattr(encoder, "fetch", _offline)
        yield


@pytest.fixture
def few_texts(_small_unless_marked, request, monkeypatch):
    """Made models are calibrated on six texts: for files that make many, or read the texts token by token."""
    if not request.node.get_closest_marker("real"):
        monkeypatch.setattr(calibration, "TEXTS", calibration.TEXTS[::4])


@pytest.fixture
def few_draws(monkeypatch):
    """The nulls of indexes have few draws: for files that make many."""
    monkeypatch.setattr(search, "CHANCE_NEURONS", 4)
    monkeypatch.setattr(search, "DIRECTIONS", 20)


class Double(TorchFunctionMode):
    """Makes the upcasts to float32 inside transformers' norms and softmax leave float64 alone."""

    UPCASTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.float, torch.Tensor.to})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in self.UPCASTS:
            return func(*args)
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "matmul" and {x.dtype for x in args} == {torch.float32, torch.float64}:
            args = [x.double() for x in args]  # frequencies and positions, before transformers 5.20
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def random_model(config, attention="sdpa", dtype=torch.float64, seed=0) -> Model:
    """A random model with weights large enough that attention is not uniform, and all norms' gains random."""
    torch.default_generator.manual_seed(seed)
    config = copy.deepcopy(config)  # a model of another implementation would change that of this one
    net = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.4)
    net.generation_config.pad_token_id = 0
    return Model(net, name=f"random {config.model_type}")


@pytest.fixture(params=list(CONFIGS))
def tiny(request):
    return random_model(CONFIGS[request.param])


@pytest.fixture
def llama():
    return random_model(LLAMA, dtype=torch.float32)


@pytest.fixture(scope="session")
def smol() -> Model:
    return loading.load_model("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """`shared(name, make)` is a folder that `make(folder)` fills once a run, however many processes it has."""
    base = tmp_path_factory.getbasetemp()
    home = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return lambda name, make: ensure(home / "shared" / name, make, what=name, room=0)


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with browser() as result:
        yield Tabs(result)


@functools.wraps(build_index)
def build_small(model, corpus, store, **options):
    """In the place of `build_index`: the same 20 summaries for all texts, four examples a side, few random draws."""
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        patch.setattr(search, "CHANCE_NEURONS", 4)
        patch.setattr(search, "DIRECTIONS", 20)
        texts = corpus if corpus and corpus.facts.get("input") else read_corpus("wiki-summaries", limit=20)
        return build_index(model, texts, store, k=4)


def index_small(patch):
    """`icebear index` makes that index, and encodes nothing: tests share it, and search it by words alone."""
    patch.setattr(icebear, "build_index", build_small)
    patch.setattr(encoder, "default_encoder", lambda warn: None)


@pytest.fixture(scope="session")
def scanned(smol, shared):
    """The folder of an index wiki.db, which tests copy."""

    def scan(folder):
        with open_store(folder / "wiki.db", create=True) as store:
            build_small(smol, None, store)

    return shared("index", scan)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, scanned):
    """A copy of the index, and the examples."""
    folder = tmp_path_factory.mktemp("wiki")
    shutil.copytree(scanned, folder, dirs_exist_ok=True)
    shutil.copytree(Path(__file__).parent.parent / "examples", folder / "examples")
    return folder


@pytest.fixture(scope="session")
def wheel(shared, tmp_path_factory):
    """The wheel of a copy of this repository, built once a run."""
    root, unused = Path(__file__).parent.parent, (".*", "build", "*.egg-info", "tests", "docs", "*.db*")

    def build(folder):
        source = tmp_path_factory.mktemp("source") / "icebear"
        shutil.copytree(root, source, ignore=shutil.ignore_patterns(*unused))
        offline = "--disable-pip-version-check wheel -q --no-deps --no-build-isolation --no-index -w".split()
        subprocess.run([sys.executable, "-m", "pip", *offline, folder, source], check=True)

    (built,) = shared("wheel", build).glob("*.whl")
    return built


ICE_BEAR = "The ice bear lives in the"
IDS = [7, 3, 12, 44, 5, 3, 21, 9]


def printed(renderable):
    """As a terminal shows it."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.fixture
def model():
    """A random Llama that reads letters."""
    made = random_model(LLAMA, dtype=torch.float32)
    return Model(made.net, Letters(), "letters")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random Llama and a byte-level tokenizer, which has the answers of evaluations whole, as transformers saves
    them."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(min_frequency=2, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" is are positive negative A B C D Paris Rome"] * 2, trainer)
    folder = str(tmp_path_factory.mktemp("tiny"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>").save_pretrained(folder)
    config = {**LLAMA.to_dict(), "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    random_model(LlamaConfig(**config), dtype=torch.float32).net.save_pretrained(folder)
    return folder


@pytest.fixture
def generator():
    """The same in every run; `make random` draws another seed, and prints it where a test fails."""
    print("ICEBEAR_TEST_SEED", SEED)
    return random.Random(SEED)


@pytest.fixture
def corpus(tmp_path, monkeypatch, generator):
    """120 random sentences in shards of 16."""
    monkeypatch.setattr(index, "SHARD", 16)
    words = "ice bear desert camel water north cold snow warm sand a of the in to lives eats".split()
    lines = [" ".join(generator.choices(words, k=generator.randint(1, 9))).capitalize() + "." for _ in range(120)]
    (tmp_path / "c.txt").write_text("\n".join([*lines, "", lines[0], "x"]))
    return read_corpus(str(tmp_path / "c.txt"))


ALONE = multiprocessing.get_context("forkserver")
ALONE.set_forkserver_preload(["test_evaluate", "test_index"])  # its server imports once, and forks


def started_alone(work, *arguments):
    """A process that does `work(*arguments, started)`, once that has set `started`."""
    started = ALONE.Event()
    process = ALONE.Process(target=work, args=(*arguments, started))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # which the server does not get otherwise
        patch.setitem(
            sys.modules, "__main__", types.ModuleType("__main__")
        )  # a test of the app leaves its script there
        process.start()
    assert started.wait(120)
    return process


@pytest.fixture
def few_contexts(monkeypatch):
    """Side effects are measured in 6 held-out contexts instead of 48, on 2 held-out sentences instead of 24, and on 10
    generated tokens instead of 40; texts beside a flip are shorter, and cards in the app have fewer measured places;
    concepts read every eighth calibration text; explanations group fewer nodes, and edits, nodes and edges have fewer
    random controls: for tests that assert no number of theirs."""
    few(monkeypatch)


@pytest.fixture
def few_all(monkeypatch):
    """And three random edits."""
    few(monkeypatch, UNCOUNTED)


@pytest.fixture(scope="session")
def desert(smol, shared):
    """The ice bear's way to the desert by neurons, found once a run."""

    def find(folder):
        flip(smol, ICE_BEAR, " desert", source=CAMEL, heads=False).save(folder / "desert.json")

    return Recipe.load(shared("desert", find) / "desert.json")


@pytest.fixture(scope="session")
def desert_by_heads(smol, shared):
    """The same by swaps of heads."""

    def find(folder):
        flip(smol, ICE_BEAR, " desert", source=CAMEL).save(folder / "desert.json")

    return Recipe.load(shared("desert-by-heads", find) / "desert.json")


@pytest.fixture(scope="session")
def address(folder):
    """Of the app with the small index and few contexts."""
    with serving(folder / "wiki.db", few=True) as result:
        yield result


@pytest.fixture
def environment(whole_environment, few_all):
    """And few contexts and draws."""
    return whole_environment


@pytest.fixture
def whole_environment(folder, monkeypatch):
    """The app's settings: the small index."""
    from appview import end_jobs, set_up

    set_up(monkeypatch, store=str(folder / "wiki.db"), dtype="float32", device="cpu")
    yield folder
    end_jobs()


@pytest.fixture
def no_stages(monkeypatch):
    """Stages and counterfactuals take seconds. What tests leave of them in the caches of the app is forgotten."""
    from icebear.app.web.shared import all_visitors, counterfactuals

    def forget():
        all_visitors.server_state().staged.clear()
        counterfactuals._exchanging.clear()

    forget()
    monkeypatch.setattr("icebear.app.web.shared.explanations.saved_stages", lambda begun, *arguments: begun)
    monkeypatch.setattr("icebear.concepts.answers.what_if.exchange_words_if_short", lambda *arguments: None)
    yield
    forget()


@pytest.fixture
def first_visit(tiny_folder, corpus, tmp_path, monkeypatch):
    """A small model, and a store that is not there; the texts are ours, as a store is built of them."""
    from appview import end_jobs, set_up

    from icebear.app.web.shared import all_visitors

    set_up(monkeypatch, model=tiny_folder, store=str(tmp_path / "none.db"))
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(all_visitors.server_state(), "builds", {})
    monkeypatch.setattr("icebear.actmax.index.corpus.read_corpus", lambda name, limit: corpus)
    yield tmp_path
    end_jobs()
