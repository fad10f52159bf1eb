"""Relevance by the operation table equals the papers' equations written out (tests/reference/attnlrp.py,
tests/reference/models.py)."""

from functools import partial

import pytest
import torch
import transformers
from configurations import dense, mixtures, others
from conftest import CONFIGS, IDS, Double, random_model
from reference import models as reference_models

from icebear import ATTNLRP, CP_LRP, PA_LRP, VIT, AlphaBeta, AttnLRP, Epsilon, Gamma, Model, ZPlus, attribute

MASKED = [*IDS[:4], 49, *IDS[4:]]
IMAGE = torch.randn(3, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
MODELS = {
    **{name: (reference_models.llama, "AutoModelForCausalLM", config, IDS, {}) for name, config in CONFIGS.items()},
    **{
        name: (
            reference_models.gpt if config.model_type in reference_models.GPTS else reference_models.llama,
            "AutoModelForCausalLM",
            config,
            IDS,
            {},
        )
        for name, config in dense().items()
        if name not in CONFIGS
    },
    **{name: (reference_models.llama, "AutoModelForCausalLM", config, IDS, {}) for name, config in mixtures().items()},
    **{name: (reference_models.t5, *others()[name], IDS, {"written": (0, 5, 9)}) for name in ("t5", "t5, relu")},
    **{name: (reference_models.bert, *others()[name], MASKED, {}) for name in ("bert", "distilbert")},
    **{name: (reference_models.vit, *others()[name], IMAGE, {}) for name in ("vit", "deit")},
    **{
        name: (reference_models.dinov2, *others()[name], IMAGE, {})
        for name in ("dinov2", "dinov2, swiglu", "dinov2, registers")
    },
    **{name: (reference_models.clip, *others()[name], IMAGE[..., :16], {}) for name in ("clip", "siglip")},
}
METHODS = [
    ATTNLRP,
    CP_LRP,
    PA_LRP,
    VIT,
    AttnLRP(linear=Epsilon(0.3)),
    AttnLRP(softmax="zplus", linear=ZPlus(), positions=True),
    AttnLRP(linear=AlphaBeta(2), conv=ZPlus()),
    AttnLRP(softmax="constant", linear=Gamma(0.5), attention_out=ZPlus()),
    AttnLRP(linear=ZPlus(), attention_in=AlphaBeta(2)),
]
NO_SDPA = {"bloom", "gptj", "gemma2", "gpt_oss"}
ONLY_SDPA = {"falcon, alibi"}  # transformers adds its slopes twice in eager
EVERY_RULE = {"llama", "gpt2", "bloom", "mixtral", "t5", "t5, relu", "bert", "vit", "dinov2, registers", "siglip"}
KINDS = {
    **dict.fromkeys(MODELS, ("eager", "sdpa")),
    **dict.fromkeys(NO_SDPA, ("eager",)),
    **dict.fromkeys(ONLY_SDPA, ("sdpa",)),
}
CASES = [
    (name, KINDS[name][(model + rule) % len(KINDS[name])], method)
    for model, name in enumerate(MODELS)
    for rule, method in enumerate(METHODS if name in EVERY_RULE else (ATTNLRP, PA_LRP))
]
"""Two methods with each model and all with some, and each kind of attention with each model and with each method."""


class Marked:
    """A tokenizer whose mask is 49, for token ids."""

    mask_token_id, all_special_ids = 49, ()

    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(part) for part in text.split()]}


def make(name, kind):
    _, auto, config, *_ = MODELS[name]
    if auto == "AutoModelForCausalLM":
        return random_model(config, kind)
    torch.manual_seed(0)
    cls = getattr(transformers, auto)
    create = cls.from_config if auto.startswith("Auto") else cls._from_config
    net = create(config, attn_implementation=kind).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.4)
    return Model(net, Marked(), name)


IN_FLOAT32 = {"glm4_moe", "deepseek_v3"}
"""Their routers compute in float32 whatever the model does."""


def close(a, b, tolerance=1e-8):
    return (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-12)


@pytest.mark.parametrize(("name", "kind", "method"), CASES, ids=lambda part: str(part))
def test_tokens_sites_positions_and_shares_equal_the_reference(name, kind, method):
    build, _, _, prompt, options = MODELS[name]
    model = make(name, kind)
    near = partial(close, tolerance=1e-5 if name in IN_FLOAT32 else 1e-8)
    about = partial(pytest.approx, rel=1e-5 if name in IN_FLOAT32 else 1e-8)
    target = 1 if model.task.name == "image" else 11
    prefix = " ".join(map(str, options["written"][1:])) if options else None
    with Double():
        result = attribute(model, prompt, target, method=method, sites=model.sites, prefix=prefix, number="logit")
        leaves, tape, logits = reference_models.explain(build, method, model.net, prompt, target, **options)
    assert abs(result.target.logit - logits[target]) < 1e-5  # TokenScore comes from float32
    if model.task.name == "image":
        assert near(result.image.pixels, leaves[0].R.sum(0))
        tape.retained["biases"] += sum(token.R.sum().item() for token in tape.own)
    else:
        assert near(result.tokens, torch.cat([leaf.R.sum(-1) for leaf in leaves]))
    for site in model.sites:
        assert near(result.of(site), tape.site(site, model.layers, len(result.tokens))), site
    conserved = result.conservation()
    assert conserved.target == about(logits[target].item())
    assert conserved.biases == about(tape.retained["biases"], abs=1e-8)
    if method.positions:
        positions = tape.position_relevance(*result.positions.shape)
        assert near(result.positions, positions)
        assert conserved.positions == about(positions.sum().item(), abs=1e-8)
    if kind == "eager" or method.positions or not ("t5" in name or "alibi" in name):
        # Fused attention does not tell what a constant position bias in it keeps: that is part of `softmax` there.
        assert conserved.softmax == about(tape.retained["softmax"], abs=1e-8)
    if not isinstance(method.linear, Epsilon) or method.linear.eps == 0:
        assert abs(conserved.remainder) < (1e-6 if name in IN_FLOAT32 else 1e-8) * max(1, abs(conserved.target))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cp_lrp_conserves(name):
    model = random_model(CONFIGS[name])
    with Double():
        result = attribute(model, IDS, method=CP_LRP, number="logit")
    assert result.tokens.sum().item() == pytest.approx(result.conservation().target, rel=1e-6)


def test_the_reference_is_not_plain_gradient_times_input():
    """The comparison can fail: without the rules the numbers are others."""
    model = random_model(CONFIGS["llama"])
    embedded = model.net.model.embed_tokens(torch.tensor([IDS])).detach().requires_grad_()
    with Double():
        model.net(inputs_embeds=embedded).logits[0, -1, 11].backward()
        leaves, *_ = reference_models.explain(reference_models.llama, ATTNLRP, model.net, IDS, 11)
    assert not close((embedded.grad * embedded)[0].sum(-1), leaves[0].R.sum(-1), 1e-2)
