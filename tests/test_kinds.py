"""Kinds of models that transformers ships: the self-test, and what loading, limits, batches and passes depend on."""

import copy

import pytest
import torch
import transformers
from conftest import LLAMA, Letters, random_model
from pages import script
from transformers import CONFIG_MAPPING

from icebear import Model, attribute, load_model, steer
from icebear.concepts import selftest as tested
from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.selftest import selftest
from icebear.errors import InputError, ModelError
from icebear.models.tasks import task_of

IDS = [5, 9, 23, 42, 7, 31, 12]
OTHER = [*IDS[:3], 33, *IDS[4:]]
SMALL = {
    **{"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    "max_position_embeddings": 66,
}
BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None},
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
CAUSAL, SEQ2SEQ, MASKED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
LABELS = "AutoModelForSequenceClassification"


def random_net(config, auto=CAUSAL):
    torch.manual_seed(0)
    net = getattr(transformers, auto).from_config(config).eval()
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1 and weight.requires_grad:  # not fixed positions
                weight.normal_(0, 0.2)
    return net


def make(kind, auto=CAUSAL, **sizes):
    return Model(random_net(CONFIG_MAPPING[kind](**{**SMALL, **sizes}), auto), name=kind)


def same(one, other):
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


# --- the self-test ---------------------------------------------------------------------------------------

KNOWN = [("llama", CAUSAL), ("xglm", CAUSAL), ("falcon_h1", CAUSAL), ("roberta", MASKED), ("t5", SEQ2SEQ)]


@pytest.mark.parametrize(("kind", "auto"), KNOWN)
def test_the_laws_hold(kind, auto):
    """More kinds are in tests/test_families.py and tests/test_tasks.py."""
    row = script("families").row_of(kind, auto)
    assert row.laws == "all"
    assert row.counterfactual.startswith("yes")
    assert row.neurons


MORE = [(kind, SEQ2SEQ) for kind in "umt5 longt5 mbart m2m_100".split()]


@pytest.mark.parametrize(("kind", "auto"), [*MORE, ("granitemoehybrid", CAUSAL)])
def test_these_kinds_have_neurons(kind, auto):
    row = script("families").row_of(kind, auto)
    assert (row.laws, row.counterfactual[:3]) == ("all", "yes")
    assert row.neurons.startswith("ffn, attn")
    assert row.neurons.endswith("cross" if auto == SEQ2SEQ else "mixer")


def test_experts_that_are_modules_have_tokens_neurons_and_a_refusal():
    row = script("families").row_of("switch_transformers", SEQ2SEQ)
    assert row.laws == "all"
    assert "chosen rows lose their partners" in row.counterfactual
    assert row.neurons.startswith("ffn, attn")


@pytest.mark.parametrize(
    ("kind", "auto", "broken", "law"),
    [
        ("gpt2", CAUSAL, (Model, "context_length", 200), "context"),
        ("mobilebert", MASKED, (Model, "padding_changes_results", lambda *_: False), "batch"),
        ("llama", CAUSAL, (Values, "values", lambda self, row, x: x[row] + 1), "activations"),
        ("llama", CAUSAL, (tested, "_special", lambda model: {*IDS, 50}), "counterfactual"),
    ],
)
def test_a_law_that_does_not_hold_is_named(kind, auto, broken, law, monkeypatch):
    model = script("families").small_model(kind, auto)
    monkeypatch.setattr(*broken)
    holds = {one.name: one.holds for one in selftest(model, [*IDS, 50]).laws}
    assert holds.pop(law) is False
    assert law in selftest(model, [*IDS, 50]).verdict


# --- loading ---------------------------------------------------------------------------------------------

TEXT = {key: value for key, value in SMALL.items() if key != "decoder_start_token_id"}
TEXT |= {"num_key_value_heads": 2}
EYE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
EYE |= {"image_size": 8, "patch_size": 4}
QWEN_EYE = {"depth": 1, "num_heads": 2, "patch_size": 2}
WIDE = {**QWEN_EYE, "hidden_size": 8, "out_hidden_size": 32, "intermediate_size": 8}
TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN_IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
IMAGE_TEXT = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": EYE | {"model_type": "clip_vision_model"},
    },
    "qwen2_vl": {
        "text_config": TEXT | TURNS,
        "vision_config": {**QWEN_EYE, "embed_dim": 8, "hidden_size": 32},
        **QWEN_IDS,
    },
    "qwen2_5_vl": {"text_config": TEXT | TURNS, "vision_config": WIDE, **QWEN_IDS},
    "qwen3_vl": {
        "text_config": {**TEXT, **TURNS, "head_dim": 8},
        "vision_config": {**WIDE, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN_IDS,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": EYE,
        "image_token_id": 60,
        "scale_factor": 1,
    },
}


@pytest.mark.parametrize("kind", IMAGE_TEXT)
def test_a_folder_of_images_and_text_loads_its_text_part(kind, tmp_path):
    net = random_net(CONFIG_MAPPING[kind](**IMAGE_TEXT[kind]), "AutoModelForImageTextToText")
    net.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    with torch.no_grad():
        assert same(model.next_logits(IDS), net(torch.tensor([IDS])).logits[0, -1])
    assert model.sites == ("ffn", "attn", "q", "k", "v")
    assert selftest(model, IDS).verdict == "fine"


def test_a_class_is_looked_up_before_its_name_is_read(tmp_path):
    net = random_net(CONFIG_MAPPING["marian"](**{**SMALL, **BART}), SEQ2SEQ)
    net.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert (type(model.net).__name__, model.task.name) == ("MarianMTModel", "seq2seq")
    with torch.no_grad():
        own = net(torch.tensor([IDS]), decoder_input_ids=torch.tensor([[2]])).logits[0, -1]
    assert same(model.next_logits(IDS), own)
    assert task_of("BertGenerationDecoder", False).name == "causal"
    with pytest.raises(ModelError, match="BertModel"):
        Model(random_net(CONFIG_MAPPING["bert"](**SMALL), "AutoModel"))


@pytest.mark.parametrize(
    ("kind", "auto"), [("xlnet", CAUSAL), ("canine", LABELS), ("ibert", MASKED), ("fsmt", SEQ2SEQ)]
)
def test_what_does_not_embed_tokens_as_others_is_refused_by_name(kind, auto):
    sizes = {"hidden_size": 32, "num_attention_heads": 4} if kind == "canine" else {}
    config = (
        CONFIG_MAPPING[kind](**sizes) if kind == "canine" else script("families").small(kind, script("families").SMALL)
    )
    with pytest.raises(ModelError):
        attribute(Model(random_net(config, auto), script("families").Ids()), IDS, sites=())


# --- the longest prompt ----------------------------------------------------------------------------------

TABLES = "roberta camembert xlm-roberta roberta-prelayernorm data2vec-text xlm-roberta-xl mpnet esm bert".split()


@pytest.mark.parametrize("kind", TABLES)
def test_as_many_tokens_run_as_the_table_of_positions_has_rows(kind):
    own = {"pad_token_id": 0 if kind == "bert" else 1, "position_embedding_type": "absolute"}
    own |= {"token_dropout": False, "mask_token_id": 3} if kind == "esm" else {}
    model = make(kind, MASKED, **own)
    longest = [7] * model.context_length
    with torch.no_grad():
        assert model.final_stream(model.read([longest])).isfinite().all()
        with pytest.raises((IndexError, RuntimeError)):
            model.net(torch.tensor([[*longest, 7]]))
    with pytest.raises(InputError, match="1 tokens"):
        model.ids([*longest, 7])


# --- batches ---------------------------------------------------------------------------------------------

LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}


def test_a_short_row_beside_a_long_one_keeps_its_rotation():
    """transformers takes longrope's factors for the whole batch by its longest row."""
    rope = {**LONG_ROPE, "original_max_position_embeddings": 12}
    model = make("phi3", num_key_value_heads=2, original_max_position_embeddings=12, rope_parameters=rope)
    rows = [IDS, [7] * 20]
    with torch.no_grad():
        alone, beside = (model.logits(model.read_ids(part), [6])[0] for part in (rows[:1], rows))
        assert not same(alone, beside)
    assert same(attribute(model, rows, 5, sites=())[0].tokens, attribute(model, IDS, 5, sites=()).tokens)


@pytest.mark.parametrize("kind", ["mobilebert", "convbert", "nystromformer", "bert"])
def test_rows_run_alone_where_padding_counts(kind):
    model = script("families").small_model(kind, MASKED)
    rows = [IDS, IDS[2:5]]
    alone = attribute(model, rows[1], 5, sites=())
    assert same(attribute(model, rows, 5, sites=())[1].tokens, alone.tokens)
    assert list(model.batches([7, 3], 8)) == ([[0, 1]] if kind == "bert" else [[0], [1]])
    assert list(model.batches([3, 3], 8)) == [[0, 1]]


@pytest.mark.parametrize("kind", ["bart", "mbart", "pegasus", "blenderbot"])
def test_an_encoder_is_padded_on_the_right(kind):
    model = make(kind, SEQ2SEQ, **BART)
    rows = [IDS[:3], [*IDS, *IDS]]
    assert list(model.batches([3, 14], 8, model.task.generation_padding)) == [[0, 1]]
    assert model.continuations(rows, 6)[0] == model.continuations(rows[:1], 6)[0]


# --- labels behind a decoder -----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "sizes"), [("bart", BART), ("mbart", BART), ("t5", T5), ("umt5", T5)])
def test_a_label_behind_a_decoder(kind, sizes):
    model = make(kind, LABELS, **sizes, num_labels=3)
    prompt = [*IDS, 2]
    with torch.no_grad():
        assert same(model.next_logits(prompt), model.net(torch.tensor([prompt])).logits[0])  # which shifts by itself
    relevance = attribute(model, prompt, 1, 0, counterfactual=[*OTHER, 2], sites=model.sites)
    assert abs(relevance.conservation().remainder) < 1e-5
    assert len(relevance.tokens) == 2 * len(prompt)
    pair = [5, 2, 9, 2]  # with another number of end tokens
    together = attribute(model, [prompt, pair], 1, sites=())
    assert same(together[1].tokens, attribute(model, pair, 1, sites=()).tokens)
    with pytest.raises(InputError, match="end token"):
        attribute(model, IDS, sites=())


def test_a_classifier_that_would_cut_its_logits_reads_all_of_them():
    model = make("biogpt", LABELS, num_labels=3)
    with torch.no_grad():
        assert same(model.next_logits(IDS), model.net(torch.tensor([IDS])).logits[0])


def test_a_decoder_starts_as_transformers_starts_it():
    """T5Gemma's configuration has no start; its generation's has, or its decoder's beginning of a text."""
    part = {**TEXT, "head_dim": 8, "model_type": "t5_gemma_module"}
    config = CONFIG_MAPPING["t5gemma"](encoder=part, decoder=part, vocab_size=64)
    model = Model(random_net(config, SEQ2SEQ), name="t5gemma")
    with torch.no_grad():
        own = model.net(torch.tensor([IDS]), decoder_input_ids=torch.tensor([[1]])).logits[0, -1]
    assert same(model.next_logits(IDS), own)


# --- what a caller did to the network --------------------------------------------------------------------


def measured(model):
    result = attribute(model, IDS, 5, method="cp-lrp", number="logit")
    with steer(model, ["L1.ffn.3=20"]):
        return result.tokens, model.next_logits(IDS)


COMPILED = {
    "in place": lambda net: net.compile(backend="eager"),
    "layers in place": lambda net: [layer.compile(backend="eager") for layer in net.model.layers],
    "wrapped": lambda net: torch.compile(net, backend="eager"),
}


@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_network_is_explained_and_steered_as_it_is_written(how):
    right = measured(random_model(LLAMA, dtype=torch.float32))
    net = random_model(LLAMA, dtype=torch.float32).net
    wrapped = COMPILED[how](net)
    model = Model(wrapped if how == "wrapped" else net)
    for _ in range(2):
        assert all(map(torch.equal, measured(model), right))


def test_dropout_does_not_act_on_a_network_in_training():
    config = copy.deepcopy(LLAMA)
    config.attention_dropout = 0.5
    model = random_model(config, dtype=torch.float32)
    right = measured(model)
    model.net.train()
    assert all(map(torch.equal, measured(model), right))
    assert all(module.training for module in model.net.modules())
    model.tokenizer = Letters()
    assert model.generate("ice", 4) == model.generate("ice", 4)
