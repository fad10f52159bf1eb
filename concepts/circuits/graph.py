"""`Graph`: a circuit, its measurements, groups and pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icebear.concepts.circuits import checks, drawing
from icebear.concepts.circuits.circuit_records import Edge, EdgeFaithfulness, Group, GroupAblation
from icebear.concepts.circuits.groups import grouped
from icebear.concepts.circuits.nodes import pair_of, patchable
from icebear.concepts.circuits.stages_set import whole_mask
from icebear.concepts.circuits.wiring import Wiring
from icebear.concepts.nodes.controls import Ablation, ablate
from icebear.edits import Edit
from icebear.errors import InputError, need
from icebear.recipe import Recipe
from icebear.render import page, render
from icebear.values import real, seed_of, shown

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class Graph(Wiring):
    """The circuit of an answer: its nodes and edges, what interventions say about them, and its groups and pictures."""

    def ablation(self, seed: int = 0) -> Ablation:
        """Measure sufficiency and necessity of the nodes, with random controls.

        Whole parts are recomputed when sufficiency is measured.
        """
        generator, chosen = torch.Generator().manual_seed(seed_of(seed)), self.mask()
        recomputed = whole_mask(self.whole_parts, chosen.shape, self.model.ffn_width) if self.whole_parts else None
        return ablate(patchable(self.model, self.relevance, self.heads), chosen, generator, recomputed)

    def faithfulness(self, edges: int | None = None, seed: int = 0) -> EdgeFaithfulness:
        """Measure the share of the difference that edges alone recover.

        Node by node, upwards, each node is computed while its sources along these edges have the values computed so
        far, and all else keeps its counterfactual value; the answer is last.

        Parameters
        ----------
        edges
            The number of edges from tokens and nodes, the most influential first; None for all edges of the graph.
        seed
            The seed of the random edges.
        """
        return checks.faithfulness(self, [edges], seed)[0]

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        complete = replace(self, saved_groups=self.groups)  # they need the model
        super(Graph, complete).save(path, overwrite)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Similar nodes (`icebear.concepts.circuits.groups`), the groups with the largest score first."""
        return grouped(self) if self.saved_groups is None else self.saved_groups

    def group(self, group: Group | str) -> Group:
        """Return a group, or the group of a name. Raises `InputError` if there is none."""
        for known in self.groups if isinstance(group, str) else ():
            if known.name == group:
                return known
        if not isinstance(group, Group):
            names = ", ".join(repr(known.name) for known in self.groups[:5])
            raise InputError(f"{shown(group)} is not a group of this graph; take one of its groups, such as {names}.")
        return group

    def without(self, group: Group | str) -> GroupAblation:
        """Give the nodes of a group their counterfactual values while all other neurons are recomputed.

        Raises `InputError`."""
        mask = self.mask(self.group(group).nodes)
        nodes = patchable(self.model, self.relevance, self.heads)
        measured = ablate(nodes, mask, torch.Generator().manual_seed(0))
        return GroupAblation(measured.necessity, measured.random_necessity, tuple(nodes.predictions(~mask)))

    def recipe(self, group: Group | str, off: bool = False) -> Recipe:
        """Return edits that give the nodes of a group their counterfactual values, at their tokens; off: zero. Heads
        take their outputs after the counterfactual prompt. Raises `InputError`."""
        edits, group = [], self.group(group)
        batch = pair_of(self.relevance).batch
        text, ids = "".join(token.counterfactual for token in self.tokens), tuple(batch.row_ids(1))
        source = text if self.model.tokenizer and tuple(self.model.ids(text)) == ids else ids
        for node in group.nodes:
            where = f"position:{node.position - batch.span_of(self.model.stack_of(node.neuron.layer)).start}"
            if node.neuron.site == "head" and not off:
                if self.model.task.stacks == 2:
                    raise InputError(
                        f"{node.neuron} has no single value, and the heads of an encoder-decoder are not swapped; pass "
                        "off=True for zero."
                    )
                edits.append(Edit.from_prompt(node.neuron, source, where))
                continue
            edits.append(Edit(node.neuron, "scale" if off else "set", 0.0 if off else node.counterfactual, where=where))
        prompt = "".join(self.relevance.prompt.strings)
        return Recipe.for_model(
            self.model, f"without the group: {group.name}", edits, found_by="circuit", prompt=prompt
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as a dictionary for JSON."""
        groups = {node.id: group.name for group in self.groups for node in group.nodes}
        return {
            "icebear_circuit": 1,  # the version of the format
            "prompt": [token.text for token in self.tokens],
            "counterfactual": [token.counterfactual for token in self.tokens],
            "target": self.answer.text,
            "contrast": self.answer.contrast,
            "difference": self.difference[-1].item(),
            "whole_parts": [vars(part) for part in self.whole_parts],
            "edge_check": self.edge_check and vars(self.edge_check),
            "nodes": [
                {"id": node.id, **vars(node), "neuron": str(node.neuron), "group": groups[node.id]}
                for node in self.nodes
            ],
            "groups": [
                {**vars(group), "score": group.score, "nodes": [node.id for node in group.nodes]}
                for group in self.groups
            ],
            "edges": self.edge_rows(),
            **self.made_with,
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    def to_svg(self) -> str:
        """Return the picture: tokens from left to right, layers from bottom to top."""
        return drawing.on_paper(self)

    def to_png(self, scale: float = 2) -> bytes:
        """Return the picture as a PNG file; scale: pixels per unit of the SVG."""
        need("circuits")
        import vl_convert

        real(scale, "The scale of a picture", 0.1, 20)
        return vl_convert.svg_to_png(self.to_svg(), scale=scale)

    def to_html(self) -> str:
        """Return a self-contained page with an interactive picture."""
        picture = drawing.fragment(self)
        body = render("icebear.concepts/circuit_page.html", fragment=picture, made_with=self.made_with)
        return page("icebear circuit", body, "body{max-width:80rem}")

    def _repr_html_(self) -> str:
        return drawing.fragment(self)

    def to_frame(self) -> pandas.DataFrame:
        """Return the edges as a pandas table, a row each; `to_arrow` returns an Arrow table."""
        import pandas

        return pandas.DataFrame(self.edge_rows(), columns=[field.name for field in fields(Edge)])

    def edge_rows(self) -> list[dict[str, Any]]:
        """Return the edges as dictionaries for JSON."""
        return [{**vars(edge), "source": edge.source.id, "target": edge.target.id} for edge in self.edges]

    def nodes_frame(self) -> pandas.DataFrame:
        """Return the nodes as a pandas table, a row each."""
        import pandas

        tokens = [self.tokens[node.position].text for node in self.nodes]
        words = {side: [", ".join(getattr(node, side)) for node in self.nodes] for side in ("raises", "lowers")}
        return pandas.DataFrame(self.to_dict()["nodes"]).assign(token=tokens, **words)
