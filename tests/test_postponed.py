"""Imports that the command line postpones: the same output, nothing loaded for nothing, all of it when it is used."""

import json
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from icebear import postponed
from icebear.models.loading.presets import PRESETS
from icebear.postponed import NAMES, Postponing

PLAIN = "Paris is A"
LINES = f"""
rank "{PLAIN}" --top 3 --json
explain "{PLAIN}" --counterfactual "Rome is B" --json
steer "{PLAIN}" --edit L1.ffn.3=2 --max-new-tokens 3 --json
circuit "{PLAIN}" --counterfactual "Rome is B" --nodes 4 --json
"""
RUN = """
import json, sys
{change}
from icebear.postponed import NAMES, Postponing
{changed}
sys.meta_path.insert(0, Postponing)
from click.testing import CliRunner
from icebear.app.cli.main import main
outputs = []
for line in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, line, catch_exceptions=False)
    outputs.append(done.stdout)
    sys.stderr.write(done.stderr)
    {after}
print(json.dumps(outputs))
{last}
"""
UNUSED = "scipy.linalg pyarrow sqlite_utils faiss sklearn icebear.db.store icebear.db.sqlite "
UNUSED += "icebear.actmax.describe icebear.app.cli.tables.cards torch._inductor torch._dynamo.eval_frame torch.onnx "
UNUSED += "torch.distributed.tensor accelerate.big_modeling pandas.core"
AFTER = f"""
    if "explain" in line or "rank" in line or "steer" in line:
        loaded = {UNUSED.split()} & sys.modules.keys()
        assert not loaded, (line, loaded)
"""
USED = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
import torch._dynamo.utils
assert torch._dynamo.utils.__spec__.loader.get_code("torch._dynamo.utils")
x, names = torch.arange(24.0).reshape(1, 1, 6, 4), []
compiled = torch.compile(lambda x: (x @ x.mT).softmax(-1), backend=lambda graph, _: names.append(graph) or graph)
assert torch.equal(compiled(x), (x @ x.mT).softmax(-1)) and names
mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 6, 6, device="cpu")
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
assert torch.allclose(flex_attention(x, x, x, block_mask=mask), expected)
import accelerate, accelerate.hooks, pandas, scipy.optimize, sqlite_utils.db
from transformers.integrations.accelerate import dispatch_model
from transformers.loss.loss_for_object_detection import PartialState, linear_sum_assignment
assert PartialState._shared_state == accelerate.PartialState._shared_state == {}
assert linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]
assert issubclass(accelerate.hooks.AlignDevicesHook, accelerate.hooks.ModelHook)
assert isinstance(pandas.Timestamp(0), pandas.Timestamp)
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.eager_paged import eager_paged_attention_forward
assert eager_paged_attention_forward.__wrapped__
"""


def run(lines, model, **code):
    """Return what the commands print in a new process."""
    parts = {"change": "", "changed": "", "after": "pass", "last": ""} | code
    command = [sys.executable, "-c", RUN.format(**parts), json.dumps(with_model(lines, model))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def with_model(lines, model):
    return [[*shlex.split(line), "--model", model] for line in lines.strip().splitlines()]


@pytest.mark.release
def test_outputs_are_the_same_what_is_used_is_loaded_and_what_has_changed_is_imported_at_once(
    tiny_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ICEBEAR_DEBUG", "1")
    outputs, _ = run(LINES, tiny_folder, after=AFTER.strip(), last=USED)
    other = "import icebear.postponed; icebear.postponed.VERSIONS = dict.fromkeys(icebear.postponed.VERSIONS, '0.')"
    loaded = "assert {'sympy', 'pandas.core', 'torch._inductor', 'torch.distributed.tensor'} <= sys.modules.keys()"
    plain, errors = run(LINES, tiny_folder, changed=other, last=loaded)
    assert outputs == plain
    assert {name for name in NAMES if f"{name} is imported at once, for lack of " in errors} == NAMES.keys()
    renamed = "NAMES['transformers.utils.import_utils'] = ('transformers', 'is_renamed')"
    loaded = "assert 'torch.distributed.tensor' in sys.modules and 'torch._inductor' not in sys.modules"
    few, errors = run(LINES.strip().splitlines()[0], tiny_folder, changed=renamed, last=loaded)
    assert few == plain[:1]
    assert "for lack of is_renamed" in errors


def is_postponed(name):
    package = name.rpartition(".")[0]
    path = import_module(package).__path__ if package else None
    return hasattr(Postponing.find_spec(name, path).loader, "plain")


def test_another_version_is_imported_at_once(monkeypatch):
    assert all(map(is_postponed, NAMES))
    monkeypatch.setattr(postponed, "VERSIONS", dict.fromkeys(postponed.VERSIONS, "0."))
    assert not any(map(is_postponed, NAMES))


def test_what_lacks_a_name_is_imported_at_once(monkeypatch):
    monkeypatch.setitem(NAMES, "pandas", ("sqlite_utils", "is_renamed"))
    assert not is_postponed("pandas")


@pytest.mark.real
def test_a_preset_is_loaded_and_explained_without_sympy_and_has_the_weights_and_buffers_of_any_folder(smol):
    from transformers import AutoModelForCausalLM

    words = ["explain", "Ice bears live in the", "--counterfactual", "Polar bears live in the", "--json"]
    code = f"from icebear.app.cli.main import main; main({words}, standalone_mode=False)\n"
    code += f"loaded = {{'sympy', *{UNUSED.split()}}} & sys.modules.keys(); assert not loaded, loaded\n"
    code += "from transformers.loss.loss_for_object_detection import linear_sum_assignment\n"
    code += "assert linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]"
    start = "import sys; from icebear.postponed import Postponing; sys.meta_path.insert(0, Postponing)\n"
    subprocess.run([sys.executable, "-c", start + code], check=True)
    net = AutoModelForCausalLM.from_pretrained(PRESETS["smollm2-135m"].folder, dtype=smol.dtype).to(smol.device)
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(net, kind)())
        assert expected.keys() == dict(getattr(smol.net, kind)()).keys()
        assert all(torch.equal(value, expected[name]) for name, value in getattr(smol.net, kind)())
