"""Do relevance maps of a vision transformer name the patches that matter, and the object?

python -m benchmarks.images --out images deletion   # the first patches are deleted, and inserted
python -m benchmarks.images --out images objects    # objects cut out by hand, pasted on other backgrounds

The model is dinov2-small, asked by examples: its number is 1 at the mean features of the examples and 0 at those of the
others. The pictures are those of scikit-image's wheel that show an object (`pictures.json`; pip install -e
'.[benchmarks]').

deletion: each picture is cut in halves. Crops of a half are explained, and all examples are crops of the other halves,
so that no pixel is in both. Measured is by how much the number falls when the first tenth and three tenths of the
patches take the values of a fill, blurred or gray, plus by how much that of the fill rises when they are inserted.

objects: an object's examples are the object on other backgrounds, the others are other objects on all backgrounds.
Measured is the share of positive relevance inside the object's mask, and what deletion measures, beside the mask itself
as a map: what the number loses outside of the object is no fault of a map.

Only images that are nearest to their own examples count. Each image and method is a line of FOLDER/deletion.jsonl or
FOLDER/objects.jsonl, so that a folder resumes; the tables are CSV files beside them. Standard errors are clustered by
picture, or by object.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks.image_baselines import legrad, rollout
from icebear import Model, attribute, load_model
from icebear.models.image_examples import image_features, with_direction
from icebear.models.loading.onnx_files import IMAGE_PROCESSOR
from icebear.models.text.counterfactual_images import counterfactual_image
from icebear.models.text.images import grid, own_names, pixels_of

DATA = json.loads((Path(__file__).parent / "pictures.json").read_text())
PATCH = 14
"""Pixels."""
CROP, SCENE = 12 * PATCH, 16 * PATCH
"""The size of a crop, and of a composite."""
CROPS = 6
"""Of each half of a picture."""
SHARES = (0.1, 0.3)
"""Of the patches, that are deleted or inserted."""
FILLS = ("blur", "grey")
OBJECT_SHARE = (0.45, 0.6)
"""The longer side of a pasted object, as a share of the image's."""

Scores = Callable[[Model, Tensor], Tensor]
"""Takes a model with one label and pixels (C, H, W), and returns scores (rows, columns) of the patches."""


def by_relevance(**options: Any) -> Scores:
    return lambda model, pixels: attribute(model, pixels, sites=(), **options).image.patches


def uniform(model: Model, pixels: Tensor) -> Tensor:
    """Return random numbers, which depend on the pixels alone."""
    generator = torch.Generator().manual_seed(int(pixels.double().abs().sum() * 1000) % 2**31)
    return torch.rand(grid(model, pixels), generator=generator)


METHODS: dict[str, Scores] = {
    "difference rules, blur": by_relevance(counterfactual_image="blur"),
    "difference rules, grey": by_relevance(counterfactual_image="grey"),
    "ViT composite (gamma)": by_relevance(method="vit"),
    "AttnLRP": by_relevance(method="attnlrp"),
    "LeGrad": legrad,
    "attention rollout": rollout,
    "gradient x input": by_relevance(method="gxi"),
    "random": uniform,
}


@dataclass(frozen=True)
class Case:
    """An image, what it is asked by, and what it belongs to."""

    name: str
    cluster: str
    """The picture or the object."""
    group: str
    """What images must not share with their examples: the half of the picture, or the background."""
    pixels: Tensor
    mask: Tensor | None = None
    """(rows, columns): the share of each patch that the object covers."""


# --- pictures ---


def picture(file: str) -> Image.Image:
    """Return a picture of scikit-image's wheel, on white where it is transparent."""
    found_spec = find_spec("skimage")
    if found_spec is None or found_spec.origin is None:
        raise SystemExit("The pictures are in scikit-image; install it with: pip install -e '.[benchmarks]'")
    image = Image.open(Path(found_spec.origin).parent / "data" / file).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def pixels_from(image: Image.Image) -> Tensor:
    """Return the pixels (C, H, W) that the model reads of an image of its size."""
    values = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32) / 255).movedim(-1, 0)
    mean, deviation = (torch.tensor(IMAGE_PROCESSOR[name])[:, None, None] for name in ("image_mean", "image_std"))
    return (values - mean) / deviation


def crops() -> Iterator[Case]:
    """Yield square crops of both halves of each picture, in turn."""
    yield from sorted(_crops(), key=lambda case: case.name.split()[-1])


def _crops() -> Iterator[Case]:
    for name, file in DATA["pictures"].items():
        image = picture(file)
        generator, middle = random.Random(name), image.width // 2
        for half, (left, right) in {"left": (0, middle), "right": (middle, image.width)}.items():
            for number in range(CROPS):
                side = round(generator.uniform(0.75, 1) * min(right - left, image.height))
                x, y = generator.randint(left, right - side), generator.randint(0, image.height - side)
                crop = image.crop((x, y, x + side, y + side)).resize((CROP, CROP), Image.Resampling.BICUBIC)
                yield Case(f"{name} {half} {number}", name, half, pixels_from(crop))


def mask_of(about: dict[str, Any], image: Image.Image) -> Image.Image:
    """Return the mask of an object, drawn by hand; of a silhouette its dark pixels."""
    if "darker_than" in about:
        return image.convert("L").point(lambda value: 255 * (value < about["darker_than"]))
    mask = Image.new("L", image.size)
    ImageDraw.Draw(mask).polygon([tuple(point) for point in about["polygon"]], fill=255)
    return mask


def composites() -> Iterator[Case]:
    """Yield the objects on each background, at random positions."""
    yield from sorted(_composites(), key=lambda case: list(DATA["backgrounds"]).index(case.group))


def _composites() -> Iterator[Case]:
    for name, about in DATA["objects"].items():
        image = picture(DATA["pictures"][about["picture"]])
        mask = mask_of(about, image)
        box = mask.getbbox()
        assert box is not None
        cut, cut_mask = image.crop(box), mask.crop(box)
        for background, file in DATA["backgrounds"].items():
            generator = random.Random(f"{name} {background}")
            scale = generator.uniform(*OBJECT_SHARE) * SCENE / max(cut.size)
            size = (round(cut.width * scale), round(cut.height * scale))
            at = generator.randint(0, SCENE - size[0]), generator.randint(0, SCENE - size[1])
            scene, covered = _square(picture(file)), Image.new("L", (SCENE, SCENE))
            small = cut_mask.resize(size, Image.Resampling.BILINEAR)
            scene.paste(cut.resize(size, Image.Resampling.BICUBIC), at, small)
            covered.paste(small, at)
            shares = torch.from_numpy(np.asarray(covered, dtype=np.float32) / 255)
            yield Case(f"{name} on {background}", name, background, pixels_from(scene), patch_means(shares))


def _square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    return image.crop((0, 0, side, side)).resize((SCENE, SCENE), Image.Resampling.BICUBIC)


def patch_means(values: Tensor) -> Tensor:
    """Return the mean (rows, columns) of values (H, W) over each patch."""
    return values.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).mean((-1, -2))


# --- questions ---


def questions(model: Model, cases: Sequence[Case]) -> Iterator[tuple[Case, Model]]:
    """Yield each image that is nearest to its own examples, with the model that is asked by them.

    A crop's examples are crops of the other half of its picture, the others such crops of other pictures. A composite's
    examples are its object on other backgrounds, the others the other objects on all backgrounds.
    """
    features = image_features(model, [case.pixels for case in cases]).double()
    clusters = list(dict.fromkeys(case.cluster for case in cases))
    for number, case in enumerate(cases):
        far = [row for row, other in enumerate(cases) if other.group != case.group]
        means = {name: features[[row for row in far if cases[row].cluster == name]].mean(0) for name in clusters}
        distances = {name: (features[number] - mean).norm().item() for name, mean in means.items()}
        if min(distances, key=lambda name: distances[name]) != case.cluster:
            continue
        all_groups = case.mask is not None
        others = [
            row for row, other in enumerate(cases) if other.cluster != case.cluster and (all_groups or row in far)
        ]
        yield case, with_direction(model, means[case.cluster], features[others].mean(0), case.cluster)


@torch.no_grad()
def numbers(model: Model, images: Sequence[Tensor]) -> list[float]:
    """Return the number of the label for images (C, H, W)."""
    return image_features(model, images)[:, 0].tolist()


def with_first_patches(model: Model, base: Tensor, source: Tensor, scores: Tensor, share: float) -> Tensor:
    """Return an image (C, H, W) whose patches with the largest scores, a share of all, are those of another image."""
    changed, begins = base.clone(), len(own_names(model))
    for patch in scores.flatten().topk(round(share * scores.numel())).indices.tolist():
        where = pixels_of(model, base, begins + patch)
        changed[where] = source[where]
    return changed


Measure = Callable[[Tensor], dict[str, Any]]
"""Takes scores (rows, columns)."""


def deletion(model: Model, case: Case) -> Measure:
    """Return a function that measures the number of the image with patches from each fill."""
    fills = {fill: counterfactual_image(model, case.pixels, fill) for fill in FILLS}
    before, *filled = numbers(model, [case.pixels, *fills.values()])

    def measure(scores: Tensor) -> dict[str, Any]:
        images = [
            with_first_patches(model, *ends, scores, share)
            for fill in fills.values()
            for ends in ((case.pixels, fill), (fill, case.pixels))
            for share in SHARES
        ]
        values, count = numbers(model, images), len(SHARES)
        row: dict[str, Any] = {"number": before}
        for at, fill in enumerate(FILLS):
            deleted, inserted = (values[(2 * at + way) * count :][:count] for way in (0, 1))
            row[fill] = {"number": filled[at], "deleted": deleted, "inserted": inserted}
        return row

    return measure


def objects(model: Model, case: Case) -> Measure:
    """Return a function that measures the share of positive scores inside the mask, and what `deletion` measures."""
    mask, deleted = case.mask, deletion(model, case)
    assert mask is not None

    def measure(scores: Tensor) -> dict[str, Any]:
        positive = scores.double().clamp(min=0)
        inside = float((positive * mask).sum() / positive.sum()) if positive.any() else 0.0
        return {"inside": inside, "area": float(mask.mean()), **deleted(scores)}

    return measure


def centred_box(model: Model, pixels: Tensor, area: float) -> Tensor:
    """Return scores of a square in the middle whose area is this share of the image's."""
    side, size = area**0.5 * pixels.shape[-1], pixels.shape[-1]
    edges = torch.arange(size + 1, dtype=torch.float64)
    along = (torch.minimum(edges[1:], torch.tensor((size + side) / 2)) - edges[:-1].clamp(min=(size - side) / 2)).clamp(
        0
    )
    return patch_means(along[:, None] * along[None])


# --- runs and tables ---


KINDS: dict[str, tuple[Callable[[], Iterator[Case]], Callable[[Model, Case], Measure]]] = {
    "deletion": (crops, deletion),
    "objects": (composites, objects),
}


def run(kind: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Measure what is not in the folder yet, for at most so many seconds."""
    file, end = folder / f"{kind}.jsonl", monotonic() + seconds
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["image"], row["method"]) for row in rows}
    model = load_model("dinov2-small", dtype="float32", device="cpu")
    make, measure_of = KINDS[kind]
    for case, labelled in questions(model, list(make())):
        wanted = {name: method for name, method in methods_of(case).items() if (case.name, name) not in known}
        measure = measure_of(labelled, case) if wanted else None
        for name, method in wanted.items():
            if monotonic() > end:
                print(f"{len(rows)} rows; run the same command again to resume", flush=True)
                return rows
            assert measure is not None
            scores = method(labelled, case.pixels).cpu()
            rows.append({"image": case.name, "cluster": case.cluster, "method": name, **measure(scores)})
            with file.open("a") as lines:
                lines.write(json.dumps(rows[-1]) + "\n")
    return rows


def methods_of(case: Case) -> dict[str, Scores]:
    """Return the methods, and for an object its mask and a box of its size."""
    mask = case.mask
    if mask is None:
        return METHODS
    area = float(mask.mean())
    return METHODS | {
        "centred box": lambda model, pixels: centred_box(model, pixels, area),
        "the mask": lambda model, pixels: mask,
    }


def mean_and_error(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """Return the mean, and its standard error where values of a cluster are not independent."""
    x, names = np.asarray(values), np.asarray(clusters)
    sums = np.asarray([(x[names == name] - x.mean()).sum() for name in sorted(set(clusters))])
    return float(x.mean()), float(np.sqrt(len(sums) / max(1, len(sums) - 1) * (sums**2).sum()) / len(x))


def measures_of(row: dict[str, Any]) -> dict[str, float]:
    """Return what a table has of a row."""
    measures = {name: row[name] for name in ("inside", "area") if name in row}
    for fill in FILLS:
        measures[f"deletion, {fill}"] = row["number"] - float(np.mean(row[fill]["deleted"]))
        measures[f"insertion, {fill}"] = float(np.mean(row[fill]["inserted"])) - row[fill]["number"]
    return measures


def tables(rows: Sequence[dict[str, Any]], baseline: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the means of each method, and image by image what `baseline` has more than it; with clustered errors."""
    by_method: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["image"]] = row
    images = sorted(set.intersection(*(set(part) for part in by_method.values())))
    clusters = [by_method[baseline][image]["cluster"] for image in images]
    best = [measures_of(by_method[baseline][image]) for image in images]
    means, gaps = [], []
    for name, part in by_method.items():
        each = [measures_of(part[image]) for image in images]
        begin = {"method": name, "images": str(len(images)), "clusters": str(len(set(clusters)))}
        means.append(begin | _cells(each, clusters))
        more = [
            {key: row[key] - values[key] for key in row if key != "area"}
            for row, values in zip(best, each, strict=True)
        ]
        gaps += [{"method": baseline, "minus": name} | _cells(more, clusters)] if name != baseline else []
    return means, gaps


def _cells(each: Sequence[dict[str, float]], clusters: Sequence[str]) -> dict[str, str]:
    cells: dict[str, str] = {}
    for measure in each[0]:
        mean, error = mean_and_error([row[measure] for row in each], clusters)
        cells |= {measure: f"{mean:.3f}", f"{measure} ±": f"{error:.3f}"}
    return cells


def write(cells: Sequence[dict[str, str]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, cells[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("deletion", "objects"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540, help="stop then; the same command resumes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = run(options.kind, options.out, options.seconds)
    means, gaps = tables(rows, "difference rules, blur")
    write(means, options.out / f"images-{options.kind}.csv")
    write(gaps, options.out / f"images-{options.kind}-paired.csv")
    print(*(json.dumps(row) for row in means), sep="\n")


if __name__ == "__main__":
    main()
