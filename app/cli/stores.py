"""The store of a verb, and the labels in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

import click

import icebear
from icebear.app import example
from icebear.app.cli.options import ModelOptions, is_given
from icebear.app.cli.progress import waiting
from icebear.errors import DownloadError, StoreError
from icebear.paths import local
from icebear.records import AutomaticLabel, Neuron

STORE_IF_ANY = "icebear.db, if any"
"""The default of --store in the help of commands that also work without an index, and prepare none."""


def store_or_shipped(
    path: str,
    load: Callable[[], icebear.Model],
    name: str | None = None,
    *,
    required: bool = True,
    site: str | None = None,
) -> str:
    """Return the path of the index to read: --store if it is given, else the one that `choose_index` picks, which is
    prepared first. Print its note about another index.

    name: of the model; None: that of the folder's store, or else the default one. required: whether an index that
    cannot be prepared is an error; else a note says why. site: whose neurons the index must have.
    """
    from icebear.actmax.shipped.index_choice import choose_index
    from icebear.db.store import scan_facts

    if is_given("store"):
        return path
    try:
        name = name or scan_facts(local(path)).get("model", example.MODEL)
        choice = choose_index(local(path), name, site)
    except StoreError:  # which whoever opens it gets
        return path
    shipped = _shipped(name, load, required) if choice.is_shipped else None
    if choice.note and (shipped or not choice.is_shipped):
        click.echo(choice.note, err=True)
    return shipped or path


def _shipped(name: str, load: Callable[[], icebear.Model], required: bool) -> str | None:
    """Return the path of the index that comes with icebear, which is prepared first; None if it cannot be used."""
    from icebear.actmax.shipped.shipped_index import OtherWeights, prepared_index, shipped_index

    if prepared := prepared_index(name):
        return str(prepared)
    try:
        with waiting(f"Preparing the index of {name} that comes with icebear, once"):
            return str(shipped_index(name, load))
    except OtherWeights:  # as with --bits
        return None
    except (StoreError, DownloadError) as error:
        if required:
            raise
        click.echo(f"Continuing without it: {error}", err=True)
        return None


def has_index(path: str) -> bool:
    """Return whether there is a file, unless it is a store that has concepts only."""
    if not local(path).exists():
        return False
    from icebear.db.store import open_store

    try:
        with open_store(path) as store:
            return bool(store.scan.shards())
    except StoreError:  # which whoever opens it gets
        return True


def store_beside(path: str, model: str) -> AbstractContextManager[icebear.Store | None]:
    """Open the index that is shown beside another, as `open_beside` does."""
    from icebear.actmax.shipped.index_choice import open_beside

    return open_beside(local(path), model, is_given("store"))


@contextmanager
def store_if_any(path: str, model: icebear.Model) -> Iterator[icebear.Store | None]:
    """Open the store of a verb that also works without one; for that of a folder the index that `choose_index` says, if
    it is prepared. Raises `StoreError` for one that was named."""
    with named_or_folder_store(readable_store(path, model.name) if has_index(path) else path, model) as store:
        yield store


def readable_store(path: str, model: str) -> str:
    """Return the path of the index to read, as `store_or_shipped` does, but prepare none."""
    from icebear.actmax.shipped.index_choice import index_to_read

    with suppress(StoreError):  # which whoever opens it gets
        if not is_given("store"):
            return str(index_to_read(local(path), model))
    return path


@contextmanager
def named_or_folder_store(path: str, model: icebear.Model) -> Iterator[icebear.Store | None]:
    """Open a store for a verb that also works without one.

    The default store is left out, with a note, where it is missing or of another model. Raises `StoreError` for one
    that was named.
    """
    required = is_given("store")
    with ExitStack() as stack:
        store = None
        try:
            if required or has_index(path):
                from icebear.db.store import open_finished

                store = stack.enter_context(open_finished(path, model.index_fingerprint, model.name))
        except StoreError as error:
            if required:
                raise
            click.echo(f"Continuing without a store: {error}", err=True)
        yield store


@contextmanager
def store_alone(path: str, model_name: str) -> Iterator[icebear.Store | None]:
    """Open the store that answers without the model of this name; None where the model must be loaded and checked."""
    from icebear.db.store import open_without_model

    with ExitStack() as stack:
        store = None
        with suppress(StoreError):
            store = stack.enter_context(open_without_model(path, model_name))
        yield store


def significant_labels(store: icebear.Store | None, pairs: Iterable[tuple[Neuron, str]]) -> list[AutomaticLabel]:
    """Return the significant automatic labels that a store has of neurons at polarities."""
    wanted = dict.fromkeys(pairs)
    labels = store.labels.automatic(dict.fromkeys(neuron for neuron, _ in wanted)) if store else {}
    return [labels[pair] for pair in wanted if pair in labels and labels[pair].significant]


def neurons_named(
    store: icebear.Store, neurons: Sequence[Neuron], prompt: str | None, top: int, model_options: ModelOptions
) -> tuple[icebear.Model, list[Neuron]]:
    """Return the loaded model and these neurons, or else the most relevant ones after a prompt.

    Raises `StoreError`, before the model is loaded, for a neuron that the store does not have.
    """
    for neuron in neurons:
        if neuron.site != "head":
            store.neurons.statistics(neuron)
    model = model_options.load()
    if prompt:
        sites = [site for site in store.facts.get("sites") if site != "head"]
        neurons = [row.neuron for row in icebear.attribute(model, prompt, sites=sites).top(top)]
    return model, list(neurons)
