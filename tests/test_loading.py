"""Loading: each failure has its own true reason; the hub is faked by a server, the network by what it lacks."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gguf
import numpy as np
import pytest
import torch
import transformers
from configurations import others
from conftest import LLAMA, random_model
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from icebear import Model, attribute, load_model
from icebear.cache import hub_reachable
from icebear.errors import IcebearError, ModelError
from icebear.models.loading import conversion, loading

IDS = [7, 3, 12]
CONFIGS = {
    "no/safetensors": {**LLAMA.to_dict(), "architectures": ["LlamaForCausalLM"]},
    "odd/architecture": {"model_type": "zzz", "architectures": ["ZzzForCausalLM"]},
}


@contextmanager
def serving(answer):
    """(address, paths asked for) of a server; `answer(path)` gives a status, headers and a body."""
    request = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            request.append(self.path)
            status, headers, body = answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", request
    server.shutdown()
    server.server_close()


def hub(path):
    """Answers as the hub's: two repositories that have a configuration only, and one that is gated."""
    if "gated/" in path:
        return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."}, b""
    for name, config in CONFIGS.items():
        if path == f"/{name}/resolve/main/config.json":
            return 200, {"ETag": '"1"', "X-Repo-Commit": "a" * 40}, json.dumps(config).encode()
        if path == f"/api/models/{name}":
            return 200, {}, json.dumps({"id": name, "siblings": []}).encode()
        if name in path:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
    return 404, {"X-Error-Code": "RepoNotFound"}, b""


def refusal(name):
    with pytest.raises(IcebearError) as caught:
        load_model(name)
    return str(caught.value)


def test_the_hubs_refusals_keep_their_reason(nowhere, tmp_path):
    nowhere.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    nowhere.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")
    names = ("gated/model", "no/safetensors", "odd/architecture", "none/such", "not a/name")
    with serving(hub) as (address, _):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
        nowhere.setattr(constants, "ENDPOINT", address)
        nowhere.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        gated, pickled, odd, none, no_name = map(refusal, names)
    assert gated == (
        "gated/model is gated: accept its terms on https://huggingface.co/gated/model and log in with `hf auth login`."
    )
    assert pickled.startswith("no/safetensors has no weights as .safetensors")
    assert "odd/architecture could not be loaded" in odd
    assert "model type `zzz`" in odd
    for sentence in (none, no_name):
        assert "the model hub has no model of that name" in sentence
        assert "reached" not in sentence


@pytest.fixture
def nowhere(monkeypatch):
    """The hub at a name that nobody here knows."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    close_session()  # it remembers proxies
    yield monkeypatch
    close_session()


def test_a_proxy_may_know_the_hub_where_this_machine_does_not(nowhere):
    assert not hub_reachable()
    with serving(lambda path: (404, {}, b"")) as (address, request):
        nowhere.setenv("http_proxy", address)
        close_session()
        assert hub_reachable()
        assert [path.rstrip("/") for path in request] == ["http://hub.invalid"]
        nowhere.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not hub_reachable()
        assert len(request) == 1


def test_without_a_network_a_hub_id_is_refused_at_once(nowhere, tmp_path):
    """Also where names resolve; the hub's client would wait and try again."""
    waited = []
    nowhere.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    nowhere.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    nowhere.setattr("time.sleep", waited.append)
    with pytest.raises(IcebearError, match="some/model"):
        load_model("some/model")
    assert not waited


def saved(folder):
    random_model(LLAMA, dtype=torch.float32).net.save_pretrained(folder)
    return folder


def test_a_truncated_file_is_said_to_be_one(tmp_path):
    weights = saved(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..\\up.safetensors",
        "C:\\x.safetensors",
        "pytorch_model.bin",
        "a/../../b.safetensors",
    ],
)
def test_an_index_of_weights_names_files_of_its_folder_only(tmp_path, name):
    net = random_model(LLAMA).net
    net.save_pretrained(tmp_path, max_shard_size="20kB")
    assert load_model(str(tmp_path)).layers == 3
    index = tmp_path / "model.safetensors.index.json"
    weights = json.loads(index.read_text())
    weights["weight_map"]["lm_head.weight"] = name
    for damaged in (json.dumps(weights), "[]", "{", '{"weight_map": 5}'):
        index.write_text(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
            load_model(str(tmp_path))


def test_a_full_memory_while_loading_has_a_way_out(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    saved(tmp_path)
    words("ice").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(IcebearError, match="--dtype"):
        load_model(str(tmp_path))


def words(*names):
    vocabulary = {name: number for number, name in enumerate(["[UNK]", *names])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")))


@pytest.mark.parametrize("own", [True, False])
def test_an_adapter_is_read_with_its_own_tokenizer_if_it_has_one(tmp_path, own):
    from peft import LoraConfig, get_peft_model

    base = saved(tmp_path / "base")
    words("ice", "bear").save_pretrained(base)
    adapted = get_peft_model(random_model(LLAMA).net, LoraConfig(target_modules=["down_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(tmp_path / "adapter")
    if own:
        words(*map(str, range(48)), "arctic").save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"))
    assert loaded.tokens_of("arctic") == ([49] if own else [0])


def test_an_adapter_beside_the_weights_is_refused_and_merged_it_is_right():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    net = random_model(LLAMA, dtype=torch.float32).net
    adapted = get_peft_model(net, LoraConfig(target_modules=["down_proj", "q_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        logits = adapted(torch.tensor([IDS])).logits[0, -1]
    for arguments in (adapted, adapted.get_base_model()):
        with pytest.raises(ModelError, match="merge_and_unload"):
            Model(arguments)
    result = attribute(Model(adapted.merge_and_unload()), IDS)
    assert result.target.logit == pytest.approx(logits.max().item(), rel=1e-4)


def adapter(folder, net, target, task=None, base=None, **options):
    """Saves a base model and a random adapter of it; returns the adapter's folder and its own logits."""
    from peft import LoraConfig, get_peft_model

    (base or net).save_pretrained(folder / "base")
    config = LoraConfig(r=4, task_type=task, target_modules=target, **options)
    adapted = get_peft_model(net, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                weight.normal_(0, 0.2)
        decoder = {"decoder_input_ids": torch.tensor([[0]])} if net.config.is_encoder_decoder else {}
        logits = adapted(torch.tensor([IDS]), **decoder).logits[0]
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    return str(folder / "adapter"), logits[-1] if logits.dim() == 2 else logits


def tied():
    return random_model(LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True}), dtype=torch.float32).net


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_an_adapter_of_one_of_two_tied_ends_changes_that_end_only(target, task, tmp_path):
    folder, logits = adapter(tmp_path, tied(), ["q_proj", target], task)
    loaded = load_model(folder)
    assert torch.allclose(loaded.next_logits(IDS), logits, atol=1e-4)
    plain = load_model(str(tmp_path / "base"))
    assert (loaded.next_logits(IDS) - plain.next_logits(IDS)).abs().max() > 0.1


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("name", "target", "task"),
    [
        ("bert, sequence", "query", "SEQ_CLS"),
        ("bert, token", "query", "TOKEN_CLS"),
        ("bert", "query", "FEATURE_EXTRACTION"),
        ("t5", "q", "SEQ_2_SEQ_LM"),
    ],
)
def test_an_adapter_is_loaded_with_the_class_of_its_task(name, target, task, own, tmp_path):
    auto, config = others()[name]
    net = getattr(transformers, auto).from_config(config).eval()
    folder, logits = adapter(tmp_path, net, [target], task if own else None)
    loaded = load_model(folder)
    assert type(loaded.net) is type(net)
    with torch.no_grad():
        batch = loaded.read([IDS[:1] if loaded.task.stacks == 2 else IDS])
        inputs = loaded.inputs(batch) | {"input_ids": torch.tensor([IDS])}
        inputs.pop("attention_mask")
        found = loaded.net(**inputs).logits[0]
    assert torch.allclose(found[-1] if found.dim() == 2 else found, logits, atol=1e-5)


def test_a_classifiers_adapter_brings_its_own_labels(tmp_path):
    """Of a base model that was saved without them."""
    _, config = others()["bert"]
    base = transformers.BertForMaskedLM(config)
    net = transformers.BertForSequenceClassification.from_pretrained(_saved(base, tmp_path / "masked"), num_labels=3)
    folder, _ = adapter(tmp_path, net.eval(), ["query"], "SEQ_CLS", base=base)
    assert load_model(folder).output_size == 3


def _saved(net, folder):
    net.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_an_adapter_that_changes_no_weight_is_refused_by_name(kind, tmp_path):
    import peft

    net = tied()
    net.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(net, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=kind[:6].lower()):
        load_model(str(tmp_path / "adapter"))


def test_an_extended_vocabulary_without_its_tokenizer_is_said_to_be_one(tmp_path):
    base, net = tied(), tied()
    net.resize_token_embeddings(53)
    folder, _ = adapter(tmp_path, net, ["q_proj"], modules_to_save=["embed_tokens", "lm_head"], base=base)
    with pytest.raises(ModelError, match="53 tokens and its base model 50"):
        load_model(folder)


def write_gguf(path, seed=0):
    """A Llama of two layers and bytes for tokens, as llama.cpp keeps it."""
    generator, tokens = np.random.default_rng(seed), [*bytes_to_unicode().values(), "ab", "<s>", "</s>", "<unk>"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_unk_token_id(259)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    for layer in range(2):
        own = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32))
        own |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_for_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "cache"))
    converted = []
    plain = conversion.from_gguf
    monkeypatch.setattr(conversion, "from_gguf", lambda *arguments: converted.append(arguments) or plain(*arguments))
    write_gguf(tmp_path / "a.gguf")
    first = load_model(str(tmp_path / "a.gguf"), device="cpu")
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf")
    second = load_model(str(tmp_path / "b.gguf"), device="cpu")
    assert len(converted) == 1
    assert (first.name, second.name) == (str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"))
    assert "GGUF" in second.weights_note
    assert torch.equal(first.next_logits("ice bear"), second.next_logits("ice bear"))
    write_gguf(tmp_path / "b.gguf", seed=1)
    third = load_model(str(tmp_path / "b.gguf"), device="cpu")
    assert len(converted) == 2
    assert third.fingerprint != second.fingerprint
    assert load_model(str(tmp_path / "b.gguf"), device_map="disk").offloaded


@pytest.mark.parametrize(
    ("cuda", "mps", "bfloat16", "device", "dtype"),
    [
        (True, True, True, "cuda", torch.bfloat16),
        (True, False, False, "cuda", torch.float32),
        (False, True, True, "mps", torch.float32),
        (False, False, True, "cpu", torch.float32),
    ],
)
def test_a_faked_machine_has_its_best_device_and_dtype(cuda, mps, bfloat16, device, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    chosen = loading.device_of("auto")
    assert chosen.type == device
    assert loading.dtype_of(None, chosen) == dtype
    for name, there in (("cuda", cuda), ("mps", mps)):
        if not there:
            with pytest.raises(IcebearError, match=name):
                loading.device_of(name)
