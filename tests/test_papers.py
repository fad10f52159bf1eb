"""The smallest form of every row of docs/papers.md: a sum, an order or a number of each."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import test_rules as rules
import torch
import torch.nn.functional as F
from configurations import dense, mixtures
from conftest import IDS, LLAMA, Double, Letters, random_model
from reference import models as reference_models
from test_rules import relevance
from test_tasks import make, prompt

from benchmarks import pruning
from benchmarks.baselines import OTHERS, AltiLogit
from icebear import (
    ATTNLRP,
    CP_LRP,
    PA_LRP,
    VIT,
    AlphaBeta,
    AttnLRP,
    Epsilon,
    Gamma,
    Model,
    Neuron,
    ZPlus,
    annotate,
    attribute,
    build_index,
    open_store,
    project,
    read_corpus,
    steer,
)
from icebear.concepts.methods.gradients import GradientTimesInput, IntegratedGradients
from icebear.concepts.statistics import localization_metrics, removal_metrics
from icebear.evaluation import faithfulness, groundtruth
from icebear.evaluation.baselines import BASELINES, Occlusion, methods_of
from icebear.evaluation.groundtruth import GroundTruth
from icebear.lrp.context import relevance_rules
from icebear.models.loading.loading import load_model

PAGE = (Path(__file__).parent.parent / "docs" / "papers.md").read_text(encoding="utf-8")
ICE_BEAR = "The ice bear lives in the"
NUMBERED = {
    "AttnLRP": [
        *(f"Section {number}" for number in "3 3.1 3.1.1 3.2 3.2.1 3.2.2 3.3 3.3.1 3.3.2 3.3.3 3.4".split()),
        *(f"Section {number}" for number in "4 4.1 4.1.1 4.1.2 4.2 4.3".split()),
        *(f"Proposition 3.{number}" for number in range(1, 5)),
        *(f"Figure {number}" for number in range(1, 17)),
        *(f"Table {number}" for number in range(1, 9)),
        *(f"Appendix {number}" for number in "A A.1 A.1.1 A.1.2 A.1.3 A.1.4 A.1.5 A.2 A.2.1 A.2.2 A.2.3".split()),
        *(f"Appendix {number}" for number in "A.3 A.3.1 A.3.2 A.3.3 A.3.4 B B.1 B.2 B.3 B.4 B.5 B.6 B.7".split()),
    ],
    "A Close Look": [
        *(f"Figure {number}" for number in range(1, 6)),
        *(f"Table {number}" for number in range(1, 10)),
        *(f"Appendix {number}" for number in "A B B.1 B.2 B.3 C C.1 C.2 C.3 C.4 C.5 C.6 D E".split()),
    ],
    "PA-LRP": [
        *(f"Lemma 3.{number}" for number in range(1, 4)),
        *(f"Figure {number}" for number in range(1, 7)),
        *(f"Table {number}" for number in range(1, 6)),
        *(f"Appendix {letter}" for letter in "ABCDEF"),
    ],
}
"""Paper -> all that it numbers."""


def rows(paper):
    """(item, what, here, tests) of each row of a paper's table."""
    (section,) = re.findall(rf"^## {paper}$(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def items(text):
    """``Figures 4, 5`` -> Figure 4, Figure 5."""
    kind, numbers = text.split(" ", 1)
    return [f"{kind.removesuffix('s')} {number}" for number in numbers.split(", ")]


@pytest.mark.parametrize("paper", NUMBERED)
def test_everything_numbered_has_a_row(paper):
    found = [item for text, *_ in rows(paper) for item in items(text)]
    assert sorted(found) == sorted(NUMBERED[paper])


def test_every_row_has_a_test_or_is_of_the_paper_only():
    named = {name: paper for paper in NUMBERED for row in rows(paper) for name in re.findall("`(.*?)`", row[3])}
    for paper in NUMBERED:
        for item, _, here, tests in rows(paper):
            assert tests or here.startswith("paper only: "), (paper, item)
    structure = {"everything_numbered_has_a_row", "every_row_has_a_test_or_is_of_the_paper_only"}
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {*named} == tests - structure


# --- the rules (AttnLRP 3; A Close Look C) ---


def explained(function, *inputs, method=ATTNLRP):
    """The relevance of each input of a function of tensors, for the relevance y * y of its output."""

    class Net(torch.nn.Module):
        def forward(self, *values):
            return function(*values)

    leaves = [x.clone().requires_grad_() for x in inputs]
    with relevance_rules(Net(), method) as mode:
        y = mode.net(*leaves)
    y.backward(y.detach())
    return y.detach(), [leaf.detach() * leaf.grad for leaf in leaves]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_gamma():
    """Eq. 8, and Eq. 24 by its two cases, contribution by contribution."""
    layer, x = torch.nn.Linear(6, 4, bias=False).double(), random(6)
    z = layer.weight.detach() * x  # (j, i)
    total = z.sum(1)
    assert torch.allclose(relevance(layer, x[None], Epsilon())[0], (z * total[:, None]).sum(0))
    signed = torch.where(total[:, None] > 0, z.clamp(min=0), z.clamp(max=0))
    shares = (z + 0.25 * signed) / (total + 0.25 * signed.sum(1))[:, None]
    assert torch.allclose(relevance(layer, x[None], Gamma(0.25))[0], (shares * total[:, None] ** 2).sum(0))


def test_identity():
    """Eq. 9: relevance passes through, unchanged."""
    for function in (F.gelu, F.silu, F.relu, torch.tanh):
        y, (result,) = explained(function, random(9))
        assert torch.allclose(result, y * y)


def test_softmax():
    """Eq. 13: R_i = x_i (R_i - s_i sum of R)."""
    x = random(7)
    s, (result,) = explained(lambda x: x.softmax(-1), x)
    R = s * s
    assert torch.allclose(result, x * (R - s * R.sum()))


def test_product():
    """Eq. 14 with two factors: half of the relevance to each."""
    y, both = explained(torch.mul, random(5), random(5) + 1)
    for result in both:
        assert torch.allclose(result, y * y / 2)


def test_matmul():
    """Eq. 15, message by message."""
    A, V = random(3, 4), random(4, 2)
    y, (of_A, of_V) = explained(torch.matmul, A, V)
    messages = torch.einsum("ji,ip->jip", A, V) * y[:, None]  # A_ji V_ip R_jp / y_jp, of R = y * y
    assert torch.allclose(of_A, messages.sum(2) / 2)
    assert torch.allclose(of_V, messages.sum(0) / 2)


def test_norm():
    """Eq. 19: the divisor is a constant, so that relevance is conserved."""
    x = random(2, 8)
    y, (result,) = explained(lambda x: F.rms_norm(x, (8,)), x)
    assert torch.allclose(result, y * y)
    y, (result,) = explained(lambda x: F.layer_norm(x, (8,)), x)
    assert torch.allclose(result.sum(-1), (y * y).sum(-1))


def test_reference():
    """Gradient x input of the changed graph, and relevance as explicit messages (A Close Look, appendix C)."""
    model = random_model(LLAMA)
    for method in (ATTNLRP, CP_LRP):
        with Double():
            result = attribute(model, IDS, 11, method=method, number="logit")
            leaves, *_ = reference_models.explain(reference_models.llama, method, model.net, IDS, 11)
        assert torch.allclose(result.tokens, torch.cat([leaf.R.sum(-1) for leaf in leaves]), rtol=1e-7)


def test_conservation():
    """All parts sum to the explained number; CP-LRP's tokens alone do in a model without biases."""
    model = random_model(LLAMA)
    with Double():
        attn, cp = (attribute(model, IDS, method=method).conservation() for method in (ATTNLRP, CP_LRP))
    assert abs(attn.remainder) < 1e-9 * abs(attn.target)
    assert attn.softmax != 0
    assert cp.tokens == pytest.approx(cp.target, rel=1e-9)


def test_variants():
    """CP-LRP gives queries and keys nothing; AttnLRP does; a softmax by z+ differs from both."""
    model = random_model(LLAMA)
    attn, cp, zplus = (
        attribute(model, IDS, method=method, sites=("q", "k", "v"))
        for method in (ATTNLRP, CP_LRP, AttnLRP(softmax="zplus"))
    )
    for site in ("q", "k"):
        assert attn.of(site).abs().max() > 0
        assert cp.of(site).abs().max() == 0
    assert attn.of("v").abs().max() > 0
    assert cp.of("v").abs().max() > 0
    tokens = torch.stack([attn.tokens, cp.tokens, zplus.tokens])
    assert torch.corrcoef(tokens).triu(1).max() < 0.999


# --- neurons (AttnLRP 3.4, 4.3) ---


def test_neurons(smol):
    """Neurons are ranked by relevance; those of a site sum to what passes it."""
    result = attribute(smol, ICE_BEAR, sites=("ffn", "q", "k", "v"))
    (best,) = result.top(1, site="ffn", position="all")
    others = result.ffn.clone()
    others[:, list(result.prompt.sinks)] = 0
    assert best.relevance == pytest.approx(others.max().item())
    for site in ("q", "k", "v"):
        assert result.of(site).abs().max() > 0


def test_actmax(tmp_path):
    """The first sentence of a neuron has its largest activation, and the tokens' relevance sums to that (CP-LRP)."""
    model = Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")
    texts = [
        f"{text} and {text}." for text in ("ice bear", "a wild camel", "the cold sea", "sand and sun", "far north")
    ]
    (tmp_path / "c.txt").write_text("\n".join(texts))
    with open_store(tmp_path / "c.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "c.txt")), store, k=3)
        annotate(model, store, ["L1.ffn.3"], method=CP_LRP)
        (best, *_) = store.examples(Neuron.parse("L1.ffn.3"), "+", method="cp-lrp")
    largest = {text: attribute(model, text, sites=("ffn",)).activation("ffn")[1, 1:, 3].max().item() for text in texts}
    assert best.sentence.text == max(largest, key=largest.get)
    assert best.activation == pytest.approx(max(largest.values()), rel=1e-4)
    assert sum(best.relevance) == pytest.approx(best.activation, rel=1e-3)


def test_projection():
    """A neuron's words: the largest products of its W_out row and the unembedding, through the final norm's gain."""
    model = random_model(LLAMA, dtype=torch.float32)
    model = Model(model.net, Letters(), "letters")
    row = model.net.model.layers[1].mlp.down_proj.weight[:, 3]
    words = (model.net.lm_head.weight * model.net.model.norm.weight) @ row
    found = project(model, "L1.ffn.3", k=5)
    assert [token.id for token in found.promoted] == words.topk(5).indices.tolist()
    assert [token.id for token in found.suppressed] == (-words).topk(5).indices.tolist()


def test_steering(smol):
    """A neuron that is set to another value changes the prediction, and only inside of `steer`."""
    before = smol.next_logits(ICE_BEAR)
    (best,) = attribute(smol, ICE_BEAR).top(1, site="ffn")
    changes = []
    for edit in (f"{best.neuron}=0", f"{best.neuron}={3 * best.activation}"):
        with steer(smol, [edit]):
            changes.append((smol.next_logits(ICE_BEAR) - before)[smol.tokens_of(" Arctic")[0]].item())
    assert changes[0] * changes[1] < 0
    assert torch.equal(smol.next_logits(ICE_BEAR), before)


# --- how good explanations are (AttnLRP 4.1, B; A Close Look 5) ---


@pytest.fixture(scope="module")
def removed(smol):
    """The curves and metrics of three beginnings of summaries, by method."""
    (part,) = faithfulness.Faithfulness("attnlrp,random,pa-lrp,pa-lrp-signed", samples=3, max_tokens=40).parts(smol)
    return [part.measure(ids)["methods"] for ids in part.samples]


def mean(removed, method, metric):
    return sum(line[method][metric] for line in removed) / len(removed)


@pytest.mark.release
def test_faithfulness(removed):
    """Delta A is the area between both curves; AttnLRP's is above random scores'."""
    for line in removed:
        for row in line.values():
            between = [least - most for least, most in zip(row["curve_least"], row["curve_most"], strict=True)]
            assert row["delta_a"] == pytest.approx(sum(x + y for x, y in pairwise(between)) / 10, abs=1e-4)
    assert mean(removed, "attnlrp", "delta_a") > max(0, mean(removed, "random", "delta_a"))


def test_auac(removed):
    """AUAC and AU-MSE by the trapezoid rule; positions with tokens are above random scores."""
    numbers = removal_metrics([(2, 0.5), (1, 0.5), (0, 0)], [(2, 0.5), (1, 0.5), (0, 0)])
    assert (numbers["auac"], numbers["au_mse"]) == (0.375, 1.5)
    for method in ("attnlrp", "pa-lrp"):
        assert mean(removed, method, "auac") > mean(removed, "random", "auac")
    assert mean(removed, "pa-lrp", "auac") != mean(removed, "pa-lrp-signed", "auac")


def test_classifier():
    """A classifier on Llama: relevance sums to the label's number, and removing all tokens removes the difference."""
    model = make("llama, sequence", "sdpa")
    with Double():
        parts = attribute(model, prompt(model), method=CP_LRP).conservation()
    assert abs(parts.remainder) < 1e-6 * abs(parts.target)
    row = faithfulness.sample(model, prompt(model), methods_of("attnlrp"))["methods"]["attnlrp"]
    assert row["curve_least"][0] == row["curve_most"][0]
    assert row["curve_least"][-1] == row["curve_most"][-1]


def test_baselines():
    """Each runs, and has a number for each token; gradient x input is the gradient's product, and integrated gradients
    sum to the change of the logit."""
    model = random_model(dense()["gpt2"], "eager")
    embeddings = model.net.get_input_embeddings()(torch.tensor([IDS])).detach().requires_grad_()
    logit = model.net(inputs_embeds=embeddings).logits[0, -1, 11]
    (gradient,) = torch.autograd.grad(logit, embeddings)
    options = {"target": 11, "number": "logit"}
    plain = attribute(model, IDS, method=GradientTimesInput(), **options).tokens
    assert torch.allclose(plain.double(), (embeddings * gradient).sum(-1)[0], rtol=1e-5)
    path = attribute(model, IDS, method=IntegratedGradients(steps=200), **options).tokens
    zero = model.net(inputs_embeds=torch.zeros_like(embeddings)).logits[0, -1, 11]
    assert path.sum().item() == pytest.approx((logit - zero).item(), rel=0.02)
    others = {name: method for name, method in OTHERS.items() if name != "alti"}  # of encoders
    for name, method in (BASELINES | others).items():
        scores = attribute(model, IDS, method=method, **options).tokens
        assert scores.shape == (len(IDS),), name
        assert scores.abs().max() > 0, name


def test_passes():
    """One pass; with checkpoints the layers run twice; occlusion takes a row for each token."""
    model, rows = random_model(LLAMA, dtype=torch.float32), []
    ffn = model.net.model.layers[1].mlp.down_proj
    hook = ffn.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    for options, expected in (({"checkpoint": False}, [1]), ({"checkpoint": True}, [1, 1])):
        rows.clear()
        attribute(model, IDS, sites=(), **options)
        assert rows == expected
    rows.clear()
    attribute(model, IDS, method=Occlusion())
    hook.remove()
    assert sum(rows) > len(IDS)


@pytest.mark.release
def test_evidence(smol):
    """Agreement and anaphora: AttnLRP's largest score is the evidence more often than random scores would be."""
    for task in ("agreement", "anaphora"):
        (part,) = GroundTruth("attnlrp,random", samples=12, task=task).parts(smol)
        lines = [line for line in groundtruth.counted(part.measure(part.samples)) if line["counts"]]
        assert len(lines) >= 5
        attn, random = (sum(line["methods"][name]["pointing"] for line in lines) for name in ("attnlrp", "random"))
        assert attn > random


def test_metrics():
    """By hand: two of four tokens are evidence, and one of the two positive scores is of them."""
    numbers = localization_metrics([3, -1, 1, -2], [0, 1])
    assert (numbers["pointing"], numbers["mrr_worst"], numbers["mass"]) == (1, 1, 0.75)
    assert (numbers["pta"], numbers["iou_positive"]) == (0.5, pytest.approx(1 / 3))


@pytest.mark.release
def test_questions(smol):
    """The answer in a text: a larger share of AttnLRP's relevance lies on it than of gradient x input."""
    (part,) = GroundTruth("attnlrp,gxi", samples=6, task="qa").parts(smol)
    lines = [line for line in groundtruth.counted(part.measure(part.samples), "context") if line["counts"]]
    attn, gxi = (sum(line["methods"][name]["mass"] for line in lines) for name in ("attnlrp", "gxi"))
    assert attn > gxi
    assert all(0 < line["methods"]["attnlrp"]["iou_positive"] <= 1 for line in lines)


@pytest.mark.release
def test_contrast(smol):
    """The subject of a verb: with the other verb as contrast AttnLRP finds it, by the raw logit it does not."""
    items = groundtruth.subject_verb(12)
    points = {}
    for contrastive in (True, False):
        methods = {"attnlrp": ATTNLRP}
        lines = groundtruth.counted(groundtruth.score_items(smol, items, methods, contrastive))
        points[contrastive] = sum(line["methods"]["attnlrp"]["pointing"] for line in lines if line["counts"])
    assert points[True] > points[False]


@pytest.mark.release
def test_scope(smol):
    """Where fewer tokens count, evidence is never hit less often."""
    lines = groundtruth.score_items(smol, groundtruth.facts(6), {"attnlrp": ATTNLRP})
    points = [
        [line["methods"]["attnlrp"]["pointing"] for line in groundtruth.counted(lines, part) if line["counts"]]
        for part in ("all", "inner", "context")
    ]
    for every, inner, context in zip(*points, strict=True):
        assert every <= inner <= context


def test_precision(tiny_folder):
    single, double = (load_model(tiny_folder, device="cpu", dtype=dtype) for dtype in ("float32", "float64"))
    one, other = (attribute(model, "Paris Rome A").tokens.double() for model in (single, double))
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    assert not torch.equal(one, other)


def test_embeddings():
    """GPT-2: tokens have the share of the token embeddings; with positions, the whole of both."""
    model = random_model(dense()["gpt2"])
    with Double():
        partial, full = (attribute(model, IDS, method=method, number="logit") for method in (ATTNLRP, PA_LRP))
    assert torch.allclose(partial.tokens, full.tokens)
    whole = full.combined("signed")
    parts = full.conservation()
    assert whole.sum().item() == pytest.approx(parts.tokens + parts.positions)
    assert parts.positions != 0


def test_alti():
    """ALTI-Logit has a score for each token, which no two tokens share; it needs attention that is read."""
    model = random_model(LLAMA, "eager")
    scores = attribute(model, IDS, 11, method=AltiLogit(), number="logit").tokens
    assert len(set(scores.tolist())) == len(IDS)


@pytest.mark.release
def test_pruning(smol):
    """Heads: without any the log-probability is the model's, and with more of the most relevant gone it is lower."""
    method = methods_of("attnlrp")["attnlrp"]
    prompts = [smol.token_ids(text) for text in (ICE_BEAR, "The capital of France is")]
    order = pruning.ranking(smol, prompts, "head", method)
    least, most = (pruning.answer_curves(smol, prompts, "head", sign * order) for sign in (1, -1))
    for row in range(len(prompts)):
        assert least[row][0] == most[row][0]
    assert sum(curve[4] for curve in least) > sum(curve[4] for curve in most)


# --- positions (PA-LRP) ---


def test_positions():
    """Learned: tokens alone lack the share of positions, and with it all parts sum (lemma 3.1). Rotary: with positions
    the sum holds in a model without biases by CP-LRP (lemma 3.2), and positions change nothing of the tokens."""
    with Double():
        learned = attribute(random_model(dense()["gpt2"]), IDS, method=PA_LRP).conservation()
        rotary = attribute(random_model(LLAMA), IDS, method=PA_LRP)
        plain = attribute(random_model(LLAMA), IDS)
    assert abs(learned.positions) > 1e-3 * abs(learned.target)
    assert abs(learned.remainder) < 1e-8 * abs(learned.target)
    parts = rotary.conservation()
    assert parts.positions != 0
    assert abs(parts.remainder) < 1e-8 * abs(parts.target)
    assert rotary.positions.shape == (3, len(IDS))
    assert rotary.combined("signed").sum().item() == pytest.approx(parts.tokens + parts.positions)
    assert not torch.equal(rotary.tokens, plain.tokens)


def test_zero_map():
    """ALiBi: where only positions tell tokens apart, AttnLRP has no relevance of the keys' positions; PA-LRP does."""
    model = random_model(dense()["bloom"], "eager")
    with Double():
        pa = attribute(model, IDS, method=PA_LRP)
    assert pa.positions.abs().max() > 0
    assert abs(pa.conservation().remainder) < 1e-8 * abs(pa.conservation().target)
    rules.test_lemma_3_3_relevance_that_is_only_in_positions()


# --- images, and other kinds of models ---


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_images(kind):
    """The parts sum to the label's number, for each method of the papers; positions have a share."""
    model = make(kind, "sdpa")
    maps = []
    for method in (ATTNLRP, CP_LRP, VIT, PA_LRP):
        with Double():
            result = attribute(model, prompt(model), method=method)
        parts = result.conservation()
        assert abs(parts.remainder) < 1e-6 * abs(parts.target)
        assert result.image.pixels.sum().item() == pytest.approx(result.image.patches.sum().item(), rel=1e-5)
        maps.append(result.image.patches.flatten())
    assert parts.positions != 0
    assert torch.corrcoef(torch.stack(maps[:3])).triu(1).max() < 0.9999


def test_layers():
    """A rule of one type of layer changes the map, and all parts still sum."""
    model = make("vit", "sdpa")
    with Double():
        plain = attribute(model, prompt(model)).tokens
        for part in ({"conv": AlphaBeta(2)}, {"linear": Gamma(0.05)}, {"attention_in": ZPlus()}, {"softmax": "zplus"}):
            result = attribute(model, prompt(model), method=AttnLRP(**part))
            parts = result.conservation()
            assert abs(parts.remainder) < 1e-6 * abs(parts.target), part
            changed = result.image.pixels if "conv" in part else result.tokens
            assert changed.isfinite().all()
            assert "conv" in part or not torch.allclose(result.tokens, plain, rtol=1e-3), part
        conv = attribute(model, prompt(model), method=AttnLRP(conv=AlphaBeta(2))).image.pixels
        assert not torch.allclose(conv, attribute(model, prompt(model)).image.pixels, rtol=1e-3)


def test_encoder():
    """T5: the tokens of the encoder and of the decoder share the answer's number."""
    model = make("t5", "sdpa")
    with Double():
        result = attribute(model, prompt(model), method=CP_LRP)
    parts = result.conservation()
    assert len(result.tokens) > len(prompt(model))
    assert abs(parts.remainder) < 1e-6 * abs(parts.target)
    row = faithfulness.sample(model, prompt(model), methods_of("attnlrp"))["methods"]["attnlrp"]
    assert row["curve_least"][0] == row["curve_most"][0]


def test_mixture():
    """Mixtral: relevance passes the experts that ran."""
    model = random_model(mixtures()["mixtral"], dtype=torch.float32)
    parts = attribute(model, IDS, method=CP_LRP, number="logit").conservation()
    assert abs(parts.remainder) < 1e-3 * abs(parts.target)
