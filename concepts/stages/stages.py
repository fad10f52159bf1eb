"""`stages`: how an answer is computed, shown by interventions on two prompts.

Its eight steps are those of `icebear.concepts.stages.stage_measurements`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from markupsafe import Markup

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.passes.prompt import Counterfactual
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.patched_pair import PART_SITES, PatchedPair
from icebear.concepts.stages.stage_measurements import PROGRESS_STEPS, StageMeasurement
from icebear.concepts.stages.stage_parts import WholeKinds
from icebear.concepts.stages.stage_picture import stage_fragment
from icebear.concepts.stages.stage_records import StageRecord, StageShares
from icebear.concepts.stages.stage_sentences import question, stage_lines
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Objective, Token, joint_objective, likelier_form, prompt_request
from icebear.models.text.prompts import Prompt, PromptLike, Prompts
from icebear.paths import write_file
from icebear.records import Neuron
from icebear.render import page
from icebear.steps import OnProgress, unwatched
from icebear.values import shown, typed


@dataclass(frozen=True, eq=False, repr=False)
class Stages(StageRecord):
    """How an answer is computed, with its model."""

    model: Model | None = None
    pairs: tuple[Objective, ...] = ()
    """The prompt with each counterfactual."""

    def __str__(self) -> str:
        return "\n".join(map(str, stage_lines(self)))

    def _repr_html_(self) -> str:
        return stage_fragment(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a self-contained HTML page. path: also write it to this file."""
        html = page(question(self), Markup("<h1>{}</h1>{}").format(question(self), stage_fragment(self)))
        if path is not None:
            write_file(path, html)
        return html

    def swapped(self, nodes: Sequence[Neuron | str]) -> tuple[float | None, float | None]:
        """Return the probabilities of target and contrast when heads and neurons, all together, take their
        counterfactual values at the last token, and everything else is recomputed.

        Parameters
        ----------
        nodes : list of Neuron or str
            A head is named by the site ``head``, such as ``L23.head.4``.

        Returns
        -------
        tuple
            None for a model without probabilities, and for an answer without contrast.

        Raises
        ------
        InputError
            If these stages have no model, or the model has no such node.
        """
        if self.model is None or not self.pairs:
            raise InputError("These stages have no model that could be run again.")
        measured = StageMeasurement(self.model, [PatchedPair(self.model, pair) for pair in self.pairs])
        return measured.swapped([[self.model.check(node) for node in nodes]])[0]

    def transfer(
        self,
        prompt: PromptLike,
        counterfactual: PromptLike,
        target: Token | None = None,
        contrast: Token | None = None,
    ) -> StageShares:
        """Measure the same heads and neurons at the last token of another pair of prompts.

        The same kinds of whole parts are recomputed, at the pair's own tokens.

        Parameters
        ----------
        prompt, counterfactual : prompt
            They end with the tokens that target and contrast share, such as " New" for " New York" and " New Orleans".
        target, contrast : str or int, optional
            Default: the same.

        Returns
        -------
        StageShares

        Raises
        ------
        InputError
            If these prompts have no stages of the same kind.
        """
        if self.model is None or not self.heads:
            raise InputError("These stages have no heads that could be measured on other prompts.")
        if any(pair.batch.images is not None for pair in self.pairs):
            raise InputError("Stages of prompts with an image are not measured on other prompts.")
        target = self.target.id if target is None else target
        contrast = self.contrast.id if contrast is None and self.contrast else contrast
        answers = (likelier_form(self.model, prompt, answer) for answer in (target, contrast))
        measured = StageMeasurement(self.model, [patched_prompts(self.model, prompt, counterfactual, *answers)])
        if measured.kind != self.kind:
            raise InputError(
                "The two prompts must have equally many tokens and end with the same one; choose another pair."
            )
        whole_kinds = frozenset((part.kind, part.where) for part in self.whole)
        alone, without, random = measured.set_shares(
            [node.neuron for node in (*self.heads, *self.neurons)], whole_kinds
        )
        at = measured.pairs[0].position
        heads, neurons = (tuple(replace(node, position=at) for node in row) for row in (self.heads, self.neurons))
        return StageShares(
            kind=self.kind,
            heads=heads,
            neurons=neurons,
            whole=measured.named(whole_kinds),
            alone=alone,
            without=without,
            random=random,
            **measured.answers(),
        )


def patched_prompts(
    model: Model, prompt: PromptLike, counterfactual: PromptLike, target: Token | None, contrast: Token | None
) -> PatchedPair:
    """Return two prompts whose parts can be exchanged. Raises `InputError`."""
    row = prompt_request(model, Prompt.of(prompt), target, contrast)
    return PatchedPair(model, joint_objective(model, [row, replace(row, prompt=Prompt.of(counterfactual))]))


def set_shares(
    model: Model, pair: PatchedPair, nodes: Sequence[Neuron], whole_kinds: WholeKinds, seed: int = 0
) -> tuple[float, float, float]:
    """Return what heads and neurons of the last token give alone with whole parts of earlier tokens, what is lost
    without them, and what random sets give. Raises `InputError` for other pairs of prompts."""
    for node in nodes:
        model.check(node)
    measured = StageMeasurement(model, [pair])
    if measured.kind != "alone":
        raise InputError("Stages compare prompts of equally many tokens that end with the same one; choose another.")
    return measured.set_shares(nodes, whole_kinds, seed)


def swap_changes(model: Model, pair: PatchedPair, head: Neuron, seed: int = 0) -> tuple[float, list[float]]:
    """Return by how much the target's probability falls when only a head has its counterfactual value, and when only a
    random other head has. Raises `InputError` for a model without such a head or without probabilities."""
    model.check(head)
    measured = StageMeasurement(model, [pair])
    if head not in measured.nodes.heads():
        raise InputError(f"{head} is no head of the tokens that are compared; a head is named like L23.head.4.")
    (swap,), random = measured.measure_swaps([head], [0.0]), measured.measure_random_swaps([head], seed)
    before, after, *others = swap.before[0], swap.after[0], *(row.after[0] for row in random)
    if before is None or after is None:
        raise InputError(f"{model.name} gives no probabilities.")
    return before - after, [before - other for other in others if other is not None]


@typed
def stages(
    model: Model,
    prompt: PromptLike,
    target: Token | None = None,
    contrast: Token | None = None,
    counterfactual: PromptLike | Prompts | None = None,
    on_progress: OnProgress = unwatched,
) -> Stages:
    """Show how an answer is computed: which token is read, which heads move it, and which neurons write the answer.

    A set of heads and neurons of the last token is searched that gives 80 % of the difference between the two prompts,
    while everything else, from the first difference on, holds its value in the counterfactual prompt. What else must
    be recomputed is named (`Stages.whole`): the FFN at the tokens that differ, and sometimes attention there.

    Parameters
    ----------
    model, prompt, target, contrast
        See `attribute`.
    counterfactual : prompt or list of prompts
        The prompt to compare with; of several, the shares are means.
    on_progress : callable
        Called with the number of finished steps, and of all steps.

    Returns
    -------
    Stages

    Raises
    ------
    InputError
        Without a counterfactual, or if the model has no attention heads.

    References
    ----------
    Causal traces: Meng et al. 2022, arXiv 2202.05262. Path patching: Wang et al. 2022, arXiv 2211.00593. Sets of nodes
    that suffice alone: Marks et al. 2024, arXiv 2403.19647; Mueller et al. 2025 (MIB), arXiv 2504.13151.
    """
    if counterfactual is None and isinstance(target, str) and len(model.continuation(target, prompt)) > 1:
        raise InputError(
            f"stages reads {shown(target)} as target, the token that is explained, and has no counterfactual; pass the "
            "prompt to compare with as counterfactual=..."
        )
    relevance = attribute(model, prompt, target, contrast, counterfactual=counterfactual, sites=stage_sites(model))
    return stages_of(model, relevance, on_progress)


def stage_sites(model: Model) -> tuple[str, ...]:
    """Return the sites whose relevance stages need; none for a model without stages."""
    sites = [site for names in PART_SITES.values() for site in names if site != "router"]
    has_stages = model.has_family and "attn" in model.sites and not model.has_scan
    return tuple(site for site in sites if site in model.sites) if has_stages else ()


def why_no_stages(model: Model, relevance: Relevance) -> str:
    """Return why an answer has no stages; empty if it has."""
    counterfactual, sites = relevance.counterfactual, stage_sites(model)
    if not sites:
        return f"{model.name} has no attention heads, or scans beside them, so its answers have no stages."
    if counterfactual is None or counterfactual.model is not None:
        return "Stages compare two prompts; give a counterfactual (`suggest_counterfactuals` finds one)."
    if relevance.prompt.is_image:
        return "Stages explain a text; of an image, `explain` names the heads that move patches to [CLS]."
    if not _compares_texts(model, counterfactual):
        return "Stages compare two texts about the same image, in which no token attends to a later word."
    if relevance.target is None or len(relevance.prompt.target_positions) != 1:
        return "Stages explain one token of a text; give a target of one token."
    if not {*sites} <= {*relevance.sites} or len(relevance.neurons.recorded) != len(relevance.tokens):
        return f"Stages need the relevance of the sites {', '.join(sites)} at all positions; record them."
    return ""


def _compares_texts(model: Model, counterfactual: Counterfactual) -> bool:
    """Return whether prompts differ only in text, and answers do not change what earlier tokens attend to."""
    batches = [pair.batch for pair in counterfactual.pairs if pair.batch.images is not None]
    pairs = [batch.images for batch in batches if batch.images is not None]
    same = all(torch.equal(image.values, other.values) for image, other in pairs)
    return not pairs or (same and not (model.vision and model.vision.marks_answers))


def stages_of(model: Model, relevance: Relevance, on_progress: OnProgress = unwatched) -> Stages:
    """Return the stages of an answer whose relevance is known. Raises `InputError`, see `stages`."""
    model.check_made(relevance.made_with["model"], "The relevance")
    if reason := why_no_stages(model, relevance):
        raise InputError(reason)
    assert relevance.counterfactual is not None
    measured = StageMeasurement(model, [PatchedPair(model, pair) for pair in relevance.counterfactual.pairs])
    on_progress(1, PROGRESS_STEPS)
    record = measured.stages(relevance, on_progress)
    return Stages(**vars(record), model=model, pairs=relevance.counterfactual.pairs)
