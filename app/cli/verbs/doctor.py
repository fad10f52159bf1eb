"""`icebear doctor`: check the installation."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import click

import icebear
from icebear.app.cli.options import ModelOptions, option, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import waiting
from icebear.app.cli.stores import named_or_folder_store, readable_store
from icebear.cache import cache_folder, cached
from icebear.errors import IcebearError
from icebear.models.loading.presets import PRESETS


@record
class Options:
    store: str
    json: bool
    checksum: str | None = option("Print only the checksum of the results in this store.", type="file", advanced=True)
    tokens: int | None = option(
        "Load no weights; estimate from the configuration whether a prompt of so many tokens, with --image, fits in "
        "memory.",
        type="count",
    )
    image: str | None
    model: ModelOptions


@verb(Options)
def doctor(options: Options) -> None:
    """Check the installation: versions, presets, cache, a self-test of the model, and whether a store fits it.

    Example:
      icebear doctor --model smollm2-135m
      icebear doctor --model smollm2-135m --tokens 2048
    """
    if options.tokens:
        return _fits(options, options.tokens)
    if options.image:
        raise click.UsageError("--image is of a prompt whose memory is estimated; add --tokens, those of its text.")
    if options.checksum:
        with icebear.open_store(options.checksum) as store:
            value = store.checksum()
        return show(options.json, {"checksum": value}, value)
    from icebear.db.vectors import NAMES

    facts = _installation()
    try:
        model = options.model.load()
        facts |= _model_facts(model)
        with named_or_folder_store(readable_store(options.store, model.name), model) as store:
            if store:
                for name in NAMES:
                    store.vectors.verify(name)  # raises StoreError for a damaged file, and for that of another store
            facts["store"] = f"{store.path} fits the model" if store else "none"
            facts |= {"index": store.documents_phrase} if store else {}
    except IcebearError as error:
        facts["error"] = str(error)
    indented = "\n".ljust(14)
    texts = {"presets": indented.join(map(_preset, facts["presets"])), "families": ", ".join(facts["families"])}
    show(options.json, facts, *(f"{name:<12} {value}" for name, value in (facts | texts).items()))
    if "error" in facts:
        sys.exit(1)


def _fits(options: Options, tokens: int) -> None:
    """Show how much memory each kind of explanation takes, and whether it fits into the free memory."""
    from icebear.concepts.memory import memory_needs
    from icebear.concepts.passes.storage import memory_at_hand
    from icebear.models.loading.loading import device_of, dtype_of

    device = device_of(options.model.device)
    dtype = dtype_of(options.model.dtype, device)
    with waiting("Computing sizes"):
        about = (options.model.trust_remote_code, options.image)
        weights, needs = memory_needs(options.model.model, tokens, dtype, *about)
    free = memory_at_hand(device)
    rows = [{**vars(need), "fits": need.fits(weights, device)} for need in needs]
    document = {"tokens": tokens, "dtype": str(dtype).removeprefix("torch."), "device": str(device), "free": free}
    document |= {"model": options.model.model, "weights": weights, "needs": rows}
    of_image = f" of text and {needs[0].tokens - tokens:,} of the image" if options.image else ""
    length = f"{tokens:,} tokens{of_image}"
    lines = [f"{options.model.model}, {document['dtype']}, {length}; {_size(free)} are free on {device}."]
    lines.append(f"{'weights':<35} {_size(weights):>9}")
    for row in rows:
        total = _size(row["in_pass"] + row["result"])
        lines.append(f"{row['what']:<35} {total:>9}  {'fits' if row['fits'] else 'does not fit'}")
    if not any(row["fits"] for row in rows):
        lines.append("Nothing fits; take fewer tokens, --dtype bfloat16, --bits 8 or 4, or --device-map auto.")
    show(options.json, document, *lines)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def _installation() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from icebear.models.parts.families import FAMILIES

    facts: dict[str, Any] = {"python": sys.version.split()[0], "machine": platform.platform()}
    for name in ("icebear", "torch", "transformers", "tokenizers", "safetensors", "gguf"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "missing"
    return {
        **facts,
        "package": str(Path(icebear.__file__).parent),
        "cache": str(cache_folder()),
        "presets": [
            {"name": p.name, "about": p.about, "download_mb": p.download // 1_000_000, "cached": cached(p.folder)}
            for p in PRESETS.values()
        ],
        "families": list(FAMILIES),
    }


def _preset(preset: dict[str, Any]) -> str:
    state = "cached" if preset["cached"] else f"{preset['download_mb']} MB to download"
    return f"{preset['name']:<19} {preset['about']} [{state}]"


def _model_facts(model: icebear.Model) -> dict[str, Any]:
    from icebear.concepts.selftest import selftest
    from icebear.concepts.vocabulary.calibration import cached_calibration
    from icebear.models.text.prompts import special_note

    calibration = cached_calibration(model)
    test = selftest(model)
    return {
        "model": f"{model.name}, {model.layers} layers, {model.dtype_name}, {model.device}",
        "dtype": model.dtype_name,
        "fingerprint": model.fingerprint,
        "family": model.net.config.model_type if model.has_family else "unknown",
        "sites": ", ".join(f"{site} {width}" for site, width in test.sites.items()) or "none",
        "tokenizer": (model.reads_any_text and special_note(model, "The ice bear"))
        or "adds nothing to the end of a text",
        "parity": f"logits under the rules differ by {test.parity:.1e} of the largest",
        "cp-lrp": str(test.conserved),
        "LRP rules": f"none for {', '.join(test.missing)}" if test.missing else "all operations covered",
        **{law.name: law.finding for law in test.laws},
        "sinks": list(test.sinks),
        "calibration": calibration.about if calibration else "not in the cache; it is measured when it is needed",
        "cost": f"{test.cost:.2f}x the time of gradient x input",
        "verdict": test.verdict,
    }
