"""`icebear check`: are claims about a model still true?"""

from __future__ import annotations

from icebear.app.cli.options import ModelOptions, argument, named, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import bar
from icebear.errors import InputError


@record
class Options:
    file: str = argument(type="file")
    json: bool
    model: ModelOptions


@verb(Options)
def check(options: Options) -> None:
    """Measure the claims of FILE again, and print each number then and now. The exit code is 1 if one is broken.

    FILE is made by --claim of explain, rank, circuit, flip, label and concept find. Without --model, each claim is
    checked in the model that it names, or in the default model if it names none. With --model, all claims are checked
    in that model.

    Example:
      icebear explain "The ice bear lives in the" --claim claims.yaml
      icebear check claims.yaml
    """
    from icebear.app.cli.tables.evaluations import claims_table
    from icebear.claims.check import CheckedClaim, CheckedClaims, check
    from icebear.claims.claim import Claim
    from icebear.claims.claims_files import read_claims

    claims = read_claims(options.file)
    if not claims:
        raise InputError(f"{options.file} has no claim; write one with --claim (docs/claims.md).")
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        name = options.model.model if named("model") or not claim.provenance else claim.provenance.model
        groups.setdefault(name, []).append(claim)
    rows: list[CheckedClaim] = []
    for name, group in groups.items():
        model = options.model.load(name)
        with bar("claims") as move:
            rows += check(model, group, move).rows
    result = CheckedClaims(tuple(rows))
    show(options.json, {"file": options.file, **result.to_dict()}, claims_table(result))
    if not result.passed:
        raise SystemExit(1)
