"""What a tokenizer adds to a text is said where it changes the question."""

import logging

import pytest
import tokenizers
import torch
from conftest import LLAMA, random_model
from tokenizers import decoders, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from icebear import Model, attribute
from icebear.app.api.calls import CALLS
from icebear.app.cli.verbs.doctor import _model_facts
from icebear.concepts.attribution.request import say
from icebear.models.text.chat import Chat
from icebear.models.text.prompts import special_note

TEXT = "The ice bear"


def model_with(template):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    special = [("<s>", 0), ("</s>", 1)]
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    config = LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": len(fast)})
    return Model(random_model(config, dtype=torch.float32).net, fast, "special")


@pytest.mark.parametrize(
    ("template", "text", "word"),
    [
        ("<s> $A", f"<s>{TEXT}", "<s> twice"),
        ("<s> $A", f"\n<s>{TEXT}", "<s> twice"),
        ("<s> $A </s>", f"<s>{TEXT}", "<s> twice"),
        ("<s> $A </s>", f"<s>{TEXT}", "</s> at the end"),
        ("$A </s>", f"{TEXT}</s>", "</s> twice"),
        ("<s> <s> $A", TEXT, ""),
        ("<s> $A </s>", TEXT, "</s> at the end"),
        ("$A </s>", TEXT, "</s> at the end"),
        ("<s> $A", TEXT, ""),
        (None, f"<s>{TEXT}", ""),
        (None, TEXT, ""),
        (None, f"{TEXT}</s>", ""),
    ],
)
def test_a_note_where_special_tokens_change_the_question(template, text, word, caplog):
    model = model_with(template)
    say.cache_clear()
    with caplog.at_level(logging.WARNING, "icebear"):
        attribute(model, text, 7, sites=())
    assert (special_note(model, text) == "") is (word == "")
    assert word in special_note(model, text)
    assert special_note(model, text) in caplog.text
    for path, field in (("/v1/tokenize", "text"), ("/v1/lens/prompt", "prompt")):
        call, kind = CALLS[path]
        more = {"prompt": {"type": ["LOGIT_LENS"], "layers": [0], "top_n": 1}}.get(field, {})
        answer = call(model, kind(model="special", **{field: text}, **more))
        notes = (answer.get("meta") or answer).get("notes", [])
        assert notes == ([special_note(model, text)] if word else [])


def test_token_ids_and_chats_have_no_note():
    model = model_with("<s> $A </s>")
    assert special_note(model, [0, 0, 5]) == special_note(model, Chat([{"role": "user", "content": TEXT}])) == ""


def test_doctor_says_it():
    assert "</s>" in _model_facts(model_with("$A </s>"))["tokenizer"]
    assert "nothing" in _model_facts(model_with("<s> $A"))["tokenizer"]
