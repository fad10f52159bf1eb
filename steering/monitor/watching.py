"""`with watching(model, monitors) as log:` reads each token that the model writes, and flags it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icebear.errors import InputError, ModelError
from icebear.models.model import Model
from icebear.steering.concept.detectors import NOT_RUN, contributing, contributions, scaled
from icebear.steering.concept.reading import counted_positions
from icebear.steering.monitor.monitor import Monitor, Passage, Verdict
from icebear.steering.token_tracker import TokenTracker
from icebear.values import several, typed

MARK = re.compile(r"[^\w\s]|\n")
"""What a sentence can end with; between letters and spaces none ends."""

OnFlag = Callable[[str, Passage], Any]
"""Called with the name of the monitor and what it flags."""


@dataclass
class WatchedText:
    """A text that the model writes, as far as it was read; the last token of a generation is not read."""

    ids: list[int] = field(default_factory=list)
    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Monitor -> contributions (n,) at each token."""
    flagged: dict[str, int] = field(default_factory=dict)
    """Monitor -> the end of the last passage that was reported."""
    read: dict[int, tuple[int, dict[str, np.ndarray]]] = field(default_factory=dict)
    """The number of a new token -> its id, and monitor -> contributions: what was read and may be rejected."""

    def accept(self, count: int, ends: Collection[int]) -> None:
        """Keep the first `count` new tokens of the text up to an end, and drop what else was read."""
        for number in range(len(self.ids), count):
            if number not in self.read or (self.ids and self.ids[-1] in ends):  # behind an end is padding
                break
            token, parts = self.read[number]
            self.ids.append(token)
            for name, values in parts.items():
                self.parts[name].append(values)
        self.read.clear()


class Log:
    """What monitors read while a model generates. It is also a stopping criterion of `generate`: it ends a text that is
    flagged."""

    def __init__(self, model: Model, monitors: Iterable[Monitor], on_flag: OnFlag | None = None) -> None:
        self._model, self._on_flag = model, on_flag
        self.monitors = {monitor.name: monitor for monitor in monitors}
        self._texts: list[WatchedText] = []
        self._running: list[WatchedText] = []  # the rows of the running generation
        self._pass: dict[str, list[tuple[list[int], Tensor]]] = {}  # monitor -> columns and what is read in this pass
        self._special = model.special_ids()
        self._ends: Collection[int] = ()

    @property
    def texts(self) -> list[dict[str, Verdict]]:
        """Monitor -> verdict, for each text that was written, in order; the rows of a batch are in its order."""
        return [
            {name: self._verdict(monitor, text) for name, monitor in self.monitors.items()}
            for text in self._texts
            if any(token not in self._special for token in text.ids)
        ]

    @property
    def flagged(self) -> bool:
        """Whether a passage was flagged so far."""
        return any(text.flagged for text in self._texts)

    def __call__(self, ids: Tensor, scores: Any = None, **_: Any) -> Tensor:
        """Return which rows of a batch (B,) are flagged, so that `generate` ends them."""
        ends = [bool(text.flagged) for text in self._running] or [False] * len(ids)
        return torch.tensor(ends, device=ids.device)

    def begin(self, rows: int, ends: Collection[int]) -> None:
        """Begin texts that end with one of these tokens."""
        self._ends = ends
        self._running = [WatchedText(parts={name: [] for name in self.monitors}) for _ in range(rows)]
        self._texts += self._running

    def see(self, name: str, columns: list[int], x: Tensor) -> None:
        """Take what a detector reads in a pass (B, T, n)."""
        self._pass.setdefault(name, []).append((columns, x))

    def end_pass(self, tracker: TokenTracker) -> None:
        """Take the tokens after the prompt that a pass read. Drafts may be among them, which are rejected later."""
        taken, self._pass = self._pass, {}
        if not tracker.generates:
            return
        numbers = tracker.position[0] - tracker.prompt_length[0][:, None]  # of new tokens (B, T)
        new = (numbers >= 0).nonzero().tolist()
        if not new:
            return
        if lacking := [name for name in self.monitors if name not in taken]:
            raise ModelError(NOT_RUN.format(f"{self._model.name}, watched for {lacking[0]!r},"))
        each = {}
        for name, seen in taken.items():
            order = np.argsort([column for columns, _ in seen for column in columns])
            array = torch.cat([x for _, x in seen], -1).float().cpu().numpy()[..., order]
            each[name] = scaled(self.monitors[name].detector, array)
        for row, column in new:
            text, number = self._running[row], int(numbers[row, column])
            if number >= len(text.ids):  # without a cache, a pass reads all tokens again
                parts = {name: array[row, column] for name, array in each.items()}
                text.read[number] = int(tracker.ids[0][row, column]), parts

    def accept(self, read: int) -> None:
        """Add the tokens that were read and stay, `read` of each text in all, and report what they complete."""
        for text in self._running:
            text.accept(read, self._ends)
        self.report(ended=False)

    def report(self, ended: bool) -> None:
        """Report passages that were not reported; a sentence or message that may go on, only at the end."""
        for text in self._running:
            for name, monitor in self.monitors.items():
                for passage in self._completed(monitor, text, ended):
                    text.flagged[name] = passage.stop
                    if self._on_flag:
                        self._on_flag(name, passage)

    def _completed(self, monitor: Monitor, text: WatchedText, ended: bool) -> list[Passage]:
        if not text.ids or (monitor.unit == "message" and not ended):
            return []
        if not (ended or self._may_complete(monitor, text)):
            return []
        going_on = len(text.ids) if ended or monitor.unit == "token" else len(text.ids) - 1
        flags = self._verdict(monitor, text).flags
        return [flag for flag in flags if text.flagged.get(monitor.name, 0) < flag.stop <= going_on]

    def _may_complete(self, monitor: Monitor, text: WatchedText) -> bool:
        """Return whether the last token can complete a passage: one that is flagged, or one after a mark."""
        if monitor.unit == "token":
            return text.parts[monitor.name][-1].sum() > monitor.threshold
        return MARK.search("".join(self._model.pieces(text.ids[-2:]))) is not None

    def _verdict(self, monitor: Monitor, text: WatchedText) -> Verdict:
        counted = [position for position, token in enumerate(text.ids) if token not in self._special]
        return monitor.judge(self._model.pieces(text.ids), np.array(text.parts[monitor.name]), counted)


def read_message(model: Model, monitors: Iterable[Monitor], message: str) -> list[Verdict]:
    """Return the verdicts of a message to the model, read alone like the texts that set the threshold; none for a
    message of a single token."""
    ids, monitors = model.ids(message), list(monitors)
    for monitor in monitors:
        monitor.check(model)
    counted = counted_positions(model, ids)
    if not (counted and monitors):
        return []
    every = contributions(model, [monitor.detector for monitor in monitors], [ids])
    pieces = model.pieces(ids)
    return [monitor.judge(pieces, parts, counted) for monitor, (parts,) in zip(monitors, every, strict=True)]


class _Watching(TokenTracker):
    """Tells the log when a generation begins and ends."""

    def __init__(self, model: Model, log: Log) -> None:
        super().__init__(model)
        self.log = log

    def begin(self, rows: int, option: Callable[[str], Any]) -> None:
        if (option("num_beams") or 1) > 1:
            raise InputError("Monitors cannot read a beam search (num_beams above 1), which changes what is written.")
        if option("custom_generate") is not None:
            raise InputError("Monitors cannot follow custom_generate, whose steps may be others; leave it out.")
        self.log.begin(rows * (option("num_return_sequences") or 1), several(option("eos_token_id")))

    def accept(self, read: int) -> None:
        self.log.accept(read)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._generate(*args, **kwargs)
        finally:
            if not self.generates:  # a draft of the same network ends no text
                self.log.report(ended=True)


@typed
@contextmanager
def watching(model: Model, monitors: Monitor | Iterable[Monitor], on_flag: OnFlag | None = None) -> Iterator[Log]:
    """Read with monitors what the model generates inside the context.

    Parameters
    ----------
    model
        The model of the monitors; it must be causal.
    monitors
        One or several, with different names.
    on_flag
        Called with (the monitor's name, `Passage`) when a passage is flagged: a token at once, a sentence when the next
        one begins, a message at its end. An exception that it raises ends the generation.

    Yields
    ------
    Log
        `Log.texts` has the verdicts. ``model.answer(prompt, stopping_criteria=[log])`` ends an answer that is flagged.

    Raises
    ------
    InputError
        For a monitor of another model, two of one name, or a model that is not causal.
    """
    rows = several(monitors)
    for row in rows:
        row.check(model)
    if len({row.name for row in rows}) < len(rows):
        raise InputError("Two monitors have the same name; save one of them with another name.")
    if not (model.task.is_causal and model.task.generates):
        raise InputError(f"{model.name} does not continue a prompt; measure texts with Monitor.measure.")
    log = Log(model, rows, on_flag)
    tracker = _Watching(model, log)

    @contextmanager
    def reading() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(tracker.following())
            for row in rows:
                stack.enter_context(contributing(model, row.detector, partial(log.see, row.name)))
            stack.callback(model.net.register_forward_hook(lambda *_: log.end_pass(tracker)).remove)
            yield

    with model.lock.yielding(reading):
        yield log
