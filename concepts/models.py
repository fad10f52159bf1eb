"""The `Model` handle that everything else takes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from concepts import experts
from concepts.families import FAMILIES, Family
from db.errors import InputError, ModelError
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
                f"icebear does not know where {kind!r} models keep their neurons, only what their tokens' relevance is "
                f"(sites=()); it knows {', '.join(FAMILIES)}. docs/new-family.md adds one in a dozen lines."
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

    @property
    def has_family(self) -> bool:
        """Whether it is known where the neurons are; the relevance of tokens needs no more than the operations."""
        return self.net.config.model_type in FAMILIES

    @cached_property
    def layer_modules(self) -> list[nn.Module]:
        """Of an unknown family the longest list of modules, which serves to find sinks and NaNs."""
        if self.has_family:
            return list(self.net.get_submodule(self.family.layers).children())
        lists = [list(module) for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    @property
    def layers(self) -> int:
        return len(self.layer_modules)

    @property
    def heads(self) -> int:
        return getattr(self.net.config, "num_attention_heads", 1)

    @property
    def head_dim(self) -> int:
        return self.width("attn") // self.heads

    def site_module(self, site: str, layer: int) -> nn.Module:
        """The module whose input (`ffn`, `attn`) or output (`q`, `k`, `v`, or all three in one) is the site."""
        if site not in SITES:
            raise InputError(f"{site!r} is not a site; the sites are {', '.join(SITES)}.")
        family = self.family
        names = {"ffn": family.ffn_out, "attn": family.attn_out}
        return self.layer_modules[layer].get_submodule(names.get(site) or family.qkv or getattr(family, site))

    def experts(self, layer: int) -> Any:
        """A layer's experts, whose neurons are its site `ffn`; None in a dense model. Raises `ModelError` if mixed."""
        if not self.family.experts:
            return None
        try:
            return self.layer_modules[layer].get_submodule(self.family.experts)
        except AttributeError:
            raise ModelError(
                f"Layer {layer} of {self.name} has no experts where others have; icebear reads only mixtures that have "
                "them in every layer (sites=('attn',) works)."
            ) from None

    def matrix(self, module: nn.Module) -> Tensor:
        """(out, in) the weight of a linear map, in float32, whichever way round the module keeps it."""
        weight: Any = module.weight
        weight = weight.detach().float()
        return weight.T if isinstance(module, Conv1D) else weight

    def columns(self, site: str) -> Tensor | None:
        """Where the site's neurons are in the output of a map that makes q, k and v in one; None for other sites."""
        if site in ("ffn", "attn") or not self.family.qkv:
            return None
        total, dim = len(self.matrix(self.site_module(site, 0))), self.head_dim
        groups = (total // dim - self.heads) // 2  # key-value heads
        each = self.heads // groups  # query heads of one
        if self.family.qkv_order == "apart":
            sizes = [self.heads * dim, groups * dim, groups * dim]
            return torch.arange(total).split(sizes)["qkv".index(site)]
        places = torch.arange(total).view(groups, each + 2, dim)
        return {"q": places[:, :each], "k": places[:, each], "v": places[:, each + 1]}[site].flatten()

    def width(self, site: str) -> int:
        """The number of neurons of a site in each layer (heads, for `head`)."""
        if site == "head":
            return self.heads
        if site == "ffn" and self.family.experts:
            return experts.counted(self.experts(0))
        columns = self.columns(site)
        if columns is not None:
            return len(columns)
        out_features, in_features = self.matrix(self.site_module(site, 0)).shape
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
    def predict(self, prompt: Prompt, k: int = 10, also: Sequence[int] = ()) -> list[TokenScore]:
        """The k most probable next tokens, and behind them those of `also` that are not among them."""
        with self.lock:
            logits = self.net(**self.inputs(self.encode([prompt])), use_cache=False).logits[0, -1].float()
        found = self.top_tokens(logits, k)
        known = {token.id for token in found}
        return found + [self.token_score(logits, token) for token in also if token not in known]

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

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 40,
        temperature: float = 0.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Any:
        """The text that follows the prompt (a list of texts for a list of prompts).

        temperature: 0 always takes the most probable token; above, tokens are drawn with `seed`.
        on_token: called with the number of new tokens after each; what it raises ends the generation.
        options: what transformers' `generate` takes (num_beams, use_cache, ...).
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        batch = self.encode(prompts, padding_side="left")
        length = batch.ids.shape[1]
        room = self.context_length - length
        if max_new_tokens > room:
            raise InputError(
                f"The prompt leaves room for {room} tokens in {self.name}; ask for at most that many new ones."
            )
        if temperature < 0:
            raise InputError(f"The temperature must be 0 or more, not {temperature}.")
        options = {"do_sample": temperature > 0, "pad_token_id": self._pad_id(), **options}
        if temperature > 0:
            options["temperature"] = temperature
        if on_token:

            def watch(ids: Tensor, scores: Any, **_: Any) -> Tensor:
                on_token(ids.shape[1] - length)
                return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

            options["stopping_criteria"] = [watch]
        with self.lock, torch.no_grad(), torch.random.fork_rng(enabled=temperature > 0):
            if temperature > 0:
                torch.manual_seed(seed)
            output = self.net.generate(**self.inputs(batch), max_new_tokens=max_new_tokens, **options)
        texts = self._tokenizer().batch_decode(output[:, length:], skip_special_tokens=True)
        return texts[0] if isinstance(prompt, str) and len(texts) == 1 else texts

    def _pad_id(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        return 0
