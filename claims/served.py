"""Claims of a server: how probable an answer is by OpenAI's API, which knows nothing of neurons."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from statistics import fmean
from typing import Any

from icebear.claims.checked_claim import CheckedClaim, checked_number, not_run
from icebear.claims.claim import Claim
from icebear.claims.kind import Measured
from icebear.claims.kinds.predictions import AnswerClaim, control_contexts
from icebear.errors import IcebearError, InputError, ModelError
from icebear.models.model import Model
from icebear.openai_server import check_address, server_answer, server_model
from icebear.values import shown

ONLY_TEXTS = "A server gives probabilities only: it measures claims of the kind answer, about a prompt that is a text."


@dataclass(frozen=True)
class ServedModel:
    """A server, and its model."""

    url: str
    name: str

    @classmethod
    def at(cls, url: str) -> ServedModel:
        """Return the first model of a server. Raises `InputError` or `ModelError`."""
        url = check_address(url)
        try:
            return cls(url, server_model(url))
        except (LookupError, TypeError):
            raise ModelError(f"The server at {url} names no model; check its address.") from None

    def probability(self, prompt: str, answer: str) -> float:
        """Return the probability of a text after a prompt: the product over its tokens. Raises `ModelError` if the
        server does not give it, `InputError` if its tokens do not begin where the answer does."""
        request = {"model": self.name, "prompt": prompt + answer, "max_tokens": 1, "temperature": 0}
        request |= {"echo": True, "logprobs": 1}
        reply: Any = server_answer(f"{self.url}/completions", request)
        try:
            logprobs = reply["choices"][0]["logprobs"]
            rows = [
                (int(at), value) for at, value in zip(logprobs["text_offset"], logprobs["token_logprobs"], strict=True)
            ]
        except (LookupError, TypeError, ValueError):
            raise ModelError(
                f"The server at {self.url} gives no log-probabilities of a prompt; take one with echo and logprobs in "
                "its completions, such as vLLM."
            ) from None
        inside = [value for at, value in rows if len(prompt) <= at < len(prompt) + len(answer)]
        if len(prompt) not in [at for at, _ in rows] or not all(isinstance(value, int | float) for value in inside):
            raise InputError(
                f"The tokens of {self.name} do not begin where {shown(answer)} does; claim another answer."
            )
        return exp(sum(inside))


def check_served(served: ServedModel, model: Model, claim: Claim) -> CheckedClaim:
    """Measure a claim about the probability of an answer. model: whose held-out contexts are the control's."""
    what = claim.what
    if not isinstance(what, AnswerClaim) or not isinstance(what.prompt, str):
        return not_run(claim, ONLY_TEXTS)
    contexts = ["".join(model.pieces(ids)) for ids in control_contexts(model)]
    try:
        control = fmean(served.probability(context, what.answer) for context in contexts)
        measured = Measured(served.probability(what.prompt, what.answer), control)
    except IcebearError as error:
        return not_run(claim, str(error))
    return checked_number(claim, served.name, "", measured)
