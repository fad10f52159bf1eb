"""Pairs of texts: the tokenizer's own ids and segments reach the model, however the pair is given."""

import json

import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner
from conftest import LLAMA, Letters, random_model
from transformers import PreTrainedTokenizerFast

from icebear import Model, attribute, load_model
from icebear.app.cli.main import main
from icebear.errors import InputError
from icebear.models.text.prompts import Prompt, prompt_json

WORDS = "[PAD] [UNK] [CLS] [SEP] the bear eats fish an animal sleeps".split()
PAIR = "the bear eats fish", "an animal eats"
SHAPE = {
    **{"vocab_size": len(WORDS), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 20, "max_position_embeddings": 40, "num_labels": 3, "pad_token_id": 0},
}


def joining(template="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"):
    """A tokenizer of words that joins a pair in BERT's way."""
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(WORDS)}, "[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    single = template.partition("$B")[0].strip()
    fast.post_processor = tokenizers.processors.TemplateProcessing(single, template, special)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=fast, model_input_names=inputs, **names)


def network(kind="Bert", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **more})
    net = getattr(transformers, f"{kind}ForSequenceClassification")(config).double().eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_(0, 0.4)
    return net


@pytest.fixture
def model():
    return Model(network(), joining(), "pairs")


def expected(model, *texts):
    with torch.no_grad():
        return model.net(**model.tokenizer(*texts, return_tensors="pt")).logits[0]


@pytest.mark.parametrize("kind", ["Bert", "Electra", "MegatronBert", "ErnieM", "Roberta", "DebertaV2"])
def test_a_pair_is_the_tokenizers_own_pair(kind):
    if not hasattr(transformers, f"{kind}ForSequenceClassification"):
        pytest.skip(f"transformers has no {kind}")
    model = Model(network(kind, **({"embedding_size": 24} if kind == "Electra" else {})), joining(), kind)
    ids = model.tokenizer(*PAIR)["input_ids"]
    for prompt in (PAIR, Prompt(*PAIR), ids, torch.tensor([ids]), " [SEP] ".join(PAIR)):
        assert model.ids(prompt) == ids
        torch.testing.assert_close(model.next_logits(prompt), expected(model, *PAIR).float())
    torch.testing.assert_close(model.next_logits(PAIR[0]), expected(model, PAIR[0]).float())


def test_segments_matter_and_relevance_adds_up_to_the_right_logit(model):
    ids = model.ids(PAIR)
    with torch.no_grad():
        without = model.net(torch.tensor([ids])).logits[0]
    logits = expected(model, *PAIR)
    assert (without - logits).abs().max() > 1e-3
    result = attribute(model, PAIR, 1, method="cp-lrp", number="logit")
    assert result.conservation().target == pytest.approx(logits[1].item())
    assert abs(result.conservation().remainder) < 1e-6
    other = "the bear eats an", PAIR[1]
    both = attribute(model, PAIR, 1, 0, counterfactual=other)
    difference = logits - expected(model, *other)
    assert both.conservation().target == pytest.approx((difference[1] - difference[0]).item())
    assert abs(both.conservation().remainder) < 1e-6


def test_a_batch_of_pairs_equals_single_ones(model):
    pairs = [PAIR, ("the bear", "an animal sleeps"), "the animal"]
    for result, pair in zip(attribute(model, pairs, 1), pairs, strict=True):
        torch.testing.assert_close(result.tokens, attribute(model, pair, 1).tokens)


def test_pairs_are_stored_and_refused_where_there_are_none(model):
    assert Prompt.of(json.loads(json.dumps(prompt_json(PAIR)))) == Prompt.of(PAIR)
    with pytest.raises(InputError):
        Model(random_model(LLAMA).net, Letters()).ids(PAIR)
    strange = Model(network(), joining("[CLS]:1 $A:1 [SEP]:1 $B:0 [SEP]:0"), "strange")
    with pytest.raises(InputError):
        strange.next_logits(PAIR)


def test_the_command_reads_a_pair(model, tmp_path):
    model.net.float().save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    arguments = ["explain", PAIR[0], "--pair", PAIR[1], "--model", str(tmp_path), "--device", "cpu", "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)
    loaded = load_model(str(tmp_path), device="cpu")
    assert [row["text"] for row in shown["tokens"]] == list(loaded.pieces(loaded.ids(PAIR)))
    assert CliRunner().invoke(main, [*arguments, "--chat"]).exit_code == 2
