"""The similarity of a text and an image by two towers: the laws of its relevance, on random weights in float64."""

import json

import pytest
import torch
from click.testing import CliRunner
from conftest import Double
from PIL import Image
from towers import END, IDS, KINDS, images, made
from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast

from icebear.app.cli.main import main
from icebear.concepts.methods.attnlrp import ATTNLRP, CP_LRP
from icebear.concepts.similarity import TwoTowers, explained_rows, similarity
from icebear.concepts.similarity_laws import misplaced, own_similarity, similarity_laws
from icebear.errors import InputError, ModelError


@pytest.fixture(scope="module", params=KINDS)
def net(request):
    return made(request.param)


@pytest.mark.parametrize("method", [ATTNLRP, CP_LRP])
def test_words_patches_and_constants_sum_to_the_models_own_similarity(net, method):
    with Double():
        ids, pixels = torch.tensor(IDS), images()
        values, (tokens, of_pixels), constants = explained_rows(net, ids, pixels, method)
        assert torch.allclose(values, own_similarity(net, ids, pixels), atol=1e-12)
        total = tokens.sum(1) + of_pixels.flatten(1).sum(1) + sum(constants.values())
        sizes = tokens.abs().sum(1) + of_pixels.abs().flatten(1).sum(1)
        assert ((values - total).abs() / sizes).max() < 1e-6
        result = similarity(TwoTowers(net), IDS[0], pixels[0], method)
        assert abs(result.sums.remainder) < 1e-6 * sizes[0]
        assert result.value == pytest.approx(values[0].item())
        assert result.image.patches.sum().item() == pytest.approx(of_pixels[0].sum().item())


def test_gradient_x_input_is_that_of_torch(net):
    with Double():
        ids, pixels = torch.tensor(IDS), images().requires_grad_()
        _, (tokens, of_pixels), _ = explained_rows(net, ids, pixels, None)
        embedding = net.text_model.embeddings.token_embedding
        vectors = embedding(ids).detach().requires_grad_()
        hook = embedding.register_forward_hook(lambda *args: vectors)
        gradients = torch.autograd.grad(own_similarity(net, ids, pixels).sum(), (vectors, pixels))
        hook.remove()
        assert torch.allclose(tokens, (vectors * gradients[0]).sum(-1), atol=1e-12)
        assert torch.allclose(of_pixels, pixels * gradients[1], atol=1e-12)


@pytest.mark.parametrize("method", [ATTNLRP, CP_LRP])
def test_a_batch_of_pairs_is_each_alone(net, method):
    with Double():
        pixels = images()
        _, together, _ = explained_rows(net, torch.tensor(IDS), pixels, method)
        for row, ids in enumerate(IDS):
            _, alone, _ = explained_rows(net, torch.tensor([ids]), pixels[row : row + 1], method)
            assert all(torch.allclose(x[row], y[0], atol=1e-12) for x, y in zip(together, alone, strict=True))


def test_a_patch_of_the_map_is_the_block_of_pixels_it_is_made_of(net):
    pixels, seen = images(1), []
    hook = net.vision_model.embeddings.patch_embedding.register_forward_hook(lambda m, a, x: seen.append(x))
    for row in range(4):
        for column in range(4):
            changed = pixels.clone()
            changed[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
            seen.clear()
            for x in (pixels, changed):
                net.vision_model(pixel_values=x)
            moved = (seen[0] != seen[1]).any(1)[0]
            assert moved.nonzero().tolist() == [[row, column]]
    hook.remove()


def test_region_of_a_word_is_the_map_minus_the_map_without_it(net):
    with Double():
        towers, pixels = TwoTowers(net), images(1)[0]
        result = similarity(towers, IDS[0], pixels)
        for position in result.words:
            left = [*IDS[0][:position], *IDS[0][position + 1 :], *([1] if towers.is_padded else [])]
            without = similarity(towers, left, pixels)
            expected = result.image.patches - without.image.patches
            assert torch.allclose(result.region(position).patches, expected, atol=1e-12)


DRAWS = 20


def planted(kind):
    """A model whose image embedding is the mean over patches, each by itself: its vision tower mixes them once, by
    uniform attention, and does nothing else to them."""
    net = made(kind)
    layers, vision = net.vision_model.encoder.layers, net.vision_model
    silent = [layer.mlp.fc2 for layer in layers] + [layer.self_attn.out_proj for layer in layers]
    silent.append(vision.embeddings.position_embedding)
    if kind == "clip":  # its last layer mixes
        silent.remove(layers[-1].self_attn.out_proj)
        silent += [layers[-1].self_attn.q_proj, layers[-1].self_attn.k_proj]
    else:  # its pooling does
        silent.append(vision.head.mlp.fc2)
        vision.head.attention.in_proj_weight.data[: 2 * 24] = 0
        vision.head.attention.in_proj_bias.data.zero_()
    for module in silent:
        for parameter in module.parameters():
            parameter.zero_()
    for path, parameter in vision.named_parameters():
        if path.endswith(("bias", "class_embedding")):
            parameter.zero_()
    return net


def set_text(net, ids, direction):
    """Set the last linear map of the text tower so that the embedding of a text is a direction."""
    name = "text_projection" if hasattr(net, "text_projection") else "head"
    linear, seen = net.get_submodule(name if name == "text_projection" else "text_model.head"), []
    hook = linear.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    net.get_text_features(input_ids=ids)
    hook.remove()
    [read] = seen
    linear.weight = torch.nn.Parameter(direction[:, None] * read / read.square().sum())
    if linear.bias is not None:
        linear.bias.zero_()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_planted_patch_is_first_in_20_of_20(kind):
    """The text's embedding is set so that its product with the image's does not change without any other patch, and is
    0 without the planted one."""
    with Double():
        net, ids = planted(kind), torch.tensor(IDS[:1])
        if kind == "clip":
            net.visual_projection.weight = torch.nn.Parameter(torch.eye(24, dtype=torch.float64))
        firsts, chosen = {ATTNLRP: [], CP_LRP: []}, [(7 * draw + draw // 3) % 16 for draw in range(DRAWS)]
        for pixels, patch in zip(images(DRAWS), chosen, strict=True):
            views = pixels.repeat(17, 1, 1, 1)
            for number in range(16):
                row, column = 8 * (number // 4), 8 * (number % 4)
                views[1 + number, :, row : row + 8, column : column + 8] = 0
            wanted = torch.ones(17, dtype=torch.float64)
            wanted[1 + patch] = 0
            direction = torch.linalg.pinv(net.vision_model(pixel_values=views).pooler_output) @ wanted
            set_text(net, ids, direction)
            for method, found in firsts.items():
                found.append(int(similarity(TwoTowers(net), IDS[0], pixels, method).image.patches.argmax()))
        for found in firsts.values():
            assert found == chosen
            assert sum(a == b for a, b in zip(reversed(found), chosen, strict=True)) < DRAWS  # the control


def test_the_laws_of_two_towers_hold_and_see_what_breaks_them(net):
    with Double():
        laws = similarity_laws(net, torch.tensor(IDS), images())
        assert max(laws.values()) < 1e-6, laws
        embed = net.vision_model.embeddings.patch_embedding
        shifted = embed.register_forward_hook(lambda module, args, x: x.roll(1, -1))
        moved = misplaced(net, images(1))
        shifted.remove()
        assert len(moved) == 16


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    words = {"<s>": 0, "<pad>": 1, "a": 2, "brown": 3, "bear": 4, "?": 5, "</s>": END}
    inner = Tokenizer(WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_and_a_picture_of_a_folder_are_explained(kind, tmp_path):
    made(kind).float().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    Image.new("RGB", (80, 40), "saddlebrown").save(tmp_path / "brown.png")
    towers = TwoTowers.load(str(tmp_path))
    result = similarity(towers, "a brown bear", str(tmp_path / "brown.png"))
    assert [result.strings[position] for position in result.words] == ["a", "brown", "bear"]
    assert result.blurred == pytest.approx(result.value, abs=1e-5)  # of one color
    assert len(result.ids) == (8 if kind == "siglip" else 5)
    assert result.region(result.words[1]).patches.shape == (4, 4)
    assert "brown" in str(result)
    with pytest.raises(InputError):
        result.region(0)
    with pytest.raises(InputError):
        similarity(towers, [0, END], torch.zeros(3, 16, 16))
    with pytest.raises(InputError):
        similarity(towers, "a " * 20, str(tmp_path / "brown.png"))


def test_the_command_explains_a_similarity(tmp_path):
    made("clip").float().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    Image.new("RGB", (80, 40), "saddlebrown").save(tmp_path / "brown.png")
    command = ["explain", "brown <b>bear</b>", "--image", str(tmp_path / "brown.png"), "--model", str(tmp_path)]
    pages = [str(tmp_path / name) for name in ("page.html", "map.png")]
    result = CliRunner().invoke(main, [*command, "--json", "--html", pages[0], "--png", pages[1]])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert len(data["words"]) == 2
    assert len(data["patches"]) == 4
    total = sum(data["sums"][name] for name in ("tokens", "positions", "biases", "softmax", "remainder"))
    assert total == pytest.approx(data["similarity"], abs=1e-5)
    assert (tmp_path / "page.html").read_text().count("<img") == 3
    assert Image.open(pages[1]).size == (448, 448)
    shown = CliRunner().invoke(main, command)
    assert "Similarity" in shown.stdout
    for other in (["--counterfactual", "a"], ["--bits", "8"], ["--span", "0:1"]):
        assert CliRunner().invoke(main, [*command, *other]).exit_code == 2
    assert CliRunner().invoke(main, [*command, "--dtype", "bfloat16"]).exit_code == 0


def test_other_models_are_refused_by_name(tiny_folder):
    with pytest.raises(ModelError, match="llama"):
        TwoTowers.load(tiny_folder)
