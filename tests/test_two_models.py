"""What fine-tuning changed: causes add up to the difference, are nothing where nothing differs, and can be undone."""

import copy
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from configurations import DIFFERENT, dense, mixtures
from conftest import IDS, LLAMA, Double, Letters, random_model
from few import few_of, third_of
from test_differences import FAMILIES, OTHER, pair_of
from test_loading import words
from test_reference import IN_FLOAT32
from test_tasks import make
from transformers import LlamaConfig

from icebear import ATTNLRP, Model, Neuron, attribute, load_model
from icebear.app.cli.main import main
from icebear.concepts.answers.restoring import Restoring
from icebear.concepts.nodes.controls import ablation
from icebear.concepts.results.diff import Diff, ranked_changes
from icebear.concepts.weights.changed_weights import ModelPair, neuron_similarity
from icebear.errors import InputError, MissingRule
from icebear.lrp.model_pairs import OuterProduct

PLANTED = Neuron(2, "ffn", 7)
LEARNED = ("apertus",)
"""Families whose activation function has weights."""
EACH = {name: kind for name, kind in reversed(FAMILIES) if name in DIFFERENT and name not in LEARNED}
"""Families with difference rules, with one kind of attention."""


def edited(model, change):
    """A copy whose weights were changed."""
    net = copy.deepcopy(model.net)
    with torch.no_grad():
        change(net)
    return Model(net, model.tokenizer, f"{model.name}, edited", model.processor)


def turned_of(net):
    net.model.layers[2].mlp.down_proj.weight[:, 7] *= -3


def trained(net):
    torch.manual_seed(1)
    for weight in net.parameters():
        weight += 0.05 * torch.randn_like(weight)


def number(model, ids, target, contrast, position=None):
    return attribute(model, ids, target, contrast, method="attnlrp", sites=(), position=position).conservation().target


def adds_up(model, one, other, position=None, close=1e-9):
    """Weights alone, and weights and prompt at once."""
    base = edited(model, trained)
    with Double():
        here = number(model, one, 1, 2, position)
        for counterfactual in (None, other):
            read = one if counterfactual is None else counterfactual
            options = {"counterfactual": counterfactual, "position": position, "sites": model.sites}
            diff = attribute(model, one, 1, 2, base_model=base, **options)
            assert diff.total == pytest.approx(here - number(base, read, 1, 2, position), abs=close)
            assert diff.caused_total + diff.conservation().tokens == pytest.approx(diff.total, abs=1e-6)
            assert (diff.caused_total == pytest.approx(diff.total, abs=1e-6)) is (counterfactual is None)
            assert sum(diff.by_layer().values()) == pytest.approx(diff.caused_total)
            assert sum(diff.by_kind().values()) == pytest.approx(diff.caused_total)
            assert {change.kind for change in diff.top_changes(10**6)} == set(diff.by_kind())


@pytest.mark.parametrize("name", third_of(EACH, "phi3", "gemma3"))
def test_causes_add_up(name):
    close = 1e-6 if name in IN_FLOAT32 else 1e-9
    adds_up(random_model({**dense(), **mixtures()}[name], EACH[name]), IDS, OTHER, close=close)


@pytest.mark.parametrize(
    "name",
    few_of(
        ["bert", "distilbert, sequence", "bert, token", "t5", "t5, relu", "bart", "vit", "dinov2", "clip"],
        *("bert", "t5", "bart", "vit"),
    ),
)
def test_and_in_encoders_encoder_decoders_and_images(name):
    model = make(name, "eager")
    adds_up(model, *pair_of(name), position=2 if model.task.labels_tokens else None)


def test_causes_do_not_depend_on_fused_attention_or_checkpoints():
    changes = []
    for kind, checkpoint in (("eager", False), ("sdpa", False), ("sdpa", True)):
        model = random_model(LLAMA, kind, torch.float32)
        changes.append(attribute(model, IDS, 1, 2, base_model=edited(model, trained), checkpoint=checkpoint).changes)
    for first, *fused in zip(*changes, strict=True):
        assert first.caused.any() or first.module == "model.embed_tokens"
        for other in fused:
            torch.testing.assert_close(first.caused, other.caused, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_exchanging_the_models_changes_the_sign_and_nothing_else(name):
    model = random_model({**dense(), **mixtures()}[name], "eager")
    other = edited(model, trained)
    with Double():
        one = attribute(model, IDS, 1, 2, base_model=other)
        two = attribute(other, IDS, 1, 2, base_model=model)
    for a, b in zip(one.changes, two.changes, strict=True):
        torch.testing.assert_close(a.caused, -b.caused)
        torch.testing.assert_close(a.size, b.size)


def test_the_midpoint_of_two_factors():
    """By hand: two changed maps in a row, without anything else between them."""
    model = random_model(LLAMA)

    def both(net):
        net.model.norm.weight *= 1.5
        net.lm_head.weight += 0.3 * torch.randn_like(net.lm_head.weight)

    base = edited(model, both)
    with torch.no_grad(), Double():
        ids = torch.tensor([IDS])
        x = model.net.model(ids)[0][0, -1] / model.net.model.norm.weight  # the normalized stream, equal in both
        (g, w), (h, u) = (
            (one.net.model.norm.weight, one.net.lm_head.weight[1] - one.net.lm_head.weight[2]) for one in (model, base)
        )
        diff = attribute(model, IDS, 1, 2, base_model=base)
    causes = diff.by_kind()
    assert causes["norm"] == pytest.approx((((w + u) / 2) * (g - h) * x).sum().item())
    assert causes["unembedding"] == pytest.approx(((w - u) * (g + h) / 2 * x).sum().item())
    rows = {change.index: change.caused for change in diff.top_changes(5, "unembedding")}
    assert set(rows) >= {1, 2}
    assert sum(rows[token] for token in (1, 2)) == pytest.approx(causes["unembedding"])


def test_rows_and_columns_of_an_outer_product():
    """What a linear map adds up without all of its entries is the sum of them."""
    x, g, change = torch.randn(5, 3), torch.randn(5, 4), torch.randn(4, 3)
    entries = change * (g.T @ x)
    product = OuterProduct(x, g, change)
    torch.testing.assert_close(product.along(0), entries.sum(1))
    torch.testing.assert_close(product.along(1), entries.sum(0))
    g[:, 2] = 0  # as of tokens that are not explained
    some = OuterProduct(x, g[:, g[0] != 0], change[g[0] != 0], g[0] != 0)
    torch.testing.assert_close(some.along(0), (change * (g.T @ x)).sum(1))
    torch.testing.assert_close(some.along(1), (change * (g.T @ x)).sum(0))


def test_a_planted_edit_is_the_only_cause(llama):
    """One column of W_out: nothing else caused anything, and the neuron's own activation did not change."""
    base = edited(llama, turned_of)
    diff = attribute(llama, IDS, 1, 2, base_model=base)
    (change,) = diff.top_changes(5)
    assert (change.neuron, change.kind) == (PLANTED, "w_out")
    assert change.caused == pytest.approx(diff.total, abs=1e-5)
    weight = llama.net.model.layers[2].mlp.down_proj.weight[:, 7]
    assert change.size == pytest.approx(4 * weight.norm().item(), rel=1e-5)
    assert all(row.neuron.layer > 2 for row in diff.passed_on(3) if row.relevance)
    assert not diff.tokens.any()
    alike = neuron_similarity(llama, base, PLANTED)
    assert alike == pytest.approx({"reads": 1, "writes": -1})
    assert neuron_similarity(llama, base, Neuron(1, "ffn", 7)) == pytest.approx({"reads": 1, "writes": 1})


def test_a_model_differs_from_itself_in_nothing(llama):
    diff = attribute(llama, IDS, base_model=llama)
    assert isinstance(diff, Diff)
    assert diff.total == diff.caused_total == 0
    assert not diff.top_changes()
    assert not diff.ffn.any()


def test_where_rows_belong():
    """A row of a gate, of W_in, of a query head and of a key-value head; a column of W_out and of a head's output."""
    model = random_model(LLAMA)  # 4 heads and 2 key-value heads of 6, 20 neurons

    def each(net):
        layer = net.model.layers[1]
        layer.mlp.gate_proj.weight[3] += 1
        layer.mlp.up_proj.weight[4] += 1
        layer.mlp.down_proj.weight[:, 5] += 1
        layer.self_attn.q_proj.weight[6 * 2 + 1] += 1
        layer.self_attn.k_proj.weight[6 * 1 + 5] += 1
        layer.self_attn.v_proj.weight[2] += 1
        layer.self_attn.o_proj.weight[:, 6 * 3] += 1

    rows = attribute(model, IDS, 1, 2, base_model=edited(model, each)).top_changes(20)
    assert {(row.kind, row.index) for row in rows} == {
        ("gate", 3), ("w_in", 4), ("w_out", 5), ("q", 2), ("k", 1), ("v", 0), ("o", 3)
    }  # fmt: skip
    assert {str(row.neuron) for row in rows} == {"L1.ffn.3", "L1.ffn.4", "L1.ffn.5", "L1.head.2", "L1.head.3", "None"}


def test_tied_embeddings_are_two_rows():
    model = random_model(LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True}))
    token = IDS[2]

    def change(net):
        net.model.embed_tokens.weight[token] *= 1.5

    with Double():
        diff = attribute(model, IDS, token, 2, base_model=edited(model, change))
    assert {(row.kind, row.index) for row in diff.top_changes()} == {("embedding", token), ("unembedding", token)}
    assert diff.caused_total == pytest.approx(diff.total)


@pytest.mark.release
def test_an_adapter_is_what_its_merged_weights_changed(tmp_path):
    """LoRA is BA with its scale, whether it was merged before or as it was loaded."""
    peft = pytest.importorskip("peft")
    base = random_model(LLAMA, dtype=torch.float32)
    base.net.save_pretrained(tmp_path / "base")
    words("ice", "bear").save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        copy.deepcopy(base.net), peft.LoraConfig(r=2, lora_alpha=8, target_modules=["down_proj"])
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"), device="cpu", dtype="float32")
    merged = Model(adapted.merge_and_unload(), name="merged")
    diffs = [attribute(one, IDS, 1, 2, base_model=base) for one in (loaded, merged)]
    assert {row.kind for row in diffs[0].top_changes(1000)} == {"w_out"}
    for a, b in zip(*(diff.changes for diff in diffs), strict=True):
        torch.testing.assert_close(a.caused, b.caused, rtol=1e-3, atol=1e-4)
    assert diffs[0].caused_total == pytest.approx(diffs[0].total, abs=1e-3)


def test_the_default_contrast_is_the_base_models_answer(llama):
    base = edited(llama, lambda net: net.lm_head.weight.__imul__(-1))
    diff = attribute(llama, IDS, base_model=base)
    answers = [attribute(one, IDS).target.id for one in (llama, base)]
    assert [diff.target.id, diff.contrast.id] == answers
    assert attribute(llama, IDS, base_model=edited(llama, turned_of)).contrast_text == ""  # the same answer


def test_restoring_gives_the_base_models_number_and_is_undone():
    for name in ("llama", "gpt2", "mixtral"):
        model = random_model({**dense(), **mixtures()}[name], "eager", torch.float32)
        base = edited(model, trained)
        pair, before = ModelPair(model, base), copy.deepcopy(model.net.state_dict())
        diff = attribute(model, IDS, 1, 2, base_model=base, sites=())
        rows = [(row.kind, row.module, row.index) for row in diff.top_changes(10**6)]
        with pair.restored(rows):
            assert number(model, IDS, 1, 2) == pytest.approx(number(base, IDS, 1, 2), abs=1e-4)
        assert all(torch.equal(x, before[name]) for name, x in model.net.state_dict().items())
        row = next(row for row in diff.top_changes(10**6, "w_out") if row.layer is not None)
        with pair.restored([(row.kind, row.module, row.index)]):
            differing = sum(int(not torch.equal(x, before[name])) for name, x in model.net.state_dict().items())
        assert differing == 1


def test_a_base_model_of_unrelated_weights_is_warned_of(caplog):
    def slightly(net):
        for weight in net.parameters():
            weight += 0.1 * weight.std(correction=0) * torch.randn_like(weight)

    model = random_model(LLAMA)
    attribute(model, IDS, 1, 2, base_model=edited(model, slightly), sites=())
    assert not caplog.records
    attribute(model, IDS, 1, 2, base_model=random_model(LLAMA, seed=1), sites=())
    assert "unrelated" in caplog.text


def test_a_list_a_phrase_and_patched_activations(llama):
    """Each prompt for itself; a phrase; and what exchanging activations with the base model's does."""
    base = edited(llama, trained)
    many = attribute(llama, [IDS, IDS[:5]], [3, 4], base_model=base)
    for result, ids, target in zip(many, (IDS, IDS[:5]), (3, 4), strict=True):
        alone = attribute(llama, ids, target, base_model=base)
        assert result.total == pytest.approx(alone.total)
    phrase = attribute(llama, IDS, target_text=[(3, 4)], contrast=[(5, 6)], base_model=base)
    assert phrase.caused_total == pytest.approx(phrase.total, abs=1e-4)
    assert ablation(llama, many[0], 10**6, by="absolute").necessity > 0
    several = attribute(llama, IDS, 1, 2, base_model=base, counterfactual=[OTHER, IDS])
    assert several.caused_total + several.conservation().tokens == pytest.approx(several.total, abs=1e-4)


def test_changes_as_a_table(llama):
    diff = attribute(llama, IDS, 1, 2, base_model=edited(llama, trained))
    assert list(diff.to_frame(3, "w_out")["kind"]) == ["w_out"] * 3


def test_what_cannot_be_compared_is_refused(llama):
    with pytest.raises(InputError, match="gpt2"):
        attribute(llama, IDS, base_model=random_model(dense()["gpt2"]))
    with pytest.raises(InputError, match="difference rules"):
        attribute(llama, IDS, method=ATTNLRP, base_model=llama)
    spelled, other = (Model(llama.net, tokenizer, "spelled") for tokenizer in (Letters(), Backwards()))
    with pytest.raises(InputError, match="spelled"):
        attribute(spelled, "abc", base_model=other)
    with pytest.raises(InputError, match="configuration"):
        attribute(llama, IDS, 1, 2, base_model=edited(llama, blunted))
    model = random_model(dense()["apertus"])
    with pytest.raises(MissingRule, match="XIELU"):
        attribute(model, IDS, 1, 2, base_model=edited(model, trained))


def blunted(net):
    net.model.norm.variance_epsilon = 10.0


class Backwards(Letters):
    def __call__(self, text, **options):
        return super().__call__(text[::-1], **options)


def unembedding_and_noise(net):
    """One row of the unembedding that moves the answer, and ten of the same norm that hardly do."""
    row = net.model.norm.weight.abs()
    change = 6 * row / row.norm()
    net.lm_head.weight[1] += change
    for index in range(10):
        net.lm_head.weight[20 + index] += change.norm() * torch.randn_like(change) / len(change) ** 0.5


def test_restoring_beside_controls(llama):
    """The row that caused all undoes all; as many with the largest norms do not."""
    model = edited(llama, unembedding_and_noise)
    diff = attribute(model, IDS, 1, 2, base_model=llama)
    restoring = Restoring.of(diff)
    assert restoring.ends == pytest.approx((number(model, IDS, 1, 2), number(llama, IDS, 1, 2)), abs=1e-5)
    (row,) = restoring.top(1)
    assert (row.kind, row.index) == ("unembedding", 1)
    (one, *_) = restoring.restorations((1, 10, 1000))
    assert (one.changes, one.undone) == (1, pytest.approx(1, abs=1e-4))
    largest = ranked_changes(diff.changes, [x.size for x in diff.changes], 1)
    assert one.largest == pytest.approx(restoring.undone(largest))
    assert len(restoring.restorations((1, 10, 1000))) == 2  # there are eleven changes
    assert row.caused == pytest.approx(diff.total, abs=1e-4)


def test_changes_that_work_against_the_difference_are_not_restored_first(llama):
    def both(net):
        net.lm_head.weight[1] += 3 * net.model.norm.weight
        net.lm_head.weight[2] += net.model.norm.weight

    diff = attribute(edited(llama, both), IDS, 1, 2, base_model=llama)
    rows = Restoring.of(diff).top()
    assert len(diff.top_changes()) == 2
    assert all(row.caused * diff.total > 0 for row in rows)


def test_the_mean_over_prompts(llama):
    base = edited(llama, trained)
    with pytest.raises(InputError, match="attribute"):
        Restoring.of()
    pairs = [(IDS, None), (IDS[:5], None), (IDS, OTHER)]
    diffs = [attribute(llama, prompt, 1, 2, base_model=base, counterfactual=other) for prompt, other in pairs]
    restoring = Restoring.of(*diffs)
    assert sum(one.caused.sum().item() for one in restoring.changes) == pytest.approx(
        sum(diff.caused_total for diff in diffs) / 3, abs=1e-5
    )


@pytest.fixture
def folders(tiny_folder, tmp_path):
    """A tiny model, and one that was made from it."""
    model = load_model(tiny_folder, device="cpu")
    made = edited(model, trained)
    made.net.save_pretrained(tmp_path / "made")
    model.tokenizer.save_pretrained(tmp_path / "made")
    return tiny_folder, str(tmp_path / "made")


def test_a_repaired_model_is_saved_while_weights_are_restored(folders, tmp_path):
    """As docs/fine-tuning.md does it. With all changes restored, it is the base model."""
    base, model = (load_model(folder, device="cpu") for folder in folders)
    restoring = Restoring.of(attribute(model, "ice bear", base_model=base, sites=()))
    everything = ranked_changes(restoring.changes, [one.size for one in restoring.changes])
    with restoring.restored(everything):
        model.net.save_pretrained(tmp_path / "repaired")
        model.tokenizer.save_pretrained(tmp_path / "repaired")
    repaired = load_model(str(tmp_path / "repaired"), device="cpu")
    logits = [one.next_logits("ice bear") for one in (repaired, base, model)]
    torch.testing.assert_close(logits[0], logits[1])
    assert (logits[2] - logits[1]).abs().max() > 1e-3


def run_command(*words):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_commands_explain_what_changed(folders, tmp_path):
    base, made = folders
    page = str(tmp_path / "page.html")
    request = ["--model", made, "--base-model", base, "--target", "A", "--contrast", "B", "--top", "3", "--json"]
    result = json.loads(run_command("explain", "ice bear", *request, "--html", page))
    changes = result["restored"]
    assert changes["total"] == pytest.approx(result["changes"]["total"], abs=1e-4)
    assert [row["name"] for row in changes["changes"]]
    assert {row["changes"] for row in changes["restorations"]} == {1, 10, 100}
    assert changes["changes"][0]["name"] in Path(page).read_text()
    assert json.loads(run_command("rank", "ice bear", *request))["restored"] == changes
    assert "Changed rows" in run_command("explain", "ice bear", *request[:-1])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "ice bear"}))
    refused = CliRunner().invoke(main, ["explain", "--file", str(prompts), "--model", made])
    assert "counterfactual" in refused.stderr


def test_the_commands_in_words(folders):
    base, made = folders
    request = ["ice bear", "--model", made, "--base-model", base, "--site", "ffn", "--top", "3"]
    assert f"Predicted by {base}" in run_command("rank", *request)
    itself = run_command("neuron", "L2.ffn.7", "--model", base, "--base-model", base, "--top", "3")
    assert "reads 1.0000, writes 1.0000" in itself


@pytest.mark.release
def test_on_real_weights_the_sum_is_exact(smol):
    base = edited(
        smol, lambda net: [weight.add_(0.03 * weight.std() * torch.randn_like(weight)) for weight in net.parameters()]
    )
    diff = attribute(smol, "The ice bear lives in the", " Arctic", contrast=" desert", base_model=base)
    assert abs(diff.total) > 0.5
    assert abs(diff.caused_total - diff.total) < 1e-3 * abs(diff.total)


def extended(model, tokens, seed=5):
    """A copy with some changed weights and a vocabulary of another size."""
    net = copy.deepcopy(model.net)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw).to(weight) * 0.02)
    net.resize_token_embeddings(tokens)
    return Model(net, name="tuned")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [53, 64, 46])
def test_vocabularies_of_other_sizes_are_compared_in_what_both_have(tied, tokens, caplog):
    config = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": tied})
    base = random_model(config, dtype=torch.float32)
    model = extended(base, tokens)
    diff = attribute(model, IDS, 7, 9, base_model=base)
    ours, theirs = model.next_logits(IDS), base.next_logits(IDS)
    right = ((ours[7] - ours[9]) - (theirs[7] - theirs[9])).item()
    assert diff.total == pytest.approx(right, abs=1e-4)
    assert diff.caused_total == pytest.approx(right, abs=1e-4)
    assert f"{tokens} tokens" in caplog.text
    for ids, target in (([*IDS, 51], 7), (IDS, 51)):
        with pytest.raises(InputError):  # a token that one of both lacks, as part of the prompt and as the answer
            attribute(model, ids, target, 9, base_model=base)
    with pytest.raises(InputError):
        attribute(model, IDS, target_text=[7, 8], contrast=(9, 8), base_model=base)
    assert attribute(model, IDS, base_model=base).target.id < min(tokens, 50)
