"""Operations that change their input in place have the rule of their plain form, for the result and for the input."""

import pytest
import torch
import torch.nn.functional as F
from conftest import IDS, LLAMA, random_model
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from icebear import ATTNLRP, DIFFERENCE, attribute
from icebear.lrp import differences, operation_table
from icebear.lrp.context import relevance_rules

TABLES = {"attnlrp": operation_table, "difference": differences}
METHODS = {"attnlrp": ATTNLRP, "difference": DIFFERENCE}


def listed(table):
    """The names of the operations that have a rule."""
    return {
        getattr(func, "__name__", "") for func in table if func is getattr(Tensor, getattr(func, "__name__", ""), 0)
    }


@pytest.mark.parametrize("name", TABLES)
def test_the_in_place_form_of_each_operation_is_in_the_table(name):
    table = TABLES[name].TABLE
    lacking = [
        f"{other}_" for other in listed(table) if (form := getattr(Tensor, f"{other}_", None)) and form not in table
    ]
    assert lacking == []
    assert {Tensor.clamp_, Tensor.relu_, Tensor.exp_, Tensor.mul_, Tensor.neg_, Tensor.__ipow__} <= {*table}


PAIRS = {
    "clamp": (lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp_(-0.5, 0.5)),
    "clip": (lambda x: torch.clip(x, max=0.3), lambda x: torch.clip_(x, max=0.3)),
    "relu": (torch.relu, torch.relu_),
    "tanh": (torch.tanh, lambda x: x.tanh_()),
    "exp": (torch.exp, lambda x: x.exp_()),
    "square": (torch.square, lambda x: x.square_()),
    "power": (lambda x: x**3, lambda x: x.__ipow__(3)),
    "negative": (torch.neg, lambda x: x.neg_()),
    "times a number": (lambda x: x * 3, lambda x: x.mul_(3)),
    "sum": (lambda x: x + 2, lambda x: x.add_(2)),
    "silu": (F.silu, lambda x: F.silu(x, inplace=True)),
    "silu, by place": (F.silu, lambda x: F.silu(x, True)),
    "elu": (F.elu, lambda x: F.elu(x, inplace=True)),
    "leaky": (lambda x: F.leaky_relu(x, 0.1), lambda x: F.leaky_relu(x, 0.1, True)),
}


class Twice(nn.Module):
    """Uses the result of an operation and its input, which the operation may have changed."""

    def __init__(self, func, uses_result):
        super().__init__()
        self.func, self.uses_result = func, uses_result

    def forward(self, x):
        x = x * 2
        y = self.func(x)
        return (y if self.uses_result else x) * 5


def relevance(module, method, x):
    leaf = x.clone().requires_grad_()
    with relevance_rules(module, METHODS[method]):
        y = module(leaf)
    (gradient,) = torch.autograd.grad(y[:1].sum(), leaf)
    return y.detach(), gradient[:1]


@pytest.mark.parametrize("uses_result", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PAIRS)
def test_the_rule_is_that_of_the_plain_form(name, method, uses_result):
    x = torch.randn(2, 7, dtype=torch.float64)
    plain, in_place = PAIRS[name]
    right = relevance(Twice(plain, True), method, x)
    got = relevance(Twice(in_place, uses_result), method, x)
    for one, other in zip(got, right, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [nn.SiLU, nn.ReLU, nn.ELU])
def test_modules_that_work_in_place(kind, method):
    x = torch.randn(2, 7, dtype=torch.float64)

    class Residual(nn.Module):
        """The summand is what the activation function left in its input."""

        def __init__(self, act):
            super().__init__()
            self.act = act

        def forward(self, x):
            x = x * 2
            return x + self.act(x)

    class Written(Residual):
        def forward(self, x):
            y = self.act(x * 2)
            return y + y

    for act in (kind(inplace=True), kind()):
        got = relevance(Residual(act) if act.inplace else Written(act), method, x)
        right = relevance(Written(kind()), method, x)
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(got, right, strict=True))


@pytest.mark.parametrize("kind", ["olmo", "olmoe"])
@pytest.mark.parametrize("method", ["attnlrp", "cp-lrp", "gxi"])
def test_clipped_queries(kind, method):
    """OLMo clips queries, keys and values in place, after hooks have read them."""
    config = CONFIG_MAPPING[kind](
        **{**LLAMA.to_dict(), "model_type": kind, "num_experts": 4, "num_experts_per_tok": 2}, clip_qkv=0.5
    )
    model = random_model(config, "eager", torch.float32)
    seen = {}
    hook = model.net.model.layers[1].self_attn.v_proj.register_forward_hook(
        lambda *call: seen.update(v=call[-1].clone())
    )
    with torch.no_grad():
        logits = model.net(torch.tensor([IDS]), use_cache=False).logits[0, -1]
    hook.remove()
    result = attribute(model, IDS, 7, method=method, number="logit", sites=model.sites)
    assert result.target.logit == pytest.approx(logits[7].item(), abs=1e-5)
    assert torch.allclose(result.activation("v")[1], seen["v"][0], atol=1e-6)
    if method == "cp-lrp":
        assert result.conservation().remainder == pytest.approx(0, abs=1e-4)
    compared = attribute(model, IDS, 7, 9, counterfactual=[*IDS[:4], 6, *IDS[5:]], sites=model.sites)
    assert compared.conservation().remainder == pytest.approx(0, abs=1e-4)
