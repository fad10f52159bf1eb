"""A question to a model of images without labels: how much is an image like these, not those?"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.text.images import encode_pixels
from icebear.models.text.prompts import Prompt
from icebear.paths import local

IMAGES_PER_PASS = 16
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Of the files in a folder that are read as images."""
Images = str | Path | Sequence[Any] | Tensor
"""A folder of images, or images: paths, PIL images or pixels (C, H, W)."""


def by_examples(model: Model, examples: Images, others: Images) -> Model:
    """Return a model with one label: the position of an image between two sets of images.

    The label's number is the projection of the image's features on the difference of both means: 1 at the mean of the
    examples, 0 at the mean of the others. The features are what a classification head would read: the final [CLS], and
    in DINOv2 the mean of the final patches beside it.

    Parameters
    ----------
    model : Model
        A model of images without labels. The result shares its weights.
    examples, others : folder or list of images
        What the images are compared with; images of the same objects in other surroundings make a good second set.

    Returns
    -------
    Model

    Raises
    ------
    InputError
        If the model reads text or has labels, a folder has no images, or both sets have the same mean.
    """
    if model.task.reads_text:
        raise InputError(f"{model.name} reads text; examples are for models of images, such as dinov2-small.")
    if model.labels:
        raise InputError(f"{model.name} has labels; name one as the target, and leave out the examples.")
    mean, other = (image_features(model, listed_images(images)).mean(0) for images in (examples, others))
    names = [Path(images).name if isinstance(images, str | Path) else "" for images in (examples, others)]
    label = f"{names[0] or 'the examples'}, not {names[1] or 'the others'}"
    return with_direction(model, mean, other, label)


def listed_images(images: Images) -> Sequence[Any]:
    """Return images; those of a folder by name. Raises `InputError` for none."""
    if not isinstance(images, str | Path):
        listed: Sequence[Any] = list(images)
        where = "the list of examples"
    else:
        folder = local(images)
        if not folder.is_dir():
            raise InputError(f"{images} is no folder; give a folder of images.")
        listed = [folder / name for name in image_names(folder)]
        where = f"the folder {images}"
    if not listed:
        raise InputError(f"There is no image in {where}; put images of the formats PNG or JPEG there.")
    return listed


def image_names(folder: Path) -> list[str]:
    """Return the names of the images of a folder and its subfolders, in order; hidden ones are left out. Raises
    `InputError`."""
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    parts = [path.relative_to(folder).parts for path in paths]
    names = sorted("/".join(part) for part in parts if not any(name.startswith(".") for name in part))
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"The name of the file {name!r} is not in UTF-8; rename the file.") from None
    return names


@torch.no_grad()
def image_features(model: Model, images: Sequence[Any]) -> Tensor:
    """Return the features (N, F) that a classification head reads, of images of any sizes."""
    features = []
    for start in range(0, len(images), IMAGES_PER_PASS):
        pixels = [encode_pixels(model, image) for image in images[start : start + IMAGES_PER_PASS]]
        same = len({row.shape for row in pixels}) == 1
        for rows in [pixels] if same else [[row] for row in pixels]:
            batch: Batch = model.task.encode(model, [Prompt(image=row) for row in rows])
            with model.lock:
                features.append(model.task.forward(model, batch).logits.to(model.sums_in["dtype"]))
    return torch.cat(features)


def with_direction(model: Model, examples: Tensor, others: Tensor, label: str) -> Model:
    """Return a model whose label's number is 1 at the features (F,) of `examples` and 0 at those of `others`.

    Raises `InputError` if they are equal.
    """
    difference = examples.double() - others.double()
    if not difference.any():
        raise InputError("The examples and the others have the same features on average; give other images.")
    weight = difference / (difference @ difference)
    head = nn.Linear(len(weight), 1)
    with torch.no_grad():
        head.weight.copy_(weight[None])
        head.bias.copy_(-(weight @ others.double())[None])
    shared = {id(x): x for x in (*model.net.parameters(), *model.net.buffers())}
    net = deepcopy(model.net, shared)
    net.classifier = head.to(model.device, model.dtype)
    net.config.id2label, net.config.label2id, net.config.problem_type = {0: label}, {label: 0}, "regression"
    result = Model(net, None, model.name, model.processor)
    result.weights_note, result.without_label = model.weights_note, model
    return result
