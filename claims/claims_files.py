"""Files of claims: YAML that is checked before it is read, and written so that a person can edit it; or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import yaml

from icebear.claims.claim import CONVERTER, Claim
from icebear.claims.conditions import Condition, conditions_of
from icebear.claims.kind import Draft
from icebear.converters import check_version
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.paths import existing, local, locked, read_text, write_file

FORMAT = 1
KEY = "icebear_claims"
LOCAL = ("localhost", "127.0.0.1", "::1")
UNDER = "under"
"""The key of the conditions under which the claims of a file are checked."""
LARGEST = 1_000_000
"""The largest file, in bytes."""
DEEPEST = 20
WAITING = 60
"""Seconds; an append takes milliseconds."""
ClaimsOfFile = tuple[tuple[Claim, ...], tuple[Condition, ...]]
"""The claims of a file, and the conditions under which they are checked."""
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _PlainLoader(_Loader):
    """Reads dates as texts."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        character: [(tag, pattern) for tag, pattern in rows if not tag.endswith(":timestamp")]
        for character, rows in _Loader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_claims(path: str | Path) -> tuple[Claim, ...]:
    """Read the claims of a file. Raises `InputError` as `read_claims_file` does."""
    return read_claims_file(path)[0]


def read_claims_file(path: str | Path) -> ClaimsOfFile:
    """Read a file of claims, and the conditions under which they are checked. Raises `InputError` if it is none, or too
    large, or has YAML that claims do not need: anchors, aliases and tags."""
    try:
        size = existing(path).stat().st_size
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; write claims with --claim (docs/claims.md).") from None
    if size > LARGEST:
        raise InputError(f"{path} has {size:,} bytes, but a file of claims has at most {LARGEST:,}; split it.")
    return _parsed(read_text(path), str(path))


def _is_json(path: str | Path) -> bool:
    return str(path).endswith(".json")


def _parsed(text: str, source: str) -> ClaimsOfFile:
    is_json = _is_json(source) and text.lstrip().startswith("{")  # files of earlier versions have YAML
    data = _from_json(text, source) if is_json else _from_yaml(text, source)
    version = data.get(KEY) if isinstance(data, dict) else None
    check_version(version, FORMAT, source, InputError)
    if not isinstance(data, dict) or version != FORMAT or not isinstance(data.get("claims"), list):
        raise InputError(f"{source} is not a file of claims; add {KEY!r}: {FORMAT} and a list of claims.")
    if more := set(data) - {KEY, UNDER, "claims"}:
        raise InputError(f"{source} has the unknown entry {', '.join(map(repr, sorted(map(str, more))))}; remove it.")
    claims = tuple(_claim(fields, number, source) for number, fields in enumerate(data["claims"], 1))
    return claims, _conditions(data.get(UNDER, []), source)


def _conditions(values: Any, source: str) -> tuple[Condition, ...]:
    if not isinstance(values, list):
        raise InputError(f"{source} has {UNDER!r} without a list of conditions; write it like [dtype=bfloat16].")
    try:
        conditions = conditions_of(values)
    except InputError as reason:
        raise InputError(f"The conditions of {source} cannot be read. {reason}") from None
    for condition in conditions:  # who wrote the file must not be sent the key of who checks it
        if condition.kind == "url" and urlsplit(condition.value).hostname not in LOCAL:
            raise InputError(f"{source} names a server elsewhere, {condition}; give it with --under, if you trust it.")
    return conditions


def _from_json(text: str, source: str) -> Any:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=mapping)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not JSON ({error}); correct the file.") from None


def _from_yaml(text: str, source: str) -> Any:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise InputError(
                    f"{source} is nested more than {DEEPEST} levels deep, which no claim is; correct the file."
                )
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
                line = event.start_mark.line + 1
                raise InputError(f"{source} has an anchor, alias or tag in line {line}; write the value out.")
        return yaml.load(text, Loader=_PlainLoader)  # a safe loader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}: {getattr(error, 'problem', '')})" if mark else ""
        raise InputError(f"{source} is not YAML{where}; correct the file.") from None


def _claim(data: Any, number: int, source: str) -> Claim:
    try:
        if not isinstance(data, dict):
            raise TypeError("it is not a mapping")
        return CONVERTER.structure(data, Claim)
    except Exception as reason:  # of cattrs, or of a record that checks its own fields
        why = f"it lacks {reason}" if isinstance(reason, KeyError) else " ".join(str(reason).split()).rstrip(".")
        raise InputError(
            f"Claim {number} of {source} cannot be read ({why}); docs/claims.md shows the format."
        ) from None


def write_claims(path: str | Path, claims: Sequence[Claim], under: Sequence[Condition] = ()) -> None:
    """Write a file of claims, in place of one that exists: JSON if its name ends so, else YAML. under: the conditions
    under which they are checked. Raises `InputError`."""
    conditions = {UNDER: list(map(str, under))} if under else {}
    if _is_json(path):
        text = json.dumps({KEY: FORMAT, **conditions, "claims": _rows(claims)}, ensure_ascii=False, indent=1) + "\n"
    else:
        heading = yaml.safe_dump({KEY: FORMAT, **conditions}, sort_keys=False, allow_unicode=True)
        text = f"{heading}claims:\n{_text(claims)}"
    _write(path, text)


def _write(path: str | Path, text: str) -> None:
    if len(text.encode()) > LARGEST:
        raise InputError(f"{path} would have more than {LARGEST:,} bytes; write the claims to another file.")
    write_file(path, text)


def append_claims(path: str | Path, claims: Sequence[Claim]) -> int:
    """Add claims at the end of a file, which is made if it does not exist, and return how many it had. What a person
    wrote there in YAML stays. Other processes that append to the same file wait. Raises `InputError`."""
    with locked(path, seconds=WAITING):
        if not local(path).exists():
            write_claims(path, claims)
            return 0
        before, under = read_claims_file(path)
        text = read_text(path).rstrip("\n") + "\n" + _text(claims)
        try:
            same_list = not _is_json(path) and _parsed(text, str(path)) == ((*before, *claims), under)
        except InputError:  # its list is written in another way
            same_list = False
        if same_list:
            _write(path, text)
        else:
            write_claims(path, (*before, *claims), under)
        return len(before)


def append_drafts(model: Model, path: str | Path, drafts: Iterable[Draft]) -> tuple[list[Claim], list[str], int]:
    """Append claims to a file. Return what was written, a sentence for each claim that was not, such as one that cannot
    fail, and how many claims the file had. Raises `InputError` if there is nothing to write, or the file cannot be
    written."""
    claims: list[Claim] = []
    refused: list[str] = []
    for what, measured in drafts:
        try:
            claims.append(Claim.of(model, what, measured))
        except InputError as error:
            refused.append(f"{what.kind}: {what}. {error}")
    if not claims:
        reason = refused[0] if refused else "nothing was measured that a claim can be made of"
        raise InputError(f"No claim was written ({reason.rstrip('.')}).")
    return claims, refused, append_claims(path, claims)


def _text(claims: Sequence[Claim]) -> str:
    return yaml.safe_dump(_rows(claims), sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)


def _rows(claims: Sequence[Claim]) -> list[Any]:
    return [_plain(CONVERTER.unstructure(claim, Claim)) for claim in claims]


def _plain(value: Any) -> Any:
    """Return a claim without the fields that have no value."""
    if isinstance(value, dict):
        return {key: _plain(field) for key, field in value.items() if field is not None}
    return [_plain(element) for element in value] if isinstance(value, list | tuple) else value
