"""Relevance of prompts without a counterfactual: one forward and one backward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from icebear.concepts.attribution.request import AttributionRequest
from icebear.concepts.methods.method import OnePass
from icebear.concepts.passes.inputs import Inputs, Stream
from icebear.concepts.passes.neuron_recorders import AllNeurons, LargestNeurons, Values
from icebear.concepts.passes.prompt import Prediction, PromptTokens, excluded_positions, prompt_relevance, recorded_at
from icebear.concepts.passes.proved import rules_at_modules
from icebear.concepts.passes.run import Conservation, Logits, Recorder, forward, forward_backward, new_accounting
from icebear.concepts.passes.storage import SiteValues
from icebear.concepts.results.ranking import NeuronScores
from icebear.concepts.results.result import Relevance, Run
from icebear.errors import InputError, NumericalError
from icebear.lrp.positions import Sinks
from icebear.models.objective import Objective

OF_IMAGES = ("attnlrp", "cp-lrp", "pa-lrp", "vit", "gxi")
"""The methods that explain images."""


def single_relevances(request: AttributionRequest, objective: Objective) -> list[Relevance]:
    """Explain a batch of prompts without a counterfactual."""
    method = request.method
    if not isinstance(method, OnePass):
        results = _method_scores(request.recording_all(), objective.resolved(request.model))
        return [request.reduced(relevance) for relevance in results] if request.sites else results
    model, batch, sites = request.model, objective.batch, request.sites
    recorded = [recorded_at(objective, row, request.record) for row in range(len(batch.ids))]
    columns = None
    if request.record != "all":
        columns = [[batch.columns(row)[position] for position in positions] for row, positions in enumerate(recorded)]
    target, inputs, stream, sinks = Logits(objective), Inputs(), Stream(model, batch), Sinks(model, batch)
    neurons = AllNeurons(model, batch, sites, columns)
    accounting = new_accounting(model, len(batch.ids))
    excluded = partial(excluded_positions, model, objective, stream)
    largest = None if request.k is None else LargestNeurons(model, batch, sites, request.k, excluded)
    optional: list[Recorder] = [*([sinks] if method.positions else []), *([largest] if largest else [])]
    usual = method.rules if request.strict and not method.positions else None
    with model.lock:  # to take it, all modules are looked at: once for both
        at_modules = rules_at_modules(model, target, usual, request.checkpoint)
        numbers, rules = forward_backward(
            model,
            target,
            [inputs, stream, neurons, *optional],
            method.rules,
            accounting=accounting,
            strict=request.strict,
            checkpoint=request.checkpoint,
            at_modules=at_modules,
        )
    values = inputs.relevance()
    if not all(torch.isfinite(value).all() for value in values):  # the error of this pass says where
        stream = Stream(model, batch, gradients=True)
        forward_backward(model, Logits(objective), [Inputs(), stream], method.rules, strict=request.strict)
        raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
    results = []
    for row in range(len(batch.ids)):
        sums = {name: entry[row].item() for name, entry in accounting.items()}
        tokens, image = prompt_relevance(model, objective, row, batch.of_row(row, values))
        positions = sinks.relevance[row][:, batch.columns(row)].cpu() if method.positions else None  # (K, T)
        if positions is not None:
            sums["positions"] += positions.sum().item()
        largest_neurons = largest.row(row) if largest else None
        results.append(
            Relevance(
                tokens=tokens,
                prompt=PromptTokens.of(model, objective, row, stream.sinks(row)),
                prediction=Prediction.of(model, objective, row, target.targets[row], target.logits),
                method=method,
                neurons=NeuronScores(*neurons.row(row), recorded[row], model.heads, largest=largest_neurons),
                sums=Conservation(target=numbers[row].item(), tokens=tokens.sum().item(), **sums),
                made_with=model.made_with,
                positions=positions,
                image=image,
                missing_rules=tuple(dict.fromkeys(rules.missing)) if rules else (),
                at_modules=at_modules is not None,
                run=Run(model, replace(objective.rows([row]), targets=(target.targets[row],))),
            )
        )
    return results


def _method_scores(request: AttributionRequest, objective: Objective) -> list[Relevance]:
    """Explain prompts by a method that computes the scores itself."""
    model, method = request.model, request.method
    results: list[Relevance] = []
    assert method is not None
    if not model.task.reads_text:
        raise InputError(f"{method} scores the tokens of a text; explain an image by {', '.join(OF_IMAGES)}.")
    scores = method.scores(model, objective)
    target, stream = Logits(objective), Stream(model, objective.batch)
    numbers = forward(model, target, [stream])
    for row, tokens in enumerate(scores):
        prompt_objective = objective.rows([row])
        recorded = recorded_at(objective, row, request.record) if request.sites else ()
        values, columns = Values(model, prompt_objective.batch, request.sites), list(recorded)
        if request.sites:
            forward(model, Logits(prompt_objective), [values])
        relevance = {site: method.neuron_scores(model, prompt_objective, site)[:, columns] for site in request.sites}
        activation = {site: x[:, columns].cpu() for site, x in values.activations(0).items()}
        results.append(
            Relevance(
                tokens=tokens.float().cpu(),
                prompt=PromptTokens.of(model, objective, row, stream.sinks(row)),
                prediction=Prediction.of(model, objective, row, target.targets[row], target.logits),
                method=method,
                neurons=NeuronScores(SiteValues(relevance), SiteValues(activation), recorded, model.heads),
                sums=Conservation(numbers[row].item(), tokens.sum().item()),
                made_with=model.made_with,
                run=Run(model, prompt_objective),
            )
        )
    return results
