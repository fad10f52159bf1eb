"""An image as a source of an answer: what is lost when it is blurred, beside removals of the text's sentences."""

import json

import pictured
import pytest
import torch
from click.testing import CliRunner
from few import few_of
from PIL import Image

from icebear import Chat, InputError, attribute, matrix, source_breakdown, sources
from icebear.app.cli.main import main
from icebear.concepts.methods.attnlrp import CP_LRP
from icebear.models.objective import objective_of
from icebear.models.text.counterfactual_images import blurred
from icebear.models.text.prompt_images import with_image
from icebear.models.text.prompts import Prompt

KINDS = few_of(pictured.CONFIGS, *pictured.FEW)
PARTS = ["- a bear\n", "- Describe it\n", "- user that\n", "- this is\n"]
TEXT = "".join(PARTS) + "what is this?"


@pytest.fixture(scope="module", params=KINDS)
def loaded(request, tmp_path_factory):
    return pictured.loaded(request.param, tmp_path_factory.mktemp(request.param))


def chat(text=TEXT, image=None):
    parts = [{"type": "text", "text": text}, *([{"type": "image", "path": str(image)}] if image else [])]
    return Chat([{"role": "user", "content": parts}])


def log_probability(model, text, image, answer):
    """The slow way: one pass of the plain network over everything."""
    prompt = with_image(model, Prompt(chat=chat(text), image=image))
    read = Prompt(ids=(*prompt.ids, *answer.ids), image=prompt.image)
    with torch.no_grad():
        logits = model.net(**model.inputs(objective_of(model, [read]).batch)).logits[0, len(prompt.ids) - 1 : -1]
    return logits.log_softmax(-1)[range(len(answer.ids)), list(answer.ids)].sum().item()


def blur(image):
    return image.with_tiles(image.cut([blurred(view) for view in image.views(image.tiles)]))


def test_every_number_of_an_answer_about_an_image_is_a_removal_of_ones_own(loaded):
    model, folder = loaded
    answer = model.answer(chat(image=folder / "bear.png"), max_new_tokens=3)
    [sentence] = sources(model, answer, span=(0, len(answer.ids))).sentences
    base = log_probability(model, TEXT, answer.image, answer)
    assert sentence.log_probability == pytest.approx(base, abs=1e-3)
    assert [source.is_image for source in sentence.sources].count(True) == 1
    for source in sentence.sources:
        image = blur(answer.image) if source.is_image else answer.image
        text = TEXT if source.is_image else TEXT.replace(source.text, "")
        assert source.change == pytest.approx(log_probability(model, text, image, answer) - base, abs=1e-3)
    of_text = [source.text for source in sentence.sources if not source.is_image]
    controls = [
        log_probability(model, TEXT.replace(part, ""), answer.image, answer) - base
        for part in PARTS
        if part not in of_text
    ]
    assert sorted(sentence.random.singles) == pytest.approx(sorted(controls), abs=1e-3)  # the image is no control
    kept = [part for part in PARTS if part not in [source.text for source in sentence.leading]]
    all_blurred = any(source.is_image for source in sentence.leading)
    left = log_probability(
        model, "".join(kept) + "what is this?", blur(answer.image) if all_blurred else answer.image, answer
    )
    assert sentence.together == pytest.approx(left - base, abs=1e-3)


def test_relevance_of_an_image_is_that_of_its_tokens(loaded):
    model, folder = loaded
    answer = model.answer(chat(image=folder / "bear.png"), max_new_tokens=1)
    [sentence] = sources(model, answer).sentences
    [source] = [source for source in sentence.sources if source.is_image]
    result = attribute(model, answer, span=(0, 1), method="cp-lrp", number="logit", sites=())
    tokens = result.tokens[source.start : source.stop]
    assert source.relevance == pytest.approx(tokens.sum().item(), abs=1e-4 * tokens.abs().sum().item())
    positions = result.prompt.image_positions
    assert (source.start, source.stop) == (positions[0], positions[-1] + 1)
    values = matrix(model, answer, by="token", method=CP_LRP).values
    assert torch.allclose(values[0, : len(answer.prompt_ids)], result.tokens, atol=1e-4)


def test_an_image_that_a_blur_does_not_change_costs_nothing(loaded):
    """The control: one color, blurred, is the same color."""
    model, folder = loaded
    Image.new("RGB", (80, 40), "saddlebrown").save(folder / "brown.png")
    of_picture, of_color = (
        next(source for source in sources(model, talk).sentences[0].sources if source.is_image)
        for talk in (chat(image=folder / name).then("assistant", "bear") for name in ("bear.png", "brown.png"))
    )
    assert abs(of_color.change) < 1e-5
    assert abs(of_picture.change) > 1e-4


def test_a_recorded_answer_about_an_image_is_read_with_it(loaded):
    model, folder = loaded
    talk = chat(image=folder / "bear.png")
    answer = model.answer(talk, max_new_tokens=1)
    recorded = talk.then("assistant", answer.text, answer.ids)
    again = sources(model, recorded).sentences
    assert [sentence.sources for sentence in again] == [x.sources for x in sources(model, answer).sentences]


def test_an_answer_without_other_sources_has_no_control(loaded):
    model, folder = loaded
    result = sources(model, model.answer(chat("what is this?", folder / "bear.png"), max_new_tokens=1))
    [sentence] = result.sentences
    assert [source.is_image for source in sentence.sources] == [True]
    assert not sentence.random.singles
    assert not sentence.is_decided
    assert result.question == "what is this?"


def test_the_command_measures_an_image(loaded, tmp_path):
    model, folder = loaded
    run = lambda *more: CliRunner().invoke(  # noqa: E731
        main,
        [
            *(
                "explain",
                f"Describe:\n{TEXT}",
                "--chat",
                "--image",
                str(folder / "bear.png"),
                "--sources",
                "--model",
                str(folder),
            ),
            *("--dtype", "float32", "--max-new-tokens", "2", *more),
        ],
    )
    shown = run("--html", str(tmp_path / "page.html"))
    assert shown.exit_code == 0, shown.output
    assert "5 sentences and an image" in " ".join(shown.stdout.split())
    assert "the image (blurred)" in shown.stdout
    assert "the image (blurred)" in (tmp_path / "page.html").read_text()
    data = json.loads(run("--json").stdout)
    assert sum(source["is_image"] for source in data["answer_sentences"][0]["sources"]) == 1
    assert run("--details").exit_code == 1
    with pytest.raises(InputError, match="sources"):
        source_breakdown(model, model.answer(chat(image=folder / "bear.png"), max_new_tokens=1))
