"""Where a row in a batch begins to differ from the row alone, in models that were made to differ there."""

import math

import pytest
import torch
from conftest import IDS, LLAMA, random_model

from icebear import attribute
from icebear.concepts.batch_law import ROUNDING, beginning, remedied, remedies
from icebear.concepts.deviation import deviation as share_of
from icebear.concepts.methods.attnlrp import CP_LRP
from icebear.concepts.selftest import WHY, selftest
from icebear.models.objective import objective_of


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient depends on the number of rows."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 0.01 * (len(gradient) - 1))


def coarse(module, args, output):
    """Add an error to all but single rows, in 16 bits only."""
    return output * 1.01 if len(output) > 1 and output.dtype == torch.bfloat16 else output


def beginning_of(model):
    return beginning(model, *(objective_of(model, rows, 7) for rows in ([IDS], [IDS, IDS[4:]])))


def test_a_deviation_is_a_share_of_the_largest_and_infinite_for_nan():
    reference = torch.tensor([1.0, -4.0])
    assert share_of(torch.tensor([2.0, -4.0]), reference) == 0.25
    assert share_of(reference.bfloat16(), reference + 2**-10) == pytest.approx(2**-10 / (4 - 2**-10))  # not rounded
    assert share_of(torch.zeros(2), torch.zeros(2)) == 0
    assert share_of(torch.tensor([math.nan, -4.0]), reference) == share_of(reference, reference / 0) == math.inf


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("path", "kind"), [("model.layers.1.mlp.up_proj", "Linear"), ("model.layers.0.self_attn", "LlamaAttention")]
)
def test_a_module_that_sees_other_rows_is_named(path, kind, attention):
    model = random_model(LLAMA, attention, torch.float32)
    assert beginning_of(model) is None

    def mixed(module, args, output):
        if isinstance(output, tuple):
            return (output[0] * (1 + 0.01 * (len(output[0]) - 1)), *output[1:])
        return output * (1 + 0.01 * (len(output) - 1))

    model.net.get_submodule(path).register_forward_hook(mixed)
    assert beginning_of(model) == f"{path} ({kind}{', ' + attention if 'Attention' in kind else ''})"


def test_a_backward_pass_that_sees_other_rows_is_named(llama):
    llama.net.model.layers[1].mlp.register_forward_hook(lambda module, args, output: ScaledGradient.apply(output))
    assert beginning_of(llama) == "the gradient at model.layers.1.mlp.down_proj (Linear)"


def test_float32_mends_what_16_bits_do_and_is_undone():
    model = random_model(LLAMA, "eager", torch.bfloat16)
    model.net.model.layers[1].mlp.register_forward_hook(coarse)
    before = [x.data_ptr() for x in model.net.parameters()]

    def deviation():
        alone, together = (model.logits(model.padded(rows), [0])[0] for rows in ([IDS], [IDS, IDS]))
        return ((alone - together).abs().max() / alone.abs().max()).item()

    assert deviation() > 1e-3
    (in_float32,) = remedied(model, deviation)
    assert in_float32.name == "float32"
    assert in_float32.deviation < ROUNDING
    assert in_float32.cost > 0
    assert [x.data_ptr() for x in model.net.parameters()] == before
    assert model.dtype == torch.bfloat16
    assert deviation() > 1e-3


def test_only_what_the_model_does_not_have_is_tried(monkeypatch):
    names = {
        (attention, dtype): [*remedies(random_model(LLAMA, attention, dtype))]
        for attention in ("sdpa", "eager")
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert names == {
        ("sdpa", torch.float32): ["math attention"],
        ("sdpa", torch.bfloat16): ["math attention", "float32"],
        ("eager", torch.float32): [],
        ("eager", torch.bfloat16): ["float32"],
    }
    monkeypatch.setattr("icebear.concepts.batch_law.memory_at_hand", lambda device: 1000)
    assert [*remedies(random_model(LLAMA, "sdpa", torch.bfloat16))] == ["math attention"]


def test_the_selftest_names_the_module_only_beyond_rounding(llama):
    assert WHY not in {law.name for law in selftest(llama, IDS).laws}
    path = "model.layers.1.mlp"
    llama.net.get_submodule(path).register_forward_hook(lambda module, args, output: output * (1 + 0.1 * len(output)))
    laws = {law.name: law for law in selftest(llama, IDS).laws}
    assert laws["batch"].holds is False
    assert path in laws[WHY].finding
    assert laws[WHY].holds is None


def test_a_padded_row_that_differs_alone_is_said(llama):
    scales = torch.tensor([1, 1.1]).view(2, 1, 1)
    module = llama.net.get_submodule("model.layers.1.mlp")
    module.register_forward_hook(lambda module, args, output: output * scales[: len(output)])
    laws = {law.name: law for law in selftest(llama, IDS).laws}
    assert laws["batch"].holds is False
    assert laws[WHY].finding.startswith("only the padded row differs")


def test_the_module_is_searched_in_the_passes_that_differ(llama, monkeypatch):
    """They explain the answers of rows alone, by the rules of the deviation."""
    searched = []
    monkeypatch.setattr("icebear.concepts.selftest.beginning", lambda *args: searched.append(args))
    llama.net.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * (1 + 0.1 * len(output)))
    selftest(llama, IDS)
    ((_, alone, together, rules, strict),) = searched
    answer = attribute(llama, IDS).target.id
    assert (alone.targets[0], together.targets[0], alone.kind, together.kind) == (
        (answer,),
        (answer,),
        "logit",
        "logit",
    )
    assert (rules, strict) == (CP_LRP, True)


@pytest.mark.filterwarnings("ignore:The operation ScaledGradient")
def test_passes_with_rules_are_searched(llama):
    """CP-LRP takes no gradient through queries, so what differs there is no difference."""
    llama.net.model.layers[1].self_attn.q_proj.register_forward_hook(
        lambda module, args, output: ScaledGradient.apply(output)
    )
    rows = [objective_of(llama, rows, 7) for rows in ([IDS], [IDS, IDS[4:]])]
    assert beginning(llama, *rows).startswith("the gradient at")
    assert beginning(llama, *rows, CP_LRP, False) is None
