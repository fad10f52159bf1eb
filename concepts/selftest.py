"""`selftest` checks on one prompt whether relevance works for a model, and the laws that hold for every model."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.batch_law import ROUNDING, beginning, remedied
from icebear.concepts.deviation import deviation
from icebear.concepts.methods.attnlrp import ATTNLRP, CP_LRP
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Conservation, Logits, forward_backward
from icebear.concepts.passes.sites import hooks, not_called
from icebear.concepts.passes.timing import seconds
from icebear.concepts.results.result import Relevance
from icebear.concepts.vocabulary.calibration import noise, token_rows
from icebear.errors import MissingRule, ModelError
from icebear.lrp.context import relevance_rules
from icebear.models.batch import Batch
from icebear.models.image_examples import by_examples
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.models.parts import experts
from icebear.models.parts.linear import packed
from icebear.models.text.prompts import PromptLike
from icebear.records import WRITERS
from icebear.values import several

TRIED = 2048
"""Tokens: a longer context is not run."""
WHY = "batch differs"
"""Not a law, but why that of batches does not hold exactly."""


@dataclass(frozen=True)
class Law:
    name: str
    finding: str
    """What was found, in a few words."""
    holds: bool | None
    """None if it was not tried, or is refused by name."""


Found = dict[str, float | str]
"""By law: the deviation, as a share of the largest value, or why it was not tried."""


def laws_of(model: Model, prompt: PromptLike, position: int | None, tolerance: float) -> list[Law]:
    """Measure each law.

    ``context``: as many tokens as `context_length` says run. ``batch``: each row has the relevance that it has alone;
    if it does not have it to rounding, ``batch differs`` says from which module on, and what mends it at which cost.
    ``activations``: recorded activations equal a plain pass with a plain hook. ``counterfactual``: relevance
    sums to the difference of two prompts. ``compared activations``: the same beside a counterfactual. ``edits``: to
    silence neurons does what the model does without their W_out rows.

    tolerance: the largest deviation at which a law holds.
    """
    options: dict[str, Any] = {"position": position, "strict": not model.has_scan}  # which have no rule alone
    measures: dict[str, Callable[[], Found]] = {}
    half: Callable[[], PromptLike]
    changed: Callable[[], PromptLike]
    encoded = model.encode([prompt])
    if encoded.pixels is None:
        ids = encoded.ids[0, : encoded.lengths[0]].tolist()
        measures["context"] = partial(_longest, model, ids)
        prompt, half, changed = ids, partial(_half, model, ids), partial(_changed, model, ids)
    else:
        half = changed = partial(_other_image, model, encoded.pixels.shape[1:])
    measures |= {
        "batch": lambda: _together(model, [prompt, half()], options),
        "activations": partial(_recorded, model, prompt, options),
        "counterfactual": lambda: _compared(model, prompt, changed(), options),
        "edits": lambda: _silenced(model, prompt, options),
    }
    return [law for name, measure in measures.items() for law in _laws(name, measure, tolerance)]


def _laws(name: str, measure: Callable[[], Found], tolerance: float) -> list[Law]:
    try:
        deviations = measure()
    except MissingRule as error:
        return [Law(name, f"refused: {str(error).split('; ')[0].split('. The method')[0]}", None)]
    except ModelError as error:
        return [Law(name, f"fails: {error}", False)]
    except Exception as error:  # whatever another's model may raise
        return [Law(name, f"fails ({type(error).__name__})", False)]
    return [
        Law(law, value, None) if isinstance(value, str) else Law(law, f"differs by {value:.0e}", value <= tolerance)
        for law, value in deviations.items()
    ]


def _longest(model: Model, ids: Sequence[int]) -> Found:
    longest = model.context_length
    if longest > TRIED:
        return {"context": f"{longest} tokens, not tried" if longest < 1 << 30 else "no limit"}
    row = [*(list(ids) * longest)[: longest - len(ids)], *ids] if len(ids) < longest else list(ids)[:longest]
    with torch.no_grad(), model.lock:
        stream = model.final_stream(model.read([row]))
    return {"context": 0.0 if torch.isfinite(stream).all() else float("nan")}


def _half(model: Model, ids: Sequence[int]) -> list[int]:
    """Return the second half of a prompt, with the special tokens of all of it."""
    return [token for position, token in enumerate(ids) if position >= len(ids) // 2 or token in _special(model)]


def _changed(model: Model, ids: Sequence[int]) -> list[int]:
    """Return a prompt with another token in its middle."""
    position = next(position for position in range(len(ids) // 2, -1, -1) if ids[position] not in _special(model))
    return [*ids[:position], (ids[position] + 7) % model.config.vocab_size, *ids[position + 1 :]]


def _other_image(model: Model, shape: Sequence[int]) -> Tensor:
    return noise(model, shape)[1]


def _together(model: Model, rows: list[PromptLike], options: dict[str, Any]) -> Found:
    """Compare rows, of which only the first has no padding, with the rows alone."""
    deviations = _from_alone(model, rows, options)
    if max(deviations) <= ROUNDING:
        return {"batch": max(deviations)}
    if deviations[0] <= ROUNDING:
        why = "only the padded row differs"
    else:
        where = _beginning(model, rows, options)
        why = f"from {where} on" if where else "rounding adds up"
    mended = remedied(model, lambda: max(_from_alone(model, rows, options)))
    return {"batch": max(deviations), WHY: "; ".join([why, *map(str, mended)])}


def _beginning(model: Model, rows: list[PromptLike], options: dict[str, Any]) -> str | None:
    """Return where the first row begins to differ, in passes that explain the answers of rows alone."""
    objective = partial(objective_of, model, position=options["position"])
    alone = [objective([row]).resolved(model) for row in rows]
    together = replace(objective(rows), targets=tuple(row.targets[0] for row in alone))
    return beginning(model, alone[0], together, CP_LRP, options["strict"])


def _from_alone(model: Model, rows: list[PromptLike], options: dict[str, Any]) -> list[float]:
    """Return how much the relevance of each row in a batch deviates from its relevance alone."""
    options = {**options, "method": CP_LRP, "sites": (), "number": "logit"}
    alone = [attribute(model, row, **options) for row in rows]
    together = attribute(model, rows, [row.target.id if row.target else None for row in alone], **options)
    return [deviation(batched.tokens, other.tokens) for batched, other in zip(together, alone, strict=True)]


def _recorded(model: Model, prompt: PromptLike, options: dict[str, Any]) -> Found:
    result = attribute(model, prompt, method=CP_LRP, sites=model.sites if model.has_family else (), **options)
    return {"activations": _deviation_from_plain(model, result)}


def _compared(model: Model, prompt: PromptLike, other: PromptLike, options: dict[str, Any]) -> Found:
    best = [token.id for token in model.predict(prompt, 2, position=options["position"])]
    sites = model.sites if model.has_family else ()
    result = attribute(model, prompt, *best, counterfactual=other, sites=sites, position=options["position"])
    sums = result.conservation()
    largest = max(abs(sums.target), result.tokens.abs().max().item(), 1e-12)
    return {
        "counterfactual": abs(sums.remainder) / largest,
        "compared activations": _deviation_from_plain(model, result),
    }


def _silenced(model: Model, prompt: PromptLike, options: dict[str, Any]) -> Found:
    """Silence the strongest neuron of each layer and site by a hook, and by zeros in place of its W_out row: weights
    count even where no module is called that a hook could see."""
    objective = objective_of(model, [prompt], position=options["position"])
    batch, positions = objective.batch, objective.all_positions
    if not model.has_family or model.offloaded or any(map(packed, model.net.modules())):
        return {"edits": "not tried (no neurons, or weights that are quantized or offloaded)"}
    seen = plain_activations(model, batch)
    wanted = [(site, layer) for site in model.sites if site in WRITERS for layer in model.layers_with(site)]
    if lacking := [key for key in wanted if key not in seen]:
        raise not_called(model, *lacking[0])
    strongest = {key: int(seen[key].abs().amax(0).argmax()) for key in wanted}
    rows = [_w_out_row(model, site, layer, index) for (site, layer), index in strongest.items()]
    if len({row.data_ptr() for row in rows}) < len(rows):
        return {"edits": "not tried (layers share weights)"}
    silence = lambda site, layer, x: x.index_fill(-1, torch.tensor(strongest[site, layer], device=x.device), 0)  # noqa: E731
    with model.lock, torch.no_grad():
        plain = model.logits(batch, positions)
        with hooks(model, strongest, silence):
            edited = model.logits(batch, positions)
        before = [row.clone() for row in rows]
        try:
            for row in rows:
                row.zero_()
            without = model.logits(batch, positions)
        finally:
            for row, values in zip(rows, before, strict=True):
                row.copy_(values)
    change = (plain - without).abs().max().clamp(min=torch.finfo(plain.dtype).eps * plain.abs().max())
    return {"edits": ((edited - without).abs().max() / change).item()}


def _w_out_row(model: Model, site: str, layer: int, index: int) -> Tensor:
    """Return the W_out row (D,) of a neuron, as a part of the weights of which torch counts no version."""
    if site == "ffn" and (mixture := model.experts(layer)) is not None:
        expert, neuron = divmod(index, experts.width(mixture))
        weight, is_first = mixture.down_proj.data[expert], experts.is_transposed(mixture)
    else:
        module = model.site_module(site, layer)
        weight, neuron, is_first = module.weight.data, index, isinstance(module, Conv1D)
    return weight[neuron] if is_first else weight[:, neuron]


def _special(model: Model) -> set[int | None]:
    ends = several(getattr(model.config, "eos_token_id", None))
    return {*model.special_ids(), *ends, getattr(model.tokenizer, "mask_token_id", None)}


def _deviation_from_plain(model: Model, result: Relevance) -> float:
    """Return the largest deviation of recorded activations from those of a plain pass."""
    batch, deviations = result.explained().batch, []
    for (site, layer), x in plain_activations(model, batch).items():
        deviations.append(deviation(result.activation(site)[layer, batch.span_of(model.stack_of(layer))], x))
    return max(deviations, default=0.0)


def plain_activations(model: Model, batch: Batch) -> dict[tuple[str, int], Tensor]:
    """Return the activations (T, N) of each site and layer in a pass without rules, of one prompt. Those of linear maps
    are read by hooks of torch; only a mixture of experts, whose neurons no map has as its input, needs ours."""
    seen: dict[tuple[str, int], Tensor] = {}
    with model.lock, torch.no_grad(), ExitStack() as undo:
        for site in model.sites if model.has_family else ():
            for layer in model.layers_with(site):
                if site in ("ffn", "router") and model.family.experts:
                    see = lambda site, layer, x: seen.update({(site, layer): x[0]})  # noqa: E731
                    undo.enter_context(hooks(model, [(site, layer)], see))
                    continue
                module = model.site_module(site, layer)
                register: Any = module.register_forward_pre_hook if site in WRITERS else module.register_forward_hook
                undo.callback(register(partial(_keep, seen, (site, layer), model.columns(site))).remove)
        model.logits(batch, [0])
    return seen


def _keep(
    seen: dict[Any, Tensor], key: Any, columns: Tensor | None, module: Any, args: Any, output: Any = None
) -> None:
    """Keep the output of a module, or its input, which a hook before it sees."""
    x = args[0] if output is None else output
    seen[key] = (x if columns is None else x[..., columns]).flatten(0, -2).clone()  # models may change it in place


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of the rest that conservation leaves, as a share of the target; coarser types get 0.1. In a float64 model, norms of
transformers still compute in float32."""


@dataclass(frozen=True)
class SelfTest:
    """The results of a self-test; `troubles` has a sentence for each problem."""

    parity: float
    """The largest change of a logit under the rules, as a share of the largest logit."""
    conserved: Conservation
    """Under CP-LRP, whose rules conserve everything except the relevance of positions and biases."""
    missing: tuple[str, ...]
    """Operations without a rule."""
    sites: dict[str, int]
    """Site -> neurons per layer; empty for an unknown family."""
    sinks: tuple[int, ...]
    cost: float
    """The time of a relevance pass as a multiple of gradient x input, the median of three."""
    laws: tuple[Law, ...]
    troubles: tuple[str, ...]

    @property
    def verdict(self) -> str:
        return "fine" if not self.troubles else " ".join(self.troubles)


def selftest(model: Model, prompt: PromptLike = "The ice bear lives in the") -> SelfTest:
    """Measure parity, conservation, missing operations, sites, sinks and cost on one prompt, in some seconds."""
    if not model.task.reads_text and not model.labels:
        model = by_examples(model, noise(model)[:2], noise(model)[2:])
    if not model.task.reads_text and isinstance(prompt, str):
        prompt = noise(model)[0]
    elif isinstance(prompt, str):
        prompt = model.task.as_prompt(model, prompt) if model.reads_any_text else token_rows(model)[0]
    position = -1 if model.task.unembeds else None
    objective = objective_of(model, [prompt], position=position)
    with model.lock, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing operations are reported below
        plain = model.logits(objective.batch, objective.all_positions)
        with relevance_rules(model.net, ATTNLRP, strict=False):
            ruled = model.logits(objective.batch, objective.all_positions)
        parity = deviation(ruled, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        relevance = attribute(model, prompt, method=CP_LRP, sites=(), number="logit", position=position, strict=False)
        ours = partial(attribute, model, prompt, position=position, sites=(), strict=False)
        bare = lambda: forward_backward(model, Logits(objective), [Inputs()])  # noqa: E731
        cost = statistics.median(seconds(ours, model.device) / seconds(bare, model.device) for _ in range(3))
    sites = {site: model.width(site) for site in model.sites} if model.has_family else {}
    conserved = relevance.conservation()
    with warnings.catch_warnings(action="ignore"):
        laws = tuple(laws_of(model, prompt, position, TOLERANCE.get(model.dtype, 0.1)))
    troubles = _troubles(model, parity, conserved, relevance.missing_rules)
    troubles += tuple(f"The law of {law.name} does not hold ({law.finding})." for law in laws if law.holds is False)
    return SelfTest(parity, conserved, relevance.missing_rules, sites, relevance.prompt.sinks, cost, laws, troubles)


def _troubles(model: Model, parity: float, conserved: Conservation, missing: tuple[str, ...]) -> tuple[str, ...]:
    tolerance = TOLERANCE.get(model.dtype, 0.1)
    troubles = []
    if parity > tolerance:
        troubles.append(f"The logits change by {parity:.1e} under the rules; please report this model.")
    if missing:
        troubles.append(f"No rule for {', '.join(missing)}: add it to lrp/operation_table.py.")
    elif abs(conserved.remainder) > tolerance * max(abs(conserved.target), abs(conserved.tokens)):
        troubles.append(f"Relevance is not conserved (remainder {conserved.remainder:.1e}); try --dtype float32.")
    if not model.has_family:
        troubles.append("Only tokens have relevance: docs/new-family.md shows how to add the places of the neurons.")
    return tuple(troubles)
