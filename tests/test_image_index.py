"""The index of a folder of images, against each image read alone; its cards, its search, and edits of what it shows."""

import base64
import hashlib
import io
import json
import random
import shutil

import numpy
import pytest
import test_tasks
import torch
from appview import fine, set_up, text, visit
from click.testing import CliRunner
from PIL import Image
from test_heads import slow_norms
from test_images import KINDS, PATCH, SIDE, small_vit
from transformers import (
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    ViTImageProcessorPil,
)

from icebear import (
    VIT,
    Neuron,
    annotate,
    attribute,
    build_index,
    by_examples,
    describe,
    load_model,
    more_examples,
    open_store,
    read_images,
)
from icebear.actmax.atlas.atlas import atlas
from icebear.actmax.crops import HALF, LEAST, smallest_square
from icebear.actmax.index import build as index
from icebear.actmax.index.activation_statistics import BIN_EDGES
from icebear.actmax.index.annotation import attribute_neurons
from icebear.actmax.index.parts import merge_parts, scan_part
from icebear.actmax.index.scan import Settings, _hash, has_statistics, scan_shard
from icebear.actmax.labels.sample import prepare_samples
from icebear.actmax.reading import ImageReading
from icebear.actmax.searching import search, search_image
from icebear.app.cli.main import main
from icebear.concepts.vocabulary.calibration import mean_activations
from icebear.edits import parse_edits
from icebear.errors import InputError, StoreError, UnknownName
from icebear.models.text.images import names, own_names
from icebear.steering.outcome import outcome_of_steering

RUN = CliRunner()
K = 4
PLANTED = Neuron(1, "ffn", 7)
"""A neuron that reads how red a patch is."""


def run(*words):
    result = RUN.invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A small random ViT whose first dimension is red minus green and blue: layers write nothing to it, and a neuron
    reads nothing else."""
    folder = tmp_path_factory.mktemp("vit")
    net = small_vit()
    with torch.no_grad():
        plant(net)
    net.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return load_model(str(folder), dtype="float32", device="cpu")


def plant(net):
    parts = dict(net.named_parameters())
    patches = next(value for name, value in parts.items() if name.endswith("patch_embeddings.projection.weight"))
    patches[0] = torch.tensor([2.0, -1.0, -1.0])[:, None, None] / PATCH
    for name, value in parts.items():
        if name.endswith(("projection.bias", "position_embeddings", "cls_token")):
            value[..., 0] = 0
        if value.ndim == 2 and len(value) == 24 and "query" not in name and "key" not in name and "value" not in name:
            value[0] = 0  # what is written to the residual stream
    model = load_layers(net)[PLANTED.layer]
    for name, value in model.named_parameters():
        if tuple(value.shape) == (20, 24):
            value[PLANTED.index] = 0
            value[PLANTED.index, 0] = 3
        if tuple(value.shape) == (20,):
            value[PLANTED.index] = -3
        if "layernorm_after" in name or "norm2" in name:
            value[0] = 1.0 if name.endswith("weight") else 0.0


def load_layers(net):
    return next(module for module in net.modules() if isinstance(module, torch.nn.ModuleList))


def picture(seed, size=(SIDE, SIDE)):
    """Gray noise in squares of a patch."""
    generator = random.Random(seed)
    small = Image.new("L", (SIDE // PATCH, SIDE // PATCH))
    small.putdata([generator.randrange(60, 200) for _ in range(small.width * small.height)])
    return small.resize(size, Image.Resampling.NEAREST).convert("RGB")


def with_square(image, color, row, column):
    image.paste(color, (column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH))
    return image


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """22 pictures, one of them twice, in two folders; one has a red square at the patch 2,1."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "deep").mkdir()
    for seed in range(20):
        image = picture(seed)
        image.putpixel((seed % SIDE, 3), (seed * 9, 200 - seed * 7, 90))
        image.save(folder / ("deep" if seed % 2 else ".") / f"{seed}.png")
    with_square(picture(50), "red", 2, 1).save(folder / "red.png")
    with_square(picture(51), "lime", 0, 0).save(folder / "green.png")
    shutil.copy(folder / "0.png", folder / "again.png")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("no image")
    return folder


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(index, "IMAGE_SHARD", 6)
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)


@pytest.fixture(scope="module")
def made(vit, photos, tmp_path_factory):
    """The path of an index."""
    path = tmp_path_factory.mktemp("store") / "photos.db"
    with pytest.MonkeyPatch.context() as patch, open_store(path, create=True) as store:
        patch.setattr(index, "IMAGE_SHARD", 6)
        build_index(vit, read_images(photos), store, k=K)
    return path


@pytest.fixture
def store(made):
    with open_store(made) as opened:
        yield opened


# --- the scan ---------------------------------------------------------------------------------------------


def test_the_index_equals_each_image_read_alone(vit, photos, store):
    """Every neuron and head, both signs, ties in order of id; the statistics are of all patches of the first shard."""
    images = {image.id: image for image in read_images(photos).sentences()}
    assert len(images) == 22
    means = mean_activations(vit)["attn"]
    seen, norms = {}, {}
    for identity, image in images.items():
        result = attribute(vit, str(photos / image.text), sites=("ffn", "attn"), method=VIT)
        seen[identity] = result.activation("ffn")[:, 1:]  # (L, patches, F)
        with torch.no_grad():
            z = result.activation("attn")
            norms[identity] = torch.stack(
                [slow_norms(vit, vit.site_module("attn", layer), z[layer], means[layer])[1:] for layer in range(2)]
            )
    columns = [(site, layer, at) for site, n in (("ffn", 20), ("head", 4)) for layer in range(2) for at in range(n)]
    for site, layer, at in columns:
        values = {i: (seen if site == "ffn" else norms)[i][layer, :, at] for i in images}
        for polarity, sign in (("+", 1), ("-", -1)) if site == "ffn" else (("+", 1),):
            best = sorted((-(sign * x).max().item(), i) for i, x in values.items() if (sign * x).max() > 0)[:K]
            examples = store.examples(Neuron(layer, site, at), polarity)
            assert [sign * e.activation for e in examples] == pytest.approx([-v for v, _ in best], rel=1e-4)
            assert [e.sentence.id for e in examples] == [i for _, i in best]
            for example in examples:
                patch = int((sign * values[example.sentence.id]).argmax())
                assert (example.token, example.token_text) == (1 + patch, f"{patch // 4},{patch % 4}")
        if site == "ffn":
            statistics = store.neurons.statistics(Neuron(layer, site, at))
            every = torch.cat(list(values.values()))
            assert (statistics.min, statistics.max) == pytest.approx((every.min().item(), every.max().item()), rel=1e-4)


def test_the_store_has_names_and_digests(photos, store):
    for image in store.sentences.starting_at(0):
        digest = hashlib.sha256((photos / image.text).read_bytes()).hexdigest()
        assert (image.title, image.id) == (digest, int(digest[:16], 16) >> 2)
        assert image.tokens == ("[CLS]", *(f"{row},{column}" for row in range(4) for column in range(4)))
    facts = store.facts.all()
    assert facts["corpus"] == str(photos)
    assert facts["counts"] == {"documents": 23, "sentences": 22, "duplicates": 1}
    assert store.documents_phrase == f"all images of {photos}"


def test_statistics_are_of_patches_alone(vit, photos, store):
    """Means of all patches, histograms of one seeded patch of each image, both of the shards that sums include."""
    images = [image for at, image in enumerate(read_images(photos).sentences()) if has_statistics(at // 6, 0)]
    assert 0 < len(images) < 22
    values = [attribute(vit, str(photos / i.text), sites=("ffn",), method=VIT).activation("ffn") for i in images]
    drawn = torch.stack([x[:, 1 + _hash(0, "token", i.id) % 16] for x, i in zip(values, images, strict=True)], 1)
    every = torch.cat([x[:, 1:] for x in values], 1)  # (L, patches, F)
    for layer in range(2):
        for at in range(20):
            statistics = store.neurons.statistics(Neuron(layer, "ffn", at))
            bins = torch.bucketize(drawn[layer, :, at].contiguous(), BIN_EDGES, right=True)
            assert list(statistics.histogram) == torch.bincount(bins, minlength=len(BIN_EDGES) + 1).tolist()
            assert statistics.mean == pytest.approx(every[layer, :, at].mean().item(), abs=1e-4)
    assert store.made_with()["index"]["statistics_tokens"] == every.shape[1]


def stopping(after):
    def stop(done, total):
        if done >= after:
            raise KeyboardInterrupt

    return stop


def test_an_interrupted_scan_goes_on_to_the_same_index(vit, photos, store, tmp_path):
    """Also one of fewer images, which are a sample of the folder."""
    with open_store(tmp_path / "stopped.db", create=True) as stopped:
        for after in (6, 12):
            with pytest.raises(KeyboardInterrupt):
                build_index(vit, read_images(photos), stopped, k=K, on_progress=stopping(after))
        build_index(vit, read_images(photos), stopped, k=K)
        assert stopped.checksum() == store.checksum()
    with open_store(tmp_path / "few.db", create=True) as few, open_store(tmp_path / "more.db", create=True) as more:
        build_index(vit, read_images(photos, 7), few, k=K)
        assert few.count("sentences") == 7
        build_index(vit, read_images(photos, 20), few, k=K)
        build_index(vit, read_images(photos, 20), more, k=K)
        assert few.checksum() == more.checksum()


@pytest.mark.parametrize("count", [2, 3])
def test_parts_in_any_order_are_one_run(vit, photos, store, tmp_path, count):
    for part in random.Random(count).sample(range(1, count + 1), count):
        if part == 2:
            with pytest.raises(KeyboardInterrupt):
                scan_part(vit, read_images(photos), tmp_path / "parts", part, count, k=K, on_progress=stopping(6))
        scan_part(vit, read_images(photos), tmp_path / "parts", part, count, k=K)
    with open_store(tmp_path / "merged.db", create=True) as merged:
        merge_parts(vit, tmp_path / "parts", merged)
        assert merged.checksum() == store.checksum()


def test_another_number_of_images_a_pass_changes_the_last_digits_only(vit, photos):
    images = list(read_images(photos).sentences())
    reading = ImageReading(vit, photos)
    (a, v), (b, w) = (scan_shard(vit, images, Settings(k=K), batch_size=size, reading=reading) for size in (8, 3))
    assert torch.allclose(a.values, b.values, rtol=1e-4)
    assert torch.allclose(v.float(), w.float(), rtol=1e-2, atol=1e-3)
    assert a.token_count == b.token_count == 22 * 16


def test_a_changed_folder_is_another_corpus(vit, photos, made, tmp_path):
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    picture(99).save(folder / "new.png")
    with open_store(made) as store, pytest.raises(StoreError):
        build_index(vit, read_images(folder), store, k=K)


# --- files that are no images, are gone, or have odd names ------------------------------------------------


@pytest.fixture
def some(tmp_path):
    """A folder of its own, with four pictures."""
    folder = tmp_path / "some"
    folder.mkdir()
    for seed in range(4):
        picture(seed).save(folder / f"{seed}.png")
    return folder


def indexed(model, folder, path):
    with open_store(path, create=True) as store:
        return build_index(model, read_images(folder), store, k=K)


def test_a_damaged_image_is_skipped_and_named(vit, some, tmp_path, caplog):
    (some / "cut.png").write_bytes((some / "0.png").read_bytes()[:60])
    (some / "text.jpg").write_text("no image")
    printed = run("index", "--images", some, "--model", vit.name, "--store", tmp_path / "i.db", "--k", K)
    assert "6 images, 2 unreadable" in printed
    assert "cut.png, text.jpg" in printed
    indexed(vit, some, tmp_path / "b.db")
    with open_store(tmp_path / "i.db") as store, open_store(tmp_path / "b.db") as other:
        assert store.checksum() == other.checksum()
        read = {e.sentence.text for at in range(20) for e in store.examples(Neuron(0, "ffn", at))}
        assert read == {f"{seed}.png" for seed in range(4)}
    for path in some.glob("?.png"):
        path.unlink()
    with pytest.raises(InputError, match="can be read"):
        indexed(vit, some, tmp_path / "none.db")


def test_a_missing_or_changed_image_has_no_crop_and_says_so(vit, some, tmp_path):
    indexed(vit, some, tmp_path / "i.db")
    (some / "0.png").unlink()
    picture(77).save(some / "1.png")
    with open_store(tmp_path / "i.db") as store:
        for kind in ("patch", "relevance"):
            annotate(vit, store, [PLANTED, "L1.head.0"], K)
            for neuron in (PLANTED, "L1.head.0"):
                card = describe(store, neuron, vit, crop=kind)
                sides = [zip(card.examples[side], card.crops[side], strict=True) for side in card.crops]
                shown = {example.sentence.text: crop for rows in sides for example, crop in rows}
                assert "missing" in shown["0.png"].about
                assert "has changed" in shown["1.png"].about
                assert not shown["0.png"].png
                assert not shown["1.png"].png
                assert shown["2.png"].png
                assert shown["3.png"].png
    assert (
        "missing"
        in run("neuron", PLANTED, "--store", tmp_path / "i.db", "--model", vit.name, "--html", tmp_path / "c")
        + (tmp_path / "c").read_text()
    )


HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\n.png"


def test_a_hostile_file_name_is_data(vit, some, tmp_path):
    with_square(picture(60), "red", 1, 1).save(some / HOSTILE)
    path, page = tmp_path / "i.db", tmp_path / "card.html"
    printed = run("index", "--images", some, "--model", vit.name, "--store", path, "--k", K)
    printed += run("neuron", PLANTED, "--store", path, "--model", vit.name, "--html", page)
    printed += run("search", "--image", some / HOSTILE, "--store", path, "--model", vit.name)
    assert "onerror=alert(1)" in printed
    assert "\x1b" not in printed
    assert "<img src=x" not in page.read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;" in page.read_text()


def test_a_name_in_a_store_of_others_shows_no_file_with_another_digest(vit, some, tmp_path):
    indexed(vit, some, tmp_path / "i.db")
    secret = tmp_path / "secret.png"
    with_square(picture(61), "red", 1, 1).save(secret)
    with open_store(tmp_path / "i.db") as store:
        store.database.execute("UPDATE sentences SET text = '../secret.png'")
        for crop in describe(store, PLANTED, vit).crops["+"]:
            assert (crop.png, "has changed" in crop.about) == ("", True)


@pytest.mark.parametrize("folder", ["none", "empty", "a.txt"])
def test_a_folder_without_images_is_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match=folder):
        read_images(tmp_path / folder)


class Resizing:
    """An image processor for a model of a test."""

    def __init__(self, shape):
        self.shape = shape

    def __call__(self, images, return_tensors="pt", **how):
        values = numpy.asarray(images.resize((self.shape[2], self.shape[1])), dtype=numpy.float32) / 255
        return {"pixel_values": torch.from_numpy(values).permute(2, 0, 1)[None]}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_vision_model_is_indexed(name, some, tmp_path):
    """Its own tokens never count; a model without any has its strongest patch at position 0, too."""
    vision = test_tasks.make(name)
    vision.processor = Resizing(test_tasks.prompt(vision).shape)
    indexed(vision, some, tmp_path / "i.db")
    begins, tokens = len(own_names(vision)), set()
    with open_store(tmp_path / "i.db") as store:
        for neuron in store.neurons.all_with_heads():
            tokens |= {e.token for side in "+-" for e in store.examples(neuron, side)}
        assert min(tokens) == begins
        assert store.facts.get("tokens") == 4 * (
            len(names(vision, vision.encode([str(some / "0.png")]).pixels)) - begins
        )
        annotate(vision, store, [Neuron(0, "ffn", 1)], K)
        for kind in ("patch", "relevance"):
            card = describe(store, Neuron(0, "ffn", 1), vision, crop=kind)
            shown = [crop for crops in card.crops.values() for crop in crops]
            assert all(crop.png or (kind == "relevance" and "No patch" in crop.about) for crop in shown)
        for example in describe(store, "L1.head.0", vision).examples["+"]:
            assert sum(example.relevance) == pytest.approx(1, abs=1e-3)


# --- a store of images and a model of texts, and the other way --------------------------------------------


def test_images_and_texts_are_refused_by_one_another(vit, model, photos, store, corpus, tmp_path):
    with open_store(tmp_path / "new.db", create=True) as new:
        with pytest.raises(InputError, match="reads text"):
            build_index(model, read_images(photos), new)
        with pytest.raises(InputError, match="reads images"):
            build_index(vit, corpus, new)
        assert not new.path.exists()
        build_index(model, corpus, new, k=2)
        with pytest.raises(StoreError, match="index of"):
            search_image(vit, new, str(photos / "red.png"))
        with pytest.raises(StoreError, match="index of texts"):
            search_image(model, new, str(photos / "red.png"))
        with pytest.raises(StoreError, match="not of"):
            build_index(vit, read_images(photos), new)
    for refused in (
        lambda: describe(store, "L0.head.0", model),
        lambda: build_index(model, corpus, store, k=K),
        lambda: search(store, "red"),
        lambda: prepare_samples(vit, store),
        lambda: atlas(store),
        lambda: more_examples(vit, store, PLANTED),
    ):
        with pytest.raises(StoreError, match="images"):
            refused()


@pytest.mark.parametrize(
    "words",
    [
        "index --images {photos} --corpus wiki-summaries",
        "index --images {photos} --language fr",
        "index --images {photos} --lens",
        "search red --image {photos}/red.png",
        "search",
        "steer --image {photos}/red.png --chat --edit L1.ffn.3*0",
        "steer a --edit L1.ffn.3*0",
    ],
)
def test_options_that_do_not_go_together(vit, photos, words):
    result = RUN.invoke(main, [*words.format(photos=photos).split(), *["--model", vit.name] * ("lens" not in words)])
    assert result.exit_code == 2, result.output


# --- the planted neuron -----------------------------------------------------------------------------------


def test_the_planted_neuron_is_on_its_card_in_the_search_and_in_the_answer(vit, photos, store, tmp_path):
    """A weight that fires on one color: its strongest patch is the red one, by far."""
    strongest, *others = store.examples(PLANTED)
    assert (strongest.sentence.text, strongest.token_text) == ("red.png", "2,1")
    assert all(strongest.activation > 10 * other.activation for other in others)
    document = json.loads(run("neuron", PLANTED, "--store", store.path, "--model", vit.name, "--json"))
    row = document["examples"]["+"][0]
    assert (row["file"], row["patch"]) == ("red.png", "2,1")
    assert row["sha256"] == hashlib.sha256((photos / "red.png").read_bytes()).hexdigest()
    assert "red.png" in run("neuron", PLANTED, "--store", store.path, "--model", vit.name)
    image = tmp_path / "other.png"
    with_square(picture(70), "red", 2, 1).save(image)
    result = search_image(vit, store, str(image), 100)
    assert result.images[0][0] == "red.png"
    assert result.images[0][1] > result.images[1][1]


def test_a_search_has_the_neurons_whose_images_are_most_like_an_image(vit, photos, store):
    """By hand: mean vectors of the examples of each side, against the vector of the image; none is left out above the
    largest of the random sets, and all are above it."""
    ids, vectors = store.sentence_vectors()
    rows = dict(zip(ids.tolist(), torch.tensor(store.vectors.standardized(vectors.astype("float32"))), strict=True))
    image = next(image for image in store.sentences.starting_at(0) if image.text == "red.png")
    cosines = {}
    for neuron in store.neurons.all_with_heads():
        for side in "+-":
            examples = store.examples(neuron, side)
            if len(examples) == K:
                mean = torch.stack([rows[e.sentence.id] for e in examples]).mean(0)
                cosines[neuron, side] = torch.cosine_similarity(mean, rows[image.id], dim=0).item()
    hits = search_image(vit, store, str(photos / "red.png"), 1000).hits
    for hit in hits:
        assert hit.score == pytest.approx(cosines[hit.neuron, hit.polarity], abs=3e-3)
    ordered = sorted(cosines.values(), reverse=True)
    assert [hit.score for hit in hits] == pytest.approx(ordered[: len(hits)], abs=3e-3)


def test_an_edit_of_the_planted_neuron_changes_the_answer(vit, photos):
    """The number before and after is that of the network itself, with the neuron's activation multiplied by hand."""
    path = str(photos / "red.png")
    outcome = outcome_of_steering(vit, path, parse_edits(f"{PLANTED}*0"))
    module = vit.site_module("ffn", PLANTED.layer)

    def off(module, args):
        x = args[0].clone()
        x[..., PLANTED.index] = 0
        return (x,)

    def probabilities():
        with torch.no_grad():
            return vit.net(vit.encode([path]).pixels).logits[0].softmax(-1)

    before, handle = probabilities(), module.register_forward_pre_hook(off)
    after = probabilities()
    handle.remove()
    label = vit.labels[int(after.argmax())]
    assert label in outcome.control.number
    assert outcome.control.before == pytest.approx(before[int(after.argmax())].item(), abs=1e-5)
    assert outcome.control.after == pytest.approx(after.max().item(), abs=1e-5)
    assert len(outcome.control.drawn) > 1
    assert "not measured on images" in outcome.side_effects_text
    printed = run("steer", "--image", path, "--edit", f"{PLANTED}*0", "--model", vit.name, "--json")
    document = json.loads(printed)
    assert (document["before"], document["after"]) == (outcome.control.before, outcome.control.after)
    assert document["steered"]["first_token"] == label


def test_a_model_without_labels_is_indexed_and_its_edits_are_measured_by_examples(photos, some, tmp_path):
    """Its cards have no words, and the number is the projection on the examples."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 1}
    Dinov2Model(Dinov2Config(**sizes, image_size=SIDE, patch_size=PATCH, initializer_range=0.3)).save_pretrained(
        tmp_path
    )
    size = {"shortest_edge": SIDE}
    BitImageProcessorPil(size=size, crop_size={"height": SIDE, "width": SIDE}).save_pretrained(tmp_path)
    model, neuron = load_model(str(tmp_path), dtype="float32", device="cpu"), "L1.ffn.3"
    indexed(model, photos, tmp_path / "i.db")
    with open_store(tmp_path / "i.db") as store:
        assert store.is_complete
        assert store.count("tokens") == 0
        assert describe(store, neuron).projection is describe(store, neuron, model).projection is None
        assert search_image(model, store, str(photos / "2.png")).images
    asking = ["--examples", photos / "deep", "--others", some]
    printed = run(
        "steer", "--image", photos / "red.png", *asking, "--edit", f"{neuron}+5", "--model", tmp_path, "--json"
    )
    document = json.loads(printed)
    asked = by_examples(model, str(photos / "deep"), str(some))
    logit = asked.next_logits(str(photos / "red.png"))[0].item()
    assert document["before"] == pytest.approx(logit, abs=1e-5)
    assert document["after"] != document["before"]
    assert document["control"]["draws"] > 1
    page = tmp_path / "why.html"
    run(
        "explain",
        "--image",
        photos / "red.png",
        *asking,
        "--model",
        tmp_path,
        "--store",
        tmp_path / "i.db",
        "--html",
        page,
    )
    html = page.read_text()
    assert html.count("data:image/png") > 10  # crops on the cards, beside the map
    assert asked.fingerprint != asked.index_fingerprint == model.fingerprint
    with torch.no_grad():
        next(model.net.parameters()).add_(1)
    assert asked.index_fingerprint == model.fingerprint


# --- cards ------------------------------------------------------------------------------------------------


def test_the_relevance_of_patches_and_biases_sum_to_the_activation(vit, photos, store):
    neuron = Neuron(1, "ffn", 3)
    annotate(vit, store, [neuron], K)
    for polarity in "+-":
        for example in store.examples(neuron, polarity, K):
            assert example.relevance[0] == 0  # [CLS] is a constant
            ((tokens, sums),) = attribute_neurons(
                vit, [str(photos / example.sentence.text)], [neuron], [example.token], VIT
            )
            assert example.relevance == pytest.approx(tokens.tolist(), abs=1e-4)
            assert sums.target == pytest.approx(example.activation, rel=1e-4)
            assert abs(sums.remainder) < 1e-3 * max(1, abs(sums.target))


def test_a_head_has_its_attention(vit, photos, store):
    head = Neuron(0, "head", 1)
    card = describe(store, head, vit, K)
    vit.net.set_attn_implementation("eager")
    for example in card.examples["+"]:
        with torch.no_grad():
            pixels = vit.encode([str(photos / example.sentence.text)]).pixels
            maps = vit.net(pixels, output_attentions=True).attentions[0][0, 1, example.token]
        assert example.relevance == pytest.approx(maps.tolist(), abs=1e-4)
    assert card.attends_to == {}
    assert card.swap == ""
    assert "attends to" in card.to_html()


def decoded(crop):
    return Image.open(io.BytesIO(base64.b64decode(crop.png)))


def test_both_kinds_of_crops(vit, store):
    annotate(vit, store, [PLANTED], K)
    cards = {kind: describe(store, PLANTED, vit, K, crop=kind) for kind in ("patch", "relevance")}
    for card in cards.values():
        assert len(card.crops["+"]) == len(card.examples["+"])
        assert all(max(decoded(crop).size) == 168 for crop in card.crops["+"])
        page = card.to_html()
        assert page.count("data:image/png;base64,") == sum(map(len, card.crops.values()))
        assert "http" not in page.replace("http://www.w3.org", "")
        assert "<img" in card._repr_html_()
    assert cards["patch"].crops["+"][0].png != cards["relevance"].crops["+"][0].png
    assert "of the relevance" in cards["relevance"].crops["+"][0].about
    red, green, blue = decoded(cards["patch"].crops["+"][0]).convert("RGB").resize((4, 4)).getpixel((1, 2))
    assert red > 200 > 100 > max(green, blue)
    assert list(cards["patch"].to_frame().columns) == ["neuron", "polarity", "activation", "patch", "file", "sha256"]
    with pytest.raises(UnknownName):
        describe(store, PLANTED, vit, crop="whole")
    assert describe(store, PLANTED).crops == {}  # without the model
    assert "needs the model" in describe(store, PLANTED).to_html()


def test_a_crop_by_relevance_that_is_not_measured_says_so(vit, store):
    (crop, *_) = describe(store, Neuron(0, "ffn", 11), vit, crop="relevance").crops["+"]
    assert (crop.png, "--annotate" in crop.about) == ("", True)


def test_the_smallest_square_with_half_of_the_relevance():
    """Against all squares of all sizes."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((4, 4), (5, 9), (16, 16), (2, 7)):
        for _ in range(20):
            relevance = torch.rand(rows, columns, generator=generator) ** 8
            (top, left, height, width), share = smallest_square(relevance)
            shares = {}
            for size in range(LEAST, max(rows, columns, LEAST) + 1):
                h, w = min(size, rows), min(size, columns)
                sums = [
                    relevance[r : r + h, c : c + w].sum().item()
                    for r in range(rows - h + 1)
                    for c in range(columns - w + 1)
                ]
                shares[size] = max(sums) / relevance.sum().item()
            size = min(size for size, best in shares.items() if best >= HALF or size == max(shares))
            assert (height, width) == (min(size, rows), min(size, columns))
            assert share == pytest.approx(shares[size])
            assert relevance[top : top + height, left : left + width].sum() / relevance.sum() == pytest.approx(share)


def test_the_card_in_the_app(vit, photos, made, monkeypatch):
    set_up(monkeypatch, store=str(made), model=vit.name)
    page = fine(visit("neurons", neuron=str(PLANTED)))
    assert "red.png" in text(page)
    with open_store(made) as store:
        shown = sum(len(store.examples(PLANTED, side)) for side in "+-")
    assert text(page).count("data:image/png;base64,") == shown
    assert "icebear steer --image" in text(page)
    again = fine(visit("neurons", neuron=str(PLANTED), crop="relevance"))
    assert "of the relevance" in text(again)
    assert "Choose an image" in text(fine(visit("neurons")))
