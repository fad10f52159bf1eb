"""Temporary changes to a model that threads share: a fair lock, seeded draws, replaced attributes."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from icebear.models.modules import modules_of

PutIn = Callable[[], AbstractContextManager[Any]]


class FairLock:
    """A reentrant lock that threads receive in the order of waiting."""

    # Hooks and replaced methods on a shared model affect the passes of every thread. So `yield_lock` removes all that
    # its thread has installed before it releases the lock. Then no hook must know whose pass it sees, and threads may
    # leave in any order (nested replaced methods could only be restored in the reverse order).

    def __init__(self, held: PutIn = nullcontext) -> None:
        """held: makes a context in which each thread holds the lock."""
        self._held, self._inside = held, ExitStack()
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()
        self._holder: int | None = None
        self._depth = 0  # of the holder's `with`
        self._contexts: list[tuple[PutIn, ExitStack]] = []  # those among them that can be interrupted

    def __reduce__(self) -> tuple[type[FairLock], tuple[PutIn]]:
        return FairLock, (self._held,)  # a copy of a model has its own lock

    def __enter__(self) -> None:
        if self._holder != threading.get_ident():
            self._take()
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._leave()

    def _take(self) -> None:
        ticket = threading.get_ident()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._holder is None and self._waiting[0] == ticket)
                self._holder = threading.get_ident()
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            self._inside.enter_context(self._held())
        except BaseException:
            self._leave()
            raise

    def is_waiting(self, thread: int) -> bool:
        """Return whether a thread, by its identifier, waits for the lock."""
        return thread in self._waiting

    @property
    def holder(self) -> int | None:
        """The identifier of the thread that has the lock."""
        return self._holder

    def _leave(self) -> None:
        self._inside.close()
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    @contextmanager
    def yielding(self, put_in: PutIn) -> Iterator[None]:
        """Hold the lock inside a context that `put_in` makes; `yield_lock` leaves it and enters a new one."""
        with self, ExitStack() as inside:
            inside.enter_context(put_in())
            self._contexts.append((put_in, inside))
            try:
                yield
            finally:
                self._contexts.pop()

    def yield_lock(self) -> None:
        """Let waiting threads go first, except inside a plain `with` of this lock, which cannot be undone."""
        if not self._waiting or self._depth > len(self._contexts):
            return
        contexts, depth = self._contexts, self._depth
        for _, inside in reversed(contexts):
            inside.close()
        self._contexts, self._depth = [], 0
        self._leave()
        interrupt: BaseException | None = None
        while self._holder != threading.get_ident():
            try:
                self._take()
            except BaseException as error:  # Ctrl-C: the surrounding contexts still have to be left first
                interrupt = error
        self._contexts, self._depth = contexts, depth
        for put_in, inside in contexts:
            inside.enter_context(put_in())
        if interrupt:
            raise interrupt


@contextmanager
def as_written(net: nn.Module) -> Iterator[None]:
    """Inside, the network computes what its code says: in eval mode, and not by a graph that was compiled before hooks
    and rules were installed, because such a graph does not look for them."""
    modules = modules_of(net)
    training = [module for module in modules if module.training]
    compiled = any(module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in modules)
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def unhooked(net: nn.Module) -> Iterator[None]:
    """Inside, the network has no hooks."""
    with ExitStack() as undo:
        for module in net.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                undo.enter_context(replaced(module, name, OrderedDict()))
        yield


def draws(device: torch.device, seed: int) -> PutIn:
    """For `FairLock.yielding`: draw random numbers from `seed`, and continue after an interruption."""
    backend: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    where = (device,) if device.type == "cuda" else ()
    state = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def drawing() -> Iterator[None]:
        nonlocal state
        others = backend.get_rng_state(*where)
        backend.set_rng_state(state, *where)
        try:
            yield
        finally:
            state = backend.get_rng_state(*where)
            backend.set_rng_state(others, *where)

    return drawing


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one object, not of its class, and restore it on exit."""
    missing = object()
    before = vars(owner).get(name, missing)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is missing:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before
