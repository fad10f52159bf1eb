"""The bodies of requests, by Neuronpedia's inference API, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    body: int = 1 << 20
    """Bytes; the longest prompt has 20,000 characters of at most 12 bytes in JSON."""
    characters: int = 20_000
    tokens: int = 1024
    """Of a prompt; longer ones take seconds of the time of all who wait."""
    prompts: int = 64
    batch_tokens: int = 4096
    """Of the prompts of a request together."""
    source_values: int = 1 << 22
    """Tokens of a request times neurons of a layer, where each value may be in the answer."""
    new_tokens: int = 256
    results: int = 100
    """Neurons of an answer, each with a value for each token; Neuronpedia's page asks for 50."""
    top: int = 50
    """Neurons or words at a token."""
    waiting: int = 32
    """Requests that wait or run; further ones are answered with 429."""
    seconds: float = 120.0
    """For one request, from when it runs."""


LIMITS = Limits()

Prompt = Annotated[str, Field(min_length=1, max_length=LIMITS.characters)]
PromptList = Annotated[list[Prompt], Field(min_length=1, max_length=LIMITS.prompts)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Word = Annotated[str | None, Field(max_length=200)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, le=10**9)]
Top = Annotated[int | None, Field(ge=1, le=LIMITS.top)]
LensType = Literal["LOGIT_LENS", "JACOBIAN_LENS"]
SteerType = Literal["STEERED", "DEFAULT"]


class Body(BaseModel):
    """Unknown fields are refused: a field that is ignored would be a wrong answer."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="forbid", strict=True)


class ModelRequest(Body):
    model: Name


class TokenizeRequest(ModelRequest):
    text: Prompt
    prepend_bos: bool | None = None


class _OfNeuron(ModelRequest):
    source: Name | None = None
    index: Name | None = None
    vector: None = None
    hook: None = None


class ActivationSingleRequest(_OfNeuron):
    prompt: Prompt


class ActivationSingleBatchRequest(_OfNeuron):
    prompts: PromptList


class _MostActive(ModelRequest):
    source_set: Name
    selected_sources: Annotated[list[Name], Field(max_length=1000)]
    sort_by_token_indexes: Annotated[list[Index], Field(max_length=LIMITS.tokens)]
    ignore_bos: bool
    num_results: Annotated[int | None, Field(ge=1, le=LIMITS.results)] = 25


class ActivationAllRequest(_MostActive):
    prompt: Prompt


class ActivationAllBatchRequest(_MostActive):
    prompts: PromptList


class _ByToken(ModelRequest):
    source: Name
    ignore_bos: bool
    top_k: Top = 5


class ActivationTopkByTokenRequest(_ByToken):
    prompt: Prompt


class ActivationTopkByTokenBatchRequest(_ByToken):
    prompts: PromptList


class ActivationSourceRequest(ModelRequest):
    prompts: PromptList
    source: Name


class SteerFeature(ModelRequest):
    source: Name
    index: Index
    strength: Number
    steering_vector: None = None


class _Steering(ModelRequest):
    steer_method: Literal["SIMPLE_ADDITIVE"]
    normalize_steering: Literal[False]
    types: Annotated[list[SteerType], Field(min_length=1, max_length=2)]
    features: Annotated[list[SteerFeature], Field(max_length=100)]
    vectors: None = None
    n_completion_tokens: Annotated[int, Field(ge=1, le=LIMITS.new_tokens)]
    temperature: Annotated[float, Field(ge=0, le=100)]
    strength_multiplier: Number
    freq_penalty: Annotated[float, Field(ge=-10, le=10)]
    seed: Annotated[float, Field(ge=0, lt=2**53, multiple_of=1)]
    n_logprobs: Annotated[int | None, Field(ge=0, le=10)] = 0
    stream: Literal[False] | None = False


class SteerCompletionRequest(_Steering):
    prompt: Prompt


class Message(Body):
    role: Name
    content: Annotated[str, Field(max_length=LIMITS.characters)]


Messages = Annotated[list[Message], Field(min_length=1, max_length=100)]


class SteerCompletionChatRequest(_Steering):
    prompt: Messages
    steer_special_tokens: bool
    is_assistant_axis: Literal[False] | None = False


class LensPromptRequest(ModelRequest):
    type: Annotated[list[LensType], Field(min_length=1, max_length=2)]
    prompt: Prompt | None = None
    chat: Messages | None = None
    top_n: Annotated[int, Field(ge=1, le=LIMITS.top)] = 10
    layers: Annotated[list[Index], Field(max_length=1000)] = []
    filter_non_word_tokens: bool = True
    stream: bool = True
    num_completion_tokens: Literal[0] = 0
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    prepend_bos: bool = True
    fail_if_busy: bool = False


class StagesRequest(ModelRequest):
    """Of a call that Neuronpedia does not have."""

    prompt: Prompt
    counterfactual: Prompt
    target: Word = None
    contrast: Word = None


class Refusal(BaseModel):
    error: str
