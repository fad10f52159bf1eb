"""The check on a GPU, run on the CPU: it compares, counts, and survives parts that fail."""

import json
from importlib.util import find_spec

import pytest
import torch

from benchmarks import gpu, gpu_checks

WAITS = {
    "AttnLRP, tokens": 22,
    "AttnLRP, all neurons": 22,
    "AttnLRP, largest neurons": 53,
    "difference rules, all neurons": 29,
    "stages": 121,
    "scan of 32 rows": 24,
}
"""The calls for which Python would wait for a GPU, in a model of two layers. Lower a limit when a call goes."""


@pytest.mark.release
def test_every_part_writes_its_results(tmp_path):
    facts = gpu_checks.facts("cpu")
    assert gpu.main(gpu_checks.PARTS, facts, "cpu", True, str(tmp_path)) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [(part["part"], part["shape"]) for part in report["parts"]] == list(gpu.PLAN)
    assert all(part["rows"] and part["error"] is None for part in report["parts"])
    assert all(row["check"] in (tmp_path / "gpu.md").read_text() for part in report["parts"] for row in part["rows"])


def test_a_part_that_fails_leaves_the_results_of_the_others(tmp_path):
    def failing(device, quick, shape):
        yield gpu_checks.row("before", 1.0)
        raise RuntimeError("no kernel")

    def large(device, quick, shape):
        yield gpu_checks.row("deviation", 1.0, 0.5)

    parts = {"right": failing, "waiting": large, "quick": large}
    failed = sum(1 for _ in gpu.PLAN)  # each part of the plan fails, or has a value that is too large
    assert gpu.main(parts, {}, "cpu", True, str(tmp_path)) == failed
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {part["error"] for part in report["parts"]} == {"RuntimeError: no kernel", None}
    assert [row["check"] for row in report["parts"][0]["rows"]] == ["before"]


def test_a_wrong_result_is_a_deviation():
    reference = gpu_checks.filled(torch.tensor([1.0, -4.0, float("-inf")]))
    assert gpu_checks.deviation(reference, reference) == 0
    other = gpu_checks.filled(torch.tensor([1.0, -3.0, float("-inf")]))
    assert gpu_checks.deviation(other, reference) == pytest.approx(0.25)
    assert gpu_checks.row("check", 2e-4, gpu_checks.CLOSE)["verdict"] != "ok"


def test_passes_and_scans_wait_no_more_often_than_before():
    lines = gpu_checks.waits(gpu_checks.build("135M", "cpu", torch.float32, True))
    assert lines.keys() == WAITS.keys()
    assert all(counted.total() <= WAITS[name] for name, counted in lines.items()), lines


@pytest.mark.release
def test_the_waits_of_a_pass_do_not_grow_with_layers(monkeypatch):
    few, many = ({**gpu_checks.NARROW, "num_hidden_layers": layers} for layers in (2, 5))
    counted = []
    for sizes in (few, many):
        monkeypatch.setattr(gpu_checks, "NARROW", sizes)
        lines = gpu_checks.waits(gpu_checks.build("135M", "cpu", torch.float32, True))
        counted.append({name: lines[name] for name in WAITS if "neurons" in name or "tokens" in name})
    assert len(counted[0]) == 4
    assert counted[0] == counted[1]


def test_each_function_that_makes_the_host_wait_is_counted():
    x = torch.tensor([1.0, 0.0])
    mode = gpu_checks.Waits()
    with mode:
        _ = x[0].item(), x.tolist(), x.cpu(), x.nonzero(), x[x > 0], bool(x[0]), x + 1
    assert mode.lines.total() == 6


def test_a_bare_machine_gets_icebear_by_links(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.sys, "path", list(gpu.sys.path))
    monkeypatch.setattr(gpu.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "icebear" else find_spec(name))
    assert gpu.provide(None) == "folders linked"
    linked = next(tmp_path.glob("icebear-*/icebear"))
    assert (linked / "concepts" / "passes" / "run.py").is_file()
    assert (linked / "__init__.py").is_file()
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(SystemExit, match="no_such_package"):
        gpu.provide(None)
