"""`attribute`: one forward and one backward pass under the relevance rules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from concepts.lrp.context import relevance_rules
from concepts.lrp.method import ATTNLRP, AttnLRP
from concepts.models import Batch, Model, Prompt
from concepts.relevance import Conservation, Relevance
from concepts.taps import Taps
from db.errors import InputError, NumericalError

Token = str | int
SINK_RATIO = 4
"""A sink's residual stream exceeds the median position's this many times, in most layers. Massive activations
(Sun et al. 2024) reach 10 to 150 on SmolLM2 and Gemma 3, other positions stay under 2."""


@overload
def attribute(model: Model, prompt: str, *args: Any, **options: Any) -> Relevance: ...
@overload
def attribute(model: Model, prompt: Sequence[Any], *args: Any, **options: Any) -> Any: ...
def attribute(
    model: Model,
    prompt: Prompt | Sequence[Prompt],
    target: Token | Sequence[Token] | None = None,
    contrast: Token | Sequence[Token] | None = None,
    *,
    target_text: str | Sequence[str] | None = None,
    method: AttnLRP = ATTNLRP,
    sites: Sequence[str] | None = None,
    checkpoint: bool = False,
    strict: bool = True,
) -> Relevance | list[Relevance]:
    """Relevance of tokens and neurons for what the model predicts after `prompt`.

    prompt: a text or token ids; a list of them is one padded batch, and gives a list back.
    target: the next token explained, one token (default: the most probable one).
    contrast: explains logit[target] - logit[contrast] instead of logit[target].
    target_text: explains a whole continuation instead, summed over its tokens.
    sites: neurons to record, of ``ffn``, ``attn``, ``q``, ``k``, ``v``; default ``ffn`` and ``attn`` (none for a family
        that icebear does not know).
    checkpoint: keep one residual stream a layer and recompute the rest, for long prompts.
    strict: raise `MissingRule` for an operation without a rule (False: warn, and list it in the result).

    Source: AttnLRP, Achtibat et al. 2024 (arXiv 2402.05602). Raises `InputError`, `MissingRule`, `NumericalError`.
    """
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
    prompts: list[Any] = [prompt] if single else list(prompt)
    if not prompts:
        raise InputError("There is no prompt to explain; give at least one.")
    if target is not None and target_text is not None:
        raise InputError("target and target_text exclude each other; give one of them.")
    if sites is None:
        sites = ("ffn", "attn") if model.has_family else ()
    plan = _plan(model, prompts, target, contrast, target_text)
    with model.lock:
        results = _run(model, plan, method, tuple(sites), checkpoint, strict)
    return results[0] if single else results


# --- what is explained ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    batch: Batch
    positions: tuple[tuple[int, ...], ...]
    """For each prompt, the positions whose next token is explained."""
    targets: tuple[tuple[int, ...] | None, ...]
    """The tokens explained there; None for the most probable one."""
    contrasts: tuple[int | None, ...]


def _plan(model: Model, prompts: list[Any], target: Any, contrast: Any, target_text: Any) -> _Plan:
    targets, contrasts, texts = (_per_prompt(value, len(prompts)) for value in (target, contrast, target_text))
    batch = model.encode(prompts)
    rows, positions, wanted = [], [], []
    for row, length in enumerate(batch.lengths):
        ids = batch.ids[row, :length].tolist()
        chosen: tuple[int, ...] | None = None if targets[row] is None else (model.token_id(targets[row]),)
        if texts[row] is not None:
            chosen = tuple(model._tokenizer()(texts[row], add_special_tokens=False)["input_ids"])
            if not chosen:
                raise InputError("The target text is empty; give at least one token.")
            ids += chosen[:-1]
        rows.append(ids)
        wanted.append(chosen)
        positions.append(tuple(range(length - 1, len(ids))))
    against = tuple(None if token is None else model.token_id(token, "contrast") for token in contrasts)
    return _Plan(model.encode(rows), tuple(positions), tuple(wanted), against)


def _per_prompt(value: Any, count: int) -> list[Any]:
    if value is None or isinstance(value, (str, int)):
        return [value] * count
    if len(value) != count:
        raise InputError(f"There are {count} prompts but {len(value)} targets or contrasts; give one for each.")
    return list(value)


# --- the passes -----------------------------------------------------------------------------------------


def _run(
    model: Model, plan: _Plan, method: AttnLRP, sites: tuple[str, ...], checkpoint: bool, strict: bool
) -> list[Relevance]:
    batch = plan.batch
    count, length = batch.ids.shape
    ledger = new_ledger(model, count)
    taps = Taps(model, sites, count, length)
    layers = model.layer_modules if checkpoint else ()
    with (
        torch.enable_grad(),
        relevance_rules(model.net, method, ledger=ledger, strict=strict, checkpoint_layers=layers) as mode,
        embedding_leaf(model) as leaf,
        taps.reading(),
    ):
        needed = sorted({place for row in plan.positions for place in row})
        logits = _logits(model, batch, needed)  # (B, P, V)
        targets, explained = _explained(plan, logits, needed)
        taps.check_forward(batch.mask)
        (gradient,) = torch.autograd.grad(explained.sum(), leaf[0])
        taps.finish()
    dtype = ledger["softmax"].dtype
    tokens = (leaf[0].detach().to(dtype) * gradient.to(dtype)).sum(-1)  # (B, T)
    return [
        _result(model, plan, row, targets[row], explained, logits, needed, tokens, taps, ledger, method, mode)
        for row in range(count)
    ]


def new_ledger(model: Model, count: int) -> dict[str, Tensor]:
    """Zeros (B,) for what the rules keep, by name, in float32 (float64 for a float64 model)."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    return {name: torch.zeros(count, dtype=dtype, device=model.device) for name in ("softmax", "biases", "positions")}


def last_logits(model: Model, batch: Batch) -> Tensor:
    """(B, 1, V) logits at the last column: the cheapest whole forward pass."""
    return _logits(model, batch, [batch.ids.shape[1] - 1])


def _logits(model: Model, batch: Batch, positions: list[int]) -> Tensor:
    """(B, P, V) logits at `positions` only: those of every token would cost a quarter of the pass."""
    keep = torch.tensor(positions, device=model.device)
    if "logits_to_keep" in inspect.signature(type(model.net).forward).parameters:
        return model.net(**model.inputs(batch), use_cache=False, logits_to_keep=keep).logits
    return model.net(**model.inputs(batch), use_cache=False).logits[:, keep]


def _explained(plan: _Plan, logits: Tensor, needed: list[int]) -> tuple[list[tuple[int, ...]], Tensor]:
    """The target tokens of each prompt, and the number explained for each (B,)."""
    targets, values = [], []
    for row, places in enumerate(plan.positions):
        scores = logits[row, [needed.index(place) for place in places]]  # (P, V)
        chosen = plan.targets[row] or (int(scores[-1].argmax()),)
        value = scores[range(len(chosen)), list(chosen)].sum()
        contrast = plan.contrasts[row]
        if contrast is not None:
            value = value - scores[:, contrast].sum()
        targets.append(chosen)
        values.append(value)
    return targets, torch.stack(values)


@contextmanager
def embedding_leaf(model: Model) -> Iterator[list[Tensor]]:
    """Makes the token embeddings (B, T, D) a leaf that requires a gradient, and yields it in a list."""
    leaf: list[Tensor] = []

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        leaf.append(output.detach().requires_grad_())
        return leaf[-1]

    handle = model.net.get_input_embeddings().register_forward_hook(hook)
    try:
        yield leaf
    finally:
        handle.remove()


def _result(
    model: Model,
    plan: _Plan,
    row: int,
    target_ids: tuple[int, ...],
    explained: Tensor,
    logits: Tensor,
    needed: list[int],
    tokens: Tensor,
    taps: Taps,
    ledger: dict[str, Tensor],
    method: AttnLRP,
    mode: Any,
) -> Relevance:
    length = plan.batch.lengths[row]
    ids = tuple(plan.batch.ids[row, :length].tolist())
    here = logits[row, needed.index(plan.positions[row][0])].detach().float()  # (V,)
    relevance = tokens[row, :length].cpu()
    if not torch.isfinite(relevance).all():
        raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
    contrast = plan.contrasts[row]
    return Relevance(
        tokens=relevance,
        token_ids=ids,
        token_strings=model.pieces(ids),
        target=model.token_score(here, target_ids[0]) if len(target_ids) == 1 else None,
        target_text="".join(model.text(token) for token in target_ids),
        contrast=None if contrast is None else model.token_score(here, contrast),
        predictions=tuple(model.top_tokens(here, 10)),
        method=method,
        sites=taps.row(row, length),
        sinks=_sinks(model, ids, taps.stream[row, :, :length]),
        head_count=model.heads,
        conserved=Conservation(
            target=explained[row].item(),
            tokens=relevance.sum().item(),
            **{name: entry[row].item() for name, entry in ledger.items()},
        ),
        model_name=model.name,
        model_fingerprint=model.fingerprint,
        missing_rules=tuple(dict.fromkeys(mode.missing)),
    )


def _sinks(model: Model, ids: tuple[int, ...], stream: Tensor) -> tuple[int, ...]:
    """Positions to set apart: the first, special tokens, and huge residual streams; `stream` is (L, T) norms."""
    ratio = stream / stream.median(dim=1, keepdim=True).values
    huge = (ratio.median(dim=0).values > SINK_RATIO).nonzero().flatten().tolist()
    special = model.special_ids()
    return tuple(sorted({0, *huge, *(place for place, token in enumerate(ids) if token in special)}))
