"""The baselines' functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from icebear.concepts.baselines import alti, attention, gradients, methods, perturbation
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan

HOW: dict[type, Callable[[Model, Plan, Any], list[Tensor]]] = {
    methods.Random: gradients.random,
    methods.Gradient: gradients.gradient,
    methods.GradientTimesInput: gradients.gradient_times_input,
    methods.IntegratedGradients: gradients.integrated_gradients,
    methods.SmoothGrad: gradients.smoothgrad,
    methods.GradCAM: attention.gradcam,
    methods.AttentionRollout: attention.rollout,
    methods.GradientRollout: attention.gradient_rollout,
    methods.AtMan: perturbation.atman,
    methods.Occlusion: perturbation.occlusion,
    methods.AltiLogit: alti.alti_logit,
    methods.Alti: alti.alti,
    methods.Positions: gradients.positions,
    methods.TokensAndPositions: gradients.tokens_and_positions,
}


def token_scores(model: Model, plan: Plan, method: methods.Baseline) -> list[Tensor]:
    """(T,) for each prompt of a plan whose targets are known."""
    return HOW[type(method)](model, plan, method)
