"""The store of a verb, and the labels in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import click

import icebear
from icebear.app import example
from icebear.app.cli.options import ModelOptions, named
from icebear.app.cli.progress import waiting
from icebear.errors import DownloadError, StoreError
from icebear.paths import local
from icebear.records import Meaning, Neuron


def store_or_shipped(
    path: str, load: Callable[[], icebear.Model], name: str = example.MODEL, required: bool = True
) -> str:
    """Return the path of the store; where none was named and there is none, that of the index that comes with icebear
    for the model of this name, if there is one.

    required: whether an index that cannot be prepared is an error; else a note says why.
    """
    from icebear.actmax.index.shipped_index import OtherWeights, prepared_index, shipped_index

    if named("store") or has_index(path):
        return path
    if prepared := prepared_index(name):
        return str(prepared)
    try:
        with waiting(f"Preparing the index of {name} that comes with icebear, once"):
            return str(shipped_index(name, load) or path)
    except OtherWeights:  # as with --bits
        return path
    except (StoreError, DownloadError) as error:
        if required:
            raise
        click.echo(f"Continuing without a store: {error}", err=True)
        return path


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


@contextmanager
def store_if_any(path: str, model: icebear.Model) -> Iterator[icebear.Store | None]:
    """Open the store of a verb that also works without one.

    The default store is left out, with a note, where it is missing or of another model. Raises `StoreError` for one
    that was named.
    """
    required = named("store")
    with ExitStack() as stack:
        store = None
        try:
            if required or has_index(path):
                from icebear.db.store import open_finished

                store = stack.enter_context(open_finished(path, model.fingerprint, model.name))
        except StoreError as error:
            if required:
                raise
            click.echo(f"Continuing without a store: {error}", err=True)
        yield store


@contextmanager
def store_alone(path: str, model_name: str) -> Iterator[icebear.Store | None]:
    """Open the store that answers without the model of this name; None where the model must be loaded and checked."""
    from icebear.db.store import open_alone

    with ExitStack() as stack:
        store = None
        with suppress(StoreError):
            store = stack.enter_context(open_alone(path, model_name))
        yield store


def significant_labels(store: icebear.Store | None, pairs: Iterable[tuple[Neuron, str]]) -> list[Meaning]:
    """Return the significant automatic labels that a store has of neurons at polarities."""
    wanted = dict.fromkeys(pairs)
    labels = store.labels.meanings(dict.fromkeys(neuron for neuron, _ in wanted)) if store else {}
    return [labels[pair] for pair in wanted if pair in labels and labels[pair].significant]


def neurons_named(
    store: icebear.Store, names: Sequence[str], prompt: str | None, top: int, loading: ModelOptions
) -> tuple[icebear.Model, list[Neuron]]:
    """Return the loaded model and the neurons of these names, or else the most relevant ones after a prompt.

    Raises `StoreError`, before the model is loaded, for a neuron that the store does not have.
    """
    neurons = [Neuron.parse(name) for name in names]
    for neuron in neurons:
        if neuron.site != "head":
            store.neurons.statistics(neuron)
    model = loading.load()
    if prompt:
        sites = [site for site in store.facts.get("sites") if site != "head"]
        neurons = [row.neuron for row in icebear.attribute(model, prompt, sites=sites).top(top)]
    return model, neurons
