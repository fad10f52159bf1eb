"""What each call computes of a request: one function a path, with the model that the server was started with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from icebear.app.api import schemas
from icebear.app.api.schemas import LIMITS
from icebear.concepts.passes.active_neurons import most_active, most_active_by_token, prompt_activations
from icebear.concepts.stages.stages import stages
from icebear.concepts.vocabulary.prompt_lens import logit_lens
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.chat import Chat
from icebear.models.text.prompts import PromptLike, special_note
from icebear.points import POLARITY_WORDS, Source, model_id
from icebear.records import Neuron
from icebear.steering.comparison import continued
from icebear.values import several

Document = dict[str, Any]


def check_model(model: Model, name: str) -> None:
    if name not in (model.name, model_id(model.name)):
        raise InputError(f"This server has the model {model_id(model.name)} only; give its name.")


def tokenize(model: Model, request: schemas.TokenizeRequest) -> Document:
    """Return the token ids of a text, and their texts."""
    ids = _ids(model, request.text)
    begins = _begins_with_bos(model, ids)
    if request.prepend_bos not in (None, begins):
        raise InputError(f"The tokenizer of {model.name} decides about the first token; leave prependBos out.")
    return {"tokens": ids, "tokenStrings": list(model.pieces(ids)), "prependBos": begins}


def activation_single(model: Model, request: schemas.ActivationSingleRequest) -> Document:
    """Return the activation of a neuron at each token."""
    if request.source is None or request.index is None:
        raise InputError("This server has neurons only; give source and index.")
    if not (request.index.isascii() and request.index.isdigit() and len(request.index) < 10):
        raise InputError("The index must be a whole number.")
    ids, source = _ids(model, request.prompt), Source.parse(request.source)
    neuron = _neuron(model, source, int(request.index))
    values = (source.sign * prompt_activations(model, ids, neuron.site, neuron.layer)[:, neuron.index]).tolist()
    return {
        "activation": _values(values, values.index(max(values))),
        "tokens": list(model.pieces(ids)),
        "tokensIsSpecial": _special(model, ids),
    }


def activation_all(model: Model, request: schemas.ActivationAllRequest) -> Document:
    """Return the most active neurons of all layers, or of the selected ones, with their activation at each token."""
    ids, wanted = _ids(model, request.prompt), _sources(model, request.source_set, request.selected_sources)
    at = list(dict.fromkeys(request.sort_by_token_indexes))
    if any(position >= len(ids) for position in at):
        raise InputError(f"The prompt has {len(ids)} tokens; give sortByTokenIndexes from 0 to {len(ids) - 1}.")
    sides = [(row.site, row.layer, row.sign) for row in wanted]
    ignored = _ignored(model, ids, True) or _first_sink(model, ids) if request.ignore_bos else set()
    rows = most_active(model, ids, sides, request.num_results or 25, at, ignored)
    activations = [
        {
            "source": str(Source(row.neuron.layer, row.neuron.site, "+" if row.sign > 0 else "-")),
            "index": row.neuron.index,
            "sumValues": row.score if at else 0.0,
            **_values(row.values, row.argmax),
        }
        for row in rows
    ]
    return {"activations": activations, "tokens": list(model.pieces(ids))}


def activation_topk_by_token(model: Model, request: schemas.ActivationTopkByTokenRequest) -> Document:
    """Return the most active neurons of a layer at each token."""
    ids, source = _ids(model, request.prompt), Source.parse(request.source)
    _neuron(model, source)
    rows = most_active_by_token(model, ids, source.site, source.layer, source.sign, request.top_k or 5)
    tokens, special = model.pieces(ids), _special(model, ids)
    counted = [position for position in range(len(ids)) if position not in _ignored(model, ids, request.ignore_bos)]
    results = [
        {
            "tokenPosition": position,
            "token": tokens[position],
            "isSpecial": special[position],
            "topFeatures": [{"featureIndex": index, "activationValue": value} for index, value in rows[position]],
        }
        for position in counted
    ]
    return {"results": results, "tokens": [tokens[position] for position in counted]}


def activation_single_batch(model: Model, request: schemas.ActivationSingleBatchRequest) -> Document:
    """Return the activation of a neuron at each token of several prompts."""
    return _each(model, request, activation_single, schemas.ActivationSingleRequest)


def activation_all_batch(model: Model, request: schemas.ActivationAllBatchRequest) -> Document:
    """Return for each of several prompts the most active neurons, with their activation at each token."""
    return _each(model, request, activation_all, schemas.ActivationAllRequest)


def activation_topk_by_token_batch(model: Model, request: schemas.ActivationTopkByTokenBatchRequest) -> Document:
    """Return for each of several prompts the most active neurons of a layer at each token."""
    return _each(model, request, activation_topk_by_token, schemas.ActivationTopkByTokenRequest)


def activation_source(model: Model, request: schemas.ActivationSourceRequest) -> Document:
    """Return for each prompt the neurons of a layer whose value is positive at a token: the token, and the value."""
    source = Source.parse(request.source)
    _neuron(model, source)
    most = max(1, LIMITS.source_values // model.width(source.site))
    each = _ids_of_all(model, request.prompts, min(LIMITS.tokens, most))
    return {"results": [_active(model, ids, source) for ids in each]}


def _active(model: Model, ids: list[int], source: Source) -> Document:
    values = (source.sign * prompt_activations(model, ids, source.site, source.layer)).cpu()  # (T, N)
    positions, indices = (values > 0).nonzero(as_tuple=True)
    features: dict[str, list[tuple[int, float]]] = {}
    rows = zip(positions.tolist(), indices.tolist(), values[positions, indices].tolist(), strict=True)
    for position, index, value in rows:
        features.setdefault(str(index), []).append((position, value))
    return {"tokens": list(model.pieces(ids)), "activeFeatures": features}


def steer_completion(model: Model, request: schemas.SteerCompletionRequest) -> Document:
    """Continue a prompt with `strength` times the multiplier added to each neuron's activation, and without."""
    _ids(model, request.prompt)
    texts = _continued(model, request.prompt, request, ["all"])
    return {"outputs": [{"type": kind, "output": request.prompt + text} for kind, text in texts.items()]}


def steer_completion_chat(model: Model, request: schemas.SteerCompletionChatRequest) -> Document:
    """Answer a conversation with `strength` times the multiplier added to each neuron's activation, and without."""
    messages = [message.model_dump() for message in request.prompt]
    chat = Chat(messages)
    ids = _ids(model, chat)
    raw = "".join(model.pieces(ids))
    texts = _continued(model, chat, request, ["all"] if request.steer_special_tokens else _ordinary(model, ids))
    outputs = [
        {"type": kind, "raw": raw + text, "chatTemplate": [*messages, {"role": "assistant", "content": text}]}
        for kind, text in texts.items()
    ]
    return {"outputs": outputs, "input": {"raw": raw, "chatTemplate": messages}}


def _continued(model: Model, prompt: PromptLike, request: Any, tokens: Sequence[str]) -> dict[schemas.SteerType, str]:
    """Return the continuations of a prompt by their kind. tokens: where the neurons are edited, as of `Edit`."""
    edits = []
    for feature in request.features:
        check_model(model, feature.model)
        source = Source.parse(feature.source)
        neuron, strength = _neuron(model, source, feature.index), feature.strength * request.strength_multiplier
        edits += [Edit(neuron, "add", source.sign * strength, where=where) for where in tokens]
    sampling = (request.n_completion_tokens, request.temperature, int(request.seed), request.freq_penalty)
    each: dict[schemas.SteerType, list[Edit]] = {"STEERED": edits, "DEFAULT": []}
    return {kind: continued(model, prompt, each[kind], *sampling) for kind in dict.fromkeys(request.types)}


def _ordinary(model: Model, ids: Sequence[int]) -> list[str]:
    """Return where the tokens are that are not special: in a prompt, and after it."""
    special = _special(model, ids)
    positions = ",".join(str(position) for position in range(len(ids)) if not special[position])
    return [f"position:{positions}", "generated"] if positions else ["generated"]


def lens_prompt(model: Model, request: schemas.LensPromptRequest) -> Document:
    """Return what the logit lens reads at each token after each layer."""
    if request.type != ["LOGIT_LENS"]:
        raise InputError("This server has the LOGIT_LENS only; leave other lenses out.")
    if (request.prompt is None) == (request.chat is None):
        raise InputError("Give either a prompt or a chat.")
    chat = request.chat and Chat([message.model_dump() for message in request.chat])
    ids = _ids(model, chat or request.prompt or "")
    last = model.layers - 1
    if any(layer > last for layer in request.layers):
        raise InputError(f"{model.name} has {model.layers} layers; give layers from 0 to {last}.")
    layers = sorted({*request.layers, last}) if request.layers else list(range(last + 1))
    readouts = logit_lens(model, ids, layers, request.top_n, request.filter_non_word_tokens)
    meta = {
        "kind": "meta",
        "model": model_id(model.name),
        "types": request.type,
        "layers_by_type": {"LOGIT_LENS": layers},
        "top_n": request.top_n,
        "prompt_len": len(ids),
        "num_completion_tokens": 0,
        "temperature": request.temperature,
        "prepend_bos": _begins_with_bos(model, ids),
        "reuse_len": 0,
    }
    tokens = [
        {
            "kind": "token",
            "position": position,
            "token": token,
            "id": ids[position],
            "is_generated": False,
            "results": [{"type": "LOGIT_LENS", "top_tokens": row.tokens, "top_probs": row.probabilities}],
        }
        for position, (token, row) in enumerate(zip(model.pieces(ids), readouts, strict=True))
    ]
    done = {"kind": "done", "seq_len": len(ids), "prompt_len": len(ids), "vocab_size": model.output_size}
    return {"meta": meta, "tokens": tokens, "done": {**done, "completion": ""}}


def stages_call(model: Model, request: schemas.StagesRequest) -> Document:
    """Return how an answer is computed, compared with another prompt, with controls; Neuronpedia has no such call."""
    for prompt in (request.prompt, request.counterfactual):
        _ids(model, prompt)
    return stages(model, request.prompt, request.target, request.contrast, request.counterfactual).to_dict()


def capabilities(model: Model) -> Document:
    """Return what this server has, and its limits."""
    groups = [Source(0, site, polarity).group for site in model.sites for polarity in POLARITY_WORDS]
    return {
        "model": model_id(model.name),
        "backend": "icebear",
        "device": model.device.type,
        "max_concurrent_requests": LIMITS.waiting,
        "max_tokens": LIMITS.new_tokens,
        "token_limit": min(LIMITS.tokens, model.context_length),
        "max_num_results": LIMITS.results,
        "num_layers": model.layers,
        "source_sets": groups,
        "endpoints": dict.fromkeys(("lens_logit", "neurons", *(call.__name__ for call, _ in CALLS.values())), True),
    }


Call = Callable[[Model, Any], Document]
TEXTS = ("text", "prompt", "prompts", "counterfactual")
"""The fields of requests that a tokenizer reads."""


def _noted(call: Call) -> Call:
    """Return a call whose answer has ``notes`` on special tokens that change what is asked, if there are any."""

    @wraps(call)
    def noted(model: Model, request: Any) -> Document:
        answer = call(model, request)
        texts = [text for name in TEXTS for text in several(getattr(request, name, ()))]
        notes = [note for text in texts if isinstance(text, str) and (note := special_note(model, text))]
        if notes:
            (answer.get("meta") or answer)["notes"] = notes
        return answer

    return noted


CALLS: dict[str, tuple[Call, type[schemas.ModelRequest]]] = {
    "/v1/tokenize": (_noted(tokenize), schemas.TokenizeRequest),
    "/v1/activation/single": (_noted(activation_single), schemas.ActivationSingleRequest),
    "/v1/activation/all": (_noted(activation_all), schemas.ActivationAllRequest),
    "/v1/activation/topk-by-token": (_noted(activation_topk_by_token), schemas.ActivationTopkByTokenRequest),
    "/v1/activation/single-batch": (_noted(activation_single_batch), schemas.ActivationSingleBatchRequest),
    "/v1/activation/all-batch": (_noted(activation_all_batch), schemas.ActivationAllBatchRequest),
    "/v1/activation/topk-by-token-batch": (
        _noted(activation_topk_by_token_batch),
        schemas.ActivationTopkByTokenBatchRequest,
    ),
    "/v1/activation/source": (_noted(activation_source), schemas.ActivationSourceRequest),
    "/v1/steer/completion": (_noted(steer_completion), schemas.SteerCompletionRequest),
    "/v1/steer/completion-chat": (_noted(steer_completion_chat), schemas.SteerCompletionChatRequest),
    "/v1/lens/prompt": (_noted(lens_prompt), schemas.LensPromptRequest),
    "/v1/stages": (_noted(stages_call), schemas.StagesRequest),
}
"""Path -> what it computes, and the body of its request."""


def _ids(model: Model, prompt: PromptLike) -> list[int]:
    """Return the token ids of a prompt. Raises `InputError` for too many."""
    ids = model.ids(prompt)
    if len(ids) > LIMITS.tokens:
        raise InputError(f"The prompt has {len(ids)} tokens; shorten it to {LIMITS.tokens}.")
    return ids


def _ids_of_all(model: Model, prompts: Sequence[str], limit: int = LIMITS.batch_tokens) -> list[list[int]]:
    """Return the token ids of prompts. Raises `InputError` for too many."""
    each = [_ids(model, prompt) for prompt in prompts]
    total = sum(map(len, each))
    if total > limit:
        raise InputError(f"The prompts have {total} tokens together; shorten them, or send fewer, to {limit}.")
    return each


def _each(model: Model, request: Any, call: Call, body: Callable[..., schemas.ModelRequest]) -> Document:
    """Return the answers of a call to each prompt of a batch."""
    _ids_of_all(model, request.prompts)
    fields = request.model_dump(exclude={"prompts"})
    return {"results": [call(model, body(**fields, prompt=prompt)) for prompt in request.prompts]}


def _begins_with_bos(model: Model, ids: Sequence[int]) -> bool:
    bos = getattr(model.tokenizer, "bos_token_id", None)
    return bos is not None and ids[0] == bos


def _neuron(model: Model, source: Source, index: int = 0) -> Neuron:
    """Return a neuron of a source, if the model has it; heads have several activations. Raises `InputError`."""
    if source.site == "head":
        raise InputError("Heads have no single activation; give a source of neurons, such as 0-ffn-plus.")
    return model.check(Neuron(source.layer, source.site, index))


def _sources(model: Model, group: str, names: Sequence[str]) -> list[Source]:
    """Return the sources of a set, all or those named. Raises `InputError` for unknown ones."""
    wanted = [Source.parse(name) for name in names]
    some_layer = Source.parse(f"0-{group}")
    if any(source.group != some_layer.group for source in wanted):
        raise InputError(f"selectedSources must be of the sourceSet, such as {some_layer}.")
    layers = model.layers_with(some_layer.site)
    wanted = wanted or [Source(layer, some_layer.site, some_layer.polarity) for layer in layers]
    for source in wanted:
        _neuron(model, source)
    return wanted


def _ignored(model: Model, ids: Sequence[int], ignore_bos: bool) -> set[int]:
    return {0} if ignore_bos and ids[0] in model.special_ids() else set()


def _first_sink(model: Model, ids: Sequence[int]) -> set[int]:
    """Return the position of a first token that takes the part of BOS where texts begin without one: it is a sink,
    whose huge activations would be the whole list. A single token stays."""
    return {0} if model.has_family and model.family.first_is_sink and len(ids) > 1 else set()


def _special(model: Model, ids: Sequence[int]) -> list[bool]:
    special = model.special_ids()
    return [token in special for token in ids]


def _values(values: Sequence[float], argmax: int) -> Document:
    return {"values": values, "maxValue": values[argmax], "maxValueIndex": argmax}
