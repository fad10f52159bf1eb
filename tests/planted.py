"""A small model of words in which nothing happens but what a test plants."""

import re

import torch
from conftest import random_model
from transformers import GPT2Config

from icebear import Model

TOPICS = {topic: [topic + a + b for a in "aeiouy" for b in "klmnrt"] for topic in ("song", "ship", "court")}
COMMON = "the a of in and was old new first many some zebra near under with for by it they had small great".split()
WORDS = ["?", ".", *COMMON, *(word for topic in TOPICS.values() for word in topic)]
CODES = {word: code for code, word in enumerate(WORDS)}


class Words:
    """A tokenizer of words, each with the space before it."""

    all_special_ids = ()
    pad_token_id = eos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [CODES.get(word, 0) for word in re.findall(r"\w+|\.", text.lower())]}

    def batch_decode(self, rows, **options):
        return [self.decode(row) for row in rows]

    def decode(self, ids):
        return "".join(WORDS[i] if WORDS[i] == "." else f" {WORDS[i]}" for i in ids)


def bare() -> Model:
    """One layer; attention does nothing, norms scale by 1, FFN neurons read at random."""
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_embd=32,
        n_inner=60,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    made = random_model(config, dtype=torch.float32)
    with torch.no_grad():
        block = made.net.transformer.h[0]
        for part in (block.attn.c_attn, block.attn.c_proj):
            part.weight.zero_()
            part.bias.zero_()
        for norm in (block.ln_1, block.ln_2):
            norm.weight.fill_(1)
            norm.bias.zero_()
    return Model(made.net, Words(), "planted")
