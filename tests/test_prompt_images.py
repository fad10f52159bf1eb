"""Prompts with an image: the laws of every kind of model that reads them, and where the patches of the map are."""

import copy
import json
from dataclasses import replace

import pictured
import pytest
import torch
from click.testing import CliRunner
from conftest import Double
from few import few_of
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from icebear import Chat, Model, attribute, circuit, explain
from icebear.app.cli.main import main
from icebear.concepts.image_laws import image_laws, misplaced
from icebear.concepts.nodes.image_shares import image_shares
from icebear.concepts.nodes.patch_controls import patch_controls
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.patched_pair import CompletePasses, PatchedPair
from icebear.concepts.stages.stages import why_no_stages
from icebear.errors import InputError, ModelError
from icebear.models.objective import objective_of
from icebear.models.parts.vision import VISION
from icebear.models.prompt_image import PromptImage, patches_of
from icebear.models.text.prompt_images import counterfactual_prompt, map_of, with_image
from icebear.models.text.prompts import Prompt

KINDS = list(pictured.CONFIGS)


@pytest.mark.parametrize("attention", few_of(["sdpa", "eager"], "sdpa"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_hold_for_every_kind(kind, attention):
    with Double():
        model = pictured.made(kind, attention)
        laws = image_laws(model, [pictured.prompt(kind, seed) for seed in (0, 1)])
    assert laws.pop("blocks") == 0
    assert max(laws.values()) < 1e-6, laws


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_right_block_the_law_of_blocks_fails(kind):
    """The control: a map that is shifted by a block is wrong for every token."""
    model = pictured.made(kind)
    prompt = with_image(model, pictured.prompt(kind))

    class Shifted(PromptImage):
        def token_sums(self, values):
            return super().token_sums(values).roll(1)

    shifted = Shifted(**vars(prompt.image))
    prompt = type(prompt)(ids=prompt.ids, image=shifted)
    assert len(misplaced(model, prompt)) == pictured.TOKENS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_is_the_models_own(kind):
    """With rules, and with our attention over the patches of all images (Qwen)."""
    with Double():
        model = pictured.made(kind)
        prompt = with_image(model, pictured.prompt(kind))
        own = model.net(**model.inputs(objective_of(model, [prompt]).batch)).logits[0, -1]
        for options in ({"method": "attnlrp"}, {"counterfactual_image": "blur"}):
            result = attribute(model, prompt, sites=(), **options)
            assert result.target.logit == pytest.approx(own[result.target.id].item(), rel=1e-6)
    assert int(own.argmax()) == result.target.id


DRAWS, CONTRAST = 20, 3


def planted(kind):
    """A model of patches that mix once, and prompts whose answer one patch decides. The contrast has 0."""
    model = pictured.made(kind)
    pictured.mix_once(model)
    text = pictured.ids(kind)
    model.embeddings[0].weight[text] = 0
    images = [pictured.pixels(kind, seed) for seed in range(DRAWS)]
    prompts = [with_image(model, Prompt(ids=tuple(text), image=pixels)) for pixels in images]
    chosen = [(7 * seed + seed // 3) % pictured.TOKENS[kind] for seed in range(DRAWS)]
    answers = [token for token in range(64) if token not in (*text, CONTRAST)][:DRAWS]
    for prompt, token, answer in zip(prompts, chosen, answers, strict=True):
        pictured.plant(model, prompt, token, answer)
    model.net.get_output_embeddings().weight[CONTRAST] = 0
    return model, prompts, chosen, answers


@pytest.mark.parametrize("kind", few_of(KINDS, *pictured.FEW))
@torch.no_grad()
def test_a_planted_patch_is_first_in_20_of_20(kind):
    with Double():
        model, prompts, chosen, answers = planted(kind)
        for method in ("cp-lrp", "attnlrp"):
            results = attribute(model, prompts, answers, method=method, number="logit", sites=())
            assert [first(result) for result in results] == chosen
            shuffled = [first(result) for result in reversed(results)]
            assert sum(a == b for a, b in zip(shuffled, chosen, strict=True)) < DRAWS  # the control
        compared = [
            attribute(model, prompt, answer, contrast=CONTRAST, counterfactual=without(prompt), sites=())
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        assert [first(result) for result in compared] == chosen


def without(prompt):
    """Return the prompt with an image too dark to count; SmolVLM leaves out images of zeros."""
    return replace(prompt, image=pictured.scaled(prompt.image, 1e-30))


def first(result):
    """Return which token of the image has the largest relevance."""
    return int(result.tokens[list(result.prompt.image_positions)].argmax())


@pytest.mark.parametrize("kind", KINDS)
def test_the_map_has_the_relevance_of_each_token_at_its_block(kind):
    with Double():
        model = pictured.made(kind)
        result = attribute(model, pictured.prompt(kind), method="cp-lrp", sites=())
    prompt, map_ = result.prompt, result.image
    assert map_.picture.shape == pictured.pixels(kind).shape
    low, high = pictured.pixels(kind).amin(), pictured.pixels(kind).amax()
    assert torch.allclose(map_.picture.double(), (pictured.pixels(kind) - low) / (high - low), atol=1e-6)
    for position in prompt.image_positions:
        row, column = map(int, prompt.strings[position].split(","))
        assert map_.patches[row, column].item() == pytest.approx(result.tokens[position].item(), abs=1e-12)
    assert map_.pixels.sum().item() == pytest.approx(result.tokens[list(prompt.image_positions)].sum().item())
    assert prompt.text.count("[image]") == 1
    assert sorted(sum(prompt.parts.values(), ())) == list(range(len(prompt.ids)))


@pytest.mark.parametrize("shape", [(3, 8), (4, 8, 8), (1, 3, 8, 8)])
def test_pixels_of_another_shape_or_of_integers_are_refused(shape):
    model, prompt = pictured.made("gemma3"), pictured.prompt("gemma3")
    for pixels in (torch.zeros(shape), torch.zeros(3, 8, 8, dtype=torch.uint8)):
        with pytest.raises(InputError, match="3 x height x width"):
            with_image(model, replace(prompt, image=pixels))


def tiled(rows, columns, has_overview):
    """An image of tiles of 4 x 6 pixels, blocks of 2 x 3."""
    count = rows * columns + has_overview
    values = torch.randn(count, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = {"pixel_values": values[None]}
    return PromptImage(inputs, "rows of tiles", (2, 3), 1, (rows, columns), has_overview)


@pytest.mark.parametrize(
    ("rows", "columns", "has_overview"), [(1, 1, False), (2, 3, True), (3, 1, True), (2, 2, False)]
)
def test_tiles_are_put_back_where_they_were_cut_from(rows, columns, has_overview):
    image = tiled(rows, columns, has_overview)
    tiles = image.tiles
    picture, *overview = image.views(tiles)
    assert picture.shape == (3, 4 * rows, 6 * columns)
    for row in range(rows):
        for column in range(columns):
            cut = picture[:, 4 * row : 4 * row + 4, 6 * column : 6 * column + 6]
            assert torch.equal(cut, tiles[row * columns + column])
    assert len(overview) == has_overview
    assert torch.equal(image.cut([picture, *overview]), tiles)
    assert torch.equal(image.with_tiles(tiles).values, image.values)
    relevance = torch.randn_like(image.values)
    shown = map_of(image, relevance)
    assert shown.pixels.sum().item() == pytest.approx(relevance.sum().item())
    of_tiles = relevance[0].sum(1)
    for y in range(4 * rows):
        for x in range(6 * columns):
            value = of_tiles[y // 4 * columns + x // 6, y % 4, x % 6]
            if has_overview:  # one of its pixels is rows x columns pixels of the picture
                value = value + of_tiles[-1, y // rows, x // columns] / (rows * columns)
            assert shown.pixels[y, x].item() == pytest.approx(value.item())
    sums = dict(zip(image.token_names, image.token_sums(relevance).tolist(), strict=True))
    assert len(sums) == image.count == 4 * len(tiles)
    for name, value in sums.items():
        y, x = map(int, name.removeprefix("overview:").split(","))
        in_overview = name.startswith("overview:")
        tile = of_tiles[-1] if in_overview else of_tiles[y // 2 * columns + x // 2]
        y, x = (y, x) if in_overview else (y % 2, x % 2)
        assert value == pytest.approx(tile[2 * y : 2 * y + 2, 3 * x : 3 * x + 3].sum().item())


def test_patches_follow_each_other_as_the_processor_makes_them():
    """Against transformers' own: each pixel stands where Qwen's processor puts it."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = torch.randn(3, 16, 24, dtype=torch.float32)
    theirs, rows, columns = Qwen2VLImageProcessorPil().patchify(pixels.numpy(), 4, 2, 2)
    assert (rows, columns) == (4, 6)
    assert torch.equal(torch.tensor(theirs), patches_of(pixels, (8, 8), 2, 2))


@pytest.fixture(scope="module", params=few_of(KINDS, *pictured.FEW))
def loaded(request, tmp_path_factory):
    """A model of a folder, with its tokenizer and image processor, and the path of a wide picture."""
    return pictured.loaded(request.param, tmp_path_factory.mktemp(request.param))


GRIDS = {"smolvlm": (1, 2), "internvl": (1, 2)}


def test_a_picture_a_text_and_a_chat_are_read_as_the_model_reads_them(loaded):
    model, folder = loaded
    kind = model.net.config.model_type
    result = attribute(model, "what is this", image=str(folder / "bear.png"))
    assert result.read.image.grid == GRIDS.get(kind, (1, 1))
    assert len(result.prompt.image_positions) == result.read.image.count
    assert result.prompt.text.count("[image]") in (1, len(GRIDS.get(kind, (1,))) + (kind == "smolvlm"))
    assert abs(result.conservation().remainder) < 1e-3 * result.tokens.abs().sum().item()
    brown = result.image.picture[0] - result.image.picture[2]  # where red is more than blue
    columns = (brown > 0.2).any(0).nonzero().flatten()
    width = brown.shape[1]
    if kind != "llava":  # which cuts the middle out
        assert 0.55 < columns.amin().item() / width < 0.7
        assert 0.9 < columns.amax().item() / width < 1
    chat = attribute(model, Chat([{"role": "user", "content": "what is this"}]), image=str(folder / "bear.png"))
    assert set(chat.prompt.image_positions) == set(chat.prompt.parts["image"])
    assert len(chat.tokens) > len(result.tokens)
    assert Prompt.of(chat.read).ids == chat.prompt.ids


def test_answers_are_explained_with_their_image(loaded):
    model, folder = loaded
    answer = model.answer(Prompt(text="what is this", image=str(folder / "bear.png")), max_new_tokens=3)
    result = attribute(model, answer, span=(1, 2), sites=())
    assert result.prompt.answer_start == len(answer.prompt_ids)
    alone = attribute(model, Prompt(text="what is this", image=str(folder / "bear.png")), answer.ids[0], sites=())
    assert torch.allclose(attribute(model, answer, span=(0, 1), sites=()).tokens, alone.tokens)
    compared = attribute(model, answer, span=(1, 2), counterfactual_image="blur", sites=())
    total = max(compared.tokens.abs().sum().item(), abs(compared.conservation().target))
    assert abs(compared.conservation().remainder) < 1e-3 * total


@pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3"])
def test_token_ids_are_those_of_the_models_processor(kind, tmp_path):
    """Of the kinds whose processor needs no torchvision."""
    from transformers import Gemma3Processor, LlavaProcessor, PaliGemmaProcessor

    picture, tokenizer, images = (
        Image.new("RGB", (80, 40), "red"),
        pictured.tokenizer(kind),
        pictured.image_processor(kind),
    )
    sign = {"gemma3": "<start_of_image>"}.get(kind, "<image>")
    if kind == "llava":
        options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        processor = LlavaProcessor(images, tokenizer, **options)
    elif kind == "paligemma":
        images.image_seq_length = 16
        processor = PaliGemmaProcessor(images, tokenizer)
    else:
        tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = sign, "<end_of_image>", "<image_soft_token>"
        tokenizer.boi_token_id, tokenizer.image_token_id = 40, pictured.IMAGE
        processor = Gemma3Processor(images, tokenizer, image_seq_length=4)
    theirs = processor(images=[picture], text=[f"{sign}what is this"], return_tensors="pt")
    model = pictured.made(kind, dtype=torch.float32)
    model.tokenizer, model.processor = pictured.tokenizer(kind), pictured.image_processor(kind)
    ours = with_image(model, Prompt(text="what is this", image=picture))
    assert list(ours.ids) == theirs["input_ids"][0].tolist()
    assert torch.equal(ours.image.values, theirs["pixel_values"])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3)])
def test_smolvlms_text_of_tiles_is_transformers_own(rows, columns):
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    is_cut = rows * columns > 1
    names = ("<fake_token_around_image>", "<image>", "<global-img>")
    theirs = get_image_prompt_string(rows * is_cut, columns * is_cut, 4, *names)
    image = tiled(rows, columns, is_cut)
    assert VISION["smolvlm"].written(image, "<image>", None) == theirs


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    """A model of tiles, and the path of a wide picture."""
    return pictured.loaded("smolvlm", tmp_path_factory.mktemp("tiles"))


def test_the_shares_are_those_of_the_parts_also_with_the_image_blurred(smolvlm):
    model, folder = smolvlm
    prompt = Prompt(text="what is this", image=str(folder / "bear.png"))
    result = attribute(model, prompt, method="attnlrp")
    shares = image_shares(model, result)
    assert sum(shares.sums.values()) == pytest.approx(result.tokens.sum().item(), abs=1e-5)
    assert sum(shares.shares.values()) == pytest.approx(1)
    assert shares.sums["image"] == pytest.approx(result.image.pixels.sum().item(), abs=1e-5)
    words = [result.prompt.strings[position] for position in result.prompt.parts["text"]]
    assert [word.strip() for word in words] == ["what", "is", "this"]
    soft = counterfactual_prompt(model, prompt, "blur", "")
    control = attribute(model, soft, result.target.id, method="attnlrp", sites=())
    assert shares.blurred_sums["image"] == pytest.approx(control.image.pixels.sum().item(), abs=1e-6)
    assert shares.blurred_sums != shares.sums
    assert image_shares(model, attribute(model, soft, counterfactual=prompt, sites=())) is None


def test_a_comparison_gives_relevance_to_what_differs(smolvlm):
    model, folder = smolvlm
    image = str(folder / "bear.png")
    by_image = attribute(model, "what is this", image=image, counterfactual_image="blur", sites=())
    parts = by_image.prompt.parts
    assert not by_image.tokens[[*parts["text"], *parts["template"]]].any()
    assert by_image.tokens[list(parts["image"])].any()
    assert "blurred" in by_image.comparison_text()
    by_text = attribute(model, "what is this", image=image, counterfactual="what is that", sites=())
    assert by_text.tokens.nonzero().flatten().tolist() == [len(by_text.tokens) - 1]
    other = attribute(model, "what is this", image=image, counterfactual_image=Image.new("RGB", (80, 40)), sites=())
    assert other.tokens[list(parts["image"])].any()
    multiplied = attribute(model, "what is this", image=image, counterfactual_image="blur", method="gxi", sites=())
    assert not multiplied.tokens[[*parts["text"], *parts["template"]]].any()


def test_a_result_is_saved_and_loaded_with_its_image(smolvlm, tmp_path):
    model, folder = smolvlm
    result = attribute(model, "what is this", image=str(folder / "bear.png"))
    result.save(tmp_path / "result.safetensors")
    loaded = Relevance.load(tmp_path / "result.safetensors", model)
    assert torch.equal(loaded.tokens, result.tokens)
    assert torch.equal(loaded.image.patches, result.image.patches)
    assert loaded.prompt == result.prompt
    batch = loaded.explained().batch
    assert torch.equal(batch.images[0].values, result.explained().batch.images[0].values)
    again = loaded.effects(1)
    assert torch.allclose(again.matrix, result.effects(1).matrix)


def test_the_command_prints_map_shares_and_remainder(smolvlm, tmp_path):
    _, folder = smolvlm
    words = ["explain", "what is this", "--image", str(folder / "bear.png"), "--model", str(folder), "--top", "2"]
    files = ["--png", str(tmp_path / "map.png"), "--html", str(tmp_path / "page.html")]
    done = CliRunner().invoke(main, [*words, *files, "--json"])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["patches"]) == 2
    assert len(document["patches"][0]) == 4
    assert document["image_shares"]["shares"].keys() == {"image", "text", "template"}
    assert abs(document["conservation"]["remainder"]) < 1e-3
    assert Image.open(tmp_path / "map.png").size == (448, 224)
    page = (tmp_path / "page.html").read_text()
    assert "data:image/png;base64," in page
    assert "With the image blurred" in page
    screen = CliRunner().invoke(main, words).stdout
    assert "+9" in screen or "-9" in screen
    assert "remainder" in screen
    assert "this" in screen
    asked = CliRunner().invoke(main, [*words, "--chat", "--counterfactual-image", "blur", "--json"])
    assert json.loads(asked.stdout)["counterfactual"]["image"] == "the image blurred"
    ranked = CliRunner().invoke(main, ["rank", *words[1:], "--json"])
    assert len(json.loads(ranked.stdout)["ranking"]) == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--image", "{folder}/bear.png"], 2, "PROMPT"),
        (["what", "--image", "none.png"], 1, "none.png"),
        (["what", "--counterfactual-image", "blur"], 1, "no image"),
        (["what <image> is <image>", "--image", "{folder}/bear.png"], 1, "2 signs"),
        (["what", "--image", "{folder}/bear.png", "--counterfactual-image", "mask:a.png"], 1, "mask"),
        (["what", "--image", "{folder}/bear.png", "--method", "pa-lrp"], 1, "attnlrp"),
        (["what", "--image", "{folder}/bear.png", "--base-model", "{folder}"], 1, "base model"),
        (["--image", "{folder}/bear.png", "--sources"], 2, "PROMPT"),
    ],
)
def test_mistakes_are_said(smolvlm, words, code, message):
    folder = smolvlm[1]
    done = CliRunner().invoke(
        main, ["explain", *(word.format(folder=folder) for word in words), "--model", str(folder)]
    )
    assert (done.exit_code, message in done.stderr) == (code, True), done.stderr


def test_what_does_not_read_images_with_text_says_so(smolvlm, llama):
    model, folder = smolvlm
    image = str(folder / "bear.png")
    with pytest.raises(InputError, match="reads text"):
        attribute(llama, [1, 2], image=pictured.pixels("llava"))
    with pytest.raises(InputError, match="Circuits"):
        circuit(
            model, Prompt(text="what is this", image=image), counterfactual=Prompt(text="what is that", image=image)
        )
    with pytest.raises(InputError, match="attribute"):
        model.generate(Prompt(text="what is this", image=image))
    with pytest.raises(InputError, match="another size"):
        attribute(model, "what is this", image=image, counterfactual_image=Image.new("RGB", (40, 80)))
    with pytest.raises(InputError, match="4 times"):
        attribute(model, [1, pictured.IMAGE], image=pictured.pixels("smolvlm"))


def test_other_kinds_are_refused_by_name():
    """With those that are explained."""
    config = CONFIG_MAPPING["aya_vision"](
        vision_config={**pictured.SQUARE, "model_type": "siglip_vision_model"},
        text_config={**pictured.TEXT, "model_type": "cohere2"},
        image_token_id=pictured.IMAGE,
    )
    model = Model(AutoModelForImageTextToText.from_config(config))
    assert attribute(model, [1, 2, 3], sites=()).tokens.shape == (3,)  # its text part works
    with pytest.raises(ModelError, match=r"aya_vision.*llava, smolvlm"):
        attribute(model, [1, 2, 3], image=pictured.pixels("smolvlm"))


def test_the_controls_exchange_patches_of_the_picture_and_of_the_overview(smolvlm):
    model, folder = smolvlm
    image, image_c = (
        with_image(model, Prompt(text="what is", image=Image.new("RGB", (80, 40), color))).image
        for color in ("red", "blue")
    )
    mixed = image.exchanged(image_c, [(1, 3)])
    (picture, overview), (red, small), (blue, _) = (x.views(x.tiles) for x in (mixed, image, image_c))
    assert torch.equal(picture[:, 16:, 48:], blue[:, 16:, 48:])
    assert torch.equal(picture[:, :16], red[:, :16])
    assert torch.equal(picture[:, 16:, :48], red[:, 16:, :48])
    changed = (overview != small).any(0).nonzero()
    assert changed.amin(0).tolist() == [16, 24]  # half as wide, as there are two tiles in a row
    assert changed.amax(0).tolist() == [31, 31]
    result = attribute(model, "what is this", image=str(folder / "bear.png"), counterfactual_image="blur", sites=())
    controls = patch_controls(model, result)
    assert len(controls) == 4
    total = result.conservation().target
    deleted, inserted = controls[0], controls[2]
    assert deleted.before - inserted.before == pytest.approx(total, abs=1e-4)
    every = [(row, column) for row in range(2) for column in range(4)]
    first, second = result.counterfactual.pairs[0].batch.images
    assert torch.allclose(first.exchanged(second, every).values, second.values, atol=1e-6)


def test_a_message_may_have_the_image_of_a_conversation(smolvlm, tmp_path, llama):
    model, folder = smolvlm
    part = {"type": "image", "path": str(folder / "bear.png")}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "what is this"}]}]
    chat = Chat(asked)
    assert chat.image == part["path"]
    assert Chat.from_json(chat.to_json()) == chat
    result = attribute(model, asked)
    apart = attribute(model, Chat([{"role": "user", "content": "what is this"}]), image=part["path"])
    assert torch.equal(result.tokens, apart.tokens)
    later = Chat([{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a bear"}, *asked])
    read = with_image(model, Prompt.of(later))
    assert read.ids.index(pictured.IMAGE) > result.read.ids.index(pictured.IMAGE)
    (tmp_path / "chat.json").write_text(json.dumps(asked))
    words = ["explain", "--messages", str(tmp_path / "chat.json"), "--model", str(folder), "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.stderr
    assert "image_shares" in json.loads(done.stdout)
    with pytest.raises(InputError, match="2 images"):
        attribute(model, [*asked, *asked])
    with pytest.raises(InputError, match="reads text"):
        llama.ids(chat)


@pytest.mark.parametrize("url", ["https://example.org/bear.png", "data:image/png;base64,AAAA"])
def test_no_image_is_downloaded(url):
    with pytest.raises(InputError, match="path"):
        Chat([{"role": "user", "content": [{"type": "image", "url": url}]}])


def test_the_word_of_an_answer_has_its_map(smolvlm, tmp_path):
    _, folder = smolvlm
    words = ["explain", "what is this", "--image", str(folder / "bear.png"), "--model", str(folder), "--span", "0:1"]
    done = CliRunner().invoke(main, [*words, "--max-new-tokens", "2", "--png", str(tmp_path / "word.png"), "--json"])
    assert done.exit_code == 0, done.stderr
    assert Image.open(tmp_path / "word.png").size == (448, 224)
    assert json.loads(done.stdout)["answer_start"] is not None


@pytest.mark.parametrize(("tower", "strategy", "count"), [("clip", "full", 10), ("siglip", "full", 9)])
def test_llava_with_other_towers_keeps_the_laws(tower, strategy, count, monkeypatch):
    """CLIP's [CLS] is a token without pixels; the pooling of SigLIP's tower is not read."""
    config = copy.deepcopy(pictured.CONFIGS["llava"])
    sizes = {**pictured.SQUARE, "image_size": 24, "model_type": f"{tower}_vision_model"}
    config = type(config)(**{**config.to_dict(), "vision_config": sizes, "vision_feature_select_strategy": strategy})
    monkeypatch.setitem(pictured.CONFIGS, "llava", config)
    monkeypatch.setitem(pictured.TOKENS, "llava", count)
    with Double():
        model = pictured.made("llava")
        laws = image_laws(model, [pictured.prompt("llava", seed) for seed in (0, 1)])
        result = attribute(model, pictured.prompt("llava"), method="cp-lrp", sites=())
    blocks = laws.pop("blocks")
    assert blocks == (tower == "clip")  # no pixel is in [CLS]
    assert max(laws.values()) < 1e-6, laws
    strings = [result.prompt.strings[position] for position in result.prompt.image_positions]
    assert strings[count - 9 :] == [f"{row},{column}" for row in range(3) for column in range(3)]
    assert strings[: count - 9] == ["[CLS]"] * (count - 9)


def test_a_tower_whose_first_patch_is_left_out_is_refused(monkeypatch):
    config = pictured.CONFIGS["llava"]
    sizes = {**pictured.SQUARE, "image_size": 24, "model_type": "siglip_vision_model"}
    monkeypatch.setitem(pictured.CONFIGS, "llava", type(config)(**{**config.to_dict(), "vision_config": sizes}))
    with pytest.raises(InputError, match="first patch"):
        attribute(pictured.made("llava"), pictured.prompt("llava"), sites=())


def test_stages_compare_two_texts_about_the_same_image(smolvlm):
    """The passes of stages read the image: with everything free they give the logits of the prompts."""
    model, folder = smolvlm
    image = str(folder / "bear.png")
    options = {"counterfactual": "what is that ?", "image": image}
    result = attribute(model, "what is this ?", 3, contrast=4, **options)
    pair = PatchedPair(model, result.counterfactual.pairs[0])
    assert isinstance(pair.passes, CompletePasses)
    assert pair.ends[0] - pair.ends[1] == pytest.approx(result.conservation().target, abs=1e-4)
    explanation = explain(model, result)
    assert explanation.stages.without is not None
    assert "Stages compare" in why_no_stages(
        model, attribute(model, "what is this ?", 3, contrast=4, image=image, counterfactual_image="blur")
    )
