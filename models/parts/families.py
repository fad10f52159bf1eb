"""The module names of each architecture's neurons, which families.json lists as data.

A family is chosen by the model type in the configuration; nothing is guessed for an unknown one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """Dotted module names; those after `layers` are relative to one layer. Of several names of one part, the first one
    that a layer has; a layer that has none lacks the site."""

    layers: str = "model.layers"
    ffn_out: str = "mlp.down_proj"
    """The FFN's second linear map, W_out; its input is the site `ffn`. Empty in a model of attention only."""
    ffn_in: str = "mlp.gate_proj"
    """The FFN's first linear map, W_in; the gate of a gated FFN (the first rows, if gate and up are one map)."""
    experts: str = ""
    """The experts of a mixture; their neurons are the site `ffn` instead, and their weights the site `router`."""
    expert_logits: bool = False
    """Whether experts are chosen by logits, with a softmax after the choice; else by probabilities."""
    shared: str = ""
    """The second linear map of the expert that every token uses; its input is the site `shared`."""
    attn_out: str = "self_attn.o_proj"
    """The attention output projection; its input is the site `attn`."""
    cross: str = ""
    """The output projection of the cross-attention; its input is the site `cross`."""
    mixer: str = ""
    """The output projection of a scan or short convolution over tokens; its input is the site `mixer`."""
    q: str = "self_attn.q_proj"
    """Empty, like k and v, if they are computed from compressed values, or hold more than queries."""
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    """One map whose output is q, k and v, instead of three maps."""
    qkv_order: Literal["apart", "grouped"] = "apart"
    """``apart``: all of q, then k, then v. ``grouped``: for each key-value head its query heads, its key, its value."""
    final_norm: str = "model.norm"
    """The norm before the unembedding, or empty."""
    unembedding_in: str = ""
    """A linear map between the final norm and the unembedding, or empty."""
    transforms: bool = False
    """Whether a non-linear map is before the unembedding, so that projected rows are not logits."""
    ffn_norm: str = ""
    """A norm between W_out and the residual stream (sandwich norm), or on the stream after it (post-norm), or empty."""
    attn_norm: str = ""
    mixer_norm: str = ""
    norm_offset: float = 0.0
    """The gain of a norm is offset + weight."""
    residual_scale: str | dict[str, str] = ""
    """The configuration entry that multiplies everything written to the residual stream, or empty; or that of each
    site, where ``name.1`` is the second number of an entry that is a list."""
    logit_scale: str = ""
    """The configuration entry that multiplies the logits, or after a ``/`` divides them."""
    activations: tuple[str, ...] = ()
    """The family's own classes of element-wise non-linearities (AttnLRP Eq. 9)."""
    position_inputs: tuple[str, ...] = ("position_embeddings",)
    """The arguments of a layer that encode positions: cos and sin, ALiBi, a relative bias, numbers."""
    position_method: str = ""
    """A method inside a layer that returns positions."""
    position_embedding: str = ""
    """The module, parameter or method of the model that gives what is added to the token embeddings."""
    own_tokens: tuple[str, ...] | None = None
    """The parameters that an image classifier reads as tokens before the patches: [CLS], registers; None for text."""
    first_is_sink: bool = True
    """Whether the first token counts as a sink also where its residual stream is short."""
    decoder: Family | None = None
    """The decoder of an encoder-decoder; its layers are numbered after the encoder's."""


def _read() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for names, entry in json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8")).items():
        entry = {field: tuple(value) if isinstance(value, list) else value for field, value in entry.items()}
        if "decoder" in entry:
            entry["decoder"] = families[entry["decoder"]]
        base = families[entry.pop("like")] if "like" in entry else Family()
        families |= dict.fromkeys(names.split(), replace(base, **entry))
    return families


FAMILIES = _read()
"""By `config.model_type`. An entry of families.json has one or several names, and its differences from the family that
it is ``like``, or from the defaults above."""
OPT_350M = FAMILIES.pop("opt-350m")
"""OPT with a norm after each layer, which has the same model type."""
for _decoder in ("t5", "pegasus", "bart", "m2m_100", "switch_transformers"):
    del FAMILIES[f"{_decoder}-decoder"]

SCANS = re.compile(
    r"Mamba\d?(Mixer|Layer)$|(FalconH1|Bamba)Mixer$|Delta(Net|Attention)$|Rglru$|RwkvSelfAttention$|LSTMLayer$"
)
"""Classes of modules that need a counterfactual. They multiply a state with activations at each token; the rule for
products (AttnLRP Eq. 15) would halve the relevance of the past at each token."""


def family_of(net: Any) -> Family | None:
    """Return the family of a transformers model, None if it is unknown."""
    if not hasattr(net, "config"):
        return None
    config = net.config
    family = FAMILIES.get(config.model_type)
    if family is None:  # a model of images and text has the family of its text part
        family = FAMILIES.get(config.get_text_config().model_type)
        return _inside(family, net) if family and not config.is_encoder_decoder else None
    if config.model_type == "hooked_transformer":
        lacks: Any = dict.fromkeys(config.lacks, "")
        return replace(family, **lacks)
    if config.is_encoder_decoder:
        return _inside(family, net) if family.decoder else None  # else the family is that of the decoder alone
    if family.decoder:
        family = _inside(replace(family, decoder=None), net) or family.decoder  # an encoder alone, or a decoder
    family = replace(family, cross="")  # a decoder alone has the maps of cross-attention, and does not run them
    if family.experts and not any(_has(layer, family.experts) for layer in net.get_submodule(family.layers)):
        family = replace(family, experts="", shared="")  # all its layers are dense
    return OPT_350M if config.model_type == "opt" and not config.do_layer_norm_before else family


LARGER = (
    *(("model.", inner) for inner in ("model.", "model.language_model.", "language_model.model.", "model.text_model.")),
    ("", "transformer."),
)
"""The beginnings of the names of parts in models that contain a text model (of images and text, classifiers of T5)."""


def _inside(family: Family, net: Any) -> Family | None:
    """Return a family with the names that its parts have in a larger model, None if they differ."""
    for prefix, inner in LARGER:
        placed = {
            name: getattr(family, name).replace(prefix, inner, 1)
            for name in ("layers", "final_norm", "position_embedding")
            if getattr(family, name)
        }
        if all(_has(net, path) for path in placed.values()):
            decoder = _inside(family.decoder, net) if family.decoder else None
            return replace(family, decoder=decoder, **placed)  # type: ignore[arg-type]
    return None


def _has(net: Any, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    try:
        return hasattr(net.get_submodule(parent), name)
    except AttributeError:
        return False
