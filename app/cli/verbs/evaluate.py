"""`icebear evaluate NAME`: a command for each evaluation of the registry, made from its options."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import click

from icebear.app.cli.options import (
    OPTIONS,
    ModelOptions,
    Option,
    Verb,
    click_type,
    filled,
    help_of,
    option,
    parameters,
    record,
    with_type,
)
from icebear.app.cli.output import show, stdout
from icebear.app.cli.progress import bar
from icebear.evaluation.evaluations import EVALUATIONS

if TYPE_CHECKING:
    from icebear.evaluation import protocol
    from icebear.evaluation.runner import PartResult


@record
class Output:
    out: str = option(
        "Folder for the results. Run again with the same folder to resume an interrupted evaluation.",
        type="folder",
        required=True,
    )
    json: bool


@record
class OutputAndModel(Output):
    model: ModelOptions


class Evaluations(click.Group):
    """Imports an evaluation when its command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(EVALUATIONS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return command(resolve_name(EVALUATIONS[name][0])) if name in EVALUATIONS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in EVALUATIONS and not args[0].startswith("-"):
            raise click.exceptions.NoSuchCommand(args[0], possibilities=EVALUATIONS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in EVALUATIONS.items()])


@click.command(cls=Evaluations)
def evaluate() -> None:
    """Evaluate explanations on your model and data.

    \b
    Example:
      icebear evaluate faithfulness --samples 5 --methods attnlrp,gxi,random --out faithfulness
    """


def command(kind: type[protocol.Evaluation]) -> click.Command:
    hints = get_type_hints(kind, include_extras=True)
    output = OutputAndModel if kind.needs_model else Output

    def run(**values: Any) -> None:
        evaluation = kind(**{declared.name: values[declared.name] for declared in fields(kind)})
        _run(evaluation, filled(output, values))

    params = [*(_click_option(declared, hints[declared.name]) for declared in fields(kind)), *parameters(output)]
    return Verb(kind.name, params=params, help=help_of(kind), callback=run)


def _click_option(declared: Field[Any], hint: Any) -> Option:
    kind, option = get_args(hint)
    flag = f"--{declared.name.replace('_', '-')}"
    shown = declared.default is not False and declared.default not in (MISSING, None)
    how: dict[str, Any] = {**OPTIONS.get(flag, {}), "advanced": False, "show_default": shown}
    if option.help:
        how["help"] = option.help
    if declared.default is MISSING:
        how["required"] = True
    elif declared.default is not None:
        how["default"] = declared.default
    if option.is_file:
        how["type"] = "file"
    elif option.least is not None:
        how["type"] = (click.IntRange if kind is int else click.FloatRange)(option.least)
    elif "type" not in how or get_origin(kind) is Literal:
        how = {**click_type(kind), **how}
    return Option([flag, declared.name], **with_type(how))


def _run(evaluation: protocol.Evaluation, output: Output) -> None:
    """Print each part when it is measured, or one JSON document."""
    parts: list[dict[str, Any]] = []
    columns: dict[str, str] = {}
    model = output.model.load() if isinstance(output, OutputAndModel) else None
    from icebear.evaluation import runner

    for part in runner.run(evaluation, model, output.out, bar):
        parts.append(part.to_dict())
        for name, table in part.tables.items():
            columns |= table.columns
            click.echo(f"Wrote {part.folder / name}/index.html", err=True)
        if not output.json:
            _show(part)
    notes = (f"{name}: {about}" for name, about in columns.items())
    show(output.json, {"evaluation": evaluation.name, "parts": parts}, *notes)


def _show(part: PartResult) -> None:
    from icebear.app.cli.tables.evaluations import evaluation_table, listing_table

    console = stdout()
    for name, table in part.tables.items():
        title = ": ".join(filter(None, (part.name, name)))
        console.print(evaluation_table(table.texts(), table.columns, title))
    for name, rows in part.listings.items():
        if rows:
            console.print(listing_table(rows, name))
    for line in (*part.notes, *(f"{name} cannot run: {why}" for name, why in part.unable.items())):
        console.print(line, style="dim", markup=False)
