"""Few contexts, texts, nodes and draws: for tests that assert no number of side effects or random controls.

`python tests/few.py app --store ...` is `icebear app` with few of all.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from icebear.concepts.vocabulary import calibration

FEW = {
    "icebear.actmax.atlas.clusters.SHUFFLES": 2,
    "icebear.actmax.atlas.neighbor_map.EARLY": 5,
    "icebear.actmax.atlas.neighbor_map.LATE": 5,
    "icebear.actmax.measure_heads.REPEATS": 2,
    "icebear.actmax.measure_heads.TEXTS": 4,
    "icebear.app.web.neuron_card.PAGE_SENTENCES": 2,
    "icebear.app.web.steering.concepts.CONCEPT_TOKENS": 8,
    "icebear.concepts.nodes.controls.RANDOM_SETS": 1,
    "icebear.concepts.nodes.controls.RANDOM_HEAD_SETS": 1,
    "icebear.concepts.circuits.checks.RANDOM_EDGE_SETS": 1,
    "icebear.concepts.stages.stage_measurements.RANDOM_DRAWS": 2,
    "icebear.concepts.vocabulary.lens.LENS_TEXTS": 6,
    "icebear.concepts.vocabulary.lens._CONTEXTS": WeakKeyDictionary(),
    "icebear.steering.concept.concept.TEXTS": calibration.TEXTS[::8],
    "icebear.steering.outcome.KL_DRAWS": 1,
    "icebear.steering.outcome.NEW_TOKENS": 8,
    "icebear.steering.side_effects.CONTEXTS": 6,
    "icebear.steering.side_effects.CONTINUED": 4,
}


UNCOUNTED = {**FEW, "icebear.steering.outcome.RANDOM_DRAWS": 3}
"""Also fewer random edits: for the app in Chromium, and pages where no output is printed."""


def few(patch: pytest.MonkeyPatch, values: dict[str, Any] = FEW) -> None:
    for name, value in values.items():
        patch.setattr(name, value)


def few_of(values: Iterable[Any], *now: Any) -> list[Any]:
    """The values of a parameter, or tuples of several, of which `make test` runs these few, and `make dist` all."""
    return [value if value in now else _in_dist(value) for value in values]


def _in_dist(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.release)


def third_of(values: Iterable[Any], *also: Any) -> list[Any]:
    """Every third in `make test`, and these, and all in `make dist`."""
    values = list(values)
    return few_of(values, *values[::3], *also)


if __name__ == "__main__":
    from icebear.app.cli.main import main

    few(pytest.MonkeyPatch(), UNCOUNTED)
    main()
