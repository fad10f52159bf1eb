"""Answers are tokenised behind their prompt and compared by ids (FINDINGS A5)."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from icebear import Model, attribute, flip, load_model
from icebear.app.cli.main import main
from icebear.evaluation import groundtruth
from icebear.evaluation.flips import FlipPair, flips

PROMPT = "The ice bear lives in the"
TEXTS = [
    "The ice bear lives in the Arctic.",
    "The camel lives in the desert.",
    "bears",
    "the keys are",
    "the book is",
    *(f"{item.prompt}{item.target}{item.contrast}" for item in groundtruth.subject_verb(200)),
    *(f"{item.prompt}{item.target}{item.contrast}" for item in groundtruth.facts(100)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Mistral whose tokenizer puts a space before each text that it reads, as those of Llama 2, Mistral 7B v0.1,
    Mixtral and Phi 3 do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", *"▁.,:?\n"]
    words = [f" {word}" for text in TEXTS for word in re.findall(r"\w+", text)]  # else merges would cross spaces
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    whole = Tokenizer(models.BPE(unk_token="<unk>"))
    whole.normalizer = normalizers.Replace(" ", "▁")
    whole.train_from_iterator(words, trainer)
    tokenizer.model = whole.model
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(0)
    net = MistralForCausalLM(
        MistralConfig(
            vocab_size=len(fast),
            hidden_size=24,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.4)
    place = tmp_path_factory.mktemp("mistral")
    net.save_pretrained(place)
    fast.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def mistral(folder) -> Model:
    return load_model(str(folder), device="cpu", dtype="float32")


def test_the_tokenizer_puts_a_space_first(mistral):
    assert [mistral.tokenizer.convert_ids_to_tokens(i) for i in mistral.tokens_of("the desert")] == ["▁the", "▁desert"]
    assert len(mistral.tokens_of(" desert")) == 2


def test_a_target_is_what_follows_the_prompt(mistral, folder):
    result = attribute(mistral, PROMPT, " desert", contrast=" Arctic")
    assert (result.target.text, result.contrast.text) == (" desert", " Arctic")
    assert [mistral.text(i) for i in mistral.continuation(" lives in", "The ice bear")] == [" lives", " in"]
    ids = mistral.token_ids("The ice bear")
    assert mistral.continuation(" lives in", ids) == mistral.continuation(" lives in", "The ice bear")
    assert mistral.answer_id(" desert", after=ids) == mistral.answer_id(" desert", after=PROMPT)
    whole = attribute(mistral, "The ice bear", target_text=" lives in", sites=())
    assert whole.target_text == " lives in"
    assert len(whole.tokens) == len(ids) + 1
    assert attribute(mistral, PROMPT, "desert", sites=()).target.text == " desert"  # the likelier of both
    words = ["explain", PROMPT, "--target", " desert", "--model", str(folder), "--json"]
    done = CliRunner().invoke(main, words)
    assert json.loads(done.stdout)["target"]["text"] == " desert", done.stderr


def test_a_suffix_can_be_named(mistral):
    assert [mistral.text(i) for i in mistral.continuation("s", "The ice bear")] == ["s"]


def test_each_prompt_of_a_batch_has_its_own_answer(mistral):
    result = attribute(mistral, [PROMPT, "The camel lives in the"], [" desert", " Arctic"], sites=())
    assert [row.target.text for row in result] == [" desert", " Arctic"]


@pytest.mark.parametrize("task", list(groundtruth.TASKS.values()))
def test_every_ground_truth_sample_is_kept(mistral, task):
    for item in task(20):
        result = groundtruth.counted(groundtruth.score_items(mistral, [item], {}))[0]
        assert result["correct"] is not None, result.get("why")


def test_flips_count(mistral):
    wanted = mistral.predict(PROMPT, 3)[2].text
    recipe = flip(mistral, PROMPT, to=wanted)
    assert len(recipe)
    assert flips(mistral, FlipPair(PROMPT, wanted), list(recipe))
    assert not flips(mistral, FlipPair(PROMPT, wanted), [])
