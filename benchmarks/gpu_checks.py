"""The checks of `gpu.py`: what is right, where Python waits, how quick it is. Each yields rows of a table."""

from __future__ import annotations

import copy
import statistics
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MixtralConfig, PreTrainedConfig

from icebear import Model, attribute, steer
from icebear.actmax.index.scan import Settings, scan_shard
from icebear.actmax.reading import TEXTS_PER_PASS
from icebear.concepts.deviation import deviation
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.concepts.passes.timing import seconds
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_parts import WHOLE_KINDS, ExplainedTokenNodes, Recomputed
from icebear.concepts.stages.stages import patched_prompts, stages
from icebear.models.objective import objective_of
from icebear.records import Neuron, Ranked, Sentence

ROOT = Path(__file__).resolve().parent.parent
LLAMA_3 = {"vocab_size": 128_256, "rope_theta": 500_000.0}
SHAPES: dict[str, PreTrainedConfig] = {
    "135M": LlamaConfig(
        **{"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "1B": LlamaConfig(
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "tie_word_embeddings": True, **LLAMA_3},
    ),
    "8B": LlamaConfig(
        **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, **LLAMA_3},
    ),
    "Mixtral, 2 of 32 layers": MixtralConfig(num_hidden_layers=2),
    "Gemma 3 1B": Gemma3TextConfig(
        **{"vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
    ),
}
NARROW = {
    **{"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "layer_types": None},
}
CLOSE = 1e-4
"""The largest deviation from the CPU, as a share of the largest value: float32 sums in another order."""
HALF = 1e-3
"""The same for vectors that are stored as float16: one unit in the last place."""
TARGET, CONTRAST = 10, 11
SCANNED = 200
"""Rows of a scan."""
LARGEST = 100
"""The neurons of ``keep="top"``."""
ROUNDS_OF_TIMES = 5


class Numbers:
    """A tokenizer whose words are token ids."""

    all_special_ids = ()
    pad_token_id = eos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(map(int, text.split()))}

    def decode(self, ids: Any) -> str:
        return "".join(f" {int(token)}" for token in ids)


def facts(device: str) -> dict[str, Any]:
    """Return what the numbers were measured with, and turn TF32 off."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {library.__name__: library.__version__ for library in (torch, transformers, numpy)}
    return {"device": card, **versions, "TF32": "off"}


def build(shape: str, device: str, dtype: torch.dtype, quick: bool) -> Model:
    """Return a model of random weights."""
    config = copy.deepcopy(SHAPES[shape])
    if quick:
        config = type(config)(**{**config.to_diff_dict(), **NARROW})
    torch.manual_seed(0)
    with torch.device(device):
        return Model(AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), Numbers(), shape)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(100, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def counterfactual(ids: list[int]) -> list[int]:
    return [*ids[:2], 50, *ids[3:]]


def most_changed(model: Model, ids: list[int]) -> tuple[int, int, list[int]]:
    """Return the tokens that the prompt raises and lowers most above its counterfactual, and this one: in bfloat16 the
    logits of other tokens can be equal."""
    pair = patched_prompts(model, ids, counterfactual(ids), TARGET, CONTRAST)
    change = pair.prompt.logits - pair.counterfactual.logits
    return int(change.argmax()), int(change.argmin()), counterfactual(ids)


def sentences(count: int) -> list[Sentence]:
    rows = [prompt(8 + number % 30, number) for number in range(count)]
    return [Sentence(number, " ".join(map(str, ids)), "", 0, 0) for number, ids in enumerate(rows)]


# --- right ---


def relevances(model: Model, ids: list[int]) -> dict[str, Tensor]:
    """Return what is compared with the CPU, by name."""
    compared = {"counterfactual": counterfactual(ids), "contrast": CONTRAST}
    results = {}
    for name, options in {"AttnLRP": {}, "CP-LRP": {"method": "cp-lrp"}, "difference rules": compared}.items():
        relevance = attribute(model, ids, TARGET, **options)
        results |= {f"{name}, {part}": getattr(relevance, part) for part in ("tokens", "ffn", "attn")}
    return results


def logit_changes(model: Model, relevance: Relevance, nodes: Sequence[Ranked]) -> dict[int, Tensor]:
    """Return the effects (N,) of nodes on each likely token. Which tokens are likely may differ in near ties."""
    measured = relevance.effects(nodes)
    return dict(zip(measured.token_ids, (measured.matrix + measured.means[:, None]).T, strict=True))


def steered(model: Model, ids: list[int]) -> dict[str, Tensor]:
    with steer(model, ["L1.ffn.3=5", "L0.ffn.7*0"]):
        edited = model.continuations([ids], 8)
        return {
            "logits with edits": model.next_logits(ids),
            "tokens generated with edits": torch.tensor(edited),
            "logits of a text with edits": model.continuation_logits(ids, edited[0]),
        }


def held(model: Model, ids: list[int]) -> dict[str, Tensor]:
    """Return the logits of stages: of a causal trace, and with most parts held at their counterfactual values."""
    pair = patched_prompts(model, ids, counterfactual(ids), TARGET, CONTRAST)
    nodes = [Neuron(0, "head", 1), Neuron(1, "head", 2), Neuron(1, "ffn", 3)]
    token_nodes = ExplainedTokenNodes(model, 0)
    parts = [
        Recomputed(WHOLE_KINDS, token_nodes.masks(nodes)),
        Recomputed(nodes=token_nodes.masks(nodes[:2])),
        token_nodes.without(nodes),
    ]
    return {
        "stages, causal trace": pair.trace([2, 5, len(ids) - 1], [0, model.layers - 1]),
        "stages, logits of sets": pair.logits([part.state(pair) for part in parts]),
    }


def scanned(model: Model) -> dict[str, Tensor]:
    summary, vectors = scan_shard(model, sentences(SCANNED), Settings(k=8, sites=("ffn",)))
    moments = summary.statistics["moments"]
    return {"scan, top activations": summary.values, "scan, sums": moments, "scan, sentence vectors": vectors}


def filled(x: Tensor) -> Tensor:
    """Return a table of a scan with zeros where it is not full."""
    return x.masked_fill(x.isinf(), 0)


def row(check: str, value: float, limit: float | None = None) -> dict[str, Any]:
    if limit is None:
        return {"check": check, "value": value, "limit": "", "verdict": ""}
    return {"check": check, "value": value, "limit": limit, "verdict": "ok" if value <= limit else "TOO LARGE"}


def right(device: str, quick: bool, shape: str) -> Iterator[dict[str, Any]]:
    model = build(shape, device, torch.float32, quick)
    on_cpu = Model(copy.deepcopy(model.net).to("cpu"), Numbers(), shape)
    ids, other = prompt(24), prompt(17, 1)
    for work in (
        *(lambda model: relevances(model, ids), lambda model: steered(model, ids), lambda model: held(model, ids)),
        scanned,
    ):
        on_device, cpu = work(model), work(on_cpu)
        for name, values in cpu.items():
            limit = HALF if values.dtype == torch.float16 else CLOSE
            yield row(f"{name}, from the CPU's", deviation(filled(on_device[name]), filled(values)), limit)
    both = [attribute(m, ids, TARGET, contrast=CONTRAST, counterfactual=counterfactual(ids)) for m in (model, on_cpu)]
    nodes = both[1].top(8, position="all")
    on_device, cpu = map(logit_changes, (model, on_cpu), both, (nodes, nodes))
    shared = sorted(on_device.keys() & cpu.keys())
    changes = (torch.stack([by_token[token] for token in shared]) for by_token in (on_device, cpu))
    yield row(f"effects of 8 nodes on {len(shared)} tokens, from the CPU's", deviation(*changes), CLOSE)
    sums = both[0].conservation()
    yield row("difference rules, remainder of the sum / difference", abs(sums.remainder / sums.target), 1e-3)
    single = [attribute(model, row_ids, TARGET).ffn for row_ids in (ids, other)]
    yield row("AttnLRP the second time", deviation(attribute(model, ids, TARGET).ffn, single[0]), 0.0)
    with ThreadPoolExecutor(2) as pool:
        threads = list(pool.map(lambda row_ids: attribute(model, row_ids, TARGET).ffn, (ids, other)))
    yield row("AttnLRP in two threads", max(map(deviation, threads, single)), CLOSE)
    batch = attribute(model, [ids, other], TARGET)
    yield row("AttnLRP in a batch", max(deviation(a.ffn, b) for a, b in zip(batch, single, strict=True)), CLOSE)
    in_float32 = relevances(model, ids)
    model.net.to(torch.bfloat16)
    for name, values in relevances(model, ids).items():
        yield row(f"{name}, bfloat16 from float32", deviation(filled(values), filled(in_float32[name])))


# --- waiting ---

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "__bool__", "__int__", "__float__"}
"""Functions of tensors whose results Python must wait for."""


class Waits(TorchFunctionMode):
    """Counts calls for which the host waits for the device, by line of icebear."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        masked = name == "__getitem__" and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if name in READS or masked:
            self.lines[f"{line_of_icebear()} {'mask' if masked else name}"] += 1
        return function(*args, **(kwargs or {}))


def line_of_icebear() -> str:
    """Return the innermost line of icebear that is being executed."""
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename).resolve()
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("benchmarks", ".venv", "tests"):
            return f"{path.relative_to(ROOT)}:{line}"
    return "no line of icebear"


@contextmanager
def warned(lines: Counter[str]) -> Iterator[None]:
    """Count the warnings of torch's synchronization debug mode (CUDA only)."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: lines.update(
            [line_of_icebear()] if "synchroniz" in str(message) else ()
        )
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def passes(model: Model) -> dict[str, Callable[[], object]]:
    """Return what is examined, by name."""
    ids = prompt(24)
    return {
        "AttnLRP, tokens": partial(attribute, model, ids, TARGET, sites=()),
        "AttnLRP, all neurons": partial(attribute, model, ids, TARGET),
        "AttnLRP, largest neurons": partial(attribute, model, ids, TARGET, keep="top", k=LARGEST),
        "difference rules, all neurons": partial(
            attribute, model, ids, TARGET, contrast=CONTRAST, counterfactual=counterfactual(ids)
        ),
        "stages": partial(stages, model, ids, TARGET, CONTRAST, counterfactual(ids)),
        f"scan of {TEXTS_PER_PASS} rows": partial(
            scan_shard, model, sentences(TEXTS_PER_PASS), Settings(k=8, sites=("ffn",))
        ),
    }


def waits(model: Model) -> dict[str, Counter[str]]:
    """Return for each pass the lines at which the host waits, and how often."""
    counted = {}
    for name, work in passes(model).items():
        work()
        work()  # which proves that no lookup is needed
        mode = Waits()
        with mode:
            work()
        counted[name] = mode.lines
    return counted


def waiting(device: str, quick: bool, shape: str) -> Iterator[dict[str, Any]]:
    model = build(shape, device, torch.float32, quick)
    for name, lines in waits(model).items():
        yield row(f"{name}: calls that wait", lines.total())
        yield from (row(f"{name}: {line}", count) for line, count in lines.most_common(8))
    for name, work in passes(model).items() if device == "cuda" else ():
        lines: Counter[str] = Counter()
        with warned(lines):
            work()
        yield row(f"{name}: synchronizations that torch warns of", lines.total())
        yield from (row(f"{name}: {line}, warned", count) for line, count in lines.most_common(8))


# --- quick ---


def gradient_x_input(model: Model, ids: list[int]) -> None:
    forward_backward(model, Logits(objective_of(model, [ids], TARGET)), [Inputs()])


def quick_part(device: str, quick: bool, shape: str) -> Iterator[dict[str, Any]]:
    model = build(shape, device, torch.float32 if device == "cpu" else torch.bfloat16, quick)
    for length in (8, 32) if quick else (8, 32, 128, 512, 2048):
        ids = prompt(length)
        cases = {
            "gradient x input": partial(gradient_x_input, model, ids),
            "AttnLRP, tokens": partial(attribute, model, ids, TARGET, sites=()),
            "AttnLRP, largest neurons": partial(attribute, model, ids, TARGET, keep="top", k=LARGEST),
            "AttnLRP, all neurons": partial(attribute, model, ids, TARGET),
            "one counterfactual, all neurons": partial(
                attribute, model, ids, TARGET, contrast=CONTRAST, counterfactual=counterfactual(ids)
            ),
            **({"stages": partial(stages, model, ids, *most_changed(model, ids))} if length <= 128 else {}),
        }
        yield from (row(f"{length} tokens: {name}", value) for name, value in ratios(cases, device, quick).items())
        if device == "cuda":
            yield from (row(f"{length} tokens: {name}, peak MiB", peak(work)) for name, work in cases.items())
    yield from profiled(cases["AttnLRP, tokens"], device)
    yield from scan_speed(model, device)


def ratios(cases: dict[str, Callable[[], object]], device: str, quick: bool) -> dict[str, float]:
    """Return milliseconds of the first case, and the median over rounds of the ratio of each other one to it."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(1 + (2 if quick else ROUNDS_OF_TIMES)):
        for name, work in cases.items():
            taken = seconds(work, torch.device(device))
            if turn:  # the first round warms up
                times[name].append(taken)
    (unit, base), *others = times.items()
    values = {f"{unit}, ms": 1000 * statistics.median(base)}
    return values | {
        f"{name}, ratio": statistics.median(a / b for a, b in zip(taken, base, strict=True)) for name, taken in others
    }


def peak(work: Callable[[], object]) -> float:
    """Return the peak memory of the device in MiB, less what is there before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def profiled(work: Callable[[], object], device: str) -> Iterator[dict[str, Any]]:
    """Report the operations of one pass; on a GPU its kernels, and the share of the time without any."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * (device == "cuda")
    taken = statistics.median(
        seconds(work, torch.device(device)) for _ in range(3)
    )  # without the profiler, which slows Python
    with torch.profiler.profile(activities=activities) as profile:
        work()
    events = profile.events()
    yield row("one pass: operations of torch", sum(event.name.startswith("aten::") for event in events))
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    if kernels:
        spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
        busy = sum(end - start for start, end in spans) - sum(max(0, a[1] - b[0]) for a, b in pairwise(spans))
        yield row("one pass: kernels", len(kernels))
        yield row("one pass: share of the time in which the GPU waits for Python", 1 - busy / 1e6 / taken)


def scan_speed(model: Model, device: str) -> Iterator[dict[str, Any]]:
    rows = sentences(SCANNED)
    ids = sorted((model.token_ids(sentence.text) for sentence in rows), key=len)

    def bare() -> None:
        with torch.no_grad():
            for start in range(0, len(ids), TEXTS_PER_PASS):
                model.final_stream(model.read(ids[start : start + TEXTS_PER_PASS]))

    cases = {"forward": bare, "scan": partial(scan_shard, model, rows, Settings(k=8, sites=("ffn",)))}
    measured = ratios(cases, device, quick=True)
    yield row("scan: tokens a second of the bare forward", sum(map(len, ids)) / measured["forward, ms"] * 1000)
    yield row("scan: time / bare forward", measured["scan, ratio"])


PARTS = {"right": right, "waiting": waiting, "quick": quick_part}
