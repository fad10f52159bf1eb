"""Names of neurons and heads in other libraries: which point of a layer they index there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from icebear.errors import InputError

Naming = Literal["icebear", "transformerlens"]


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
    Point("attn", interp_engine="z"),
    Point("v", interp_engine="value"),
)
HOOKS = {point.site: point.transformer_lens[0] for point in POINTS if point.transformer_lens}
"""Site -> TransformerLens' name of the activation that has its neurons, or heads, along an axis."""
TWO_INDICES = {"q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v"}
"""Site -> TransformerLens' name of an activation that has two indices, the head and the dimension."""

_HOOK = re.compile(r"blocks\.(?P<layer>\d{1,9})\.(?P<name>[\w.]+)(\[(?P<index>\d{1,9})\])?")
_ADDRESS = re.compile(r"(?P<name>[a-z]\w*)\.(?P<layer>\d{1,9})(\[(?P<index>\d{1,9})\])?")
_BY_HOOK = {name: point.site for point in POINTS for name in point.transformer_lens}
_BY_ADDRESS = {point.interp_engine: point.site for point in POINTS if point.interp_engine}
_ID = re.compile(r"\bL(\d{1,9})\.(ffn|head)\.(\d{1,9})\b")
NAMED = r"[a-z][\w.]*\[\d+\]"
"""A pattern of such names, for notations that have them as a part."""
EXAMPLES = "blocks.29.mlp.hook_post[860], blocks.4.attn.hook_z[3] (a head), mlp_act.29[860], z.4[70] or value.4[70]"


def parse_point(text: str) -> tuple[int, str, int] | None:
    """Return the layer, site and index of a neuron or head, by TransformerLens' or interp-engine's name.

    None for a text that is no such name. Raises `InputError` for a point that has no neurons or heads of icebear, and
    for one without its index.
    """
    for pattern, sites in ((_HOOK, _BY_HOOK), (_ADDRESS, _BY_ADDRESS)):
        match = pattern.fullmatch(text)
        if match is None:
            continue
        site = sites.get(match["name"])
        if site is None:
            raise InputError(f"{text} is a point without neurons or heads of icebear; those with them are {EXAMPLES}.")
        if match["index"] is None:
            raise InputError(f"{text} is a point of many neurons; add the index of one, as in {text}[0].")
        return int(match["layer"]), site, int(match["index"])
    return None


def hook_name(layer: int, site: str, index: int) -> str:
    """Return TransformerLens' name of a neuron of site ``ffn`` or of a head."""
    return f"blocks.{layer}.{HOOKS[site]}[{index}]"


def in_names(names: Naming) -> Callable[[str], str]:
    """Return a function that writes the neurons and heads of a text in the names of a library.

    TransformerLens has two indices for neurons of other sites; these keep the names of icebear.
    """
    if names == "icebear":
        return lambda text: text
    return lambda text: _ID.sub(lambda match: hook_name(int(match[1]), match[2], int(match[3])), text)
