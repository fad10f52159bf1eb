"""`icebear evaluate`: how good explanations are on your model and data, each with a folder of results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from app.options import json_option, load, model_options, print_json, stdout

if TYPE_CHECKING:
    from concepts.evaluation.report import Table
    from concepts.models import Model


@click.group()
def evaluate() -> None:
    """How faithful explanations are, on your model and data.

    \b
    Example:
      icebear evaluate faithfulness --samples 5 --methods attnlrp,gxi,random --out faithfulness
    """


def evaluation_options(command: Callable) -> Callable:
    for option in (
        click.option("--seed", default=0, show_default=True, help="Of the choice of samples."),
        click.option("--out", type=click.Path(file_okay=False), required=True,
                     help="The folder of results; an interrupted evaluation goes on in it."),
        click.option("--samples", default=20, show_default=True, type=click.IntRange(min=1)),
        click.option("--methods", default="all", show_default=True,
                     help="Names, with commas; all are in the README. Methods of LRP can be written out."),
    ):  # fmt: skip
        command = option(command)
    return command


@evaluate.command()
@evaluation_options
@click.option("--corpus", default="wiki-summaries", show_default=True, help="As of icebear index.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(min=17))
@click.option("--tune", is_flag=True, help="Choose parameters on other samples first, where a method has one.")
@json_option
@model_options
def faithfulness(
    methods: str, samples: int, out: str, seed: int, corpus: str, max_tokens: int, tune: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Remove tokens, most and least relevant first, and watch the predicted word go.

    \b
    Example:
      icebear evaluate faithfulness --samples 5 --methods attnlrp,gxi,random --out faithfulness
    """
    from actmax.corpus import read_corpus
    from concepts.evaluation import faithfulness as evaluation
    from concepts.evaluation.methods import chosen

    wanted = chosen(methods)
    model = load(**options)
    texts = [text for _, text in read_corpus(corpus).documents()]
    prompts = evaluation.next_words(model, texts, samples, seed, max_tokens)
    able, unable = _able(model, prompts[0], wanted)
    if tune:
        able = evaluation.tuned(model, evaluation.next_words(model, texts[::-1], 10, seed + 1, max_tokens), able)
    _run(
        model, "faithfulness", able, unable, prompts, lambda prompt: evaluation.sample(model, prompt, able),
        evaluation.COLUMNS, out, as_json, corpus=corpus, samples=samples, seed=seed, max_tokens=max_tokens,
    )  # fmt: skip


def _able(model: Model, prompt: Any, methods: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Methods that can run on the model, and why others cannot."""
    from concepts import tasks
    from concepts.evaluation.methods import why_not

    plan = tasks.plan(model, [prompt])
    reasons = {name: why_not(model, plan, method) for name, method in methods.items()}
    unable = {name: why for name, why in reasons.items() if why}
    return {name: method for name, method in methods.items() if name not in unable}, unable


def _run(
    model: Model, kind: str, able: dict[str, Any], unable: dict[str, str], items: Sequence[Any],
    measure: Callable[[Any], dict[str, Any]], columns: Mapping[str, str], out: str, as_json: bool,
    notes: Callable[[list], list[str]] = lambda lines: [], **settings: Any,
) -> None:  # fmt: skip
    from concepts.evaluation import report, runner

    facts = runner.facts(model, kind, {**able, **dict.fromkeys(unable)}, **settings)
    with _progress(kind, len(items)) as advance:
        lines = runner.run(out, facts, items, measure, advance)
    counted = [line for line in lines if line.get("counts", True)]
    found = report.write(out, counted, columns, facts, unable, notes(lines))
    if as_json:
        print_json({"settings": facts, "unable": unable, "table": report.frame(found).to_dict("records")})
        return
    show(found, columns, [*notes(lines), *(f"{name} cannot run: {why}" for name, why in unable.items())])
    click.echo(f"{len(counted)} samples; mean ± standard error; * best of its column. Wrote {out}/index.html", err=True)


def show(found: Table, columns: Mapping[str, str], lines: Sequence[str]) -> None:
    from app.terminal import evaluation_table

    console = stdout()
    console.print(evaluation_table(found, columns))
    for line in [*(f"{name}: {about}" for name, about in columns.items()), *lines]:
        console.print(line, style="dim", markup=False)


class _progress:
    """A bar on stderr that counts samples."""

    def __init__(self, kind: str, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=Console(stderr=True), disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self.task = self.bar.add_task(kind, total=total)

    def __enter__(self) -> Callable[[int, int], None]:
        self.bar.start()
        return lambda done, total: self.bar.update(self.task, completed=done)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
