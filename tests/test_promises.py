"""What is promised: the forward pass is the model's own, nothing stays behind, and a store answers without a model."""

import copy
import gc
import subprocess
import sys
import warnings

import pytest
import torch
from conftest import IDS, LLAMA, random_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from icebear import ATTNLRP, CP_LRP, Neuron, attribute
from icebear.actmax.index.annotation import attribute_neurons
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.passes import proved
from icebear.concepts.passes import run as passes
from icebear.errors import InputError, MissingRule, NumericalError
from icebear.lrp import context
from icebear.lrp.context import relevance_rules

INPUT = torch.tensor([IDS])
OTHERS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]


def state(model):
    """Everything of a module tree that rules, taps and hooks could leave behind."""
    return [
        (name, set(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.net.named_modules()
    ] + [(name, p.requires_grad, p.grad) for name, p in model.net.named_parameters()]


def plain_gradient(model):
    x = model.net.get_input_embeddings()(INPUT).detach().requires_grad_()
    logits = model.net(inputs_embeds=x, use_cache=False).logits
    return logits.detach(), torch.autograd.grad(logits[0, -1, 3], x)[0]


def assert_same(a, b, tolerance=1e-4):
    for x, y in ((a.tokens, b.tokens), (a.ffn, b.ffn), (a.attn, b.attn)):
        assert (x - y).abs().max() <= tolerance * y.abs().max()


def test_forward_parity(tiny):
    plain, _ = plain_gradient(tiny)
    for method in (ATTNLRP, CP_LRP):
        with relevance_rules(tiny.net, method):
            ruled = tiny.net(INPUT, use_cache=False).logits
        assert (ruled - plain).abs().max() <= 1e-6 * plain.abs().max()


def test_undone_on_exit_and_after_an_exception(tiny):
    before, logits = state(tiny), plain_gradient(tiny)
    attribute(tiny, IDS, checkpoint=True)
    with pytest.raises(ZeroDivisionError), relevance_rules(tiny.net, ATTNLRP):
        tiny.net(INPUT)
        1 / 0  # noqa: B018
    assert state(tiny) == before
    for x, y in zip(plain_gradient(tiny), logits, strict=True):
        assert torch.equal(x, y)


def tensors():
    gc.collect()
    return sum(type(result) is torch.Tensor for result in gc.get_objects())


def test_no_graph_stays_in_memory():
    model, prompt = random_model(LLAMA), [3, 1, 4, 2, 5]
    methods = [name for name, one in METHODS.items() if not one.needs_counterfactual]
    queries = [*({"method": name} for name in methods), {"checkpoint": True}, {"counterfactual": OTHERS[0]}]

    def explain():
        for query in queries:
            attribute(model, prompt, 4, 9, **query)
        attribute_neurons(model, [prompt], [Neuron(1, "ffn", 3)], [2])

    explain()  # what is made once
    before = tensors()
    explain()
    assert tensors() == before


def test_parameters_that_train_are_frozen_only_inside(llama):
    llama.net.requires_grad_(True)
    with relevance_rules(llama.net, ATTNLRP):
        assert not any(p.requires_grad for p in llama.net.parameters())
    assert all(p.requires_grad for p in llama.net.parameters())


def test_a_second_model_is_untouched_throughout():
    first, second = random_model(LLAMA), random_model(LLAMA, seed=1)
    expected = plain_gradient(second)
    with relevance_rules(first.net, ATTNLRP):
        first.net(INPUT)
        inside = plain_gradient(second)
    for x, y in zip(inside, expected, strict=True):
        assert torch.equal(x, y)


def test_same_numbers_alone_in_a_batch_eager_and_checkpointed(tiny):
    tiny.net.float()  # in float64, transformers' eager softmax turns a padded row's mask into NaN
    alone = attribute(tiny, IDS, target=4)
    assert_same(attribute(tiny, [*OTHERS, IDS], target=4)[-1], alone)
    assert_same(attribute(tiny, IDS, target=4, checkpoint=True), alone)
    tiny.net.set_attn_implementation("eager")
    assert_same(attribute(tiny, IDS, target=4), alone)
    assert_same(attribute(tiny, [*OTHERS, IDS], target=4, checkpoint=True)[-1], alone)


def test_conservation_of_each_row_of_a_batch(tiny):
    for result in attribute(tiny, [*OTHERS, IDS], method=CP_LRP):
        assert abs(result.conservation().remainder) < 1e-4 * max(1, abs(result.conservation().target))


def test_target_contrast_and_continuation_add_up(tiny):
    a, b = (attribute(tiny, IDS, target=token, number="logit") for token in (4, 9))
    both = attribute(tiny, IDS, target=4, contrast=9)
    assert torch.allclose(both.tokens, a.tokens - b.tokens, atol=1e-6)
    assert torch.allclose(both.ffn, a.ffn - b.ffn, atol=1e-6)


@pytest.mark.release
def test_a_continuation_is_the_sum_over_its_tokens(smol):
    whole = attribute(smol, "The ice bear", target_text=" lives in")
    first = attribute(smol, "The ice bear", target=" lives")
    second = attribute(smol, "The ice bear lives", target=" in")
    assert whole.tokens[:3].tolist() == pytest.approx((first.tokens + second.tokens[:3]).tolist(), abs=1e-3)
    assert whole.tokens[3].item() == pytest.approx(second.tokens[3].item(), abs=1e-3)


class Distance(nn.Module):
    """An MLP with an operation that nobody listed."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.down_proj = mlp.down_proj

    def forward(self, x):
        return self.mlp(x) + torch.cdist(x, x).mean()


class Doubling(torch.autograd.Function):
    """An operation that a TorchFunctionMode does not even see."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Custom(Distance):
    def forward(self, x):
        return Doubling.apply(self.mlp(x))


@pytest.mark.parametrize(("kind", "operation"), [(Distance, "cdist"), (Custom, "Doubling")])
def test_an_operation_that_nobody_listed_is_refused_by_name_and_place(llama, kind, operation):
    layer = llama.net.model.layers[1]
    layer.mlp = kind(layer.mlp)
    with pytest.raises(MissingRule, match=rf"{operation}.*model\.layers\.1\.mlp \({kind.__name__}\)"):
        attribute(llama, IDS)
    with pytest.warns(UserWarning, match=operation):
        result = attribute(llama, IDS, strict=False)
    assert operation in result.missing_rules[0]
    layer.mlp = layer.mlp.mlp
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attribute(llama, IDS)


@torch.jit.script
def scripted_silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@torch.jit.script
def scripted_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # in the graph it looks like any other one
    return x * y


class Calling(torch.nn.Module):
    def forward(self, x):
        return scripted_silu(x)


class ScriptedGate(Distance):
    def forward(self, x):
        return self.mlp.down_proj(scripted_product(self.mlp.act_fn(self.mlp.gate_proj(x)), self.mlp.up_proj(x)))


@pytest.mark.parametrize(
    ("path", "make", "place"),
    [
        ("mlp.act_fn", lambda old: Calling(), r"mlp\.act_fn \(Calling\)"),
        ("mlp.act_fn", torch.jit.script, r"mlp \(LlamaMLP\)"),
        ("mlp", ScriptedGate, r"mlp \(ScriptedGate\)"),
    ],
    ids=["function", "module", "product"],
)
def test_torchscript_is_refused_by_place_before_and_after_it_is_optimized(llama, path, make, place):
    layer = llama.net.model.layers[1]
    layer.set_submodule(path, make(layer.get_submodule(path)))
    for _ in range(3):
        with pytest.raises(MissingRule, match=rf"TorchScript.*model\.layers\.1\.{place}"):
            attribute(llama, IDS)
    with pytest.warns(UserWarning, match="TorchScript"):
        assert attribute(llama, IDS, strict=False).missing_rules


def test_nan_is_named_by_its_layer(llama):
    with torch.no_grad():
        llama.net.model.layers[1].mlp.up_proj.weight[2, 3] = float("nan")
    with pytest.raises(NumericalError, match="layer 1"):
        attribute(llama, IDS)


def test_deepcopied_model_has_the_same_fingerprint_in_another_dtype(llama):
    half = copy.deepcopy(llama.net).to(torch.bfloat16)
    from icebear import Model

    assert Model(half).fingerprint == llama.fingerprint
    assert random_model(LLAMA, seed=1).fingerprint != llama.fingerprint


def test_prompts_and_targets_must_match_in_number(llama):
    with pytest.raises(InputError, match="2"):
        attribute(llama, [IDS, IDS], target=[3])


def test_characters_of_several_tokens_are_shown_whole(smol):
    text = "Κεκροπία \U0001f43b naïve."
    pieces = smol.pieces(smol.token_ids(text))
    assert "".join(pieces) == text
    assert len(pieces) == len(smol.encode([text]).ids[0])
    assert attribute(smol, text).prompt.strings == pieces


def test_long_prompts_are_checkpointed_by_themselves(tiny, monkeypatch):
    """From so many tokens on, if nothing else is said."""
    calls = []
    own = context.checkpoint
    monkeypatch.setattr(context, "checkpoint", lambda *args, **options: calls.append(1) or own(*args, **options))
    for long, query, wanted in ((len(IDS), {}, True), (len(IDS) + 1, {}, False), (2, {"checkpoint": False}, False)):
        monkeypatch.setattr(passes, "LONG", long)
        calls.clear()
        attribute(tiny, IDS, **query)
        assert bool(calls) is wanted


class FusedAttention(TorchDispatchMode):
    """Counts the calls of fused attention."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in context.FUSED_ATTENTION
        return func(*args, **(kwargs or {}))


def test_long_prompts_keep_the_output_of_attention(tiny, monkeypatch):
    """The relevance is the same to the bit; `checkpoint=True` needs the least memory."""
    for module in (passes, proved):
        monkeypatch.setattr(module, "LONG", len(IDS))
    seen = []
    for multiple, query, passes_of_attention in ((0, {}, 1), (1000, {}, 2), (0, {"checkpoint": True}, 2)):
        monkeypatch.setattr(context, "ATTENTION_KEPT", multiple)
        with FusedAttention() as counted:
            seen.append(attribute(tiny, IDS, target=4, **query))
        assert counted.calls == passes_of_attention * tiny.layers
    for other in seen[1:]:
        assert_same(other, seen[0], tolerance=0)


SHOWN = """
neuron L29.ffn.860 --html card.html --store wiki.db
neuron L29.ffn.860 --json --store wiki.db
search water --store wiki.db
index --status --store wiki.db
concept list --store wiki.db
recipe show examples/ice-bear-to-desert.json
"""


def test_what_a_store_has_is_shown_without_the_model(folder):
    """One process for all: what one command imports, no other may."""
    code = (
        "import sys; from icebear.app.cli.main import main\n"
        "for line in sys.argv[1].strip().splitlines():\n"
        "    main(line.split(), standalone_mode=False)\n"
        "    heavy = {'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "    assert not heavy, (line, heavy)\n"
        "    print('<end>')"
    )
    done = subprocess.run([sys.executable, "-c", code, SHOWN], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    *shown, rest = done.stdout.split("<end>\n")
    assert len(shown) == len(SHOWN.strip().splitlines())
    assert all(text.strip() for text in shown)
    assert not rest
