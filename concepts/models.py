"""`load_model`, and the `Model` handle that everything else takes."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concepts.families import FAMILIES, Family
from concepts.presets import PRESETS, fetch
from db.errors import InputError, ModelError, UnknownName
from db.records import SITES, Neuron, TokenScore

Prompt = str | Sequence[int]
"""A text, or the token ids themselves."""


@dataclass(frozen=True)
class Batch:
    """Prompts as token ids, padded on the right (or left, for generation)."""

    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T), 1 where there is a token
    lengths: tuple[int, ...]


class Model:
    """A transformers model, its tokenizer, and where its neurons are.

    `lock` is held while rules, taps or edits are in the model, so that threads may share it.
    """

    def __init__(self, net: Any, tokenizer: Any = None, name: str = "") -> None:
        self.net = net.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or net.config._name_or_path or type(net).__name__
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {self.layers} layers, {str(self.dtype)[6:]} on {self.device})"

    # --- what it is -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.net.device

    @property
    def dtype(self) -> torch.dtype:
        return self.net.dtype

    @cached_property
    def family(self) -> Family:
        kind = self.net.config.model_type
        if kind not in FAMILIES:
            raise ModelError(
                f"icebear does not know where {kind!r} models keep their neurons; it knows {', '.join(FAMILIES)}. "
                "An entry in concepts/families.py adds a family."
            )
        return FAMILIES[kind]

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the architecture and the signs of a sample of every weight: the same in every dtype."""
        config = self.net.config
        digest = hashlib.sha256(f"{config.model_type} {config.vocab_size}".encode())
        for name, parameter in self.net.named_parameters():
            values = parameter.detach().flatten()
            sample = values[:: max(1, len(values) // 4096)]
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(torch.signbit(sample).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def context_length(self) -> int:
        return getattr(self.net.config, "max_position_embeddings", None) or 1 << 30

    # --- its parts ------------------------------------------------------------------------------------

    @cached_property
    def layer_modules(self) -> list[nn.Module]:
        return list(self.net.get_submodule(self.family.layers).children())

    @property
    def layers(self) -> int:
        return len(self.layer_modules)

    @property
    def heads(self) -> int:
        return self.net.config.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.width("attn") // self.heads

    def site_module(self, site: str, layer: int) -> nn.Module:
        """The module whose input (`ffn`, `attn`) or output (`q`, `k`, `v`) is the site."""
        if site not in SITES:
            raise InputError(f"{site!r} is not a site; the sites are {', '.join(SITES)}.")
        names = {"ffn": self.family.ffn_out, "attn": self.family.attn_out}
        return self.layer_modules[layer].get_submodule(names.get(site) or getattr(self.family, site))

    def width(self, site: str) -> int:
        """The number of neurons of a site in each layer (heads, for `head`)."""
        if site == "head":
            return self.heads
        weight: Any = self.site_module(site, 0).weight
        out_features, in_features = weight.shape
        return in_features if site in ("ffn", "attn") else out_features

    def check(self, neuron: Neuron) -> Neuron:
        """The neuron itself if this model has it, else `InputError`."""
        if neuron.layer >= self.layers:
            raise InputError(f"{neuron} is not in {self.name}: its layers are 0 to {self.layers - 1}.")
        if neuron.index >= self.width(neuron.site):
            raise InputError(
                f"{neuron} is not in {self.name}: {neuron.site} has the neurons 0 to {self.width(neuron.site) - 1}."
            )
        return neuron

    # --- tokens ---------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[Prompt], padding_side: str = "right") -> Batch:
        """Tokenize with the tokenizer's own special tokens. Raises `InputError` for empty or too long prompts."""
        rows = [self._ids(prompt) for prompt in prompts]
        longest = max(len(row) for row in rows)
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
        for row, values in enumerate(rows):
            place = slice(0, len(values)) if padding_side == "right" else slice(longest - len(values), longest)
            ids[row, place] = torch.tensor(values)
            mask[row, place] = 1
        return Batch(ids.to(self.device), mask.to(self.device), tuple(map(len, rows)))

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("The prompt is empty; give it some text.")
            ids = self._tokenizer()(prompt)["input_ids"]
        else:
            ids = list(prompt)
            if not ids:
                raise InputError("The prompt is empty; give it at least one token id.")
            if not all(0 <= token < self.net.config.vocab_size for token in ids):
                raise InputError(f"Token ids of {self.name} are 0 to {self.net.config.vocab_size - 1}.")
        if len(ids) > self.context_length:
            raise InputError(
                f"The prompt has {len(ids)} tokens, but {self.name} reads at most {self.context_length}; shorten it."
            )
        return ids

    def token_id(self, token: str | int, role: str = "target") -> int:
        """The id of a text that is exactly one token. Raises `InputError` that shows how it splits otherwise."""
        if isinstance(token, int):
            if not 0 <= token < self.net.config.vocab_size:
                raise InputError(f"Token ids of {self.name} are 0 to {self.net.config.vocab_size - 1}.")
            return token
        ids = self._tokenizer()(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            split = " + ".join(repr(self.text(part)) for part in ids) or "nothing"
            spaced = self._tokenizer()(" " + token, add_special_tokens=False)["input_ids"]
            hint = f" Did you mean {' ' + token!r}, with a space?" if len(spaced) == 1 else ""
            raise InputError(
                f"The {role} {token!r} must be one token, but splits into {split}.{hint} "
                "To explain a longer continuation, use --target-text (target_text= in Python)."
            )
        return ids[0]

    def text(self, token: int) -> str:
        return self._tokenizer().decode([token]) if self.tokenizer is not None else f"<{token}>"

    def token_ids(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of a text as the model reads it, special ones included: the first `limit`, if there are more."""
        ids = self._tokenizer()(text)["input_ids"]
        return ids[: min(limit or len(ids), self.context_length)]

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token; a character of several tokens is whole in its last one, the others are empty."""
        found = [self.text(token) for token in ids]
        if any("\ufffd" in piece for piece in found):
            before = ""
            for place in range(len(found)):
                after = self._tokenizer().decode(ids[: place + 1])
                whole = not after.endswith("\ufffd") or place + 1 == len(found)
                found[place] = after[len(before) :] if whole else ""
                before = after if whole else before
        return tuple(found)

    def special_ids(self) -> set[int]:
        return set(self.tokenizer.all_special_ids) if self.tokenizer is not None else set()

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InputError(f"{self.name} was given without a tokenizer; pass token ids instead of text.")
        return self.tokenizer

    # --- forward --------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, prompt: Prompt, k: int = 10) -> list[TokenScore]:
        """The k most probable next tokens."""
        with self.lock:
            logits = self.net(**self.inputs(self.encode([prompt])), use_cache=False).logits[0, -1].float()
        return self.top_tokens(logits, k)

    def top_tokens(self, logits: Tensor, k: int) -> list[TokenScore]:
        """The k largest of `logits` (V,)."""
        best = logits.topk(min(k, len(logits)))
        shares = (best.values - logits.logsumexp(0)).exp()
        rows = zip(best.indices.tolist(), best.values.tolist(), shares.tolist(), strict=True)
        return [TokenScore(token, self.text(token), logit, share) for token, logit, share in rows]

    def token_score(self, logits: Tensor, token: int) -> TokenScore:
        """One token's logit, and its probability under all `logits` (V,)."""
        probability = (logits[token] - logits.logsumexp(0)).exp().item()
        return TokenScore(token, self.text(token), logits[token].item(), probability)

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {"input_ids": batch.ids, "attention_mask": batch.mask}

    def generate(self, prompt: str | Sequence[str], max_new_tokens: int = 40, **options: Any) -> Any:
        """The text that follows the prompt (a list of texts for a list of prompts), greedy unless told otherwise.

        options: what transformers' `generate` takes (do_sample, num_beams, use_cache, ...).
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        batch = self.encode(prompts, padding_side="left")
        room = self.context_length - batch.ids.shape[1]
        if max_new_tokens > room:
            raise InputError(
                f"The prompt leaves room for {room} tokens in {self.name}; ask for at most that many new ones."
            )
        options = {"do_sample": False, "pad_token_id": self._pad_id(), **options}
        with self.lock, torch.no_grad():
            output = self.net.generate(**self.inputs(batch), max_new_tokens=max_new_tokens, **options)
        texts = self._tokenizer().batch_decode(output[:, batch.ids.shape[1] :], skip_special_tokens=True)
        return texts[0] if isinstance(prompt, str) and len(texts) == 1 else texts

    def _pad_id(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        return 0


# --- loading --------------------------------------------------------------------------------------------


def load_model(
    name: str = "smollm2-135m",
    *,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    accept_terms: bool = False,
) -> Model:
    """Load a preset, a folder (also of a LoRA adapter), a .gguf file or a hub id.

    device: ``auto`` takes cuda, then mps, then cpu.
    dtype: ``None`` takes bfloat16 on cuda when it has it, else float32.
    attention: ``sdpa``, ``eager``, or None for the model's default.
    accept_terms: download presets that ask for it (gemma3-270m).

    Raises `ModelError`, `UnknownName`, `DownloadError` or `InputError`, each with the way out.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = _device(device)
    kind = _dtype(dtype, place)
    source: str | Path = name
    if name in PRESETS:
        source = fetch(PRESETS[name], accept_terms)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        if not os.path.exists(source) and not name.endswith(".gguf") and not _hub_reachable():
            source = _from_hub_cache(name)
        if str(name).endswith(".gguf"):
            path = _existing(Path(name))
            net = load_gguf(path, kind, attention)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options)
        elif (Path(source) / "adapter_config.json").is_file():
            net = _load_adapter(Path(source), kind, attention, options)
            tokenizer = AutoTokenizer.from_pretrained(net.config._name_or_path, **options)
        else:
            net = AutoModelForCausalLM.from_pretrained(
                source, dtype=kind, attn_implementation=attention, use_safetensors=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _loading_error(name, error) from None
    return Model(net.to(place), tokenizer, name)


def load_gguf(path: Path, dtype: torch.dtype, attention: str | None = None) -> Any:
    """A GGUF file's model with its weights de-quantised to `dtype`."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, attn_implementation=attention
    )
    # The weights are plain by now, but transformers refuses to save what it still calls quantised.
    net.hf_quantizer = None
    del net.config.quantization_config
    return net


def _load_adapter(folder: Path, dtype: torch.dtype, attention: str | None, options: dict) -> Any:
    try:
        from peft import AutoPeftModelForCausalLM
    except ImportError:
        raise ModelError(f"{folder} is a LoRA adapter; pip install peft to load it.") from None
    adapted = AutoPeftModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, use_safetensors=True, **options
    )
    return adapted.merge_and_unload()


def _hub_reachable() -> bool:
    """Whether the hub's name resolves: without a network its client would retry for half a minute."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub.constants import ENDPOINT

    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _from_hub_cache(name: str) -> str:
    """The folder of a hub model fetched earlier; raises OSError or ValueError when there is none."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, local_files_only=True)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ModelError(f"There is no file {path}; check the path.")
    return path


def _loading_error(name: str, error: Exception) -> Exception:
    if os.path.exists(name) or name in PRESETS:
        reason = str(error).strip().splitlines()[0][:200]
        return ModelError(f"{name} could not be loaded ({reason}); check that it is a complete transformers model.")
    return UnknownName(
        "model",
        name,
        PRESETS,
        "It is no preset, folder or .gguf file, and no model hub that has it could be reached; "
        "`icebear models` lists the presets.",
    )


def _device(name: str) -> torch.device:
    available = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if name == "auto":
        return torch.device(available[0])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UnknownName("device", name, available, f"This machine has {', '.join(available)}.") from None
    if device.type not in available:
        raise InputError(f"This machine has no {name} device; use --device {available[0]}.")
    return device


def _dtype(wanted: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if wanted is None:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    dtype = wanted if isinstance(wanted, torch.dtype) else getattr(torch, wanted, None)
    known = ("float32", "bfloat16", "float16", "float64")
    if not isinstance(dtype, torch.dtype):
        raise UnknownName("dtype", str(wanted), known, f"Use one of {', '.join(known)}.")
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        if not dtype.is_floating_point:
            raise TypeError
        (ones @ ones).softmax(-1)
    except (RuntimeError, TypeError):
        raise InputError(f"{device.type} cannot compute in {wanted}; use --dtype float32.") from None
    return dtype
