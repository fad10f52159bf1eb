"""Code that takes the weights of a module without calling it, as fused kernels do, is never read or edited silently."""

from copy import deepcopy
from itertools import product
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from conftest import IDS, LLAMA, random_model
from letters import Letters
from test_tasks import make
from test_ways_of_generating import monitor_of
from transformers import CONFIG_MAPPING, BloomConfig, OpenAIGPTConfig

from icebear import Model, VectorEdit, attribute, build_index, circuit, open_store, read_corpus, stages, steer, watching
from icebear.app.cli.main import main
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import AllNeurons, Values
from icebear.concepts.passes.run import Activations, forward, forward_backward
from icebear.concepts.selftest import selftest
from icebear.errors import ModelError
from icebear.records import Neuron
from icebear.steering.flipping.last_token import LastToken

OTHER = [7, 3, 30, 44, 5, 3, 21, 9]


def fused_ffn(self, x):
    gated = F.silu(F.linear(x, self.gate_proj.weight)) * F.linear(x, self.up_proj.weight)
    return F.linear(gated, self.down_proj.weight)


@pytest.fixture
def fused():
    """A Llama whose second layer has a fused FFN."""
    net = random_model(LLAMA, dtype=torch.float32).net
    mlp = net.model.layers[1].mlp
    mlp.forward = MethodType(fused_ffn, mlp)
    return Model(net, Letters(), "fused")


USES = {
    "relevance": lambda model: attribute(model, IDS, 7),
    "relevance, twice": lambda model: [attribute(model, IDS, 7, sites=("attn",)), attribute(model, IDS, 7)],
    "most relevant": lambda model: attribute(model, IDS, 7, keep="top"),
    "comparison": lambda model: attribute(model, IDS, 7, 9, counterfactual=OTHER),
    "stages": lambda model: stages(model, IDS, 7, contrast=9, counterfactual=OTHER),
    "circuit": lambda model: circuit(model, IDS, 7, contrast=9, counterfactual=OTHER, nodes=4, heads=False),
    "activations": lambda model: attribute(model, IDS, 7, method="gxi", sites=("ffn",)),
}


@pytest.mark.parametrize("use", USES)
def test_what_reads_its_neurons_names_the_module(fused, use):
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj"):
        USES[use](fused)


def test_what_edits_or_watches_its_neurons_names_the_module(fused):
    with pytest.raises(ModelError, match="down_proj"), steer(fused, "L1.ffn.3=50"):
        fused.next_logits(IDS)
    with pytest.raises(ModelError, match="down_proj"), watching(fused, monitor_of(fused)):
        fused.generate("abc", 3)
    with steer(fused, "L2.ffn.3=50"):
        fused.next_logits(IDS)


def test_a_scan_names_the_module(fused, tmp_path):
    (tmp_path / "a.txt").write_text("The ice bear.\nA camel.")
    with open_store(tmp_path / "a.db", create=True) as store, pytest.raises(ModelError, match="down_proj"):
        build_index(fused, read_corpus(str(tmp_path / "a.txt")), store, k=2)


def test_tokens_and_other_sites_are_as_in_the_plain_model(fused):
    plain = random_model(LLAMA, dtype=torch.float32)
    for sites in ((), ("attn",)):
        one, other = (attribute(model, IDS, 7, sites=sites, method="cp-lrp") for model in (fused, plain))
        assert torch.allclose(one.tokens, other.tokens, atol=1e-5)


def test_the_selftest_finds_it(fused):
    laws = {law.name: law for law in selftest(fused, IDS).laws}
    assert (laws["activations"].holds, laws["edits"].holds) == (False, False)
    assert "down_proj" in laws["activations"].finding
    assert "down_proj" in selftest(fused, IDS).verdict


def test_the_selftest_finds_edits_that_do_not_reach_the_output():
    """Where a module is called, and what it returns is not used."""
    net = random_model(LLAMA, dtype=torch.float32).net
    mlp = net.model.layers[1].mlp

    def called_for_nothing(self, x):
        self.down_proj(torch.zeros(*x.shape[:2], LLAMA.intermediate_size))
        return fused_ffn(self, x)

    mlp.forward = MethodType(called_for_nothing, mlp)
    laws = {law.name: law.holds for law in selftest(Model(net, name="fused"), IDS).laws}
    assert laws["edits"] is False


@pytest.mark.parametrize("option", [{"slow_but_exact": True, "pretraining_tp": 2}, {"pretraining_tp": 2}, {}], ids=str)
def test_an_option_of_bloom_that_goes_around_its_maps_is_refused(option):
    size = {"vocab_size": 50, "hidden_size": 24, "n_layer": 2, "n_head": 4}
    model = random_model(BloomConfig(**size, **option), "eager", torch.float32)
    if option.get("slow_but_exact"):
        with pytest.raises(ModelError, match="dense_4h_to_h"):
            attribute(model, IDS, 7)
    else:
        assert attribute(model, IDS, 7).activation("ffn").abs().max() > 0


def test_a_module_that_is_called_for_some_tokens_at_a_time_is_refused():
    """Such as a feed-forward network in chunks of tokens."""
    size = {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = random_model(
        CONFIG_MAPPING["bert"](**size, is_decoder=True, chunk_size_feed_forward=4), "eager", torch.float32
    )
    with pytest.raises(ModelError, match="some tokens at a time"):
        attribute(model, IDS, 7)
    assert attribute(model, IDS, 7, sites=("attn",)).tokens.isfinite().all()


@pytest.fixture
def unwritten(monkeypatch):
    """New memory holds NaN."""
    empty = torch.empty

    def filled(*size, **options):
        x = empty(*size, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("counterfactual", [None, [*IDS[:3], 40, *IDS[4:]]])
def test_the_tokens_of_the_other_stack_have_no_values(unwritten, counterfactual):
    model = make("t5", dtype=torch.float32)
    sites = ("ffn", "attn", "cross")
    result = attribute(model, IDS, 7, 9, counterfactual=counterfactual, sites=sites)
    for site, layer in product(sites, range(model.layers)):
        neurons = result.neurons
        recorded = [neurons.relevance, neurons.activation, *([neurons.counterfactual] if counterfactual else [])]
        assert neurons.activation[site][layer].ne(0).any() == (site != "cross" or model.stack_of(layer) == 1)
        for values in (x[site][layer] for x in recorded):
            assert values.isfinite().all()
            other = values[: len(IDS)] if model.stack_of(layer) else values[len(IDS) :]
            assert other.eq(0).all()


def test_a_pass_over_the_first_layers_has_no_value_above(llama, unwritten):
    """Nothing is read from memory that was not written."""
    batch = llama.read([IDS])
    values, every = Values(llama, batch, ("ffn",)), AllNeurons(llama, batch, ("ffn",))
    forward(llama, Activations(batch, [(Neuron(1, "ffn", 3), 2)]), [values])
    forward_backward(llama, Activations(batch, [(Neuron(1, "ffn", 3), 2)]), [Inputs(), every])
    for recorded in (values.activation, every.activation, every.relevance):
        assert recorded["ffn"][:, 2].eq(0).all()
    assert values.activation["ffn"][:, :2].ne(0).any(-1).all()


def test_experts_without_tokens_have_no_activation_and_no_relevance():
    config = CONFIG_MAPPING["mixtral"](
        **{**LLAMA.to_dict(), "model_type": "mixtral"}, num_local_experts=4, num_experts_per_tok=1
    )
    result = attribute(random_model(config, "eager", torch.float32), IDS[:1] * 3, 7)
    silent = result.activation("ffn").abs().sum((0, 1)).view(4, -1).sum(1) == 0
    assert 0 < silent.sum() < 4
    assert result.of("ffn").abs().sum((0, 1)).view(4, -1).sum(1)[silent].eq(0).all()


def test_the_command_says_it_in_one_sentence(tiny_folder, tmp_path):
    size = {"vocab_size": 300, "hidden_size": 24, "n_layer": 2, "n_head": 4}
    folder = tmp_path / "bloom"
    random_model(
        BloomConfig(**size, slow_but_exact=True, pretraining_tp=2), "eager", torch.float32
    ).net.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((type(folder)(tiny_folder) / name).read_bytes())
    result = CliRunner().invoke(main, ["rank", "The ice", "--model", str(folder)])
    assert result.exit_code == 1
    assert "dense_4h_to_h" in result.output
    assert isinstance(result.exception, SystemExit)


def shared_ffn(net):
    net.model.layers[2].mlp = net.model.layers[1].mlp


def shared_layer(net):
    net.model.layers[2] = net.model.layers[1]


@pytest.mark.parametrize("share", [shared_ffn, shared_layer])
def test_layers_that_share_a_module_are_told_apart_or_refused(share):
    net = random_model(LLAMA, dtype=torch.float32).net
    share(net)
    model = Model(net, Letters(), "shared")
    with pytest.raises(ModelError, match="share one module"):
        attribute(model, IDS, 7)
    with pytest.raises(ModelError, match="share one module"), steer(model, "L1.ffn.3=50"):
        model.next_logits(IDS)
    with pytest.raises(ModelError, match="share one module"), watching(model, monitor_of(model)):
        model.generate("abc", 3)
    assert attribute(model, IDS, 7, sites=()).tokens.isfinite().all()
    assert any(law.holds is False for law in selftest(model, IDS).laws)
    if share is shared_layer:
        with pytest.raises(ModelError), steer(model, VectorEdit(1, (0.1,) * 24)):
            model.next_logits(IDS)
    else:
        assert attribute(model, IDS, 7, sites=("attn",)).tokens.isfinite().all()


def test_experts_with_another_forward_are_refused():
    config = CONFIG_MAPPING["mixtral"](**{**LLAMA.to_dict(), "model_type": "mixtral"}, num_local_experts=4)
    model = random_model(config, "eager", torch.float32)
    mixture = model.experts(1)
    plain = mixture.forward
    mixture.forward = lambda *args: plain(*args) * 0.1
    for use in (lambda: attribute(model, IDS, 7), lambda: attribute(model, IDS, 7, sites=())):
        with pytest.raises(ModelError, match="experts"):
            use()
    del mixture.forward
    attribute(model, IDS, 7)


def test_monitors_of_layers_that_do_not_run_are_refused():
    model = Model(random_model(deepcopy(LLAMA), dtype=torch.float32).net, Letters(), "short")
    monitor = monitor_of(model)
    model.net.config.num_hidden_layers = 1  # as early exit sets it
    with pytest.raises(ModelError):
        monitor.measure(model, "abcdefg")
    with pytest.raises(ModelError), watching(model, monitor):
        model.generate("abc", 3)


def test_rows_that_a_module_is_called_for_one_by_one_are_refused():
    net = random_model(LLAMA, dtype=torch.float32).net
    mlp = net.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: torch.cat([plain(row) for row in x.split(1)])
    model = Model(net, Letters(), "rows")
    attribute(model, IDS, 7)
    with pytest.raises(ModelError, match="some tokens at a time"):
        attribute(model, [IDS, IDS[:4]], 7)


def test_layers_that_return_lists_and_keep_nothing():
    """GPT-1: vectors act as a hook by hand adds them, and a flip reads all tokens again."""
    model = random_model(OpenAIGPTConfig(vocab_size=50, n_embd=24, n_layer=2, n_head=4), "eager", torch.float32)
    vector = torch.linspace(-1, 1, 24)
    with steer(model, VectorEdit(0, tuple(vector.tolist()))):
        edited = model.next_logits(IDS)
    hook = model.layer_modules[0].register_forward_hook(lambda *call: [call[-1][0] + vector, *call[-1][1:]])
    assert torch.allclose(edited, model.next_logits(IDS), atol=1e-5)
    hook.remove()
    last = LastToken(model, IDS)
    assert last.prefix is None
    right = attribute(model, IDS, 7, sites=("ffn",)).activation("ffn")[:, -1]
    assert torch.allclose(last.activations().view_as(right), right, atol=1e-5)
