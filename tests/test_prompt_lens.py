"""The logit lens of a prompt is the model's own head on each layer's residual stream."""

import pytest
import torch
from configurations import dense, mixtures
from conftest import IDS, random_model
from transformers import CONFIG_MAPPING

from icebear.concepts.vocabulary.prompt_lens import logit_lens

CONFIGS = {**dense(), **mixtures()}
KINDS = {
    **CONFIGS,
    "gemma2, soft cap": CONFIG_MAPPING["gemma2"](**{**CONFIGS["gemma2"].to_dict(), "final_logit_softcapping": 1.0}),
    "nanochat": CONFIG_MAPPING["nanochat"](
        **{**CONFIGS["llama"].to_dict(), "model_type": "nanochat", "final_logit_softcapping": 2.0}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_last_layer_the_lens_equals_the_model(kind):
    model = random_model(KINDS[kind], "eager", torch.float32)
    with torch.no_grad():
        right = model.logits(model.read_ids([IDS]), list(range(len(IDS))))[0].float().softmax(-1)
    for read, row in zip(logit_lens(model, IDS, [0, model.layers - 1], 3), right, strict=True):
        assert read.probabilities[-1] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["gemma2, soft cap", "gptj", "phi", "cohere", "granite", "opt"])
def test_below_it_is_the_head_by_hand(kind):
    model = random_model(KINDS[kind], "eager", torch.float32)
    config, norm = model.config, model.net.get_submodule(model.family.final_norm)
    with torch.no_grad():
        stream = model.net(torch.tensor([IDS]), output_hidden_states=True).hidden_states[1][0]
        logits = model.net.get_output_embeddings()(norm(stream)) * model.logit_scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    for read, row in zip(logit_lens(model, IDS, [0], 3), logits.softmax(-1), strict=True):
        assert read.probabilities[0] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
