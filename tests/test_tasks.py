"""Models that are not causal: masked ones, classifiers of texts, tokens and images, encoder-decoders."""

import io
import json

import pytest
import torch
import transformers
from configurations import others
from conftest import IDS, LLAMA, Double, Letters
from few import few_of, third_of
from rich.console import Console

from benchmarks.baselines import AtMan
from icebear import (
    CP_LRP,
    PA_LRP,
    Edit,
    Model,
    Neuron,
    annotate,
    attribute,
    build_index,
    open_store,
    project,
    read_corpus,
    steer,
)
from icebear.actmax.index.neuron_vectors import gated
from icebear.app.cli.tables.explanations import relevance_report
from icebear.app.cli.tables.steering import comparison_table
from icebear.concepts.nodes.random_controls import token_removal_control
from icebear.concepts.passes.sites import hooks
from icebear.concepts.selftest import selftest
from icebear.concepts.vocabulary.weight_rows import w_in_rows, w_out_rows
from icebear.errors import InputError, ModelError, UnknownName
from icebear.evaluation.baselines import AttentionRollout, Occlusion
from icebear.models.objective import objective_of
from icebear.steering.comparison import compare
from icebear.steering.outcome import answer_outcomes

NAMES = {"id2label": {0: "none", 1: "ice", 2: "bear"}, "label2id": {"none": 0, "ice": 1, "bear": 2}}
CONFIGS = {
    **others(),
    "llama, sequence": ("AutoModelForSequenceClassification", transformers.LlamaConfig(**LLAMA.to_dict() | NAMES)),
}
MASK = 49
BIASES = ("bias", "_token", "_tokens", "class_embedding", "token_type_embeddings.weight")
CASES = [(name, kind) for name in CONFIGS for kind in ("eager", "sdpa")]
SITES = ("ffn", "attn", "q", "k", "v")
READERS = ["bert", "distilbert", "bert, sequence", "distilbert, token", "t5", "t5, relu"]


class Tokens(Letters):
    """Letters, in [CLS] ... [SEP] (47 and 48), with a mask that is written as ~."""

    mask_token_id, all_special_ids, pad_token_id, eos_token_id = MASK, (47, 48), 0, None

    def __call__(self, text, add_special_tokens=True):
        ids = [MASK if letter == "~" else ord(letter) % 47 for letter in text][:60]
        return {"input_ids": [47, *ids, 48] if add_special_tokens else ids}

    def decode(self, ids):
        return "".join("~" if i == MASK else "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[i] for i in ids)

    def batch_decode(self, rows, skip_special_tokens=True):
        return [self.decode(row) for row in rows.tolist()]


def make(name, kind="eager", biases=True, dtype=torch.float64):
    auto, config = CONFIGS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, auto)
    create = cls.from_config if auto.startswith("Auto") else cls._from_config
    net = create(config, attn_implementation=kind).to(dtype)
    with torch.no_grad():
        for path, parameter in net.named_parameters():
            parameter.normal_(0, 0.4)
            if not biases and path.endswith(BIASES):
                parameter.zero_()
    return Model(net, Tokens(), name)


def prompt(model, seed=0):
    if model.task.name == "image":
        size = (3, 16, 16 if model.name in ("clip", "siglip") else 24)
        return torch.randn(size, dtype=model.dtype, generator=torch.Generator().manual_seed(seed))
    ids = IDS if seed == 0 else IDS[: 3 + seed]
    return [*ids[:2], MASK, *ids[2:]] if model.task.name == "masked" else ids


def logits(model, *prompts):
    with Double(), torch.no_grad():
        batch = model.read([*prompts]) if model.task.name == "seq2seq" else model.encode([*prompts])
        if model.task.name == "seq2seq":
            batch = objective_of(model, [*prompts]).batch
        return model.net(**model.inputs(batch)).logits


@pytest.mark.parametrize("name", READERS)
def test_the_control_of_tokens_removes_them_in_every_model_that_reads_text(name):
    model = make(name)
    with Double():
        result = attribute(model, prompt(model), sites=())
        output = token_removal_control(model, result, k=1)
        occluded = attribute(model, prompt(model), result.target.id, method=Occlusion(), sites=()).tokens
    free = [place for place in range(len(occluded)) if place not in result.prompt.sinks]
    first = max(free, key=lambda place: result.tokens[place])
    assert output.before - output.after == pytest.approx(occluded[first].item(), abs=1e-5)
    others = [output.before - number for number in output.drawn]
    assert others == pytest.approx([occluded[place].item() for place in free if place != first], abs=1e-5)


@pytest.mark.parametrize(("name", "kind"), third_of(CASES))
def test_the_forward_pass_is_the_models_own_and_cp_lrp_conserves(name, kind):
    model = make(name, kind, biases=False)
    own = logits(model, prompt(model))
    with Double():
        result = attribute(model, prompt(model), method=CP_LRP, sites=model.sites)
    here = (
        own[0]
        if own.dim() == 2
        else own[0, result.predicted_at - (result.prompt.encoder_length if model.task.name == "seq2seq" else 0)]
    )
    assert result.target.logit == pytest.approx(here[result.target.id].item(), rel=1e-6)
    conserved = result.conservation()
    assert abs(conserved.remainder) < 1e-9
    assert conserved.biases == pytest.approx(0, abs=1e-9)
    assert conserved.softmax == 0
    # A bias on scores, and a rotation of them, gets nothing in CP-LRP.
    assert (abs(conserved.positions) > 1e-4) == (name != "llama, sequence" and not name.startswith("t5"))
    assert result.tokens.sum().item() + conserved.positions == pytest.approx(conserved.target, rel=1e-6)


@pytest.mark.parametrize("name", third_of(CONFIGS))
def test_eager_equals_sdpa(name):
    one, other = (make(name, kind) for kind in ("eager", "sdpa"))
    with Double():
        a, b = (attribute(model, prompt(model), method=PA_LRP, sites=model.sites) for model in (one, other))
    assert torch.allclose(a.tokens, b.tokens, rtol=1e-8, atol=1e-11)
    for site in one.sites:
        assert torch.allclose(a.of(site), b.of(site), rtol=1e-7, atol=1e-10), site
    assert torch.allclose(a.positions, b.positions, rtol=1e-7, atol=1e-10)
    assert a.combined("signed").sum().item() == pytest.approx(a.tokens.sum().item() + a.positions.sum().item())


@pytest.mark.parametrize("name", third_of(CONFIGS))
def test_batch_equals_single_and_everything_is_undone(name):
    model = make(name, "sdpa")

    def state():
        return [
            (path, set(m.__dict__), set(m._parameters), len(m._forward_hooks), len(m._forward_pre_hooks))
            for path, m in model.net.named_modules()
        ]

    before = state()
    prompts = [prompt(model, seed) for seed in range(3)]
    options = {"prefix": ["", "ice", "be"]} if model.task.name == "seq2seq" else {}
    with Double():
        together = attribute(model, prompts, method=PA_LRP, sites=model.sites, **options)
        for row, result in enumerate(together):
            own = {key: value[row] for key, value in options.items()}
            alone = attribute(model, prompts[row], method=PA_LRP, sites=model.sites, **own)
            assert torch.allclose(alone.tokens, result.tokens, rtol=1e-6, atol=1e-9)
            assert torch.allclose(alone.positions, result.positions, rtol=1e-6, atol=1e-9)
            assert alone.prompt.ids == result.prompt.ids
            assert alone.prompt.sinks == result.prompt.sinks
            for site in model.sites:
                assert torch.allclose(alone.of(site), result.of(site), rtol=1e-6, atol=1e-9), site
            assert result.conservation().remainder == pytest.approx(0, abs=1e-9)
    assert before == state()


@pytest.mark.parametrize("padding", [0, 2, None, -1])
def test_a_batch_of_a_decoder_classifier_equals_its_singles(padding):
    """Also where a prompt ends in what others are padded with: the label is read before it."""
    model = make("llama, sequence")
    model.net.config.pad_token_id = padding
    prompts = [[5, 9, 2], [4, 0], [3, 2, 2, 0, 0], IDS]
    with Double():
        together = attribute(model, prompts, "ice")
        for ids, result in zip(prompts, together, strict=True):
            alone = attribute(model, ids, "ice")
            own = model.net(torch.tensor([ids])).logits[0]
            read_at = max(place for place, token in enumerate(ids) if token != padding)
            assert alone.target.logit == pytest.approx(own[1].item(), rel=1e-6)
            assert result.target.logit == pytest.approx(own[1].item(), rel=1e-6)
            assert torch.allclose(alone.tokens, result.tokens, rtol=1e-6, atol=1e-9)
            assert torch.allclose(alone.ffn, result.ffn, rtol=1e-6, atol=1e-9)
            assert result.top(3) == result.top(3, position=read_at)
    rolled = attribute(model, prompts, "ice", method=AttentionRollout())
    assert all(result.tokens.sum() > 0 for result in rolled)
    assert model.net.config.pad_token_id == padding


@pytest.mark.parametrize("name", third_of(CONFIGS))
def test_checkpointing_changes_nothing(name):
    model = make(name, "sdpa", dtype=torch.float32)
    plain, selected = (attribute(model, prompt(model), method=PA_LRP, checkpoint=flag) for flag in (False, True))
    assert torch.allclose(plain.tokens, selected.tokens, atol=1e-6)
    assert torch.allclose(plain.positions, selected.positions, atol=1e-6)
    assert torch.allclose(plain.ffn, selected.ffn, atol=1e-6)


@pytest.mark.parametrize("name", third_of(CONFIGS))
def test_a_w2_row_is_what_a_neuron_writes(name):
    """Adding 1 to a neuron moves what its map gives by its row (before a norm that may follow)."""
    model = make(name)
    for layer in {0, model.layers - 1}:
        outputs = []
        hook = model.site_module("ffn", layer).register_forward_hook(lambda m, a, y: outputs.append(y[0].double()))
        for edit in ([], [f"L{layer}.ffn.7*1"], [f"L{layer}.ffn.7+1"]):
            with steer(model, edit):
                logits(model, prompt(model))
        hook.remove()
        row = w_out_rows(model, "ffn", layer)[7].double()
        assert torch.equal(outputs[0], outputs[1])
        assert torch.allclose(outputs[2] - outputs[0], row.expand_as(outputs[0]), atol=1e-5)
        assert w_in_rows(model, "ffn", layer).shape == w_out_rows(model, "ffn", layer).shape
    words = project(model, Neuron(model.layers - 1, "ffn", 7), 3)
    assert words.promoted[0].z >= words.promoted[1].z
    if model.task.name == "image":
        assert {word.text for word in words.promoted} == {"none", "ice", "bear"}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_self_test_finds_nothing_wrong(name, monkeypatch):
    if name != "bert":  # what it costs is nothing of a task
        monkeypatch.setattr("icebear.concepts.selftest.seconds", lambda work, device: 1.0)
    model = make(name)
    with Double():
        result = selftest(model, prompt(model))
    assert result.verdict == "fine"
    assert result.cost > 0
    assert set(result.sites) == set(model.sites)
    assert ("cross" in result.sites) == (model.task.name == "seq2seq")


@pytest.mark.parametrize("name", third_of(READERS))
def test_ranking_scan_cards_and_annotations(name, tmp_path):
    model = make(name, dtype=torch.float32)
    text = "the ice ~ bear" if model.task.name == "masked" else "the ice bear"
    best = attribute(model, text, sites=model.sites).top(3)
    assert best[0].relevance >= best[1].relevance
    (tmp_path / "c.txt").write_text("The ice bear.\nA camel eats.\nWarm sand.\nNorth of it.")
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "c.txt")), store, k=2, sites=model.sites)
        for site in model.sites:
            neuron = Neuron(model.layers - 1, site, 3)
            for polarity, sign in (("+", 1), ("-", -1)):
                for example in store.examples(neuron, polarity):
                    seen = read(model, example.sentence.text, neuron)
                    assert seen[example.token].item() == pytest.approx(example.activation, rel=1e-3, abs=1e-5)
                    counted = sign * seen[1:-1]  # [CLS] and [SEP] do not count
                    assert counted.max().item() == pytest.approx(sign * example.activation, rel=1e-3, abs=1e-5)
        neuron = Neuron(model.layers - 1, "ffn", 3)
        assert annotate(model, store, [neuron], k=2) > 0
        for example in store.examples(neuron, "+", method="attnlrp"):
            assert len(example.relevance) == len(example.sentence.tokens)


def test_which_ffns_are_gated():
    assert [name for name in READERS if gated(make(name))] == ["t5"]


def read(model, text, neuron):
    seen = []
    batch = model.read([model.token_ids(text)])
    with torch.no_grad(), hooks(model, [(neuron.site, neuron.layer)], lambda site, layer, x: seen.append(x[0])):
        model.net(**model.inputs(batch))
    return seen[-1][:, neuron.index]


def test_edits_reach_the_encoder_and_the_decoder_where_they_say():
    model = make("t5", dtype=torch.float32)
    plain = model.generate("the ice bear", max_new_tokens=6)
    with steer(model, ["L0.ffn.3*1", "L3.ffn.3*1", "L3.cross.2*1"]):
        assert model.generate("the ice bear", max_new_tokens=6) == plain
    seen = {}

    def visit(site, layer, x):
        seen.setdefault((site, layer), []).append(x.detach()[0, :, 3].tolist())

    edits = ["L0.ffn.3=7@last", "L3.ffn.3=5@prompt", "L3.attn.3=4@generated", "L2.cross.3=3@step:1"]
    places = [("ffn", 0), ("ffn", 3), ("attn", 3), ("cross", 2)]
    with steer(model, edits), hooks(model, places, visit):
        model.generate("the ice bear", max_new_tokens=4, use_cache=True)
    encoder = seen["ffn", 0]
    assert len(encoder) == 1  # the encoder reads once
    assert encoder[0][-1] == 7
    assert 7 not in encoder[0][:-1]
    assert [step[-1] == 5 for step in seen["ffn", 3]] == [True, False, False, False]  # the start token is the prompt
    assert [step[-1] == 4 for step in seen["attn", 3]] == [False, True, True, True]
    assert [step[-1] == 3 for step in seen["cross", 2]] == [False, True, False, False]
    with pytest.raises(InputError, match=r"L0\.cross\.3"):
        Neuron.parse("L0.cross.3") and model.check(Neuron(0, "cross", 3))


def test_steering_moves_what_a_masked_model_predicts():
    model = make("bert", dtype=torch.float32)
    before = model.predict("the ~ bear", 3)
    row = w_out_rows(model, "ffn", 1)[7]
    with steer(model, ["L1.ffn.7+50"]):
        after = model.predict("the ~ bear", 3)
    assert before[0].logit != after[0].logit
    assert row.abs().max() > 0


# --- what is asked of each kind ---


def test_the_decoder_explains_its_next_token_after_a_prefix_and_a_whole_text():
    model = make("t5")
    with Double():
        result = attribute(model, IDS, target_text="abc", sites=("cross",))
        steps = [attribute(model, IDS, target="abc"[n], prefix="abc"[:n], sites=()) for n in range(3)]
    assert result.target_text == "abc" or len(result.prompt.ids) == len(IDS) + 3
    assert result.prompt.encoder_length == len(IDS)
    assert result.conservation().target == pytest.approx(sum(s.conservation().target for s in steps), rel=1e-9)
    assert steps[2].predicted_at == len(IDS) + 2
    assert result.top(3, "cross", position="last")[0].neuron.layer >= 2


def test_masks_labels_and_places():
    masked, tagged, sorted_ = make("bert"), make("bert, token"), make("bert, sequence")
    with Double():
        two = attribute(masked, [7, MASK, 3, MASK], sites=())
        assert two.target is None  # one token for each mask
        assert two.predicted_at == 1
        word = attribute(tagged, IDS, "ice", contrast="bear", position=3, sites=())
        assert (word.target.text, word.contrast.text, word.predicted_at) == ("ice", "bear", 3)
        assert attribute(sorted_, IDS, "bear", sites=()).target.id == 2
    with pytest.raises(InputError):
        attribute(masked, IDS)
    with pytest.raises(UnknownName, match="'beer'"):
        attribute(sorted_, IDS, "beer")
    with pytest.raises(InputError, match="target_text"):
        attribute(sorted_, IDS, target_text="ice")
    with pytest.raises(InputError):
        attribute(sorted_, IDS, position=3)
    with pytest.raises(InputError):
        attribute(masked, [7, MASK], prefix="ice")
    with pytest.raises(InputError, match="99"):
        attribute(tagged, IDS, position=99)
    with pytest.raises(InputError):
        masked.generate("ice")
    with pytest.raises(InputError, match="'cross'"):
        attribute(masked, [7, MASK], sites=("cross",))


def labelled(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(**CONFIGS["bert, sequence"][1].to_dict() | options)
    return Model(transformers.BertForSequenceClassification(config), Tokens(), "labelled")


def test_labels_that_do_not_exclude_each_other_have_their_own_probabilities():
    model = labelled(problem_type="multi_label_classification")
    logits = model.net(torch.tensor([IDS])).logits[0]
    result = model.predict(IDS)
    assert {token.id: token.probability for token in result} == pytest.approx(
        dict(enumerate(logits.sigmoid().tolist()))
    )
    assert attribute(model, IDS, "ice").target.probability == pytest.approx(logits[1].sigmoid().item())
    assert model.probability(IDS, "bear") == pytest.approx(logits[2].sigmoid().item())


@pytest.mark.parametrize("options", [{"id2label": {0: "reward"}}, {"problem_type": "regression"}])
def test_a_predicted_number_has_no_probability_anywhere(options):
    model = labelled(**options)
    model.net.classifier.bias.data += 3
    result = attribute(model, IDS)
    number = result.target.logit
    assert json.loads(result.to_json())["target"]["probability"] is None
    console = Console(file=io.StringIO(), width=100)
    console.print(relevance_report(result))
    steered = compare(model, "the ice bear", [Edit.parse("L1.ffn.3*0")], 5)
    console.print(comparison_table(steered))
    shown = console.file.getvalue()
    assert f"{number:+.2f}" in shown.splitlines()[0]
    assert "1.00" not in shown.splitlines()[0]
    assert f"{number:+.2f}" in result.to_html()
    control = next(answer_outcomes(model, "the ice bear", [Edit.parse("L1.ffn.3*0")])).control
    assert "logit" in control.number
    assert [control.before, control.after] == [steered.plain.next[0].logit, steered.steered.next[0].logit]
    assert abs(result.conservation().remainder) < 1e-4 * abs(number)
    assert result.top(1)
    with pytest.raises(InputError):
        attribute(model, IDS, method=AtMan())


def test_a_model_that_predicts_nothing_is_refused():
    net = transformers.BertModel(CONFIGS["bert"][1])
    with pytest.raises(ModelError, match="BertModel"):
        attribute(Model(net), IDS)


BERT = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
ENCODERS = {
    "deberta": RELATIVE,
    "deberta-v2": {**RELATIVE, "position_buckets": 8, "share_att_key": True, "conv_kernel_size": 3, "conv_act": "gelu"},
    "mpnet": {},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": MASK},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 4},
    "eurobert": {"num_key_value_heads": 2},
    "nomic_bert": {},
}


@pytest.mark.parametrize("head", few_of(["MaskedLM", "SequenceClassification", "TokenClassification"], "MaskedLM"))
@pytest.mark.parametrize("kind", ENCODERS)
def test_more_encoders_have_neurons(kind, head):
    """Gradient x input of a neuron is the slope of edits, an edit to its own value changes nothing, silence is zero in
    the weights, and relevance sums."""
    special = {"pad_token_id": 0, "bos_token_id": 47, "eos_token_id": 48, "cls_token_id": 47, "sep_token_id": 48}
    names = {} if head == "MaskedLM" else NAMES
    config = transformers.CONFIG_MAPPING[kind](
        **{**BERT, **special, **ENCODERS[kind], **names}, max_position_embeddings=64
    )
    torch.manual_seed(0)
    net = getattr(transformers, f"AutoModelFor{head}").from_config(config).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    model, text = Model(net, Tokens(), kind), "ice ~ bear"
    at = {"position": 3} if head == "TokenClassification" else {}
    with Double():
        law = {law.name: law for law in selftest(model, text).laws}
        result = attribute(model, text, 1, method="gxi", number="logit", sites=model.sites, **at)
        plain = model.next_logits(text, **at)
        neuron = Neuron(1, "ffn", 3)
        value = result.activation("ffn")[1, 4, 3].item()
        moved = []
        for added in (0, 1e-4, -1e-4):
            with steer(model, Edit(neuron, "set", value + added, where="position:4")):
                moved.append(model.next_logits(text, **at))
    assert {"ffn", "attn", "v"} <= {*model.sites}
    assert [name for name, found in law.items() if found.holds is False] == []
    assert torch.allclose(moved[0], plain, atol=1e-5)
    slope = (moved[1] - moved[2])[1].item() / 2e-4
    assert result.of("ffn")[1, 4, 3].item() == pytest.approx(slope * value, rel=1e-2, abs=1e-4)
