"""Where Python moves tensors between the CPU and the device of the model, or waits for the device."""

import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import IDS, LLAMA, Letters, random_model
from test_concepts import planted, texts
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from icebear import Model, attribute, find_concept, flip, monitor, stages, steer, watching
from icebear.actmax.index.scan import Settings, scan_shard
from icebear.concepts.passes import neuron_recorders
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.records import Sentence

ROOT = Path(__file__).resolve().parent.parent
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "unique_consecutive"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "__contains__"}
"""Functions of tensors whose results Python waits for."""
MASKED = {"__getitem__", "__setitem__"}
COPIES = {"copy_", "__setitem__"}
"""Functions that copy their last argument into their first."""


class Transfers(TorchFunctionMode):
    """Counts moves and waits by the function of icebear that asks for them: (function, what).

    All tensors are on the CPU here. Those that would be on a GPU are told from others by where they come from: what is
    made without a device, or read by `.cpu()`, is on the CPU, and so is what is computed from such tensors alone.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.on_cpu = WeakIdKeyDictionary()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, tensors = getattr(function, "__name__", ""), [x for x in tree_leaves((args, kwargs)) if is_tensor(x)]
        device = next((x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, torch.device)), None)
        is_on_cpu = [x in self.on_cpu for x in tensors]
        what = self._transfer(name, args, kwargs, is_on_cpu, device)
        if what and (function_name := asker()):
            self.counts[function_name, what] += 1
        result = function(*args, **kwargs)
        if what in ("to", "cpu") and result is args[0]:
            result = result.view_as(result)  # on a GPU it would be a copy
        is_down = name == "cpu" or (name == "to" and "cpu" in [x for x in args[1:] if isinstance(x, str)])
        if is_down or (device is None and all(is_on_cpu)):
            for x in tree_leaves(result):
                if is_tensor(x):
                    self.on_cpu[x] = True
        return result

    def _transfer(self, name, args, kwargs, is_on_cpu, device):
        """What a call moves or waits for; None if nothing."""
        if name in MASKED and any(is_tensor(x) and x.dtype == torch.bool for x in tree_leaves(args[1])):
            return None if all(is_on_cpu) else "mask"
        if name in COPIES and is_tensor(args[-1]):
            return name if is_on_cpu[0] != (args[-1] in self.on_cpu) else None
        if name == "to":
            is_down = any(isinstance(x, str) and x == "cpu" for x in (*args[1:], kwargs.get("device")))
            is_up = is_on_cpu[0] and not is_down and (device is not None or not all(is_on_cpu))
            return "to" if is_up or (is_down and not is_on_cpu[0]) else None
        return name if name in READS and not all(is_on_cpu) else None


def is_tensor(x):
    return isinstance(x, Tensor)


def asker():
    """The file and function that asks, if it is icebear's; None for a library."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        path = Path(frame.f_code.co_filename)
        if "torch" in path.parts or (path == Path(__file__) and "Transfers" in frame.f_code.co_qualname):
            continue
        if not path.is_relative_to(ROOT) or ".venv" in path.parts:
            return None
        return f"{path.relative_to(ROOT)} {frame.f_code.co_qualname.split('.<locals>')[0]}"
    return None


OTHER = [3, 9, 12, 40, 5, 3, 21, 9]


def lettered(layers):
    config = type(LLAMA)(**{**LLAMA.to_dict(), "num_hidden_layers": layers})
    return Model(random_model(config, dtype=torch.float32).net, Letters(), "letters")


def generated(model):
    with steer(model, ["L1.ffn.3=5", "L0.ffn.7*0"]):
        model.continuations([IDS], 4)


def flipped(model):
    answer = model.predict(OTHER, 1)[0].id
    return flip(model, IDS, answer, source=OTHER, unbounded=True)


SENTENCES = [Sentence(number, "ice bear " * (1 + number % 3), "", 0, 0) for number in range(6)]
PASSES = {
    "tokens": lambda model: attribute(model, IDS, 7, sites=()),
    "all neurons": lambda model: attribute(model, IDS, 7),
    "largest neurons": lambda model: attribute(model, IDS, 7, keep="top", k=5),
    "comparison": lambda model: attribute(model, IDS, 7, contrast=8, counterfactual=OTHER),
    "stages": lambda model: stages(model, IDS, 7, 8, OTHER),
    "flip": flipped,
    "scan": lambda model: scan_shard(model, SENTENCES, Settings(k=4, sites=("ffn",))),
    "steer": generated,
}


def counted(work, model):
    """The transfers of a pass, after those that are measured once (proofs, calibration)."""
    for _ in range(3):
        work(model)
    measured = tree_leaves(vars(calibrate(model)))  # on the CPU
    with pytest.MonkeyPatch.context() as patch, Transfers() as transfers:
        patch.setattr(neuron_recorders, "planned", lambda *_: "device")
        for x in filter(is_tensor, measured):
            transfers.on_cpu[x] = True
        work(model)
    return transfers.counts


@pytest.fixture(scope="module")
def monitored():
    """A model and a monitor of it."""
    model = planted()
    concept = find_concept(model, texts(80, True), texts(80, False), "song", sites=("ffn",))
    return model, monitor(model, concept, texts(130, False, 1), 0.01)


IN_A_PASS = ("tokens", "all neurons", "largest neurons", "comparison", "steer")
ALLOWED = {
    "prompts go to the device, once a batch": {
        "models/model.py Model.padded": "to",
    },
    "answers are numbers, with their probabilities": {
        "models/model.py Model.token_scores": "tolist",
        "models/model.py Model.top_tokens": "tolist",
        "models/batch.py Batch.row_ids": "tolist",
        "models/objective.py Objective.evaluate": "tolist",
        "concepts/attribution/single.py single_relevances": "item",
        "concepts/methods/difference_rules.py Difference.compare": "item",
    },
    "what is not finite is an error": {
        "concepts/attribution/single.py single_relevances": "__bool__",
        "concepts/passes/inputs.py Stream.finish": "__bool__ cpu",
        "models/model.py not_nan": "__bool__",
    },
    "sinks are positions, which are not ranked": {
        "concepts/passes/inputs.py Stream.sinks": "mask nonzero tolist",
    },
    "a result: one number a token, the k largest neurons, sums by layer and head": {
        "concepts/passes/prompt.py summed_over_width": "cpu",
        "concepts/passes/neuron_recorders.py LargestNeurons._ranked": "cpu",
        "concepts/passes/neuron_recorders.py LargestNeurons.row": "cpu",
        "concepts/results/ranking.py NeuronScores._top_of_site": "tolist",
        "concepts/results/ranking.py NeuronScores.heads": "cpu",
        "concepts/results/ranking.py _largest": "__int__ nonzero",
    },
    "the model itself asks, in an operation that rules see": {
        "lrp/operation_table.py RelevanceMode._ruled": "__bool__",
    },
    "which nodes and tokens a set leaves free is a list; its masks go to the device, once a pass": {
        "concepts/stages/patched_pair.py Passes._nodes_of": "to",
        "concepts/stages/patched_pair.py Passes.holding": "to",
    },
    "stages choose the next set by the numbers of the last one": {
        "concepts/stages/patched_pair.py Passes.logits_of": "to",
        "concepts/stages/stage_measurements.py _largest_between": "tolist",
        "concepts/stages/stage_parts.py ExplainedTokenNodes.most_changed": "tolist",
    },
    "a search chooses the next edits by the numbers of the last ones, of which it keeps tables on the CPU": {
        "steering/flipping/last_token.py LastToken.activations": "cpu",
        "steering/flipping/last_token.py LastToken.gradients": "cpu",
        "steering/flipping/last_token.py LastToken.logits": "cpu",
        "steering/flipping/flip.py _gradients": "__bool__ mask",
        "steering/flipping/phrases.py holds": "tolist",
    },
    "the tables of an index lie on the CPU, for they are of all neurons; each layer adds to them once a batch": {
        "actmax/index/activation_statistics.py Histogram.add": "cpu",
        "actmax/index/activation_statistics.py Moments.add": "cpu",
        "actmax/index/activation_statistics.py Positive.add": "cpu",
        "actmax/index/scan.py _Reader.read": "cpu",
        "actmax/reading.py _counted": "to tolist",
        "actmax/index/scan.py _largest": "cpu",
        "actmax/index/scan.py _mean_stream": "cpu",
        "actmax/index/scan.py _position": "cpu",
    },
    "where edits act is decided by token ids and positions, in each step": {
        "steering/token_tracker.py TokenTracker._before": "cpu",
        "steering/token_tracker.py TokenTracker._rows": "cpu",
        "steering/token_tracker.py TokenTracker.acting": "to",
    },
    "tokens that were written become a text": {
        "models/model.py Model.continuations": "tolist",
        "models/model.py Model.answer": "item tolist",
    },
    "a monitor judges each token as it is written": {
        "steering/monitor/watching.py Log.end_pass": "cpu",
    },
}
"""Reason -> function of icebear -> what it may move or wait for. What libraries do is not in it."""


@pytest.fixture(scope="module")
def transfers():
    """Pass -> its transfers, in a model of three layers."""
    return {name: counted(work, lettered(3)) for name, work in PASSES.items()}


def test_only_named_functions_move_tensors_or_wait(transfers, monitored):
    model, watcher = monitored

    def written(model):
        with watching(model, watcher):
            model.answer("the ice bear", max_new_tokens=5)

    seen = {key for each in [*transfers.values(), counted(written, model)] for key in each}
    allowed = {
        (function, what)
        for functions in ALLOWED.values()
        for function, each in functions.items()
        for what in each.split()
    }
    assert seen == allowed


@pytest.mark.parametrize("name", IN_A_PASS)
def test_a_pass_moves_and_waits_as_often_with_more_layers(transfers, name):
    assert counted(PASSES[name], lettered(5)) == transfers[name]


def test_each_way_of_waiting_is_counted():
    device = torch.device("cpu")
    with Transfers() as mode:
        x, mask = torch.ones(2, device=device), torch.tensor([True, False])
        _ = x[0].item(), x.tolist(), x.cpu(), x.numpy(), x.nonzero(), x[x > 0], bool(x[0]), x.to("cpu"), x + 1
        _ = x.masked_select(x > 0), mask.to(x), mask.to(device)
        x[x > 1] = 2
        x[:], mask[:] = mask, x
        _ = x.copy_(mask), mask.copy_(x, non_blocking=True)
        counted_before = mode.counts.total()
        _ = mask.tolist(), mask[mask], bool(mask[0]), mask.to(torch.float32).tolist(), x.to(torch.float64), x.to(device)
        x[:], mask[:], x[0] = x, mask, 2
        _ = x.copy_(x + 1), mask.copy_(mask)
        assert mode.counts.total() == counted_before == 16
        _ = x.cpu().tolist(), mask.to(device).tolist()
        assert mode.counts.total() == counted_before + 3
