"""Names of neurons and heads in other libraries: TransformerLens, interp-engine, Neuronpedia."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from icebear.errors import InputError
from icebear.values import shown

Naming = Literal["icebear", "transformerlens"]

FLAT = ".flatten(-2)"
"""After a point with two indices, the head and the component: both as one index, which is icebear's."""


class Point(NamedTuple):
    """A point of other libraries whose index, after the tokens, is that of a neuron or head of a site."""

    site: str
    transformer_lens: tuple[str, ...] = ()
    """After ``blocks.N.``; the first is the one that is written, the others are aliases of version 4."""
    interp_engine: str = ""
    """Before ``.N``. Its last axis counts the neurons of all heads."""


POINTS = (
    Point("ffn", ("mlp.hook_post", "mlp.out.hook_in"), "mlp_act"),
    Point("head", ("attn.hook_z", "attn.o.hook_in")),
    Point("attn", (f"attn.hook_z{FLAT}", f"attn.o.hook_in{FLAT}"), "z"),
    Point("q", (f"attn.hook_q{FLAT}",)),
    Point("k", (f"attn.hook_k{FLAT}",)),
    Point("v", (f"attn.hook_v{FLAT}",), "value"),
)
HOOKS = {point.site: point.transformer_lens[0] for point in POINTS}
"""Site -> TransformerLens' name of the activation that has its neurons, or heads, along an axis."""
TWO_INDICES = {site: HOOKS[site].removesuffix(FLAT) for site in ("q", "k", "v")}
"""Site -> TransformerLens' name of an activation that has two indices, the head and the component."""
NEURON_AXES = ("batch", "position", "neuron")
HEAD_AXES = ("batch", "position", "head", "component")
"""What the indices in brackets count."""

_INDEX = r"(\[(?P<index>[^\[\]]{1,80})\])?"
_HOOK = re.compile(rf"blocks\.(?P<layer>\d{{1,9}})\.(?P<name>[\w.]+(\.flatten\(-2\))?){_INDEX}")
_ADDRESS = re.compile(rf"(?P<name>[a-z]\w*)\.(?P<layer>\d{{1,9}}){_INDEX}")
_SHORT = re.compile(r"L(?P<layer>\d{1,9})(?P<kind>[HN])(?P<index>\d{1,9})")
_DASHBOARD = re.compile(
    r"((https?://)?(www\.)?neuronpedia\.org/)?([\w.-]+/)?(?P<source>\d{1,9}(-[\w.-]+)?)/(?P<index>\d{1,9})"
    r"(/|\?.*|#.*)?"
)
_OF_MODEL = re.compile(r"((https?://)?(www\.)?neuronpedia\.org/)?(?P<model>[\w.-]+)/\d{1,9}(-[\w.-]+)?/\d")
_SOURCE = re.compile(r"(?P<layer>\d{1,9})-(?P<site>[a-z]+)-(?P<sign>plus|minus)")
_OF_NEURONS = re.compile(r"(?P<layer>\d{1,9})(-neurons|-mlp)?")
"""A source of FFN neurons whose values are the activations, as Neuronpedia has them."""
_BY_HOOK = {name: point.site for point in POINTS for name in point.transformer_lens}
_BY_ADDRESS = {point.interp_engine: point.site for point in POINTS if point.interp_engine}
_ID = re.compile(rf"\bL(\d{{1,9}})\.({'|'.join(HOOKS)})\.(\d{{1,9}})\b")
NAMED = (
    r"[a-z]\w*(?:\.\w+)*(?:\.flatten\(-2\))?\[[^\[\]]{1,80}\]|L\d+[HN]\d+"
    r"|(?:(?:https?://)?(?:www\.)?neuronpedia\.org/)?(?:[\w.-]+/)?\d+(?:-[\w.]+)*/\d+"
)
"""A pattern of such names, for notations that have them as a part."""
EXAMPLES = (
    "blocks.29.mlp.hook_post[860], blocks.4.attn.hook_z[3] (a head), blocks.4.attn.hook_z.flatten(-2)[70], "
    "mlp_act.29[860], z.4[70] or value.4[70]"
)


@dataclass(frozen=True)
class Named:
    """A neuron or head, and what else its name says."""

    layer: int
    site: str
    index: int
    where: str = "all"
    """The tokens that an index of positions means, as of `icebear.edits.Edit.where`."""
    sign: int = 1
    """-1 for a source at negative activation, whose values are activations times -1."""


POLARITY_WORDS = {"+": "plus", "-": "minus"}
"""Polarity -> its word in the name of a source."""


@dataclass(frozen=True)
class Source:
    """The neurons of a site and layer at a polarity, such as ``29-ffn-plus`` on Neuronpedia; its values are activations
    times the sign, so that the largest come first at both."""

    layer: int
    site: str
    polarity: str

    def __str__(self) -> str:
        return f"{self.layer}-{self.group}"

    @property
    def group(self) -> str:
        """The name without the layer, which Neuronpedia calls a source set."""
        return f"{self.site}-{POLARITY_WORDS[self.polarity]}"

    @property
    def sign(self) -> int:
        return 1 if self.polarity == "+" else -1

    @classmethod
    def parse(cls, name: str) -> Source:
        """Parse the name of a source; ``29``, ``29-neurons`` and ``29-mlp`` are FFN neurons with their activations as
        values, which is ``29-ffn-plus``. Raises `InputError` for any other text."""
        neurons = _OF_NEURONS.fullmatch(name)
        if neurons:
            return cls(int(neurons["layer"]), "ffn", "+")
        match = _SOURCE.fullmatch(name)
        if not match:
            raise InputError(
                f"{shown(name)} is not a source of neurons (features of an autoencoder are none); write it like "
                "29-ffn-plus, 29-ffn-minus or 29."
            )
        return cls(int(match["layer"]), match["site"], "+" if match["sign"] == "plus" else "-")


def model_id(name: str) -> str:
    """Return a model's name on Neuronpedia, which has no folder and no capitals."""
    return Path(name).name.lower()


def check_model(text: str, model: str) -> None:
    """Raise `InputError` if a text begins with an id on Neuronpedia of a neuron of another model."""
    match = _OF_MODEL.match(text)
    if match is not None and match["model"] != model_id(model):
        raise InputError(f"{text} is a neuron of {match['model']}, not of {model}; load that model, or leave it out.")


def parse_name(text: str) -> Named | None:
    """Return the neuron or head of a name in TransformerLens, interp-engine or Neuronpedia.

    None for a text that is no such name. Raises `InputError` for a name that means no neuron or head of icebear, and
    for one without its index.
    """
    for pattern, read in READERS:
        match = pattern.fullmatch(text)
        if match is not None:
            return read(text, match)
    return None


def _of_hook(text: str, match: re.Match[str]) -> Named:
    return _of_point(text, match, _BY_HOOK)


def _of_address(text: str, match: re.Match[str]) -> Named:
    return _of_point(text, match, _BY_ADDRESS)


def _of_point(text: str, match: re.Match[str], sites: Mapping[str, str]) -> Named:
    site = sites.get(match["name"])
    if site is None:
        flat = f"{match['name']}{FLAT}" in sites
        advice = f"add {FLAT} for one index over all heads" if flat else f"those with them are {EXAMPLES}"
        raise InputError(f"{text} is a point without neurons or heads of icebear; {advice}.")
    if match["index"] is None:
        raise InputError(f"{text} is a point of many neurons; add the index of one, as in {text}[0].")
    return Named(int(match["layer"]), site, *_indexed(text, match["index"], site))


def _indexed(text: str, brackets: str, site: str) -> tuple[int, str]:
    """Return the neuron or head that an index means, and the tokens."""
    axes, parts = HEAD_AXES if site == "head" else NEURON_AXES, [part.strip() for part in brackets.split(",")]
    if parts[0] == "...":
        parts = [":"] * (len(axes) - len(parts) + 1) + parts[1:]
    elif len(parts) < 3:  # [head], [head, component]; [neuron], [position, neuron]
        parts = [":", ":", *parts] if site == "head" else [*[":"] * (3 - len(parts)), *parts]
    at, kind = dict(zip(axes, parts, strict=False)), axes[2]
    if len(parts) > len(axes) or not _is_number(at[kind]) or at["batch"] not in (":", "0"):
        raise InputError(f"{text} is no index of a single {kind}; write it like {_example(text, site)}.")
    if at.get("component", ":") != ":":
        raise InputError(_component_advice(text, at))
    return int(at[kind]), _where(text, at["position"], site)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None


def _example(text: str, site: str) -> str:
    point = text.partition("[")[0]
    return f"{point}[3], {point}[0, -1, 3] or {point}[..., 3{', :' * (site == 'head')}]"


def _where(text: str, position: str, site: str) -> str:
    """Return the tokens that an index of positions means, as of `icebear.edits.Edit.where`."""
    if position == ":":
        return "all"
    if position == "-1":
        return "last"
    if _is_number(position):
        return f"position:{int(position)}"
    raise InputError(f"{text} names no token by {position!r}; write :, -1 or a position, as {_example(text, site)}.")


def _component_advice(text: str, at: Mapping[str, str]) -> str:
    """Say how to name a component of a head: its one index depends on the model."""
    point, head, component = text.partition("[")[0], int(at["head"]), at["component"]
    if not _is_number(component):
        return f"{text} is no index of a single head or component; write {point}[{head}] for the head."
    return (
        f"{text} is a component of head {head}, and icebear counts those of all heads together: write "
        f"{point}{FLAT}[{head} * d_head + {component}], which is [{64 * head + int(component)}] if d_head is 64, or "
        f"{point}[{head}] for the head."
    )


def _of_short(text: str, match: re.Match[str]) -> Named:
    return Named(int(match["layer"]), "head" if match["kind"] == "H" else "ffn", int(match["index"]))


def _of_dashboard(text: str, match: re.Match[str]) -> Named:
    source = Source.parse(match["source"])
    return Named(source.layer, source.site, int(match["index"]), sign=source.sign)


READERS: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str]], Named]], ...] = (
    (_HOOK, _of_hook),
    (_ADDRESS, _of_address),
    (_SHORT, _of_short),
    (_DASHBOARD, _of_dashboard),
)
"""A pattern of names -> what reads them."""


def hook_name(layer: int, site: str, index: int) -> str:
    """Return TransformerLens' name of a neuron or head of a site in `HOOKS`."""
    return f"blocks.{layer}.{HOOKS[site]}[{index}]"


def in_names(names: Naming) -> Callable[[str], str]:
    """Return a function that writes the neurons and heads of a text in the names of a library.

    Neurons of a site without a name in TransformerLens keep the names of icebear.
    """
    if names == "icebear":
        return lambda text: text
    return lambda text: _ID.sub(lambda match: hook_name(int(match[1]), match[2], int(match[3])), text)
