"""`attribute`: one forward and one backward pass under the relevance rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, overload

import torch
from torch import Tensor

from concepts.baselines.common import places, resolved
from concepts.baselines.common import scores as baseline_scores
from concepts.baselines.methods import HOW, Baseline, named
from concepts.lrp.context import relevance_rules
from concepts.lrp.method import ATTNLRP, AttnLRP
from concepts.lrp.positions import Sinks
from concepts.models import images, tasks
from concepts.models.model import Model
from concepts.models.prompts import Prompt, prompts_of
from concepts.models.provenance import provenance
from concepts.models.tasks import Plan, Token
from concepts.passes.taps import Taps
from concepts.relevance import Conservation, Relevance
from icebear.errors import InputError, NumericalError


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
    method: AttnLRP | Baseline | str = ATTNLRP,
    sites: Sequence[str] | None = None,
    prefix: str | Sequence[str] | None = None,
    at: int | Sequence[int] | None = None,
    checkpoint: bool = False,
    strict: bool = True,
) -> Relevance | list[Relevance]:
    """Relevance of tokens and neurons for what the model predicts after (or in, or of) `prompt`.

    prompt: a text or token ids, with a mask token for a masked language model; for an image classifier the path of an
        image, an image, or pixels (C, H, W). A list of them is one padded batch, and gives a list back.
    target: what is explained, one token or a label (default: the most probable one).
    contrast: explains logit[target] - logit[contrast] instead of logit[target].
    target_text: explains a whole continuation instead, summed over its tokens.
    method: a value, or the name of one in `concepts.lrp.method`, or in `concepts.baselines.methods`, which know tokens
        only.
    sites: neurons to record, of ``ffn``, ``attn``, ``q``, ``k``, ``v``, in some models ``cross`` and ``router``;
        default ``ffn`` and ``attn`` (none for a family that icebear does not know).
    prefix: what the decoder of an encoder-decoder has written before the target.
    at: the token whose label is explained, for a token classifier (default: the most conspicuous one).
    checkpoint: keep one residual stream a layer and recompute the rest, for long prompts.
    strict: raise `MissingRule` for an operation without a rule (False: warn, and list it in the result).

    Source: AttnLRP, Achtibat et al. 2024 (arXiv 2402.05602). Raises `InputError`, `MissingRule`, `NumericalError`.
    """
    prompts, single = prompts_of(prompt)
    method = named(method) if isinstance(method, str) else method
    if sites is None:
        sites = ("ffn", "attn") if model.has_family and isinstance(method, AttnLRP) else ()
    if sites and not isinstance(method, AttnLRP):
        raise InputError(f"{method!r} knows no neurons; pass sites=(), or another method.")
    plan = tasks.plan(model, prompts, target, contrast, target_text, prefix, at)
    results = relevance_of(model, plan, method, tuple(sites), checkpoint, strict)
    return results[0] if single else results


def relevance_of(
    model: Model, plan: Plan, method: AttnLRP | Baseline, sites: tuple[str, ...] = (), checkpoint: bool = False,
    strict: bool = True,
) -> list[Relevance]:  # fmt: skip
    """`attribute` of what a plan says."""
    if isinstance(method, AttnLRP):
        with model.lock:
            return _run(model, plan, method, sites, checkpoint, strict)
    return _baseline(model, resolved(model, plan), method)


# --- the passes -----------------------------------------------------------------------------------------


def _run(
    model: Model, plan: Plan, method: AttnLRP, sites: tuple[str, ...], checkpoint: bool, strict: bool
) -> list[Relevance]:
    batch = plan.batch
    ledger = new_ledger(model, len(batch.ids))
    taps = Taps(model, sites, batch)
    sinks = Sinks(model, batch)
    layers = model.layer_modules if checkpoint else ()
    with (
        torch.enable_grad(),
        relevance_rules(model.net, method, ledger=ledger, strict=strict, checkpoint_layers=layers) as mode,
        embedding_leaf(model) as leaves,
        sinks.collecting() if method.positions else nullcontext(),
        taps.reading(),
    ):
        needed = places(plan)
        logits = tasks.logits(model, batch, needed)  # (B, P, V)
        targets, explained = tasks.explained(plan, logits, needed)
        taps.check_forward()
        del leaves[1 + bool(batch.decoder) :]  # of a pass that was repeated to find a missing rule
        inputs = [*leaves, *sinks.leaves]
        gradients = torch.autograd.grad(explained.sum(), inputs, allow_unused=bool(sinks.found))
        taps.finish()
    dtype = ledger["softmax"].dtype
    values = [leaf.detach().to(dtype) * g.to(dtype) for leaf, g in zip(leaves, gradients, strict=False)]
    positions = sinks.relevance(list(gradients[len(leaves) :])) if method.positions else None
    return [
        _result(
            model, plan, row, targets[row], explained, logits[row, needed.index(plan.positions[row][0])],
            [value[row] for value in values], None if positions is None else positions[row], taps, ledger, method, mode,
        )
        for row in range(len(batch.ids))
    ]  # fmt: skip


def baseline_tokens(model: Model, plan: Plan, method: Baseline) -> list[Tensor]:
    """(T,) for each prompt of a plan whose targets are known: what a baseline scores its tokens."""
    module, _, name = HOW[type(method)].partition(".")
    return getattr(import_module(f"concepts.baselines.{module}"), name)(model, plan, method)


def _baseline(model: Model, plan: Plan, method: Baseline) -> list[Relevance]:
    """The same for a method that only scores tokens; what its scores lack to the number explained is `rest`."""
    scores = baseline_tokens(model, plan, method)
    with model.lock, torch.no_grad():
        logits = baseline_scores(model, plan)  # (B, P, V)
    needed = places(plan)
    _, explained = tasks.explained(plan, logits, needed)
    found = []
    for row, tokens in enumerate(scores):
        here = logits[row, needed.index(plan.positions[row][0])].float()
        targets, contrast, ids = plan.targets[row] or (), plan.contrasts[row], plan.batch.row_ids(row)
        total = tokens.sum().item()
        found.append(
            Relevance(
                tokens=tokens.float().cpu(),
                token_ids=ids,
                token_strings=model.pieces(ids),
                explained_at=plan.explained_at(row),
                read=plan.batch.lengths[row],
                target=model.token_score(here, targets[0]) if len(targets) == 1 else None,
                target_text="".join(model.answer(token) for token in targets),
                contrast=None if contrast is None else model.token_score(here, contrast),
                predictions=tuple(model.top_tokens(here, 10)),
                method=method,
                sites={},
                sinks=(0,),
                head_count=model.heads,
                conserved=Conservation(explained[row].item(), total, 0.0, 0.0, 0.0),
                made_with=provenance(model),
            )
        )
    return found


def new_ledger(model: Model, count: int) -> dict[str, Tensor]:
    """Zeros (B,) for what the rules keep, by name, in float32 (float64 for a float64 model)."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    return {name: torch.zeros(count, dtype=dtype, device=model.device) for name in ("softmax", "biases", "positions")}


@contextmanager
def embedding_leaf(model: Model) -> Iterator[list[Tensor]]:
    """Makes the input a leaf that requires a gradient, and yields it in a list: the token embeddings (B, T, D), those
    of the encoder, then those of the decoder; or the pixels (B, C, H, W)."""
    leaves: list[Tensor] = []

    def after(module: Any, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    def before(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        leaves.append(kwargs["pixel_values"].detach().requires_grad_())
        return args, {**kwargs, "pixel_values": leaves[-1]}

    if model.task == "image":
        handles = [model.net.register_forward_pre_hook(before, with_kwargs=True)]
    else:
        handles = [module.register_forward_hook(after) for module in model.embeddings]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def _result(
    model: Model,
    plan: Plan,
    row: int,
    target_ids: tuple[int, ...],
    explained: Tensor,
    logits: Tensor,
    values: list[Tensor],
    positions: Tensor | None,
    taps: Taps,
    ledger: dict[str, Tensor],
    method: AttnLRP,
    mode: Any,
) -> Relevance:
    batch = plan.batch
    columns = batch.columns(row)
    here = logits.detach().float()  # (V,)
    image = None
    if batch.pixels is not None:
        image = images.image_map(model, batch.pixels[row], values[0])
        patches = image.patches.flatten()
        relevance = torch.cat((torch.zeros(len(columns) - len(patches), dtype=patches.dtype), patches))
    else:
        relevance = torch.cat([value.sum(-1) for value in values])[columns].cpu()  # (T,)
    if not torch.isfinite(relevance).all():
        raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
    kept = {name: entry[row].item() for name, entry in ledger.items()}
    signed, positive = (None, None) if positions is None else positions[..., columns].cpu()  # (K, T) each
    if signed is not None:
        kept["positions"] += signed.sum().item()
    contrast = plan.contrasts[row]
    ids = batch.row_ids(row)
    return Relevance(
        tokens=relevance,
        positions=signed,
        positive_positions=positive,
        token_ids=ids,
        token_strings=images.names(model) if image else model.pieces(ids),
        explained_at=plan.explained_at(row),
        read=batch.lengths[row],
        target=model.token_score(here, target_ids[0]) if len(target_ids) == 1 else None,
        target_text="".join(model.answer(token) for token in target_ids),
        contrast=None if contrast is None else model.token_score(here, contrast),
        predictions=tuple(model.top_tokens(here, 10)),
        method=method,
        sites=taps.row(row),
        sinks=taps.sinks(row),
        head_count=model.heads,
        conserved=Conservation(target=explained[row].item(), tokens=relevance.sum().item(), **kept),
        image=image,
        made_with=provenance(model),
        missing_rules=tuple(dict.fromkeys(mode.missing)),
    )
