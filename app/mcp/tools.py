"""The tools. What is said to matter has beside it what as many others do; what is long has a handle."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from icebear.actmax.card import describe
from icebear.actmax.explanation import CheckedCircuit, Explanation, silencing
from icebear.actmax.labels.score_text import title
from icebear.app.mcp.session import Session
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.counterfactuals import suggest_counterfactuals
from icebear.concepts.attribution.random_controls import DRAWS, RandomControl, explained, removing
from icebear.concepts.attribution.ranking import Ranking
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.drawing import summary
from icebear.concepts.models.chat import Chat, other_prompt
from icebear.concepts.vocabulary import project
from icebear.edits import Edit, parse_edits
from icebear.errors import IcebearError, InputError, out_of_memory
from icebear.extras import need
from icebear.records import Neuron
from icebear.steering.apply import steer
from icebear.steering.comparison import Comparison, compare
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import FEWEST, find_concept
from icebear.steering.flipping.search import flip
from icebear.steering.random_edits import random_edit_control, random_edits
from icebear.steering.side_effects import side_effects

if TYPE_CHECKING:
    from icebear.concepts.models.prompts import PromptLike

Prompt = Annotated[str, Field(min_length=1, max_length=20_000, description="The text that the model reads.")]
Other = Annotated[
    str | None,
    Field(max_length=20_000, description="Another prompt to compare with, of as many tokens."),
]
Word = Annotated[str | None, Field(max_length=200, description="One token, as it is in a text: ' Arctic'.")]
IsChat = Annotated[bool, Field(description="The prompt is a user's message; the model's own template is put around.")]
Count = Annotated[int, Field(ge=1, le=50, description="How many rows.")]
Length = Annotated[int, Field(ge=1, le=200, description="How many tokens are written.")]
Name = Annotated[str, Field(max_length=200)]
Texts = Annotated[list[str], Field(min_length=FEWEST, max_length=500)]
Report = Callable[..., None]
Answer = dict[str, Any]
ROWS = 8
"""Of a list, in an answer; a handle has all."""
RANKED = 200
"""Rows behind the handle of a ranking."""
LISTS = (100, 1000)
"""How many (neuron, token) pairs are exchanged as well."""


def short(value: Any) -> Any:
    """The same with five digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [short(part) for part in value]
    return {key: short(part) for key, part in value.items()} if isinstance(value, dict) else value


def tool(run: Callable[..., Any]) -> Callable[..., Any]:
    """One call at a time, its numbers short; what icebear raises on purpose reaches the agent as its sentence."""

    def work(self: Tools, *args: Any, **given: Any) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # stdout is the wire
                return short(run(self, *args, **given))
        except Exception as error:
            known = error if isinstance(error, IcebearError) else out_of_memory(error)
            if known is None:
                raise
            raise ToolError(_for_agents(str(known), run.__annotations__)) from None

    @functools.wraps(run)
    async def called(self: Tools, *args: Any, **given: Any) -> Any:
        async with self.session.lock:  # who waits takes no thread
            return await anyio.to_thread.run_sync(functools.partial(work, self, *args, **given))

    return called


def _for_agents(sentence: str, arguments: Collection[str]) -> str:
    """What speaks of an option of the command line speaks of the tool's argument, if that has it; a whole command for
    the user stays."""

    def name(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0]
        argument = found[1].replace("-", "_")
        return argument if argument in arguments else f"the command line's {found[0]}"

    return re.sub(r"icebear [a-z]+ [^;,]*|--([a-z][a-z-]*)", name, sentence)


def reporting(ctx: Context, before: int = 0, whole: int | None = None) -> Report:
    """Tells the client how far it is, and ends the work where the client has cancelled it. before, whole: of work that
    has several parts the steps before this one, and of all."""
    most = before

    def report(done: int, total: int | None = None) -> None:
        nonlocal most
        anyio.from_thread.check_cancelled()
        if before + done > most:
            most = before + done
            anyio.from_thread.run(ctx.report_progress, most, whole or total)

    return report


class Tools:
    """Each method is a tool: its signature is the schema, its docstring the description."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def all(self) -> tuple[Callable[..., Any], ...]:
        """In the order of an investigation."""
        causes = (
            self.predict,
            self.suggest_counterfactuals,
            self.attribute,
            self.rank,
            self.circuit,
            self.neuron,
            self.search,
        )
        changes = (self.steer, self.flip, self.concept_find, self.concept_measure, self.concept_turn)
        return (*causes, *changes, self.more, self.save)

    # --- what happens, and why --------------------------------------------------------------------------

    @tool
    def predict(
        self, ctx: Context, prompt: Prompt, chat: IsChat = False, k: Count = 5, max_new_tokens: Length = 20
    ) -> Answer:
        """What the model says next: the most probable tokens, and its greedy continuation."""
        model, asked = self.session.model, _asked(prompt, chat)
        report = reporting(ctx, whole=max_new_tokens)
        text = model.generate(asked, max_new_tokens, on_token=report) if model.task.generates else ""
        return {"next": list(map(vars, model.predict(asked, k))), "continuation": text}

    @tool
    def attribute(
        self,
        ctx: Context,
        prompt: Prompt,
        target: Word = None,
        contrast: Word = None,
        counterfactual: Other = None,
        chat: IsChat = False,
        k: Count = ROWS,
    ) -> Answer:
        """Which tokens of the prompt carried the next token (AttnLRP relevance), or with `counterfactual` what made the
        difference to another prompt. The control removes the two tokens that speak most for it, and others."""
        model, asked = self.session.model, _asked(prompt, chat)
        relevance = attribute(
            model, asked, target, contrast, counterfactual=other_prompt(asked, counterfactual), sites=()
        )
        explanation = Explanation.of(model, relevance, removed=removing(model, asked, relevance))
        assert explanation.removed is not None
        rows = list(map(vars, explanation.tokens))
        return {
            "explained": explained(relevance.target, relevance.contrast),
            "compared": relevance.meaning(),
            "account": relevance.account(),
            "tokens": _largest(rows, k, "relevance"),
            "control": explanation.removed.to_dict(),
            "handle": self._kept("tokens", explanation),
        }

    @tool
    def rank(
        self,
        ctx: Context,
        prompt: Prompt,
        target: Word = None,
        contrast: Word = None,
        counterfactual: Other = None,
        site: Annotated[Literal["ffn", "attn", "head"], Field(description="FFN neurons, attention's, heads.")] = "ffn",
        chat: IsChat = False,
        k: Count = ROWS,
    ) -> Answer:
        """Which neurons carried the next token, or with `counterfactual` made the difference to another prompt, with
        the words that they promote. Relevance alone proves nothing: the control switches these neurons off, and
        others, most of
        which are less active; with `counterfactual` those that change most are a harder one."""
        model, asked = self.session.model, _asked(prompt, chat)
        sites = ("attn",) if site == "head" else (site,)
        other = other_prompt(asked, counterfactual)
        relevance = attribute(model, asked, target, contrast, counterfactual=other, sites=sites)
        sizes = sorted({k, *LISTS}) if counterfactual and site != "attn" else []
        with self.session.store() as store:
            explanation = Explanation.of(model, relevance, Ranking(RANKED, site), store=store, sizes=sizes)
        rows = [node.ranked for node in explanation.nodes[:k]]
        control = silencing(model, asked, relevance, rows, on_progress=reporting(ctx))
        explanation = replace(explanation, silenced=control)
        return {
            "explained": explained(relevance.target, relevance.contrast),
            "compared": relevance.meaning(),
            "neurons": [node.to_dict() for node in explanation.nodes[:k]],
            "control": control.to_dict(),
            "ablation": list(map(vars, explanation.ablations)),
            "handle": self._kept("neurons", explanation),
        }

    def _kept(self, kind: str, explanation: Explanation) -> str:
        """The handle of an explanation; what is saved has its controls in it, too."""
        parts = {
            "neurons": [node.to_dict() for node in explanation.nodes],
            "tokens": list(map(vars, explanation.tokens)),
        }
        files = {"json": explanation.to_json, "html": explanation.to_html}
        return self.session.keep(kind, explanation, {name: rows for name, rows in parts.items() if rows}, **files)

    @tool
    def suggest_counterfactuals(self, ctx: Context, prompt: Prompt) -> Answer:
        """Prompts of as many tokens with another answer, to compare with: choose one whose difference is what you ask
        about, and give it as `counterfactual`."""
        suggestions = suggest_counterfactuals(self.session.model, prompt)
        names = ("text", "word", "instead_of", "answer", "probability")
        return {"counterfactuals": [{name: getattr(row, name) for name in names} for row in suggestions]}

    @tool
    def circuit(
        self,
        ctx: Context,
        prompt: Prompt,
        counterfactual: Annotated[str, Field(max_length=20_000, description="Another prompt of as many tokens.")],
        target: Word = None,
        contrast: Word = None,
        chat: IsChat = False,
        nodes: Annotated[int, Field(ge=1, le=200)] = 40,
    ) -> Answer:
        """How the neurons make the difference between two prompts together: groups of them, what is left of the
        difference without each, and edges (by the handle). Half a minute."""
        need("circuits")
        model, asked = self.session.model, _asked(prompt, chat)
        other = other_prompt(asked, counterfactual)
        graph = circuit(model, asked, target, contrast, counterfactual=other, nodes=nodes, on_progress=reporting(ctx))
        checked = CheckedCircuit.of(graph, ROWS)
        groups = checked.to_dict()["without"]
        for row, group in zip(groups, graph.groups, strict=False):
            row["nodes"], row["score"] = [node.id for node in group.nodes[:ROWS]], group.score
        parts = {
            "nodes": _rows(graph.nodes_frame()),
            "edges": _rows(graph.to_frame()),
            "groups": [{"name": one.name, "nodes": [node.id for node in one.nodes]} for one in graph.groups],
        }
        handle = self.session.keep("circuit", graph, parts, json=graph.to_json, html=graph.to_html)
        carried, faithful = vars(graph.ablation()), vars(checked.faithfulness)
        return {
            "summary": summary(graph),
            "groups": groups,
            "ablation": carried,
            "faithfulness": faithful,
            "handle": handle,
        }

    # --- what neurons mean ------------------------------------------------------------------------------

    @tool
    def neuron(
        self, ctx: Context, neuron: Annotated[str, Field(max_length=40, description="L29.ffn.860")], k: Count = 4
    ) -> Answer:
        """What a neuron means: the words it promotes and suppresses, and, with an index, the texts that drive it most
        in both directions and its label with a score. A meaning is a correlation: `steer` says what it causes."""
        model, wanted = self.session.model, Neuron.parse(neuron)
        model.check(wanted)
        with self.session.store() as store:
            card = describe(store, wanted, model, 20) if store else None
        words = card.projection if card else project(model, wanted, 20)
        promoted, suppressed = ([], []) if words is None else (words.promoted, words.suppressed)
        rows = [
            {"polarity": polarity, "activation": one.value, "token": one.token_text, "text": one.sentence.text}
            for polarity, examples in (card.examples if card else {}).items()
            for one in examples
        ]
        tokens = {"promoted": list(map(vars, promoted)), "suppressed": list(map(vars, suppressed))}
        files = {"html": card.to_html} if card else {}
        handle = self.session.keep("neuron", card, {"examples": rows, **tokens}, **files)
        return {
            "neuron": str(wanted),
            "meaning": [f"{sign}: {title(card.meanings.get(sign))}" for sign in "+-"]
            if card
            else ["no index, no texts"],
            "promotes": [token.text for token in promoted[:ROWS]],
            "suppresses": [token.text for token in suppressed[:ROWS]],
            "examples": [row for sign in "+-" for row in [one for one in rows if one["polarity"] == sign][:k]],
            "note": "promoted at + and suppressed at -, on the direct path to the vocabulary",
            "handle": handle,
        }

    @tool
    def search(
        self, ctx: Context, text: Annotated[str, Field(min_length=1, max_length=500)], k: Count = ROWS
    ) -> Answer:
        """Which neurons have to do with some words: by what they write, by the texts that drive them, by labels. Needs
        an index."""
        with self.session.store("Searching neurons by words") as store:
            assert store is not None
            hits = store.search(text, k)
            rows = [
                {**vars(hit), "neuron": str(hit.neuron), "label": store.labels.name(hit.neuron, hit.polarity)}
                for hit in hits
            ]
        return {"neurons": rows, "note": "Found by likeness, which is no cause; steer says what a neuron does."}

    # --- what they do -----------------------------------------------------------------------------------

    @tool
    def steer(
        self,
        ctx: Context,
        prompt: Prompt,
        edits: Annotated[
            list[Annotated[str, Field(max_length=200)]],
            Field(min_length=1, max_length=100, description="L29.ffn.860*0, L29.ffn.490=-6.2, L24.ffn.559+5@last"),
        ],
        target: Word = None,
        contrast: Word = None,
        chat: IsChat = False,
        max_new_tokens: Length = 20,
    ) -> Answer:
        """What the model says with edited neurons (set, scaled, added to), beside what it says without. The control
        makes the same edits of other neurons of the same layers; the price is what changes in unrelated texts."""
        model, asked, wanted = self.session.model, _asked(prompt, chat), parse_edits(edits)
        whole = DRAWS + 2 * max_new_tokens
        with self.session.store() as store:
            statistic = store.neurons.statistic if store else None
            raw = [edit.in_raw_units(statistic) for edit in wanted]
        control = random_edit_control(model, asked, raw, target, contrast, on_progress=reporting(ctx, 0, whole))
        found = compare(model, asked, raw, max_new_tokens, on_token=reporting(ctx, DRAWS, whole))
        kl = self.session.neutral.divergence(raw)
        return {**_sides(found), "control": control.to_dict(), **self._price(kl)}

    def _price(self, kl: float) -> Answer:
        """What else changes."""
        places = len(self.session.neutral.places)
        price = f"{kl:.3f} nats of KL divergence at the next token of {places} held-out contexts (0: nothing changes)"
        return {"price": price, "kl": kl}

    @tool
    def flip(
        self,
        ctx: Context,
        prompt: Prompt,
        to: Annotated[str, Field(min_length=1, max_length=200, description="What shall come next: ' desert'.")],
        source: Annotated[
            str | None, Field(max_length=20_000, description="A prompt that it follows, whose activations are taken.")
        ] = None,
        chat: IsChat = False,
        max_neurons: Annotated[int, Field(ge=1, le=50)] = 10,
    ) -> Answer:
        """The few neurons, set to other values, that make another token (or phrase) come next, and what that costs.
        The control sets other neurons of the same layers to the same values. Up to a minute."""
        model, asked, whole = self.session.model, _asked(prompt, chat), max_neurons + DRAWS
        report = reporting(ctx, 0, whole)
        with self.session.store() as store:
            recipe = flip(model, asked, to, other_prompt(asked, source), max_neurons, store=store, on_progress=report)
        cost = side_effects(model, recipe)
        edits = list(recipe)
        wanted, now = model.continuation(to, asked)[0], model.predict(asked, 1)[0].id
        rather = now if now != wanted else None  # of a phrase that begins as what comes now
        control = random_edit_control(
            model, asked, edits, wanted, rather, on_progress=reporting(ctx, max_neurons, whole)
        )
        found = compare(model, asked, recipe, 20, on_token=lambda done: anyio.from_thread.check_cancelled())
        told = [str(edit) for edit in edits]
        rows = {"edits": [{"edit": edit} for edit in told]}
        return {
            "edits": told,
            **_sides(found),
            "control": control.to_dict(),
            **self._price(cost.kl),
            "warnings": cost.warnings,
            "handle": self.session.keep("recipe", recipe, rows, json=recipe.to_json),
        }

    # --- concepts ---------------------------------------------------------------------------------------

    @tool
    def concept_find(
        self, ctx: Context, name: Name, with_texts: Texts, without_texts: Texts, most: Count = 20
    ) -> Answer:
        """The fewest neurons that tell texts with a concept from texts without it, otherwise alike. Its score is on a
        quarter of the texts, on which nothing was chosen; chance is 0.5."""
        model = self.session.model
        found = find_concept(model, with_texts, without_texts, name, most=most, on_progress=reporting(ctx))
        rows = [part.to_dict() for part in found.parts]
        handle = self.session.keep("concept", found, {"neurons": rows}, json=found.to_json)
        score = {part: found.provenance[part] for part in ("auroc", "error")}
        return {"name": name, "neurons": rows[:ROWS], "about": found.about, **score, "handle": handle}

    @tool
    def concept_measure(self, ctx: Context, concept: Name, text: Prompt) -> Answer:
        """How much of a concept is in a text, token by token. A concept is a handle, the name of one in the index, or a
        .json file in the server's folder."""
        measured = self._concept(concept).measure(self.session.model, text)
        rows = [
            {"position": place, "token": token, "value": value, "counted": place not in measured.apart}
            for place, (token, value) in enumerate(zip(measured.tokens, measured.values, strict=True))
        ]
        return {"value": measured.value, "tokens": _largest(rows, ROWS, "value")}

    @tool
    def concept_turn(
        self,
        ctx: Context,
        concept: Name,
        prompt: Prompt,
        kl: Annotated[float, Field(gt=0, le=5, description="Nats that it may cost at held-out contexts.")] = 0.25,
        suppress: Annotated[bool, Field(description="Less of the concept instead.")] = False,
        chat: IsChat = False,
        max_new_tokens: Length = 20,
    ) -> Answer:
        """What the model writes with more (or less) of a concept, at a price. The control makes the same edits of
        other neurons, twenty times, and measures those texts by the concept. Half a minute."""
        model, asked, found, report = self.session.model, _asked(prompt, chat), self._concept(concept), reporting(ctx)
        if not any(part.weight for part in found.parts):
            raise InputError(f"The concept {found.name!r} has no neurons to turn.")
        recipe = found.recipe(model, kl=kl, suppress=suppress, neutral=self.session.neutral)
        edits = list(recipe)
        others = random_edits(model, edits, DRAWS)

        def written(some: Sequence[Edit], number: int) -> str:
            report(number, len(others) + 2)
            with steer(model, some):
                return model.generate(asked, max_new_tokens, on_token=lambda _: anyio.from_thread.check_cancelled())

        texts = [written(some, number) for number, some in enumerate([[], edits, *others], 1)]
        plain, steered, *drawn = (found.measure(model, prompt + text).value for text in texts)
        what, instead = f"{found.name} turned", "the same edits of as many other neurons of the same layers"
        number = f"{found.name} in the text (standard deviations)"
        control = RandomControl(what, instead, number, plain, steered, tuple(drawn))
        cost = recipe.provenance["kl"]
        return {
            "plain": texts[0],
            "steered": texts[1],
            "edits": [str(edit) for edit in edits],
            "measured_plain": plain,
            "measured_steered": steered,
            "control": control.to_dict(),
            "as_asked": steered < plain if suppress else steered > plain,
            **self._price(cost),
        }

    def _concept(self, name: str) -> Concept:
        if name in self.session.results:
            value = self.session.kept(name).value
            if not isinstance(value, Concept):
                raise InputError(f"{name} is not a concept; give the handle of one.")
            return value
        if name.endswith(".json"):
            return Concept.load(self.session.place(name))
        with self.session.store("A concept by its name") as store:
            assert store is not None
            return Concept.from_dict(store.concepts.get(name))

    # --- more of it -------------------------------------------------------------------------------------

    @tool
    def more(
        self,
        ctx: Context,
        handle: Name,
        part: Annotated[str, Field(max_length=40, description="tokens, neurons, nodes, edges, groups, examples, ...")],
        start: Annotated[int, Field(ge=0)] = 0,
        count: Annotated[int, Field(ge=1, le=200)] = 50,
    ) -> Answer:
        """More rows of an earlier answer, by its handle."""
        kept = self.session.kept(handle)
        if part not in kept.parts:
            raise InputError(f"{handle} has no part {part!r}; it has: {', '.join(kept.parts)}.")
        rows = kept.parts[part]
        return {
            "handle": handle,
            "part": part,
            "start": start,
            "total": len(rows),
            "rows": rows[start : start + count],
            "parts": list(kept.parts),
        }

    @tool
    def save(
        self,
        ctx: Context,
        handle: Name,
        file: Annotated[str, Field(max_length=200, description="A new file in the server's folder: why.html")],
    ) -> Answer:
        """Write an earlier answer, by its handle, as .json, or as a page .html where it has one, into the folder that
        the user named."""
        kept, suffix = self.session.kept(handle), self.session.place(file).suffix.removeprefix(".")
        if suffix not in kept.files:
            raise InputError(f"{handle} is saved as {' or '.join(kept.files) or 'nothing'}, not as .{suffix}.")
        place = self.session.write(file, kept.files[suffix]())
        return {"file": place.name, "bytes": place.stat().st_size}


def _asked(prompt: str, chat: bool) -> PromptLike:
    return Chat([{"role": "user", "content": prompt}]) if chat else prompt


def _sides(comparison: Comparison) -> Answer:
    """Both texts, and the most probable first tokens of each."""
    sides = {"plain": comparison.plain, "steered": comparison.steered}
    texts = {name: side.text for name, side in sides.items()}
    return {**texts, **{f"next_{name}": list(map(vars, side.next[:5])) for name, side in sides.items()}}


def _rows(frame: Any) -> list[dict[str, Any]]:
    return frame.to_dict("records")


def _largest(rows: list[dict[str, Any]], k: int, name: str) -> list[dict[str, Any]]:
    """The k rows in which a number is largest by size."""
    return sorted(rows, key=lambda row: -abs(row[name]))[:k]
