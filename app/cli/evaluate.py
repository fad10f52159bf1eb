"""`icebear evaluate`: how good explanations are on your model and data, each with a folder of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import AT_LEAST_1, MODEL, load, options, print_json, stdout
from icebear.app.cli.progress import bar
from icebear.extras import need
from icebear.paths import write_file

if TYPE_CHECKING:
    from icebear.concepts.evaluation.pairs import Pair
    from icebear.concepts.evaluation.questions import Question
    from icebear.concepts.models.model import Model


CORPORA = {"next-word": "wiki-summaries", "reviews": "imdb-reviews", "choice": ""}


@click.group()
def evaluate() -> None:
    """How faithful explanations are, on your model and data.

    \b
    Example:
      icebear evaluate faithfulness --samples 5 --methods attnlrp,gxi,random --out faithfulness
    """


MEASURED = ("--methods", "--samples", "--out", "--seed")


@evaluate.command()
@options(*MEASURED)
@options("--task", type=click.Choice(list(CORPORA)), default="next-word")
@options("--corpus")
@options("--max-tokens", default=128, type=click.IntRange(min=17))
@click.option("--tune", is_flag=True, help="Choose parameters on other samples first, where a method has one.")
@options("--json", *MODEL)
def faithfulness(
    methods: str,
    samples: int,
    out: str,
    seed: int,
    task: str,
    corpus: str | None,
    max_tokens: int,
    tune: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Remove tokens, most and least relevant first, and watch the predicted answer go.

    Predicted is the next word, whether a review is positive, or one answer of four.

    \b
    Example:
      icebear evaluate faithfulness --samples 5 --methods attnlrp,gxi,random --out faithfulness
    """
    from icebear.concepts.evaluation import faithfulness as evaluation
    from icebear.concepts.methods.registry import methods_of

    if task == "choice" and corpus:
        raise click.UsageError("--task choice makes its own prompts, so it takes no --corpus.")
    need("evaluate")
    wanted = methods_of(methods)
    model = load(**given)
    corpus = corpus or CORPORA[task]
    asked = _questions(model, task, corpus, samples + 10 * tune, seed, max_tokens)
    wanted_samples, others = asked[:samples], asked[samples:]
    able, unable = _able(model, asked[0].prompt, wanted)
    if tune:
        able = evaluation.tuned(model, others, able)
    _run(
        model,
        "faithfulness",
        able,
        unable,
        wanted_samples,
        lambda questions: [evaluation.sample(model, question, able) for question in questions],
        1,
        evaluation.COLUMNS,
        out,
        as_json,
        notes=_accuracy,
        task=task,
        corpus=corpus,
        samples=samples,
        seed=seed,
        max_tokens=max_tokens,
        shares=evaluation.SHARES,
    )


def _questions(model: Model, task: str, corpus: str, samples: int, seed: int, longest: int) -> list[Question]:
    from icebear.concepts.corpus import read_corpus
    from icebear.concepts.evaluation import questions

    if task == "choice":
        return questions.choices(model, samples, seed)
    documents = list(read_corpus(corpus).documents())
    if task == "reviews":
        return questions.reviews(model, documents, samples, seed, longest)
    return questions.next_words(model, [text for _, text in documents], samples, seed, longest)


@evaluate.command()
@options(*MEASURED)
@options("--task", type=click.Choice(["agreement", "anaphora", "qa"]), default="agreement")
@options("--data")
@click.option("--no-contrast", is_flag=True, help="Explain the right answer, not the right against the wrong one.")
@click.option(
    "--tokens",
    type=click.Choice(["all", "inner", "context"]),
    default="all",
    show_default=True,
    help="Which count: all, none special nor the first, or a question's text only. May be asked again of a folder.",
)
@options("--json", *MODEL)
def groundtruth(
    methods: str,
    samples: int,
    out: str,
    seed: int,
    task: str,
    data: str | None,
    no_contrast: bool,
    tokens: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Whether relevance lies where the evidence is: the subject of a verb, the answer in a text.

    Instead of a task, --data takes a BLiMP file (JSON lines) or a SQuAD file (JSON).

    \b
    Example:
      icebear evaluate groundtruth --samples 4 --methods attnlrp,gxi,random --out agreement
    """
    from icebear.concepts.evaluation import groundtruth as evaluation
    from icebear.concepts.methods.registry import methods_of

    need("evaluate")
    wanted = methods_of(methods)
    items = evaluation.read(data, samples, seed) if data else evaluation.TASKS[task](samples, seed)
    model = load(**given)
    able, unable = _able(model, items[0].prompt, wanted)
    _run(
        model,
        "groundtruth",
        able,
        unable,
        items,
        lambda group: evaluation.samples(model, group, able, not no_contrast),
        evaluation.TOGETHER,
        evaluation.COLUMNS,
        out,
        as_json,
        notes=lambda lines: [*_accuracy(lines), f"tokens that count: {tokens}"],
        counted=lambda lines: evaluation.counted(lines, tokens),
        task=data or task,
        samples=samples,
        seed=seed,
        contrast=not no_contrast,
    )


def _accuracy(lines: list[dict[str, Any]]) -> list[str]:
    judged = [line["correct"] for line in lines if line.get("correct") is not None]
    left = len(lines) - sum(line.get("counts", True) for line in lines)
    rest = f"; left out, as not predicted or unusable: {left}" if left else ""
    return [f"accuracy of the model: {sum(judged)} of {len(judged)}{rest}"] if judged else []


@evaluate.command()
@options(*MEASURED)
@options("--site", type=click.Choice(["ffn", "head"]), default="ffn")
@options("--corpus")
@options("--max-tokens", default=64, type=click.IntRange(min=17))
@options("--json", *MODEL)
def pruning(
    methods: str,
    samples: int,
    out: str,
    seed: int,
    site: str,
    corpus: str | None,
    max_tokens: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Prune FFN neurons or heads, least and most relevant first, and watch the predicted words go.

    Which are needed by prompts in general: ranked on some, set to zero for others. Those of one answer: ablation.

    \b
    Example:
      icebear evaluate pruning --samples 4 --methods attnlrp,random --out pruning
    """
    from icebear.concepts.evaluation import pruning as evaluation
    from icebear.concepts.evaluation import runner
    from icebear.concepts.methods.registry import methods_of

    need("evaluate")
    wanted, corpus = methods_of(methods, evaluation.METHODS, evaluation.CONTROLS), corpus or CORPORA["next-word"]
    model = load(**given)
    asked = _questions(model, "next-word", corpus, 2 * samples, seed, max_tokens)
    prompts, reference = evaluation.split([question.prompt for question in asked], seed)
    facts = runner.facts(
        model, "pruning", wanted, site=site, corpus=corpus, samples=samples, seed=seed, shares=list(evaluation.SHARES)
    )
    with bar("pruning", len(wanted)) as advance:
        curves = runner.run(
            out,
            facts,
            list(wanted.values()),
            lambda method: evaluation.curves(model, prompts, reference, method, site, seed),
            advance,
        )
    lines = evaluation.samples(prompts, dict(zip(wanted, curves, strict=True)))
    note = f"Neurons are ranked on {len(reference)} other prompts; pruned are {list(evaluation.SHARES)} of all."
    _tell(out, lines, evaluation.COLUMNS, facts, {}, [note], as_json)


@evaluate.command()
@options("--methods")
@options("--samples", "--out", "--seed")
@options("--tasks", "--data")
@options("--site", type=click.Choice(["ffn", "head"]), default="ffn")
@click.option(
    "--mean", is_flag=True, help="All others take the mean of the task's prompts, not the other prompt's values."
)
@click.option(
    "--patching", is_flag=True, help="Instead: how scores correlate with activation patching of single nodes."
)
@options("--json", *MODEL)
def ablation(
    methods: str,
    samples: int,
    out: str,
    seed: int,
    tasks: str,
    data: str | None,
    site: str,
    mean: bool,
    patching: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Whether the nodes (neurons at a token) that a method ranks first carry an answer: kept alone, and left out.

    All others take what they are in another prompt. Methods are difference, cp-lrp@midpoint, gxi, matched and others
    (docs/evaluate.md). --data takes JSON lines with clean_prefix, patch_prefix,
    clean_answer and patch_answer instead of the tasks. Each task has a folder of its own in --out.

    \b
    Example:
      icebear evaluate ablation --tasks capitals --samples 4 --methods difference,gxi,matched --out ablation
    """
    from icebear.concepts.evaluation import ablation as evaluation
    from icebear.concepts.evaluation import pairs, runner
    from icebear.concepts.methods.registry import methods_of

    if mean and patching:
        raise click.UsageError("--patching is against the other prompt's values; leave out --mean.")
    need("evaluate")
    wanted = methods_of(methods, evaluation.METHODS, evaluation.CONTROLS)
    asked = {"data": pairs.read(data)} if data else pairs.named(tasks)
    model = load(**given)
    asked_for = {"site": site, "samples": samples, "seed": seed, "mean": mean, "patching": patching}
    columns = evaluation.PATCHED if patching else evaluation.COLUMNS
    told = {}
    for task, usable, tried in _usable(model, asked, samples, seed):
        facts = runner.facts(
            model, "ablation", dict.fromkeys(wanted), task=data or task, sizes=evaluation.SIZES, **asked_for
        )
        means = evaluation.task_means(model, usable, site) if mean else {}
        one = evaluation.patched if patching else partial(evaluation.sample, means=means)
        measure = partial(one, model, methods=wanted, site=site)
        with bar(task, len(usable)) as advance:
            lines = runner.run(f"{out}/{task}", facts, usable, measure, advance)
        notes = [f"{task}: the model is right on {len(usable)} of {tried} pairs"]
        notes += [] if patching else [evaluation.ratios(lines)]
        told[task] = _tell_part(out, task, lines, columns, facts, notes, as_json)
    if as_json:
        print_json({**runner.facts(model, "ablation", dict.fromkeys(wanted), **asked_for), "tasks": told})


def _usable(
    model: Model, asked: Mapping[str, Sequence[Pair]], count: int, seed: int
) -> Iterator[tuple[str, list[Pair], int]]:
    """Of each task the pairs to measure, and how many were tried; a task without any is passed over, which is said."""
    from icebear.concepts.evaluation import pairs

    for task, all_pairs in asked.items():
        usable, tried = pairs.usable(model, all_pairs, count, seed)
        if usable:
            yield task, usable, tried
        else:
            click.echo(f"{task}: the model is right on none of {tried} pairs of equal length.", err=True)


@evaluate.command()
@options("--samples", "--out", "--seed", "--tasks", "--nodes", "--json", *MODEL)
def circuits(samples: int, out: str, seed: int, tasks: str, nodes: int, as_json: bool, **given: Any) -> None:
    """Whether circuits are true: edges against interventions, graphs run by their own edges, groups, tasks.

    Each task's pairs have a circuit each, checked by forward passes; and one of them all, checked on other pairs.

    \b
    Example:
      icebear evaluate circuits --tasks phrase --samples 2 --nodes 20 --out circuits
    """
    from icebear.app.cli.terminal import evaluation_table, tasks_table
    from icebear.concepts.evaluation import circuits as evaluation
    from icebear.concepts.evaluation import pairs, report, runner

    need("evaluate")
    need("circuits")
    asked = pairs.named(tasks)
    model = load(**given)
    told: dict[str, Any] = {}
    choices = {}
    for task, usable, _ in _usable(model, asked, max(samples, 3 * evaluation.LEARN), seed):
        facts = runner.facts(model, "circuits", {}, task=task, samples=samples, seed=seed, nodes=nodes)
        with bar(task, len(usable[:samples])) as advance:
            lines = runner.run(
                f"{out}/samples/{task}",
                facts,
                usable[:samples],
                partial(evaluation.sample, model, nodes=nodes),
                advance,
            )
        seen, choices[task] = evaluation.of_task(model, usable)
        over = {name: evaluation.pooled(lines, name) for name in evaluation.READINGS}
        notes = [f"{task}: edges of all pairs together: " + ", ".join(f"{name} {r:.3f}" for name, r in over.items())]
        told[task] = {"pooled": over, "task": seen}
        for part, columns in evaluation.PARTS.items():
            rows = [{**line, "methods": line[part]} for line in lines]
            of = {**facts, "methods": {name: name for name in lines[0][part]}}
            found = report.write(runner.prepare(f"{out}/{part}/{task}", of), rows, columns, of, {}, notes)
            told[task][part] = report.rows(found)
            if not as_json:
                stdout().print(evaluation_table(report.told(found, columns), columns, f"{task}: {part}"))
        if not as_json:
            stdout().print("\n".join(notes), style="dim", markup=False)
    alike = evaluation.overlaps(choices)
    if as_json:
        print_json({**runner.facts(model, "circuits", {}, samples=samples, seed=seed), "tasks": told, "overlap": alike})
    else:
        stdout().print(tasks_table({task: found["task"] for task, found in told.items()}, alike))


@evaluate.command()
@options("--data", required=True)
@options("--out", "--max-neurons")
@click.option("--no-like", is_flag=True, help="Without the source prompts.")
@click.option(
    "--controls/--no-controls",
    default=True,
    show_default=True,
    help="Candidates by gradient, distance, activation and chance too, with the same search.",
)
@options("--json", *MODEL)
def flips(data: str, out: str, max_neurons: int, no_like: bool, controls: bool, as_json: bool, **given: Any) -> None:
    """How often answers flip, inside what neurons were seen to be and beyond, at what price, against controls.

    --data is a JSON list of objects with prompt, to and like; the recipes found are kept as well.

    \b
    Example:
      icebear evaluate flips --data flips.json --out flips
    """
    import json
    from dataclasses import replace
    from pathlib import Path

    from icebear.app.cli.terminal import flips_summary, flips_table
    from icebear.concepts.models.provenance import provenance
    from icebear.steering.evaluations import flips as evaluation
    from icebear.steering.flipping.search import CHOOSERS

    pairs = evaluation.read(data)
    if no_like:
        pairs = [replace(pair, like=None) for pair in pairs]
    model = load(**given)
    choosers = list(CHOOSERS)[: None if controls else 1]
    with bar("flips", len(pairs)) as advance:
        lines = evaluation.run(model, pairs, out, max_neurons, choosers, on_progress=advance)
    summary = evaluation.summary(lines)
    found = {**provenance(model), "summary": summary, "pairs": lines}
    write_file(Path(out) / "flips.json", json.dumps(found, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
    if as_json:
        print_json(found)
        return
    stdout().print(flips_table(lines), flips_summary(summary))


@evaluate.command()
@click.option("--neurons", default=200, show_default=True, type=AT_LEAST_1, help="Of each third of the layers.")
@options("--out", "--seed", "--store", "--json", *MODEL)
def labels(neurons: int, out: str, seed: int, store_path: str, as_json: bool, **given: Any) -> None:
    """How many neurons have a clear meaning, and what each kind of label tells of them, beside chance.

    On documents that the labels were neither made nor chosen from. Each third of the layers has a folder in --out.

    \b
    Example:
      icebear evaluate labels --neurons 10 --out labels --store wiki.db
    """
    from icebear.actmax.evaluations import labels as evaluation
    from icebear.actmax.labels.auto import check, prepared
    from icebear.concepts.evaluation import runner
    from icebear.db.store import open_store

    need("evaluate")
    need("index")
    model = load(**given)
    told: dict[str, Any] = {}
    with open_store(store_path) as store:
        check(model, store)
        parts, columns = prepared(model, store, seed), evaluation.COLUMNS
        asked = {"neurons": neurons, "seed": seed, "index": store.made_with()["index"]}
        for third, drawn in evaluation.neurons(store, neurons, seed).items():
            facts = runner.facts(model, "labels", dict.fromkeys(evaluation.METHODS), part=third, **asked)
            with bar(third, len(drawn)) as advance:
                measure = partial(evaluation.measure, model, store, parts, seed=seed)
                lines = runner.run_together(f"{out}/{third}", facts, drawn, measure, neurons, advance)
            rows, notes = evaluation.pairs(lines), evaluation.notes(lines)
            told[third] = _tell_part(out, third, rows, columns, facts, notes, as_json)
    if as_json:
        print_json({**runner.facts(model, "labels", dict.fromkeys(evaluation.METHODS), **asked), "thirds": told})


@evaluate.command()
@click.option("--concepts", default="all", show_default=True, help="music, sport, animals, medicine, ...; commas.")
@options("--out", "--seed", "--corpus", "--json", *MODEL)
def steering(concepts: str, out: str, seed: int, corpus: str | None, as_json: bool, **given: Any) -> None:
    """Concepts of few neurons against a vector in the residual stream, a plain prompt and chance, at equal price.

    How well each detects a concept in texts of other words, and what each writes when it may cost 0.02, 0.1, 0.25 and
    0.5 nats. Tables and a figure of the whole frontier; about an hour for twelve concepts.

    \b
    Example:
      icebear evaluate steering --concepts music --out steering
    """
    from icebear.concepts.concept.topics import CONCEPTS, topics
    from icebear.concepts.corpus import read_corpus
    from icebear.concepts.evaluation import runner
    from icebear.steering.evaluations import concepts as evaluation

    need("evaluate")
    need("circuits")
    model = load(**given)
    corpus = corpus or CORPORA["next-word"]
    names = list(CONCEPTS) if concepts == "all" else [name.strip() for name in concepts.split(",")]
    rows = [(sentence.title, sentence.text) for sentence in read_corpus(corpus).sentences()]
    found = topics(rows, names, seed)
    facts = runner.facts(
        model, "steering", {}, corpus=corpus, concepts=names, seed=seed, prices=list(evaluation.PRICES)
    )
    with bar("concepts", len(found.concepts)) as advance:
        ground = evaluation.Ground.of(model, found)
        measure = partial(evaluation.sample, ground, seed=seed)
        lines = runner.run(f"{out}/samples", facts, found.concepts, measure, advance)
    told: dict[str, Any] = {}
    for name, (columns, samples) in evaluation.parts(lines).items():
        of = {**facts, "methods": {method: method for method in samples[0]["methods"]}}
        notes = evaluation.notes(lines) if name == "detection" else []
        runner.prepare(f"{out}/{name}", of)
        told[name] = _tell_part(out, name, samples, columns, of, notes, as_json)
    evaluation.frontier(Path(out) / "frontier.png", lines)
    if as_json:
        print_json({**facts, "tables": told})
    else:
        click.echo(f"Wrote {out}/frontier.png", err=True)


def _able(model: Model, prompt: Any, methods: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Methods that can run on the model, and why others cannot."""
    from icebear.concepts.methods.registry import why_not
    from icebear.concepts.models.plan import plan

    asked = plan(model, [prompt])
    reasons = {name: why_not(model, asked, method) for name, method in methods.items()}
    unable = {name: why for name, why in reasons.items() if why}
    return {name: method for name, method in methods.items() if name not in unable}, unable


def _run(
    model: Model,
    kind: str,
    able: dict[str, Any],
    unable: dict[str, str],
    items: Sequence[Any],
    measure: Callable[[Sequence[Any]], list[dict[str, Any]]],
    together: int,
    columns: Mapping[str, str],
    out: str,
    as_json: bool,
    notes: Callable[[list], list[str]] = lambda lines: [],
    counted: Callable[[list], list[dict[str, Any]]] = lambda lines: lines,
    **settings: Any,
) -> None:
    from icebear.concepts.evaluation import runner

    facts = runner.facts(model, kind, {**able, **dict.fromkeys(unable)}, **settings)
    with bar(kind, len(items)) as advance:
        lines = counted(runner.run_together(out, facts, items, measure, together, advance))
    counting = [line for line in lines if line.get("counts", True)]
    _tell(out, counting, columns, facts, unable, notes(lines), as_json)


def _tell(
    out: str,
    lines: Sequence[dict[str, Any]],
    columns: Mapping[str, str],
    facts: dict[str, Any],
    unable: dict[str, str],
    notes: Sequence[str],
    as_json: bool,
) -> None:
    """The report into its folder, and its table on stdout."""
    from icebear.app.cli.terminal import evaluation_table
    from icebear.concepts.evaluation import report

    found = report.write(out, lines, columns, facts, unable, notes)
    if as_json:
        print_json({"settings": facts, "unable": unable, "table": report.rows(found)})
        return
    console = stdout()
    console.print(evaluation_table(report.told(found, columns), columns))
    for line in report.legend(lines, columns, notes, unable):
        console.print(line, style="dim", markup=False)
    click.echo(f"Wrote {out}/index.html", err=True)


def _tell_part(
    out: str,
    name: str,
    lines: Sequence[dict[str, Any]],
    columns: Mapping[str, str],
    facts: dict[str, Any],
    notes: Sequence[str],
    as_json: bool,
) -> dict[str, Any]:
    """A report of several: into its own folder, on stdout, and for JSON."""
    from icebear.app.cli.terminal import evaluation_table
    from icebear.concepts.evaluation import report

    found = report.write(f"{out}/{name}", lines, columns, facts, {}, notes)
    if not as_json:
        stdout().print(evaluation_table(report.told(found, columns), columns, name))
        stdout().print("\n".join(notes), style="dim", markup=False)
        click.echo(f"Wrote {out}/{name}/index.html", err=True)
    return {"notes": notes, "table": report.rows(found)}
