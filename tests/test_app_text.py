"""Texts of stores, models, corpora and files are shown as they are, on every page: never as Markdown."""

import json
import re

import pytest
import torch
from appview import set_up, visit
from conftest import LLAMA, random_model
from streamlit.testing.v1 import local_script_runner
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from icebear import Concept, build_index, load_model, open_store, read_corpus
from icebear.actmax.atlas.saved_map import mapped
from icebear.app.web.shared import markdown
from icebear.records import AutomaticLabel, Neuron
from icebear.render import characters, heatmap

LEAK = "![x](http://127.0.0.1:9/{})"
WORDS = [LEAK.format(number) for number in range(50)]
PROMPT, OTHER = " ".join(WORDS[1:4]), " ".join(WORDS[4:7])
NEURON = Neuron(1, "ffn", 3)
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
TALK = [{"role": role, "content": PROMPT} for role in ("user", "assistant", LEAK.format("role"))]
PLAIN = {"id", "value", "default", "placeholder", "raw_value", "raw_values", "form_id"}
"""Fields that the browser shows as they are, or not at all."""
SHOWN_PLAINLY = {("Selectbox", "options"), ("SliderProto", "options")}
DRAWN = {"html", "code", "dataframe", "table", "vega_lite_chart", "bidi_component"}
"""Elements that are not Markdown: HTML of ours, in which texts are escaped, and what Streamlit draws."""
VIEWS = {
    "why": [
        {},
        {
            "prompt": PROMPT,
            "counterfactual": OTHER,
            "details_open": "true",
            "method_open": "true",
        },
    ],
    "chat": [{"chat": json.dumps(TALK)}, {"chat": json.dumps(TALK), "turn": "1", "span": "0-1"}],
    "circuit": [{"prompt": PROMPT, "counterfactual": OTHER}],
    "neurons": [
        {"neuron": str(NEURON)},
        {"text": WORDS[3]},
        {"neuron": LEAK.format("neuron")},
    ],
    "atlas": [{"find": WORDS[3]}, {"lit": "neurons of this prompt", "prompt": PROMPT, "counterfactual": OTHER}],
    "steer": [
        {"prompt": PROMPT, "contrast": WORDS[9], "run": "flip"},
        {"section": "concepts"},
        {"section": "edits", "prompt": PROMPT, "edits": f"{NEURON}=2", "run": "edits"},
    ],
}
"""Each view with what is in its URL."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A model whose every token is Markdown, and a store with titles, labels and a concept that are."""
    folder = tmp_path_factory.mktemp("hostile") / LEAK.format("").replace("/", ":")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    random_model(LLAMA, dtype=torch.float32).net.save_pretrained(folder)
    model = load_model(str(folder), dtype="float32", device="cpu")
    rows = [{"text": " ".join(WORDS[n : n + 5]) + ".", "title": LEAK.format("title")} for n in range(30)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with open_store(folder / "![x](y).db", create=True) as store:
        build_index(model, read_corpus(str(folder / "corpus.jsonl")), store, k=4)
        mapped(store)
        store.labels.set_manual(NEURON, LEAK.format("label"))
        store.labels.set_automatic(
            AutomaticLabel(NEURON, sign, "words", LEAK.format("meaning"), "token", 0.9, 0.001, True, {})
            for sign in "+-"
        )
        concept = Concept.of(model, LEAK.format("concept"), {(NEURON, "+"): 1.0})
        store.concepts.set({concept.name: concept.to_dict()})
    return folder


def texts(message):
    """Each text of an element that the browser may read as Markdown, and its field."""
    for field, value in message.ListFields():
        if field.name in DRAWN or field.name in PLAIN:
            continue
        for item in value if field.is_repeated else [value]:
            if isinstance(item, str):
                if (message.DESCRIPTOR.name, field.name) not in SHOWN_PLAINLY:
                    yield f"{message.DESCRIPTOR.name}.{field.name}", item
            elif field.message_type:
                yield from texts(item)


@pytest.mark.parametrize("view", VIEWS)
def test_no_text_is_read_as_markdown(hostile, few_contexts, monkeypatch, view):
    set_up(monkeypatch, model=str(hostile), store=str(hostile / "![x](y).db"), dtype="float32", device="cpu")
    messages, parse = [], local_script_runner.parse_tree_from_messages
    monkeypatch.setattr(
        local_script_runner, "parse_tree_from_messages", lambda sent: messages.extend(sent) or parse(sent)
    )
    for parameters in VIEWS[view]:
        page = visit(view, **parameters)
        page.run()
        assert not page.exception
    read = [row for message in messages for row in texts(message.delta)]
    assert not {row for row in read if LEAK[:5] in row[1]}
    assert any(markdown.plain(LEAK[:5]) in text for _, text in read)


def test_tokens_of_one_character_stand_together():
    """Bytes of an emoji, its joiners and skin tones, a letter and its marks; the value is the largest, at its token."""
    family = ["a", "", "", "\U0001f468", "\u200d", "", "\U0001f469", "\U0001f3fd", " b", "\u05d1", "\u05bc", ""]
    assert characters(family) == [[0], [1, 2, 3, 4, 5, 6, 7], [8], [9, 10], [11]]
    html = heatmap(["x", "", "\U0001f43b"], [0.25, -0.5, 0.125])
    assert re.findall(r'title="([^"]*)" style="[^"]*">([^<]*)<', html) == [
        ("0: +0.2500", "x"),
        ("1: -0.5000", "\U0001f43b"),
    ]
    assert "\ufffd" not in heatmap(["\ufffd"], [1.0])
