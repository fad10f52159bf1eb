"""`icebear index`: the sentences that activate each neuron most."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import icebear
from icebear.app.cli.options import Choice, ModelOptions, argument, excluded, is_given, option, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import annotating, bar, indexing, merging, waiting
from icebear.app.cli.stores import named_or_folder_store, neurons_named, store_or_shipped
from icebear.errors import InputError, StoreError, need
from icebear.models.loading.presets import model_option
from icebear.paths import local
from icebear.records import LENSES, Neuron
from icebear.render import visible

if TYPE_CHECKING:
    from icebear.actmax.neuronpedia_import import Dashboards
    from icebear.records import AutomaticLabel

WIKI = "wiki-summaries"
NAMED = 10
"""The most files that are named."""
OF_OTHER_CORPORA = (
    *("limit", "language", "column", "subset", "split", "revision"),
    *("parts", "part", "merge", "workers", "address"),
)
"""Options of a scan that dashboards do not have."""
OF_TEXTS = ("language", "column", "subset", "split", "revision", "max_tokens", "encoder")
"""Options of a scan of texts that images do not have."""
SITES = ("ffn", "attn", "q", "k", "v", "mixer", "head")


@record
class Options:
    neurons: tuple[str, ...] = argument(nargs=-1)
    corpus: str | None
    images: str | None = option(
        "Index the images of this folder and its subfolders, for a model that reads images: the strongest patches.",
        type="folder",
    )
    language: str = option(f"Language of the corpus; en, es or fr for {WIKI}.", "en", advanced=True)
    column: str = option("Column (or field) of a file or dataset that has the text.", "text", advanced=True)
    subset: str | None = option("Subset (configuration) of a Hugging Face dataset.", advanced=True)
    split: str | None = option("Split of a Hugging Face dataset.", show_default="train", advanced=True)
    revision: str | None = option("Revision of a Hugging Face dataset.", show_default="latest", advanced=True)
    limit: int | None = option(
        "Number of documents (or images) to read, a sample of the corpus. Run again with a larger number to extend the "
        "index.",
        type="count",
    )

    site: tuple[str, ...] = option(
        "Site of the neurons; head for attention heads.", ("ffn", "head"), multiple=True, type=Choice(SITES)
    )
    k: int = option("Number of examples for each neuron and polarity (sign of the activation).", 32, type="count")
    annotate: bool
    prompt: str | None
    top: int = option("With --prompt: number of neurons to annotate.", default=20, type="count")
    lens: bool = option(
        "Scan nothing; build the averaged Jacobian lens of the model. This needs no corpus. Do it once for each model."
    )
    status: bool = option("Scan nothing; show what the index has, and how far its scan is.")
    from_neuronpedia: str | None = option(
        "Read dashboards of Neuronpedia's upload or export (JSON, JSONL) from this folder. Their texts are the corpus "
        "of a new --store, and their labels are scored; a --store of other texts gets the labels only.",
        type="folder",
        advanced=True,
    )
    store: str = option(type="file", show_default=True)
    parts: str | None = option("Folder of the parts of a scan over several machines.", type="folder", advanced=True)
    part: str | None = option(
        "With --parts: scan only part I of N, such as 3/8. Run it once for each part.", metavar="I/N", advanced=True
    )
    merge: bool = option("With --parts: merge the parts into --store.", advanced=True)
    workers: int | None = option("Number of Ray workers that scan the parts.", type="count", advanced=True)
    address: str | None = option(
        "With --workers: address of a running Ray cluster, or auto.", show_default="one on this machine", advanced=True
    )
    json: bool
    max_tokens: int = option(default=256, advanced=True)
    encoder: str = option(
        "Sentence encoder that says what the examples are about, for icebear search: minilm, a folder, or none.",
        "minilm",
        advanced=True,
    )
    model: ModelOptions


@verb(Options)
def index(options: Options) -> None:
    """Index the maximally activating sentences (the examples) of every neuron and attention head.

    You can interrupt the command at any time; run it again to resume.

    With --images, a sentence is an image, and its tokens are the patches. The store has the names and digests of the
    files, not their pixels: keep the folder.

    With --annotate, the command scans no text. It takes the examples of NEURONS (or, with --prompt, of the most
    relevant neurons) and attributes the neuron's activation in each example to the tokens of the example.

    With --lens, the command builds the averaged Jacobian lens of the model. The command "icebear neuron" then
    shows the words that a neuron promotes through the layers above, and how well these words predict measured effects.
    If there is a store, "icebear neuron" needs --effects to show these words, and "icebear search" uses them without
    any option.

    Example:
      icebear index --limit 20 --store wiki.db
      icebear index --annotate L29.ffn.860 --k 2 --store wiki.db
      icebear index --lens
      icebear index --part 1/8 --parts parts
      icebear index --merge --parts parts --store wiki.db
      icebear index --from-neuronpedia dashboards --store theirs.db
      icebear index --images photos --store photos.db --model my-vit
    """
    modes = {"--status": options.status, "--annotate": options.annotate, "--lens": options.lens}
    modes["--from-neuronpedia"] = options.from_neuronpedia is not None
    chosen = [mode for mode, is_chosen in modes.items() if is_chosen]
    corpora = {"--corpus": options.corpus, "--images": options.images}
    exclusive = [*chosen, *(name for name, value in corpora.items() if value is not None)]
    if len(exclusive) > 1:
        raise click.UsageError(f"{' and '.join(exclusive[:2])} exclude each other; give one of them.")
    if options.status:
        return _status(options)
    if options.annotate:
        return _annotate(options)
    if options.neurons or options.prompt:
        raise click.UsageError("NEURONS and --prompt need --annotate; add it, or leave them out.")
    if options.lens:
        return _lens(options)
    need("index")
    if options.from_neuronpedia:
        excluded("--from-neuronpedia", OF_OTHER_CORPORA)
        return _from_neuronpedia(options)
    from icebear.actmax.shipped.index_choice import replacement

    part = _part(options)
    encoder = _encoder(options.encoder) if options.encoder != "none" and not (part or options.images) else None
    model, how = options.model.load(), {"k": options.k, "sites": options.site, "max_tokens": options.max_tokens}
    if part:
        return _scan_part(options, model, *part, how)
    if options.merge:
        counts = merging(model, str(options.parts), options.store, encoder)
    elif options.workers:
        counts = _on_workers(options, model, encoder, how)
    else:
        counts = indexing(model, _documents(options), options.store, encoder, **how)
    with icebear.open_store(options.store) as store:
        document = {**store.made_with(), "store": options.store, "counts": counts}
        lines = [f"{options.store}: {_counted(counts, store.is_of_images)}", *_skipped(store)]
    lines += filter(None, [replacement(local(options.store), document["model"]["name"])])
    show(options.json, document, *lines)


def _counted(counts: Counter[str], of_images: bool) -> str:
    """Say how many sentences were read; of images, how many files."""
    names = {"documents": "images", "sentences": ""} if of_images else {}
    named_counts = {names.get(what, what): n for what, n in counts.items()}
    return ", ".join(f"{n:,} {what}" for what, n in named_counts.items() if what)


def _skipped(store: icebear.Store) -> list[str]:
    """Name the files of an index of images that are no images."""
    names = store.sentences.unread() if store.is_of_images else []
    listed = ", ".join(map(visible, names[:NAMED])) + (" ..." if len(names) > NAMED else "")
    return [f"Skipped, because they cannot be read as images: {listed}"] if names else []


def _from_neuronpedia(options: Options) -> None:
    """Index the texts of dashboards, unless the store is of other texts, and score their labels."""
    model = options.model.load()
    from icebear.actmax.neuronpedia_import import Dashboards, is_of
    from icebear.app.cli.tables.cards import labels_table

    dashboards = Dashboards.of(model, str(options.from_neuronpedia))
    sites = options.site if is_given("site") else sorted({neuron.site for neuron, _ in dashboards.sides})
    lines: list[str] = []
    document: dict[str, Any] = {"folder": options.from_neuronpedia, "store": options.store}
    with icebear.open_store(options.store, create=True) as store:
        is_theirs = not store.facts.all() or is_of(store, dashboards)
    if is_theirs:
        encoder = _encoder(options.encoder) if options.encoder != "none" else None
        how: dict[str, Any] = {"k": options.k, "sites": sites, "max_tokens": options.max_tokens}
        counts = indexing(model, dashboards.corpus(), options.store, encoder, **how)
        document["counts"] = counts
        lines.append(f"{options.store}: {', '.join(f'{n:,} {what}' for what, n in counts.items())}")
    with icebear.open_store(options.store) as store:
        if is_theirs:
            agreement = dashboards.agreement(store)
            document["activations"] = agreement._asdict()
            lines.append(str(agreement))
        try:
            meanings, note = _scored(model, store, dashboards)
        except StoreError as error:
            meanings, document["not_scored"] = [], str(error)
            lines.append(f"The labels are not scored, and not shown: {error}{_other_texts(options) * is_theirs}")
        else:
            lines += [note] if note else []
        document |= {**store.made_with(), "meanings": [meaning.to_dict() for meaning in meanings]}
    passed = sum(meaning.significant for meaning in meanings)
    table = [labels_table(meanings, f"{passed} of {len(meanings)} labels of the dashboards pass")] if meanings else []
    show(options.json, document, *lines, *table)


def _scored(model: icebear.Model, store: icebear.Store, dashboards: Dashboards) -> tuple[list[AutomaticLabel], str]:
    """Score the labels of dashboards on the sentences of their index or, if these are too few, of the index that comes
    with icebear. Return the labels, and a note if it is the other one. Raises `StoreError` if there is none."""
    from icebear.actmax.neuronpedia_import import score_labels
    from icebear.actmax.shipped.index_choice import store_name

    try:
        with bar("sentences") as move:
            return score_labels(model, store, dashboards, move), ""
    except StoreError as error:
        reason = error
    with ExitStack() as stack:
        try:
            with waiting(f"Preparing the index of {model.name} that comes with icebear"):
                sentences = stack.enter_context(icebear.shipped_store(model))
        except StoreError:
            raise reason from None
        with bar("sentences") as move:
            meanings = score_labels(model, store, dashboards, move, sentences)
        note = f"{store.path} cannot score labels, so they are scored on {store_name(sentences)}."
    return meanings, note


def _other_texts(options: Options) -> str:
    """Say how to score the labels on other texts, which are indexed first."""
    loading, folder = model_option({"model": {"name": options.model.model}}), str(options.from_neuronpedia)
    texts = ["icebear", "index", "--store", "texts.db", "--limit", "1000", *loading]
    labels = ["icebear", "index", "--from-neuronpedia", folder, "--store", "texts.db", *loading]
    return f" Score them on other texts: {shlex.join(texts)}; then {shlex.join(labels)}"


def _documents(options: Options) -> icebear.Corpus:
    if options.images:
        return icebear.read_images(options.images, options.limit)
    return icebear.read_corpus(
        WIKI if options.corpus is None else options.corpus,
        *(options.limit, options.language, options.column, options.subset, options.split, options.revision),
    )


def _part(options: Options) -> tuple[int, int] | None:
    """Return I and N of --part. Raises `UsageError` for options that do not go together."""
    if options.images:
        excluded("--images", OF_TEXTS)
    if (options.part or options.merge) and not options.parts:
        raise click.UsageError("--part and --merge need --parts, the folder of the parts; add it.")
    if options.parts and not (options.part or options.merge or options.workers):
        raise click.UsageError("--parts needs --part I/N, --merge or --status; add one of them.")
    if bool(options.part) + options.merge + bool(options.workers) > 1:
        raise click.UsageError("--part, --merge and --workers exclude each other; give one of them.")
    if options.address and not options.workers:
        raise click.UsageError("--address needs --workers; add it.")
    if options.part is None:
        return None
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.part)
    if not match:
        raise click.UsageError(f"{options.part!r} is not a part; give its number and the number of parts, such as 3/8.")
    return int(match[1]), int(match[2])


def _scan_part(options: Options, model: icebear.Model, part: int, parts: int, how: dict[str, Any]) -> None:
    from icebear.actmax.index.part_files import parts_lines

    with bar("images" if options.images else "sentences") as move:
        path = icebear.scan_part(model, _documents(options), str(options.parts), part, parts, on_progress=move, **how)
    document: dict[str, Any] = {"part": part, "parts": parts, "file": str(path), **model.made_with}
    show(options.json, document, f"{path}: part {part} of {parts} is complete.", *parts_lines(path.parent))


def _on_workers(
    options: Options, model: icebear.Model, encoder: icebear.Encoder | None, how: dict[str, Any]
) -> Counter[str]:
    """Scan on Ray workers, and merge; return the counts of the index. The parts are kept until then."""
    from icebear.actmax.index.part_files import folder_of, remove_parts
    from icebear.actmax.index.ray_parts import scan_on_ray

    folder = options.parts or str(folder_of(options.store))
    with bar("parts") as move:
        scan_on_ray(model, _documents(options), folder, options.workers or 1, options.address, move, **how)
    counts = merging(model, folder, options.store, encoder)
    if not options.parts:
        remove_parts(local(folder))
    return counts


def _encoder(name: str) -> icebear.Encoder | None:
    from icebear.models.loading.encoder import default_encoder

    return icebear.load_encoder(name) if is_given("encoder") else default_encoder(partial(click.echo, err=True))


def _status(options: Options) -> None:
    if options.parts:
        from icebear.actmax.index.part_files import parts_in, parts_lines

        folder = local(options.parts)
        return show(options.json, {"parts": parts_in(folder)}, *(parts_lines(folder) or [f"{folder}: no parts."]))
    path = store_or_shipped(options.store, options.model.load, options.model.model)
    with icebear.open_store(path) as store:
        made_with, status = store.made_with(), store.status()
    facts = {"store": path, "model": made_with["model"]["name"], **made_with["index"], **status}
    texts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
    document = {**made_with, "store": path, "status": status}
    show(options.json, document, *(f"{name:<18} {text}" for name, text in texts.items()))


def _lens(options: Options) -> None:
    model = options.model.load()
    from icebear.actmax.index.neuron_vectors import ensure_vectors
    from icebear.app.cli.tables.cards import reliability_table
    from icebear.concepts.vocabulary.lens import WIDEST, build_mean_lens, mean_lens

    width, lens = model.config.hidden_size, mean_lens(model)
    if lens is None and width > WIDEST and model.device.type == "cpu":
        raise InputError(
            f"The lens of {model.name} takes {width:,} backward passes, too many without a GPU; use icebear neuron, "
            "which computes the words of one neuron in one backward pass."
        )
    if lens is None:
        with bar("steps") as move:
            lens = build_mean_lens(model, move)
    with named_or_folder_store(options.store, model) as store:
        if store:
            ensure_vectors(model, store)
    rows = [
        {"layer": layer, "lens": name, **reliability._asdict()}
        for layer, both in enumerate(zip(lens.direct, lens.reliability, strict=True))
        for name, reliability in zip(LENSES, both, strict=True)
        if reliability
    ]
    show(options.json, {**lens.made_with, "file": str(lens.file), "reliability": rows}, reliability_table(lens))


def _annotate(options: Options) -> None:
    if bool(options.neurons) == bool(options.prompt):
        raise click.UsageError("With --annotate give either NEURONS or --prompt.")
    named_neurons = [Neuron.parse(name, options.model.model) for name in options.neurons]
    path = store_or_shipped(options.store, options.model.load, options.model.model)
    with icebear.open_store(path) as store:
        model, neurons = neurons_named(store, named_neurons, options.prompt, options.top, options.model)
        count = annotating(model, store, neurons, options.k)
        document = {**store.made_with(), "neurons": list(map(str, neurons)), "attributed": count}
    show(options.json, document, f"Attributed {count} examples; earlier ones are unchanged.")
