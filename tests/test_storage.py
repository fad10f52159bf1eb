"""Where recorded values lie, and that they move only when they are asked for."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from conftest import IDS, LLAMA, random_model
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from icebear import attribute
from icebear.concepts.passes import neuron_recorders
from icebear.concepts.passes.neuron_recorders import AllNeurons, PairedNeurons, Values
from icebear.concepts.passes.storage import SiteValues, planned

OTHER = [3, 9, 12, 40, 5, 3, 21, 9]


class Far(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU, and counts its moves; what is computed from it is far as well.
    As on a GPU, it is not computed from together with tensors of the CPU."""

    moves = 0

    @property
    def device(self):
        return torch.device("cuda")

    def cpu(self):
        type(self).moves += 1
        return self.as_subclass(torch.Tensor)

    @classmethod
    def may_mix(cls, name, args):
        """Whether operands of a function may lie on two devices: copies, and indices of the CPU."""
        return name == "copy_" or (name in ("__getitem__", "__setitem__") and isinstance(args[0], cls))

    @classmethod
    def is_near(cls, x):
        return isinstance(x, torch.Tensor) and not isinstance(x, cls) and x.dim() > 0  # single numbers go anywhere

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if not cls.may_mix(function.__name__, args) and any(map(cls.is_near, tree_leaves((args, kwargs)))):
                raise RuntimeError(f"{function.__name__} of tensors on two devices")
            near = tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, cls) else x, (args, kwargs or {}))
            result = function(*near[0], **near[1])
            return tree_map(lambda x: x.as_subclass(cls) if isinstance(x, torch.Tensor) else x, result)


@pytest.fixture(autouse=True)
def _no_moves():
    Far.moves = 0


def far(values):
    """Values by site, as if they lay on a GPU."""
    return SiteValues({site: values[site].as_subclass(Far) for site in values})


@pytest.fixture
def recorded_far(monkeypatch):
    """All neurons that passes record lie on a GPU."""
    for kind, name in ((AllNeurons, "row"), (PairedNeurons, "result")):
        plain = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, plain=plain: tuple(map(far, plain(*args))))


@pytest.mark.parametrize(
    ("size", "kind", "where"),
    [
        (25, "cuda", "device"),
        (26, "cuda", "pinned"),
        (50, "cuda", "pinned"),
        (51, "cuda", "cpu"),
        (25, "mps", "device"),
        (26, "mps", "cpu"),
        (10**18, "cpu", "device"),
    ],
)
def test_values_take_a_quarter_of_the_free_memory_at_most(size, kind, where):
    """Of the device, or, in pinned memory, of the computer."""
    assert planned(size, torch.device(kind), lambda device: 200 if device.type == "cpu" else 100) == where


def test_the_cpu_is_not_asked_for_its_memory():
    assert planned(10**18, torch.device("cpu"), lambda device: pytest.fail("asked")) == "device"


def test_values_move_when_they_are_asked_for_and_once():
    x = torch.arange(6.0).view(1, 2, 3)
    values = SiteValues({"ffn": x.as_subclass(Far), "attn": x.as_subclass(Far)})
    assert (len(values), list(values), "q" in values, values.unmoved("ffn").device.type) == (
        2,
        ["ffn", "attn"],
        False,
        "cuda",
    )
    assert Far.moves == 0
    assert torch.equal(values["ffn"], x)
    assert values["ffn"] is values["ffn"]
    assert Far.moves == 1
    copies = [copy.deepcopy(values), pickle.loads(pickle.dumps(values))]
    assert Far.moves == 2
    assert all(type(each.unmoved("attn")) is torch.Tensor and torch.equal(each["attn"], x) for each in copies)


def test_neurons_are_ranked_where_they_lie(llama):
    plain = attribute(llama, IDS, 7, counterfactual=OTHER)
    parts = {part: far(getattr(plain.neurons, part)) for part in ("relevance", "activation", "counterfactual")}
    moved = replace(plain, neurons=replace(plain.neurons, **parts))
    for options in ({"position": "all"}, {"site": "ffn", "polarity": "-"}, {"by": "absolute", "layers": [1]}):
        assert moved.top(9, **options) == plain.top(9, **options)
    assert Far.moves == 0
    assert moved.top(9, "head") == plain.top(9, "head")
    assert Far.moves == 0
    assert torch.equal(moved.ffn, plain.ffn)
    assert Far.moves == 1


SPLIT = {
    "the mean over counterfactuals": ({"target": 7, "counterfactual": [OTHER, [5, *OTHER[1:]]]}, lambda result: None),
    "a contrast phrase": ({"target_text": [7, 8], "contrast": [(9, 8)]}, lambda result: None),
    "relevance was read": ({"target": 7}, lambda result: result.ffn),
    "activations were read": ({"target": 7}, lambda result: result.activation("ffn")),
    "both were read": ({"target": 7, "counterfactual": OTHER}, lambda result: (result.ffn, result.activation("ffn"))),
}
"""Why parts of a site lie on two devices -> the explanation, and what is read of it."""


@pytest.mark.parametrize("reason", SPLIT)
@pytest.mark.parametrize("polarity", [None, "+", "-"])
def test_parts_of_a_site_are_ranked_together_wherever_they_lie(llama, reason, polarity, request):
    options, read = SPLIT[reason]
    plain = attribute(llama, IDS, **options)
    request.getfixturevalue("recorded_far")
    moved = attribute(llama, IDS, **options)
    read(moved)
    for site in ("ffn", "attn", None):
        assert moved.top(9, site, polarity=polarity) == plain.top(9, site, polarity=polarity)


def test_reading_activations_leaves_relevance_where_it_lies(llama, recorded_far):
    result = attribute(llama, IDS, 7)
    result.activation("ffn")
    assert Far.moves == 1
    assert isinstance(result.neurons.relevance.unmoved("ffn"), Far)


@pytest.mark.parametrize("options", [{}, {"counterfactual": OTHER}, {"record": "last"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_away_from_the_device_are_those_on_it(options, dtype, monkeypatch):
    """As with too little memory on a GPU, where products are computed from copies."""
    model = random_model(LLAMA, dtype=dtype)
    near = attribute(model, IDS, 7, **options)
    monkeypatch.setattr(neuron_recorders, "planned", lambda *_: "cpu")
    away = attribute(model, IDS, 7, **options)
    for site in near.sites:
        assert torch.equal(near.of(site), away.of(site))
        assert torch.equal(near.activation(site), away.activation(site))


@pytest.mark.parametrize("kind", [AllNeurons, PairedNeurons])
def test_activations_and_relevance_lie_together_when_memory_shrinks(llama, kind, monkeypatch):
    """One plan for the sum of both: free memory is less after the first of them."""
    plans, free = [], iter([10**9, 0])

    def plan(size, device, _):
        plans.append((size, planned(size, torch.device("mps"), lambda _: next(free))))
        return plans[-1][1]

    monkeypatch.setattr(neuron_recorders, "planned", plan)
    recorder = kind(llama, llama.padded([IDS, OTHER]), ("ffn", "attn"))
    size = sum(x.nbytes for part in (recorder.activation, recorder.relevance) for x in part.values())
    assert plans == [(size, "device")]
    assert not recorder.is_far


class Copies(TorchFunctionMode):
    """Remembers of each copy whether it does not wait."""

    def __init__(self):
        super().__init__()
        self.not_waiting = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ == "copy_" or "non_blocking" in (kwargs or {}):
            self.not_waiting.append((kwargs or {}).get("non_blocking", False))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["device", "pinned", "cpu"])
@pytest.mark.parametrize("kind", [AllNeurons, PairedNeurons])
def test_only_copies_to_pinned_memory_do_not_wait(llama, kind, where):
    recorder = kind(llama, llama.padded([IDS, OTHER]), ("ffn",))
    recorder.where = where
    x = torch.ones(2, len(IDS), llama.width("ffn"))
    with Copies() as copies:
        recorder.begin("ffn", 1, x)
        recorder.end("ffn", 1, x, x)
    assert set(copies.not_waiting) == {where == "pinned"}


@pytest.mark.parametrize("where", ["device", "pinned", "cpu"])
def test_a_pass_ends_when_copies_to_pinned_memory_have(llama, where, monkeypatch):
    """Whatever device the weights are on: those of an offloaded model are on none."""
    recorder, synchronized = Values(llama, llama.padded([IDS]), ()), []
    recorder.where = where
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(type(llama), "device", torch.device("cuda:1"))
    with recorder.reading(llama):
        recorder._store(torch.zeros(2), torch.ones(2).as_subclass(Far))
        assert not synchronized
    assert set(map(str, synchronized)) == ({"cuda", "cuda:1"} if where == "pinned" else set())
