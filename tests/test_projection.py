"""The number beside a neuron's words is what adding one unit of activation does (FINDINGS A1)."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from configurations import dense, different
from conftest import ICE_BEAR, IDS, WRITE_CALIBRATION, Letters, random_model
from few import third_of

from benchmarks.projection import PROMPTS
from icebear import Model, Neuron, attribute, project, steer
from icebear.concepts.vocabulary import calibration as texts
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.concepts.vocabulary.weight_rows import direct_row, typical, unembedding
from icebear.models.parts.linear import norm_divisor as divisor


@pytest.mark.release
def test_one_unit_changes_the_logits_by_what_project_says(smol):
    """15 neurons of the last layer, 20 prompts: the median ratio of what happens and what is said is near 1."""
    generator = torch.Generator().manual_seed(0)
    neurons = [Neuron(29, "ffn", i) for i in torch.randperm(1536, generator=generator)[:15].tolist()]
    text = [project(smol, neuron, 3).promoted for neuron in neurons]
    seen = {}
    hook = smol.net.model.norm.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    rows = torch.stack([smol.net.model.layers[29].mlp.down_proj.weight[:, n.index] for n in neurons])  # (15, D)
    ratios = []
    for prompt in PROMPTS:  # no calibration text has them
        plain = smol.next_logits(prompt)
        with torch.no_grad():  # the last layer's neurons at the last token reach nothing but the final norm
            moved = smol.net.lm_head(smol.net.model.norm(seen["x"][0, -1] + rows))
        for row, promoted in enumerate(text):
            ratios += [((moved[row] - plain)[word.id] / word.logit).item() for word in promoted]
        if prompt == ICE_BEAR:
            with steer(smol, [f"{neurons[3]}+1@last"]):
                assert torch.allclose(smol.next_logits(prompt), moved[3], atol=1e-3)
    hook.remove()
    assert 0.8 < torch.tensor(ratios).median() < 1.25
    low, high = typical(smol, 29)
    assert ((torch.tensor(ratios) > 0.8 * low) & (torch.tensor(ratios) < 1.25 * high)).float().mean() > 0.8


def test_canada_at_the_ice_bear(smol):
    neuron = Neuron.parse("L29.ffn.860")
    word = project(smol, neuron, 1).promoted[0]
    plain = smol.next_logits(ICE_BEAR)
    with steer(smol, [f"{neuron}+1@last"]):
        added = (smol.next_logits(ICE_BEAR) - plain)[word.id].item()
    assert (word.text, word.logit) == (" Canada", pytest.approx(added, rel=0.25))


FAMILIES = {
    name: config for name, config in different().items() if name in dense() and name != "opt, norms behind"
}  # which has no final norm


@pytest.mark.parametrize("name", third_of(FAMILIES))
def test_the_direct_path_is_what_the_rules_see(name):
    """With the final divisor of one token in place of the median, logits are gradients under Eq. 19 in every family:
    centred where the norm centres, sandwich norms passed."""
    model = Model(random_model(FAMILIES[name], "eager", torch.float32).net, name=name)
    seen = {}
    last, final = model.layers - 1, model.net.get_submodule(model.family.final_norm)
    behind = {path: model.net.get_submodule(path) for path in model.norms_after(last)}
    hooks = [
        norm.register_forward_pre_hook(lambda module, args, path=path: seen.update({path: divisor(module, args[0])}))
        for path, norm in behind.items()
    ]
    result = attribute(model, IDS, target=5, sites=("ffn",), number="logit")
    for hook in hooks:
        hook.remove()
    assert final is behind[model.family.final_norm]
    neuron = int(result.activation("ffn")[last, -1].abs().argmax())
    row = direct_row(model, Neuron(last, "ffn", neuron))
    for path in behind:
        row = row * calibrate(model).divisors[path][1] / seen[path][0, -1]
    logit = (row @ unembedding(model, 5)).item()
    gradient = result.ffn[last, -1, neuron] / result.activation("ffn")[last, -1, neuron]
    assert logit == pytest.approx(gradient.item(), rel=1e-3, abs=1e-6)


def test_calibration_is_the_range_and_the_divisors_of_the_texts(model):
    """Against a loop over texts, one at a time; the first token, a sink, left out."""
    low, high, divisors = torch.zeros(3, 20), torch.zeros(3, 20), []
    for text in texts.TEXTS:
        ids = model.token_ids(text, texts.LONGEST)
        if len(ids) < 2:
            continue
        result = attribute(model, ids, sites=("ffn",), number="logit")
        selected = [place for place in range(len(ids)) if place not in result.prompt.sinks]
        low = torch.minimum(low, result.activation("ffn")[:, selected].amin(1))
        high = torch.maximum(high, result.activation("ffn")[:, selected].amax(1))
        x = []
        hook = model.net.model.norm.register_forward_pre_hook(lambda module, args, x=x: x.append(args[0][0]))
        with torch.no_grad():
            assert model.net(torch.tensor([ids])).logits.isfinite().all()
        hook.remove()
        divisors.append(x[0][selected].pow(2).mean(1).add(model.net.config.rms_norm_eps).sqrt())
    result = calibrate(model)
    assert torch.allclose(result.low, low, atol=1e-5)
    assert torch.allclose(result.high, high, atol=1e-5)
    median = torch.cat(divisors).quantile(0.5).item()
    assert result.divisors["model.norm"][1] == pytest.approx(median, rel=1e-4)


def test_threads_share_one_calibration_also_beside_edits_of_another(model, monkeypatch, tmp_path):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    measured, whole = [], texts._calibration
    monkeypatch.setattr(texts, "_calibration", lambda *model: measured.append(model[0]) or whole(*model))
    with ThreadPoolExecutor(2) as pool:
        with steer(model, ["L0.ffn.0=50"]):
            request = [pool.submit(calibrate, model) for _ in range(2)]
            wait(request, 0.1)
        first, second = (one.result() for one in request)
    assert first is second
    assert len(measured) == 1
    assert first.high[0, 0] < 50


def test_a_model_whose_hidden_states_were_read_is_calibrated_once(model):
    """transformers leaves its hooks in the model."""
    again = Model(model.net, model.tokenizer, "again")
    with torch.no_grad():
        again.net(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert calibrate(again) is calibrate(again)


def test_calibration_is_kept_in_the_cache_but_not_under_edits(model, tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    monkeypatch.setattr(texts, "_write", WRITE_CALIBRATION)
    with steer(model, ["L0.ffn.0=50"]):
        assert calibrate(model).high[0, 0] == 50
    assert not list(tmp_path.rglob("*.safetensors"))
    plain = calibrate(model)
    assert plain.high[0, 0] < 50
    (file,) = tmp_path.rglob("*.safetensors")
    again = Model(model.net, Letters(), "another")
    monkeypatch.setattr(texts, "_calibration", None)  # it is read
    assert torch.equal(calibrate(again).high, plain.high)
    assert calibrate(again).divisors == plain.divisors
    file.write_bytes(b"no tensors")
    monkeypatch.undo()
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    assert torch.equal(calibrate(Model(model.net, Letters(), "a third")).high, plain.high)


def test_where_the_unembedding_gives_no_answers_there_are_words_without_logits():
    from test_tasks import make

    result = project(make("bert"), Neuron(1, "ffn", 3), 2)
    assert (result.typical, result.promoted[0].logit) == (None, None)
    assert "z" in result.about
    opt = Model(random_model(dense()["opt, norms behind"]).net, name="opt")  # norms between the layers, none at the end
    assert project(opt, Neuron(1, "ffn", 3), 2).promoted[0].logit is None
    t5 = make("t5")
    assert project(t5, Neuron(0, "ffn", 3), 2).promoted[0].logit is None
    assert project(t5, Neuron(t5.layers - 1, "ffn", 3), 2).promoted[0].logit > 0
