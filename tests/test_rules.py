"""The relevance rules one by one, and methods as values."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import IDS, Double
from hypothesis import given
from hypothesis import strategies as st
from reference.attnlrp import linear_shares
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from icebear import ATTNLRP, CP_LRP, PA_LRP, VIT, AlphaBeta, AttnLRP, Epsilon, Gamma, Model, ZPlus, attribute
from icebear.concepts.methods.registry import method_of, name_of
from icebear.errors import InputError, UnknownName
from icebear.lrp.context import relevance_rules
from icebear.lrp.rules import SoftmaxZPlus

RULES = [Epsilon(), Epsilon(0.5), Gamma(0.25), Gamma(3), ZPlus(), AlphaBeta(1), AlphaBeta(2)]


def relevance(module, x, rule, of="linear"):
    """Of the input for the outputs' sum of squares / 2, whose relevance is y * y."""
    leaf = x.clone().requires_grad_()
    method = AttnLRP(**{of: rule})
    with relevance_rules(module, method):
        y = module(leaf)
    y.backward(y.detach())
    return leaf.detach() * leaf.grad


def by_hand(x, weight, bias, rule):
    """From contributions z_ij, for a row x (I,)."""
    z = torch.cat((weight * x, bias[:, None]), 1)
    R = (z.sum(1) ** 2)[:, None]
    return torch.where(R == 0, 0, linear_shares(z, rule)[:, :-1] * R).sum(0)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_linear_maps_rule_is_that_of_its_contributions(rule):
    torch.manual_seed(1)
    layer = torch.nn.Linear(5, 4).double()
    x = torch.randn(3, 5).double()
    expected = torch.stack([by_hand(row, layer.weight.detach(), layer.bias.detach(), rule) for row in x])
    assert torch.allclose(relevance(layer, x, rule), expected, rtol=1e-10)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolutions_rule_is_that_of_the_matrix_it_is(rule, dimensions):
    """Unfolded: the convolution's matrix is its value at each unit input."""
    torch.manual_seed(2)
    conv = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[dimensions - 1](
        2, 4, 2, stride=2, padding=1, dilation=1, groups=2
    ).double()
    shape = (2, *[4] * dimensions)
    x = torch.randn(1, *shape).double()
    with torch.no_grad():
        units = torch.eye(x.numel()).double().view(-1, *shape)
        plain = conv(torch.zeros_like(x)).flatten()
        matrix = (conv(units).flatten(1) - plain).T  # (outputs, inputs)
    expected = by_hand(x.flatten(), matrix, plain, rule)
    for of in ("linear", "conv"):
        assert torch.allclose(relevance(conv, x, rule, of).flatten(), expected, rtol=1e-10, atol=1e-13)


LINEAR_MAPS = {
    "Linear": (partial(torch.nn.Linear, 4, 6), (3, 4)),
    "Conv1D": (partial(Conv1D, 6, 4), (3, 4)),
    "Conv1d": (partial(torch.nn.Conv1d, 2, 6, 2, stride=2), (1, 2, 6)),
    "Conv2d": (partial(torch.nn.Conv2d, 1, 6, 2, stride=2), (1, 1, 2, 6)),
    "Conv3d": (partial(torch.nn.Conv3d, 1, 6, (1, 2, 2), stride=2), (1, 1, 1, 2, 6)),
}
"""Name -> how it is made, and a shape of three rows, or windows, of four numbers."""


@pytest.mark.parametrize("bias", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("kind", LINEAR_MAPS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_zero_and_constant_inputs_never_give_nan(rule, kind, bias):
    """Also of weights that are 0, or whose sum is 0: an output of 0 has no relevance."""
    create, shape = LINEAR_MAPS[kind]
    torch.manual_seed(8)
    module = create().double()
    with torch.no_grad():
        rows = module.weight.T if kind == "Conv1D" else module.weight.view(6, 4)
        rows[1] = 0
        rows[2:4] = torch.tensor([1.0, -1, 2, -2])
        module.bias.fill_(bias)
    zero, constant, partly = (torch.full(shape, value).double() for value in (0.0, 1.0, 0.0))
    partly[..., -2:] = 3
    for x in (zero, constant, -constant, partly):
        result = relevance(module, x, rule)
        assert torch.isfinite(result).all()
        assert (result[x == 0] == 0).all()
        if kind == "Linear":
            parts = [by_hand(row, module.weight.detach(), module.bias.detach(), rule) for row in x]
            assert torch.allclose(result, torch.stack(parts), rtol=1e-10, atol=1e-13)


@given(st.integers(0, 10**6))
def test_gamma_goes_from_epsilon_to_z_plus(seed):
    print("seed", seed)
    torch.manual_seed(seed)
    layer, x = torch.nn.Linear(6, 3).double(), torch.randn(2, 6).double()
    assert torch.allclose(relevance(layer, x, Gamma(0)), relevance(layer, x, Epsilon()), rtol=1e-8)
    assert torch.allclose(relevance(layer, x, Gamma(1e13)), relevance(layer, x, ZPlus()), rtol=1e-4, atol=1e-6)


def test_z_plus_is_alpha_1_beta_0_where_outputs_are_positive():
    torch.manual_seed(3)
    layer, x = torch.nn.Linear(6, 3).double(), torch.randn(2, 6).double()
    with torch.no_grad():
        layer.bias.fill_(9)
    assert torch.allclose(relevance(layer, x, ZPlus()), relevance(layer, x, AlphaBeta(1)), rtol=1e-10)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != Epsilon(0.5)], ids=str)
def test_every_rule_but_epsilon_above_0_conserves(rule):
    torch.manual_seed(4)
    layer, x = torch.nn.Linear(6, 3, bias=False).double(), torch.randn(2, 6).double()
    assert relevance(layer, x, rule).sum().item() == pytest.approx((layer(x) ** 2).sum().item(), rel=1e-10)


@pytest.mark.parametrize("softmax", ["taylor", "zplus"])
def test_the_softmax_rules_against_the_expansion(softmax):
    """J = diag(s) - s s^T. Taylor: R_i = sum_j J_ji x_i g_j. z+: each R_j shared among its positive J_ji x_i."""
    torch.manual_seed(5)
    x = torch.randn(7).double().requires_grad_()
    with relevance_rules(Softmax(), AttnLRP(softmax=softmax)) as mode:
        s = mode.net(x)
    g = torch.randn(7).double()
    s.backward(g)
    result = (x * x.grad).detach()
    s, x = s.detach(), x.detach()
    z = (torch.diag(s) - torch.outer(s, s)) * x  # z_ji
    if softmax == "taylor":
        expected = (z * g[:, None]).sum(0)
    else:
        expected = (z.clamp(min=0) / z.clamp(min=0).sum(1, keepdim=True) * (s * g)[:, None]).sum(0)
        assert result.sum().item() == pytest.approx((s * g).sum().item())
    assert torch.allclose(result, expected, rtol=1e-10)


class Softmax(torch.nn.Module):
    def forward(self, x):
        return F.softmax(x, -1)


class Attention(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}], ids=str)
def test_attention_apart_has_the_values_of_fused_attention(options):
    net = Attention(options)
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with relevance_rules(net, AttnLRP(softmax="zplus")):
        y = net(q, k, v)
    torch.testing.assert_close(y, net(q, k, v))


@pytest.mark.parametrize(
    "scores", [(-1.0, -95.0, -99.0), (-0.1, -104.0, 0.0), (3.0, -90.0, -1e-30), (50.0, -50.0, 20.0)]
)
def test_zplus_of_a_softmax_is_finite_where_nearly_all_attention_is_at_one_score(scores):
    """In float32, against its definition by loops in float64; z+ of nearly nothing is divided by nearly nothing."""
    x = torch.tensor(scores, requires_grad=True)
    s, g = x.detach().softmax(-1), torch.tensor([1.0, -2.0, 0.5])
    (gradient,) = torch.autograd.grad(SoftmaxZPlus.apply(x, s), x, g)
    values, shares, others = x.tolist(), s.tolist(), range(len(scores))
    rest = [sum(shares[i] for i in others if i != j) for j in others]
    expected = [0.0] * len(scores)
    for j in others:
        parts = [max(0.0, shares[j] * (rest[j] if i == j else -shares[i]) * values[i]) for i in others]
        for i in others:
            if sum(parts):
                expected[i] += parts[i] / sum(parts) * shares[j] * g[j].item()
    assert (gradient * x).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-30)


def test_lemma_3_3_relevance_that_is_only_in_positions():
    """A model that answers by position alone: the tokens' embeddings and the positions' lie in different dimensions,
    and the unembedding reads those of the positions. AttnLRP gives the tokens nothing; PA-LRP gives it to the position
    that is asked about."""
    config = GPT2Config(
        vocab_size=50,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_inner=20,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    net = GPT2LMHeadModel(config).double()
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.transformer.ln_f.weight.fill_(1)
        net.transformer.wte.weight[:, :12].normal_()
        net.transformer.wpe.weight[:, 12:].normal_()
        reads = torch.randn(50, 12).double()
        net.lm_head.weight[:, 12:] = reads - reads.mean(1, keepdim=True)  # the norm's mean carries nothing over
    model = Model(net)
    with Double():
        attn, pa = (attribute(model, IDS, method=method, sites=()) for method in (ATTNLRP, PA_LRP))
    assert attn.tokens.abs().max() < 1e-12
    assert abs(attn.conservation().target) > 0.1
    assert pa.positions.shape == (1, len(IDS))
    assert pa.positions[0, -1].item() == pytest.approx(pa.conservation().target, rel=1e-10)
    assert pa.positions[0, :-1].abs().max() < 1e-12
    assert torch.equal(pa.combined("signed"), pa.positions[0] + pa.tokens)
    with pytest.raises(InputError, match="method=PA_LRP"):
        attn.combined()
    with pytest.raises(UnknownName, match="'relu'"):
        pa.combined("rely")


# --- methods ---


def test_methods_print_as_they_are_written():
    assert repr(AttnLRP(softmax="constant")) == "AttnLRP(softmax='constant')"
    assert repr(VIT) == (
        "AttnLRP(softmax='zplus', linear=Gamma(gamma=0.05), conv=Gamma(gamma=0.25), "
        "attention_in=Epsilon(eps=0.0), attention_out=Epsilon(eps=0.0))"
    )
    assert name_of(CP_LRP) == "cp-lrp"
    assert name_of(AttnLRP(linear=Gamma(1))) == "AttnLRP(linear=Gamma(gamma=1))"


linear_rules = st.one_of(
    st.builds(Epsilon, st.floats(0, 10)),
    st.builds(Gamma, st.floats(0, 10)),
    st.just(ZPlus()),
    st.builds(AlphaBeta, st.floats(1, 10)),
)


@given(st.builds(AttnLRP, st.sampled_from(["taylor", "zplus", "constant"]), linear_rules, linear_rules, st.booleans()))
def test_what_is_written_is_read_back(method):
    assert method_of(repr(method)) == method
    assert method_of(name_of(method)) == method


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("attnlpr", UnknownName, "'attnlrp'"),
        ("AttnLRP(", InputError, r"'AttnLRP\('"),
        ("AttnLRP(softmax=__import__('os'))", InputError, "__import__"),
        ("AttnLRP(colour='red')", InputError, "colour"),
        ("AttnLRP(softmax='none')", InputError, "taylor, zplus, constant"),
        ("AttnLRP(linear=Gamma(-1))", InputError, "not -1"),
        ("AttnLRP(linear=AlphaBeta(0.5))", InputError, "not 0.5"),
    ],
)
def test_a_wrong_method_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        method_of(text)
