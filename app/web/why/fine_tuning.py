"""What fine-tuning changed: the answers of the model and its base model, and the weights that make the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas
import streamlit as st

from icebear.app.web.shared import jobs, markdown, served, tables
from icebear.app.web.shared.background import Job
from icebear.app.web.why.request import Request
from icebear.explanation.explanation import Explanation, explain
from icebear.records import TokenScore
from icebear.steering.flipping.phrases import likelier_form


@st.cache_resource(max_entries=16, show_spinner=False)
def started(
    name: str, base: str, prompt: str, counterfactual: str | None, target: str | None, contrast: str | None
) -> Job:
    """Return the job that explains the difference between two models, for all visitors."""
    model, read = jobs.model(), markdown.read_prompt(prompt)
    options: dict[str, Any] = {"base_model": jobs.base_model()}
    for key, text in (("target", target), ("contrast", contrast)):
        options[key] = likelier_form(model, read, text) if text else None
    options["counterfactual"] = markdown.read_prompt(counterfactual) if counterfactual else None
    return Job("Comparing with the base model", lambda job: explain(model, read, **options))


def show(request: Request) -> None:
    names, answers = (served.model_name(), served.base_name() or ""), (request.target, request.contrast)
    explanation: Explanation = jobs.awaited(
        started, *names, request.prompt, request.counterfactual, *answers, stops=True
    )
    relevance, changes = explanation.relevance, explanation.changes
    compared = relevance.counterfactual
    assert compared is not None
    predictions = relevance.predictions, compared.predictions
    for place, title, name, likely in zip(st.columns(2), ("Model", "Base model"), names, predictions, strict=True):
        place.markdown(f"**{title}** {markdown.plain(name)}: {markdown.plain(_listed(likely))}")
    st.caption(markdown.plain(f"{relevance.conservation_text()}."))
    if changes is None:
        st.info("Both models give the same number here, so there is no difference to explain.")
        return
    st.markdown("#### Weights that caused the difference")
    causes = [{"changed row": str(one), "caused": one.caused} for one in changes.changes]
    tables.data_table(pandas.DataFrame(causes), column_config={"caused": tables.SIGNED})
    st.markdown("#### What restoring them undoes")
    st.caption(
        "The share of the difference that is undone when the first changed rows take the base model's weights, beside "
        "as many rows with the largest norms of their change."
    )
    restored = [
        {"rows": row.changes, "undone": row.undone, "largest norms": row.largest} for row in changes.restorations
    ]
    tables.data_table(pandas.DataFrame(restored), shares=["undone", "largest norms"])


def _listed(answers: Sequence[TokenScore]) -> str:
    return ", ".join(f"{token.text!r} {token.number}" for token in answers[:3])
