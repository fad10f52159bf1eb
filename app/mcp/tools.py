"""The tools. Each causal answer has its control; a long answer has a handle, by which `more` and `save` work."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Annotated, Any, Literal

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from icebear.actmax.describe import describe
from icebear.actmax.labels.significance import label_title
from icebear.actmax.searching import headings, search
from icebear.actmax.shipped.index_choice import store_name
from icebear.actmax.writes import PAGE_SENTENCES
from icebear.app.mcp.plan import Plan, approval_request, propose
from icebear.app.refusals import with_arguments
from icebear.app.session import Session
from icebear.concepts.answers.counterfactuals import Suggestion, suggest_counterfactuals
from icebear.concepts.answers.source_records import SHOWN_SOURCES
from icebear.concepts.answers.source_sentences import finding
from icebear.concepts.answers.sources import sources
from icebear.concepts.answers.what_if import WhatIf, exchange_words, exchange_words_if_short
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.drawing import summary
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS, objective_text, token_removal_control
from icebear.concepts.passes.run import Checked
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.stages.stage_sentences import stage_lines
from icebear.concepts.stages.stages import stage_sites, stages_of
from icebear.concepts.vocabulary.projection import both_projections
from icebear.db.search import absent_line, absent_words
from icebear.db.store import Store
from icebear.edits import parse_edits
from icebear.errors import InputError, known_error, need
from icebear.explanation.explanation import (
    ExplainedNode,
    Explanation,
    ablation_sizes,
    explain_relevance,
    silencing_control,
    with_changes,
)
from icebear.explanation.sentences import (
    answer_sentence,
    chosen_sentence,
    comparison_hint,
    comparison_sentence,
    lines,
    message_sentence,
)
from icebear.models.text.chat import Chat, other_prompt
from icebear.records import RandomControl
from icebear.steering.comparison import compare
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import find_concept
from icebear.steering.concept.texts import FEWEST_TEXTS
from icebear.steering.flipping.flip import flip
from icebear.steering.outcome import CONCEPT_TOKENS, OUTCOME_STEPS, outcome_of, steer_concept
from icebear.steering.random_edits import random_edit_control

Prompt = Annotated[str, Field(min_length=1, max_length=20_000, description="The text that the model reads.")]
Counterfactual = Annotated[str, Field(max_length=20_000, description="A prompt to compare with, of as many tokens.")]
Word = Annotated[str | None, Field(max_length=200, description="One token, as it is in a text: ' Arctic'.")]
IsChat = Annotated[bool, Field(description="The prompt is a user's message; the model's template is added.")]
Count = Annotated[int, Field(ge=1, le=50, description="How many rows.")]
Length = Annotated[int, Field(ge=1, le=200, description="How many tokens to generate.")]
Name = Annotated[str, Field(max_length=200)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=200, description="With role and content.")]
Texts = Annotated[list[str], Field(min_length=FEWEST_TEXTS, max_length=500)]
Answer = dict[str, Any]
SIMILAR = "Found by similarity, which is no cause; steer measures what a neuron does."
TOP_ROWS = 8
"""Rows of a list in an answer; its handle has all."""
RANKED_ROWS = 200
"""Rows behind the handle of a ranking."""


def rounded(value: Any) -> Any:
    """Round each number to five digits."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.5g}"))


def tool(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method a tool: calls run one at a time and stop when the client cancels; numbers are rounded; an error of
    icebear reaches the agent as one sentence."""

    def work(self: Tools, *args: Any, **options: Any) -> Any:
        try:
            # stdout is the wire
            with redirect_stdout(sys.stderr), Checked(anyio.from_thread.check_cancelled):
                return rounded(run(self, *args, **options))
        except Exception as error:
            known = known_error(error)
            if known is None:
                raise
            raise ToolError(with_arguments(str(known), run.__annotations__)) from None

    @functools.wraps(run)
    async def call(self: Tools, *args: Any, **options: Any) -> Any:
        return await self.session.run_exclusively(functools.partial(work, self, *args, **options))

    return call


def reporting(ctx: Context, before: int = 0, steps: int | None = None) -> Callable[..., None]:
    """Return a function that reports progress to the client, and ends the work if the client has cancelled it.

    before, steps: for work of several parts, the number of steps before this part, and of all parts.
    """
    most = before

    def report(done: int, total: int | None = None) -> None:
        nonlocal most
        anyio.from_thread.check_cancelled()
        if before + done > most:
            most = before + done
            anyio.from_thread.run(ctx.report_progress, most, steps or total)

    return report


class Tools:
    """Each public method is a tool: its signature is the schema, its docstring the description."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @tool
    def predict(
        self, ctx: Context, prompt: Prompt, chat: IsChat = False, k: Count = 5, max_new_tokens: Length = 20
    ) -> Answer:
        """Return the most probable next tokens, and the greedy continuation."""
        model, text_or_chat = self.session.model, _as_prompt(prompt, chat)
        report = reporting(ctx, steps=max_new_tokens)
        text = model.generate(text_or_chat, max_new_tokens, on_token=report) if model.task.generates else ""
        return {"next": list(map(vars, model.predict(text_or_chat, k))), "continuation": text}

    @tool
    def suggest_counterfactuals(self, prompt: Prompt) -> Answer:
        """Suggest prompts with the same number of tokens and another answer. Choose one whose difference is what you
        ask about, and give it as `counterfactual`."""
        return {"counterfactuals": list(map(_suggestion, suggest_counterfactuals(self.session.model, prompt)))}

    @tool
    def what_if(self, prompt: Prompt, chat: IsChat = False, k: Count = 6) -> Answer:
        """Exchange each content word of a prompt for similar ones, and measure what this changes: `change` is that of
        the log-odds of the likeliest content word (`explained`), in nats. The first rows are of the words on which the
        answer hangs most; `others` is the range of changes by all words but the first three, their control."""
        exchanged = exchange_words(self.session.model, _as_prompt(prompt, chat))
        document = exchanged.to_dict()
        rows = document["exchanges"]
        return {
            "summary": str(exchanged),
            "explained": {"text": exchanged.explained.text, "after": exchanged.explained_after},
            "others": exchanged.control and list(exchanged.control),
            "exchanges": rows[:k],
            "handle": self.session.keep("what_if", exchanged, {"exchanges": rows}, json=lambda: json.dumps(document)),
        }

    @tool
    def sources(
        self,
        ctx: Context,
        messages: Messages,
        units: Literal["sentence", "message", "document"] = "sentence",
        max_new_tokens: Length = 60,
    ) -> Answer:
        """Measure which sentences of a conversation an answer hangs on: each source is removed, and `change` is that of
        the log-probability of a sentence of the answer (nats; a loss is negative). `random` has the changes without
        random other sources, their control. If the last message is the assistant's, it is explained as it stands;
        else the model answers first."""
        model, chat = self.session.model, Chat(messages)
        if chat.image is not None:  # its path would be a file of this machine
            raise InputError("Messages with an image are read by the command line and in Python; leave the image out.")
        written = chat.messages[-1]["role"] == "assistant"
        answer = chat if written else model.answer(chat, max_new_tokens)
        measured = sources(model, answer, units, on_progress=reporting(ctx))
        document = measured.to_dict()
        rows = document["answer_sentences"]
        findings = [finding(sentence, units) for sentence in measured.sentences]
        shown = [
            {**row, "finding": text, "sources": row["sources"][:SHOWN_SOURCES]}
            for row, text in zip(rows, findings, strict=True)
        ]
        return {
            "answer": "".join(sentence.text for sentence in measured.sentences),
            "read_by": measured.reader or model.name,
            "sentences": shown[:TOP_ROWS],
            "dropped": document["dropped"],
            "handle": self.session.keep(
                "sources", measured, {"sentences": rows}, json=measured.to_json, html=measured.to_html
            ),
        }

    @tool
    def explain(
        self,
        ctx: Context,
        prompt: Prompt,
        counterfactual: Counterfactual | None = None,
        target: Word = None,
        contrast: Word = None,
        chat: IsChat = False,
        no_counterfactual: Annotated[bool, Field(description="Choose none for a prompt alone.")] = False,
    ) -> Answer:
        """Show how the answer is computed, compared with another prompt: which token is read, which attention heads
        move its information to the last token, and which neurons write the answer. Every share is an intervention, with
        random parts in brackets as its control. For a prompt alone a counterfactual is chosen, if there is a good one;
        without one, the answer has the tokens and the neurons with effects. Of a message alone (chat=true, or a
        question that a chat model does not continue), the first content word of the model's answer is explained. Ask
        this first."""
        model, text_or_chat = self.session.model, _as_prompt(prompt, chat)
        is_alone = not (counterfactual or target or contrast or no_counterfactual) and bool(stage_sites(model))
        exchanged = exchange_words_if_short(model, text_or_chat) if is_alone else None
        chosen = next(iter(exchanged.comparisons), None) if exchanged else None
        ways = "counterfactual for your own, no_counterfactual for none"
        about = _about_answer(exchanged, None if chat else prompt) if exchanged and exchanged.chat else []
        about += [chosen_sentence(chosen.text, ways)] if chosen else [str(exchanged)] if exchanged else []
        pair = {
            "prompt": text_or_chat,
            "target": target,
            "contrast": contrast,
            **(exchanged.arguments(chosen) if exchanged else {}),
        }
        other = pair.pop("counterfactual", None) or other_prompt(text_or_chat, counterfactual)
        if not other:
            explanation = replace(explain_relevance(model, attribute(model, **pair), cards=0), what_if=exchanged)
            command, hint = comparison_hint(explanation), comparison_sentence(explanation.relevance)
            listed = [line.text for part in lines(explanation) for line in part if line.text not in ("", command)]
            control = {"random_effect": explanation.random_effect} if explanation.random_effects else {}
            summary = [*about, *listed, *filter(None, [hint])]
            return {"summary": summary, **control, **self._explained("tokens", explanation, None)}
        relevance = attribute(model, **pair, counterfactual=other, sites=stage_sites(model))
        stages = stages_of(model, relevance, reporting(ctx))
        document = stages.to_dict()
        lists = {"heads": document["heads"], "neurons": document["neurons"], "swaps": document["swaps"]}
        numbers = ("kind", "reached", "alone", "without", "random", "most_changed", "moved", "everything", "difference")
        return {
            "summary": about + [line.text for line in stage_lines(stages) if line.text],
            **({"chosen_counterfactual": {"text": chosen.text, **chosen.to_dict()}} if chosen else {}),
            **{name: document[name] for name in numbers},
            "whole": document["whole"],
            "handle": self.session.keep("stages", stages, lists, json=stages.to_json, html=stages.to_html),
        }

    @tool
    def attribute(
        self,
        prompt: Prompt,
        target: Word = None,
        contrast: Word = None,
        counterfactual: Counterfactual | None = None,
        chat: IsChat = False,
        k: Count = TOP_ROWS,
    ) -> Answer:
        """Show how much each token of the prompt contributes to the next token (AttnLRP relevance), or with
        `counterfactual` to the difference to another prompt. The control removes the two tokens that contribute most,
        and others."""
        model, text_or_chat = self.session.model, _as_prompt(prompt, chat)
        other = other_prompt(text_or_chat, counterfactual)
        relevance = attribute(model, text_or_chat, target, contrast, counterfactual=other, sites=())
        control = token_removal_control(model, relevance)
        explanation = Explanation.of(model, relevance, removal_control=control)
        rows = sorted(explanation.tokens, key=lambda row: -abs(row["relevance"]))[:k]
        return self._explained("tokens", explanation, control, tokens=rows)

    @tool
    def rank(
        self,
        ctx: Context,
        prompt: Prompt,
        target: Word = None,
        contrast: Word = None,
        counterfactual: Counterfactual | None = None,
        site: Annotated[
            Literal["ffn", "attn", "head"], Field(description="FFN neurons, attention neurons, or heads.")
        ] = "ffn",
        chat: IsChat = False,
        k: Count = TOP_ROWS,
    ) -> Answer:
        """List the neurons that contribute most to the next token, or with `counterfactual` to the difference to
        another prompt, with the likely next words that each raises and lowers here. Relevance alone proves nothing: the
        control switches these neurons off, and others, most of which are less active; with `counterfactual`, the nodes
        that change most are a harder control."""
        model, text_or_chat = self.session.model, _as_prompt(prompt, chat)
        sites = ("attn",) if site == "head" else (site,)
        other = other_prompt(text_or_chat, counterfactual)
        relevance = attribute(model, text_or_chat, target, contrast, counterfactual=other, sites=sites)
        sizes = ablation_sizes(site, k) if counterfactual else []
        with self.session.store() as store:
            ranking = Ranking(RANKED_ROWS, site)
            explanation = Explanation.of(model, relevance, ranking, store=store, sizes=sizes)
        nodes = explanation.nodes[:k]
        control = silencing_control(model, relevance, [node.ranked for node in nodes], on_progress=reporting(ctx))
        ablations = list(map(vars, explanation.ablations))
        explanation = replace(explanation, silencing_control=control)
        rows = {"neurons": list(map(_node, nodes)), "ablation": ablations}
        return self._explained("neurons", explanation, control, **rows)

    @tool
    def compare_models(self, prompt: Prompt, target: Word = None, contrast: Word = None, k: Count = TOP_ROWS) -> Answer:
        """Show which changed weights caused the difference between this model's answer and its base model's. The
        control restores the first changes to the base model's weights, and as many with the largest norms."""
        model, base = self.session.model, self.session.base_model
        diff = attribute(model, prompt, target, contrast, base_model=base, sites=())
        explanation = with_changes(Explanation.of(model, diff, Ranking(RANKED_ROWS)))
        changes = explanation.changes.to_dict() if explanation.changes else {}
        lists = {"changes": changes.get("changes", [])}
        files = {"json": explanation.to_json, "html": explanation.to_html}
        return {
            "explained": objective_text(diff.target, diff.contrast),
            "conservation": diff.conservation_text(),
            "changes": lists["changes"][:k],
            "control": changes.get("restorations", []),
            "handle": self.session.keep("changes", explanation, lists, **files),
        }

    def _explained(self, kind: str, explanation: Explanation, control: RandomControl | None, **rows: Any) -> Answer:
        """Return the answer about an explanation; the file behind its handle has the controls too."""
        relevance = explanation.relevance
        lists = {"neurons": list(map(_node, explanation.nodes)), "tokens": explanation.tokens}
        lists = {name: every for name, every in lists.items() if every}
        files = {"json": explanation.to_json, "html": explanation.to_html}
        return {
            "explained": objective_text(relevance.target, relevance.contrast),
            "compared": relevance.comparison_text(),
            "conservation": relevance.conservation_text(),
            **rows,
            "control": control and control.to_dict(),
            "handle": self.session.keep(kind, explanation, lists, **files),
        }

    @tool
    def circuit(
        self,
        ctx: Context,
        prompt: Prompt,
        counterfactual: Counterfactual,
        target: Word = None,
        contrast: Word = None,
        chat: IsChat = False,
        nodes: Annotated[int | None, Field(ge=1, le=200)] = None,
    ) -> Answer:
        """Find the circuit behind the difference between two prompts: groups of heads and neurons, the share of the
        difference that is lost without each, and edges (by the handle). Without a number of nodes, they are those of
        the stages."""
        need("circuits")
        model, text_or_chat = self.session.model, _as_prompt(prompt, chat)
        other = other_prompt(text_or_chat, counterfactual)
        graph = circuit(
            model, text_or_chat, target, contrast, counterfactual=other, nodes=nodes, on_progress=reporting(ctx)
        )
        groups = []
        for group in graph.groups[:TOP_ROWS]:
            row = graph.without(group)
            about = {"group": group.name, "nodes": [node.id for node in group.nodes[:TOP_ROWS]], "score": group.score}
            groups.append({**about, **vars(row), "predictions": [vars(token) for token in row.predictions]})
        lists = {
            "nodes": graph.nodes_frame().to_dict("records"),
            "edges": graph.edge_rows(),
            "groups": [{"name": group.name, "nodes": [node.id for node in group.nodes]} for group in graph.groups],
        }
        return {
            "summary": summary(graph),
            "groups": groups,
            "ablation": vars(graph.ablation()),
            "faithfulness": vars(graph.edge_check or graph.faithfulness()),
            "handle": self.session.keep("circuit", graph, lists, json=graph.to_json, html=graph.to_html),
        }

    @tool
    def neuron(
        self, neuron: Annotated[str, Field(max_length=100, description="L29.ffn.860 or L23.head.4")], k: Count = 4
    ) -> Answer:
        """Return the tokens that a neuron promotes and suppresses, and, with an index, its maximally activating texts
        in both directions, the words that it raises and lowers after them (measured), and its label with a score; of
        an attention head, the texts in which it writes most, where it attends to, and its kind beside a null. A
        meaning is a correlation: `steer` measures what it causes."""
        model = self.session.model
        wanted = model.check(neuron)
        with self.session.store() as store:
            if store:
                with self.session.beside(store) as other:
                    card = describe(store, wanted, model, 20, effect_sentences=PAGE_SENTENCES, beside=other)
            else:
                card = None
        words = card.projection if card else next(iter(both_projections(model, wanted, 20)), None)
        about = words and (words.about if words.has_words else words.no_words)
        words = words if words and words.has_words else None
        tokens = {side: list(map(vars, getattr(words, side, ()))) for side in ("promoted", "suppressed")}
        rows: list[Any] = card.to_frame().drop(columns="neuron").to_dict("records") if card else []
        files = {"html": card.to_html} if card else {}
        labels = (
            [f"{sign}: {label_title(card.meanings.get(sign))}" for sign in card.examples]
            if card
            else ["no index, no texts"]
        )
        writes = {sign: effects.to_dict() for sign, effects in card.writes.items()} if card else {}
        measured = [{"polarity": sign, **text} for sign, effects in writes.items() for text in effects.pop("places")]
        return {
            "neuron": str(wanted),
            **({"index": card.index_name} if card else {}),
            "meaning": labels,
            "writes": writes,
            "promotes": [token["text"] for token in tokens["promoted"][:TOP_ROWS]],
            "suppresses": [token["text"] for token in tokens["suppressed"][:TOP_ROWS]],
            "examples": strongest(rows, k),
            "note": f"promoted at + and suppressed at -; {about}" if words else about or "writes nothing",
            **({"attention": card.attention.lines} if card and card.attention else {}),
            "handle": self.session.keep("neuron", card, {"examples": rows, "places": measured, **tokens}, **files),
        }

    @tool
    def search(self, text: Annotated[str, Field(min_length=1, max_length=500)], k: Count = TOP_ROWS) -> Answer:
        """Find neurons that are related to some words: by their maximally activating texts and labels; then, apart from
        these, by the tokens they promote. Needs an index."""
        with self.session.store("Searching neurons by words") as store:
            assert store is not None
            rows, notes = searched(store, text, k)
            with self.session.beside(store) as other:
                if other:
                    more, notes_beside = searched(other, text, k)
                    rows, notes = rows + more, [*notes, *notes_beside]
        return {"neurons": rows, "note": " ".join([*notes, SIMILAR])}

    @tool
    def steer(
        self,
        ctx: Context,
        prompt: Prompt,
        edits: Annotated[
            list[Annotated[str, Field(max_length=2000)]],
            Field(
                min_length=1,
                max_length=100,
                description='L29.ffn.860*0, L29.ffn.490=-6.2, L24.ffn.559+5@last, L23.head.4<-"Other prompt"@last',
            ),
        ],
        target: Word = None,
        contrast: Word = None,
        chat: IsChat = False,
        max_new_tokens: Length = 20,
    ) -> Answer:
        """Generate with edited neurons (set, scaled, added to, swapped) and without. The control makes the same edits
        to random neurons of the same layers; the side effects are changes in unrelated texts."""
        model, text_or_chat = self.session.model, _as_prompt(prompt, chat)
        parsed = parse_edits(edits, model.name)
        steps = RANDOM_DRAWS + 2 * max_new_tokens
        with self.session.store() as store:
            statistic = store.neurons.statistic if store else None
            raw = [edit.in_raw_units(statistic) for edit in parsed]
        control = random_edit_control(model, text_or_chat, raw, target, contrast, on_progress=reporting(ctx, 0, steps))
        comparison = compare(model, text_or_chat, raw, max_new_tokens, on_token=reporting(ctx, RANDOM_DRAWS, steps))
        kl, count = self.session.held_out.off_target_kl(raw), len(self.session.held_out.contexts)
        sides = {"plain": comparison.plain, "steered": comparison.steered}
        return {
            **{name: side.text for name, side in sides.items()},
            **{f"next_{name}": list(map(vars, side.next[:5])) for name, side in sides.items()},
            "control": control.to_dict(),
            "side_effects": f"{kl:.3f} nats of KL divergence at the next token of {count} held-out contexts (0: none)",
            "off_target_kl": kl,
        }

    @tool
    def flip(
        self,
        ctx: Context,
        prompt: Prompt,
        to: Annotated[str, Field(min_length=1, max_length=200, description="The new next token: ' desert'.")],
        source: Annotated[
            str | None, Field(max_length=20_000, description="A prompt that it follows, whose activations are used.")
        ] = None,
        chat: IsChat = False,
        max_neurons: Annotated[int, Field(ge=1, le=50)] = 10,
    ) -> Answer:
        """Find a small set of edits that makes another token (or phrase) come next, and measure its side effects. With
        `source`, heads are swapped if that suffices; else FFN neurons are set. The control makes the same edits to
        random other heads or neurons, twenty times. It takes up to a minute."""
        model, text_or_chat, steps = self.session.model, _as_prompt(prompt, chat), max_neurons + OUTCOME_STEPS
        report = reporting(ctx, 0, steps)
        with self.session.store() as store:
            recipe = flip(
                model,
                text_or_chat,
                to,
                other_prompt(text_or_chat, source),
                max_neurons,
                store=store,
                on_progress=report,
            )
        report = reporting(ctx, max_neurons, steps)
        outcome = outcome_of(model, recipe, self.session.held_out, on_progress=report)
        recipe = recipe.noting(**outcome.provenance())
        lines = [str(edit) for edit in recipe]
        return {
            "edits": lines,
            "plain": outcome.plain,
            "steered": outcome.edited,
            **outcome.to_dict(),
            "handle": self.session.keep(
                "recipe", recipe, {"edits": [{"edit": line} for line in lines]}, json=recipe.to_json
            ),
        }

    @tool
    def concept_find(
        self, ctx: Context, name: Name, with_texts: Texts, without_texts: Texts, max_neurons: Count = 20
    ) -> Answer:
        """Find the fewest neurons that separate texts with a concept from otherwise similar texts without it. The score
        is measured on a held-out quarter of the texts; chance is 0.5."""
        model = self.session.model
        concept = find_concept(
            model, with_texts, without_texts, name, max_neurons=max_neurons, on_progress=reporting(ctx)
        )
        rows = [part.to_dict() for part in concept.parts]
        score = {part: concept.provenance[part] for part in ("auroc", "error")}
        handle = self.session.keep("concept", concept, {"neurons": rows}, json=concept.to_json)
        return {"name": name, "neurons": rows[:TOP_ROWS], "about": concept.about, **score, "handle": handle}

    @tool
    def concept_measure(self, concept: Name, text: Prompt) -> Answer:
        """Measure how much of a concept is in a text, token by token. A concept is a handle, the name of one in the
        index, or a .json file in the server's folder."""
        measured = self._concept(concept).measure(self.session.model, text)
        rows: list[dict[str, Any]] = [
            {"position": position, "token": token, "value": value, "counted": position not in measured.excluded}
            for position, (token, value) in enumerate(zip(measured.tokens, measured.values, strict=True))
        ]
        return {"value": measured.value, "tokens": sorted(rows, key=lambda row: -abs(row["value"]))[:TOP_ROWS]}

    @tool
    def concept_steer(
        self,
        ctx: Context,
        concept: Name,
        prompt: Prompt,
        kl: Annotated[float, Field(gt=0, le=5, description="Side effects allowed: nats in held-out contexts.")] = 0.25,
        suppress: Annotated[bool, Field(description="Less of the concept instead.")] = False,
        chat: IsChat = False,
        max_new_tokens: Length = CONCEPT_TOKENS,
    ) -> Answer:
        """Generate with more (or less) of a concept, within a limit of side effects. The control makes the same edits
        to random neurons, twenty times, and measures those texts by the concept. It takes half a minute."""
        model, text_or_chat, used = self.session.model, _as_prompt(prompt, chat), self._concept(concept)
        contexts = self.session.held_out
        recipe = used.recipe(model, kl=kl, suppress=suppress, held_out=contexts)
        options: dict[str, Any] = {"contexts": contexts, "on_progress": reporting(ctx)}
        comparison, outcome = steer_concept(model, used, text_or_chat, recipe, max_new_tokens, **options)
        return {
            "edits": [str(edit) for edit in recipe],
            "plain": comparison.plain.text,
            "steered": comparison.steered.text,
            **outcome.to_dict(),
        }

    def _concept(self, name: str) -> Concept:
        if name in self.session.results:
            value = self.session.result(name).value
            if not isinstance(value, Concept):
                raise InputError(f"{name} is not a concept; give the handle of one.")
            return value
        if name.endswith(".json"):
            return Concept.load(self.session.path_of(name))
        with self.session.store("A concept by its name") as store:
            assert store is not None
            return Concept.from_dict(store.concepts.get(name))

    @tool
    def plan(
        self,
        question: Annotated[str, Field(min_length=1, max_length=2000, description="What the calls shall answer.")],
        calls: Annotated[
            list[dict[str, Any]],
            Field(min_length=1, max_length=200, description="Each with tool, arguments, and why it is made."),
        ],
    ) -> Answer:
        """Write down the calls that you mean to make, for the user to approve. Nothing else runs before that."""
        path = self.session.plan
        assert path is not None
        approved = propose(path, Plan.of(question, calls, tool_names(self.session)))
        return {
            "file": path.name,
            "approved": approved,
            "next": "make the calls" if approved else approval_request(path),
        }

    @tool
    def more(
        self,
        handle: Name,
        part: Annotated[str, Field(max_length=40, description="tokens, neurons, nodes, edges, groups, examples, ...")],
        start: Annotated[int, Field(ge=0)] = 0,
        count: Annotated[int, Field(ge=1, le=200)] = 50,
    ) -> Answer:
        """Return more rows of an earlier answer, by its handle."""
        lists = self.session.result(handle).lists
        if part not in lists:
            raise InputError(f"{handle} has no part {part!r}; use {', '.join(lists)}.")
        rows = lists[part]
        page = {"start": start, "total": len(rows), "rows": rows[start : start + count]}
        return {"handle": handle, "part": part, **page, "parts": list(lists)}

    @tool
    def save(
        self,
        handle: Name,
        file: Annotated[str, Field(max_length=200, description="A new file in the server's folder: why.html")],
    ) -> Answer:
        """Save an earlier answer, by its handle, as .json, or as a page .html if it has one, in the folder that the
        user named."""
        result, suffix = self.session.result(handle), self.session.path_of(file).suffix.removeprefix(".")
        if suffix not in result.files:
            ways = " or ".join(f".{way}" for way in result.files) or "nothing"
            raise InputError(f"{handle} cannot be saved as .{suffix}; it can be saved as {ways}.")
        path = self.session.write(file, result.files[suffix]())
        return {"file": path.name, "bytes": path.stat().st_size}


def tool_names(session: Session) -> list[str]:
    """Return the tools of a server; `plan` only where calls need one."""
    return [name for name in vars(Tools) if not name.startswith("_") and (name != "plan" or session.plan is not None)]


def strongest(rows: list[Answer], k: int) -> list[Answer]:
    """Return the first k examples of each index at each polarity."""
    sides = dict.fromkeys((row.get("index"), row["polarity"]) for row in rows)
    return [row for side in sides for row in [r for r in rows if (r.get("index"), r["polarity"]) == side][:k]]


def searched(store: Store, text: str, k: int) -> tuple[list[Answer], list[str]]:
    """Return the hits of a search, each with the name of its index, and what to know of them."""
    name, hits = store_name(store), search(store, text, k, download=False)
    rows = [
        {**vars(hit), "neuron": str(hit.neuron), "label": store.labels.shown(hit.neuron, hit.polarity), "index": name}
        for hit in hits
    ]
    kinds = [f"by {by}: {about}." for by, about in headings(store, download=False).items()]
    about = f"Index: {name}. It holds {store.documents_phrase}."
    return rows, list(filter(None, [absent_line(absent_words(store, text)), about, *kinds]))


def _node(node: ExplainedNode) -> Answer:
    """Return a node with the words that it raises and lowers here, without its vocabulary projection."""
    return {name: value for name, value in node.to_dict().items() if name != "promotes"}


def _about_answer(exchanged: WhatIf, text: str | None) -> list[str]:
    """Say which word of a chat's answer is explained. text: the message that was given as a text."""
    question = [message_sentence(text, "chat=true")] if text else []
    return [*question, answer_sentence(exchanged, "target for another first token")]


def _suggestion(row: Suggestion) -> Answer:
    return {name: getattr(row, name) for name in ("text", "word", "instead_of", "answer", "probability")}


def _as_prompt(prompt: str, chat: bool) -> str | Chat:
    return Chat([{"role": "user", "content": prompt}]) if chat else prompt
