"""Mixtures of experts in a pair of prompts: each prompt has its own experts, and the sums stay exact."""

import pytest
import torch
from configurations import mixtures
from conftest import IDS, Double, random_model
from few import third_of
from letters import Letters
from pages import script
from transformers import CONFIG_MAPPING

from icebear import Model, attribute, build_index, describe, open_store
from icebear.concepts.methods.gradients import GradientTimesInput
from icebear.errors import MissingRule
from icebear.models.parts import experts

OTHER = [7, 3, 14, 44, 8, 3, 21, 9]
ROUTERS = [
    *("aria_text", "kolibri1", "cohere2_moe"),  # logits: a softmax, sigmoids, sigmoids of those that are chosen
    *("ernie4_5_moe", "minimax_m2", "lfm2_moe"),  # chosen with a bias, which the weights lack
    *("llama4_text", "nemotron_h", "minimax"),  # weighs inputs; has no gate; has no family
]
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "topk_method": "group_limited_greedy"}
SCAN = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4, "chunk_size": 4, "n_groups": 1}
NOT_OF_V2 = ("model_type", "transformers_version", "num_local_experts", "num_experts")


def made(name):
    if name in ROUTERS:
        families = script("families")
        families.OWN["nemotron_h"] = SCAN
        net = families.small_model(name).net.double()
    else:
        net = random_model(configurations()[name], "eager").net
    net.set_experts_implementation("eager")  # torch has no float64 for grouped matrix products
    for path, buffer in net.named_buffers():
        if path.endswith("correction_bias"):
            torch.manual_seed(0)
            buffer.normal_(0, 0.02)
    return Model(net, name=name)


def configurations():
    known = mixtures()
    like = known["deepseek_v3"].to_dict() | GROUPS
    grouped = CONFIG_MAPPING["deepseek_v2"](**{name: like[name] for name in like if name not in NOT_OF_V2})
    return {**known, "deepseek_v2": grouped}


def pair(model, sites=None):
    with Double():
        return attribute(model, IDS, 11, 12, counterfactual=OTHER, sites=model.sites if sites is None else sites)


@pytest.mark.parametrize(
    "name", third_of([*mixtures(), "deepseek_v2", *ROUTERS], "nemotron_h", "minimax", "deepseek_v2")
)
def test_a_pair_is_two_plain_passes_and_its_tokens_add_up(name):
    model = made(name)
    sites = model.sites if model.has_family else ()
    result = pair(model, sites)
    with Double(), torch.no_grad():
        logits = model.net(torch.tensor([IDS, OTHER]), use_cache=False).logits[:, -1]
        alone = [attribute(model, ids, 11, 12, method=GradientTimesInput(), sites=sites) for ids in (IDS, OTHER)]
    here, there = (logits[:, 11] - logits[:, 12]).tolist()
    assert result.conservation().target == pytest.approx(here - there, rel=1e-5)
    assert abs(result.conservation().remainder) < 1e-5 * abs(here - there)
    for site in sites:
        recorded = (result.neurons.activation[site], result.neurons.counterfactual[site])
        for x, plain in zip(recorded, alone, strict=True):
            assert torch.allclose(x, plain.neurons.activation[site], rtol=1e-5, atol=1e-6), site


@pytest.mark.parametrize("name", [name for name in mixtures() if name != "qwen2_moe"])
def test_neurons_of_an_expert_have_relevance_where_both_prompts_chose_it(name):
    """Else it is at the router's weight, and all that is ranked first has an effect."""
    model = made(name)
    result = pair(model)
    width = experts.width(model.experts(model.layers - 1))
    chosen, chosen_there = (
        (x["router"].abs() > experts.SILENT).repeat_interleave(width, -1)
        for x in (result.neurons.activation, result.neurons.counterfactual)
    )
    assert (chosen != chosen_there).any()
    assert result.of("ffn")[~(chosen & chosen_there)].abs().max() == 0
    assert result.neurons.activation["ffn"][~chosen].abs().max() == 0
    once = (chosen != chosen_there)[..., ::width]
    once[-1, :-1] = False  # the last layer is read at the last token
    assert (result.of("router")[once] != 0).all()
    first = result.top(20, site="ffn", position="all")
    assert (result.effects(first).matrix.abs().max(1).values > 0).all()


def test_a_router_that_gives_others_a_share_is_refused():
    """Its values would not be the model's."""
    model = made("mixtral")
    router = model.net.model.layers[0].mlp.gate
    own = router.forward
    router.forward = lambda x: (lambda logits, weights, index: (logits, weights + 0.1, index))(*own(x))
    with pytest.raises(MissingRule, match="router"):
        pair(model)


def test_a_choice_that_is_no_routers_is_refused_where_it_differs():
    """Sparse attention to the largest scores; where both prompts choose all, the sums are exact."""
    model = script("families").small_model("deepseek_v32")
    assert abs(pair(model, ()).conservation().remainder) < 1e-4
    for layer in model.net.model.layers:
        layer.self_attn.indexer.index_topk = 2
    with pytest.raises(MissingRule, match="choice"):
        pair(model, ())


def test_a_card_of_a_router_s_neuron_has_no_vocabulary(corpus, tmp_path):
    """A router writes nothing to the residual stream."""
    model = Model(random_model(mixtures()["qwen3_moe"], dtype=torch.float32).net, Letters(), "letters")
    with open_store(tmp_path / "index.db", create=True) as store:
        build_index(model, corpus, store, k=4, sites=("router",))
        card = describe(store, "L0.router.1", model, effect_sentences=0)
    assert (card.projection, card.other) == (None, None)
