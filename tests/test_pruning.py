"""Pruning by relevance: zeros at neurons are zeros in weights, and rankings are sums of a method's scores."""

import csv

import pytest
import torch
from click.testing import CliRunner
from conftest import IDS, LLAMA, random_model

from benchmarks import pruning
from icebear import attribute
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.registry import method_of
from icebear.models.objective import objective_of


@pytest.mark.parametrize("site", ["ffn", "head"])
def test_pruning_is_zeroing_weights(llama, site):
    order = torch.rand(llama.layers, llama.width(site), generator=torch.Generator().manual_seed(0))
    (curve,) = pruning.answer_curves(llama, [IDS], site, order)
    (target,) = objective_of(llama, [IDS]).resolved(llama).targets[0]
    for share, value in zip(pruning.SHARES, curve, strict=True):
        plain, dim = random_model(LLAMA, dtype=torch.float32), llama.head_dim
        for flat in order.flatten().argsort()[: round(share * order.numel())].tolist():
            layer, index = divmod(flat, order.shape[1])
            block = plain.net.model.layers[layer]
            with torch.no_grad():
                if site == "ffn":
                    block.mlp.down_proj.weight[:, index] = 0
                else:
                    block.self_attn.o_proj.weight[:, index * dim : (index + 1) * dim] = 0
        logits = plain.net(torch.tensor([IDS])).logits[0, -1]
        assert value == pytest.approx(logits.log_softmax(-1)[target].item(), abs=1e-4)


@pytest.mark.parametrize("name", ["gxi", "attnlrp"])
def test_a_ranking_is_the_sum_of_relevance_over_tokens_and_prompts(llama, name):
    prompts = [IDS, IDS[::-1]]
    right = sum(attribute(llama, ids, method=name, number="logit").of("ffn").sum(1).double() for ids in prompts)
    assert torch.allclose(pruning.ranking(llama, prompts, "ffn", method_of(name)), right, atol=1e-5)
    assert pruning.ranking(llama, [IDS], "head", method_of(name)).shape == (3, 4)


def test_the_command_writes_a_table(tiny_folder, tmp_path):
    (tmp_path / "c.txt").write_text("\n".join(f"{word} " * 30 for word in ("ice", "bear", "camel", "sand")))
    options = ["--corpus", str(tmp_path / "c.txt"), "--samples", "1", "--methods", "gxi,random"]
    result = CliRunner().invoke(
        command(pruning.Pruning), [*options, "--model", tiny_folder, "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    with (tmp_path / "out" / "table.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} == {"gxi", "random"}
