"""The JSON schema of files of claims; `python docs/claims_schema.py` writes docs/claims.schema.json from records."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from icebear.claims.claim import TAG, Claim
from icebear.claims.claims_files import FORMAT, KEY, UNDER
from icebear.claims.kind import Kind, NodeId
from icebear.claims.kinds import KINDS
from icebear.edits import Edit
from icebear.records import Neuron

WRITTEN = {Neuron: "L29.ffn.860", NodeId: "L29.ffn.860@5", Edit: "L29.ffn.860=-20"}
"""Records that are texts, with an example."""
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a file of claims."""
    kinds = {name: _record(kind, {TAG: {"const": name}}) for name, kind in KINDS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Claims of icebear",
        "type": "object",
        "properties": {
            KEY: {"const": FORMAT},
            UNDER: {"type": "array", "items": {"type": "string", "description": "written like dtype=bfloat16"}},
            "claims": {"type": "array", "items": _of(Claim)},
        },
        "required": [KEY, "claims"],
        "additionalProperties": False,
        "$defs": kinds,
    }


def _of(kind: Any) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Kind:
        return {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in KINDS]}
    if kind in WRITTEN:
        return {"type": "string", "description": f"written like {WRITTEN[kind]}"}
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [_of(one) for one in inner]}
    if origin is tuple:
        return {"type": "array", "items": _of(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(inner[1])}
    assert is_dataclass(kind), kind
    return _record(kind, {})


def _record(kind: Any, more: dict[str, Any]) -> dict[str, Any]:
    hints, rows = get_type_hints(kind), fields(kind)
    required = [one.name for one in rows if one.default is MISSING and one.default_factory is MISSING]
    return {
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": {**more, **{one.name: _of(hints[one.name]) for one in rows}},
        "required": [*more, *required],
        "additionalProperties": False,
    }


def text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("claims.schema.json").write_text(text())
