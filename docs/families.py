"""Writes docs/results/families.csv: what works for each kind of model of transformers, on a small random one.

python docs/families.py
"""

from __future__ import annotations

import csv
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from icebear import Model
from icebear.concepts.image_laws import image_laws
from icebear.concepts.selftest import TOLERANCE, SelfTest, selftest
from icebear.concepts.similarity_laws import similarity_laws
from icebear.errors import IcebearError
from icebear.models.parts.families import FAMILIES
from icebear.models.tasks import SHIPPED

FILE = Path(__file__).resolve().parent / "results" / "families.csv"
AUTO_CLASSES = {
    "AutoModelForCausalLM": "Causal models",
    "AutoModelForSeq2SeqLM": "Encoder-decoders",
    "AutoModelForMaskedLM": "Masked models",
    "AutoModelForImageClassification": "Image classifiers",
}
IMAGES = "AutoModelForImageClassification"
KINDS = {auto: sorted(models) for auto, (_, models) in SHIPPED.items()}
KINDS[IMAGES] = sorted(kind for kind, family in FAMILIES.items() if family.own_tokens is not None)
"""Model types by auto class; of image classifiers only those that icebear explains."""
SMALL = {
    "vocab_size": 64,
    "hidden_size n_embd d_model dim model_dim": 32,
    "intermediate_size ffn_hidden_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim d_inner hidden_dim": 40,
    "moe_intermediate_size shared_expert_intermediate_size": 40,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers": 2,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 4,
    "num_key_value_heads num_kv_heads": 2,
    "head_dim d_kv d_head": 8,
    "max_position_embeddings n_positions n_ctx max_seq_len": 128,
    "mamba_chunk_size mamba_d_state": 4,
    "image_size": 16,
    "patch_size": 8,
}
MORE = {
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k moe_topk": 2,
    "n_group topk_group first_k_dense_replace n_shared_experts": 1,
    "qk_nope_head_dim v_head_dim": 8,
    "qk_rope_head_dim rotary_dim": 4,
    "q_lora_rank kv_lora_rank": 16,
    "mamba_n_heads mamba_d_head": 8,
}
LESS = {"head_dim": 32}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
"""Of gated delta nets."""
T5GEMMA = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 0},
    "bos_token_id": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "granitemoeshared": {"shared_intermediate_size": 40},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 8},
    "gemma3n_text": {
        **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
        **{"activation_sparsity_pattern": [0.5, 0.0], "laurel_rank": 4},
    },
    "gemma3": {
        "vision_config": {
            **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 8, "patch_size": 4},
        },
        "mm_tokens_per_image": 4,
    },
    "fuyu": {"patch_size": 2},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "falcon_h1": {
        **{"mamba_d_ssm": 64, "lm_head_multiplier": 0.3, "mlp_multipliers": [0.8, 0.5]},
        **{"attention_out_multiplier": 0.6, "ssm_out_multiplier": 0.7},
    },
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"), DELTA),
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "zamba": {"layer_types": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_headdim": 16},
    "granitemoehybrid": {
        **{
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
        },
    },
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5gemma": {"vocab_size": 64, "encoder": T5GEMMA, "decoder": T5GEMMA},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 32},
    "squeezebert": {"q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
}
"""What a kind needs besides."""
LARGEST = 3e7
"""Parameters; what stays larger has parts whose sizes are called otherwise."""
IDS = [5, 9, 23, 42, 7, 31, 12, 50]
MASK = 42
"""The mask of masked models, which is among them."""


class Ids:
    """The tokenizer of a masked model that reads ids."""

    mask_token_id, pad_token_id, eos_token_id, all_special_ids = MASK, 0, 0, (0,)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def small(kind: str, wanted: dict[str, int], option: Option | None = None, is_image: bool = False) -> PreTrainedConfig:
    """is_image: of an image classifier, whose text part is not read."""
    cls = CONFIG_MAPPING[kind]
    text = cls().get_text_config().model_type
    if is_image and "vision_config" in cls.sub_configs:
        return cls(vision_config=small(cls.sub_configs["vision_config"].model_type, wanted, option, True))
    if text != kind and "text_config" in cls.sub_configs:  # of images and text
        return cls(text_config=small(text, wanted, option), **OWN.get(kind, {}))
    known = {*cls().to_dict(), *cls.attribute_map}
    sizes = {name: value for names, value in wanted.items() for name in names.split() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention: the part of a head that is turned, and as many keys as queries
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    if "decoder_start_token_id" in known:
        sizes["decoder_start_token_id"] = 0
    changed = dict([option] if option else [])
    tokens = {} if is_image else {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return cls(**{**sizes, **OWN.get(kind, {}), **changed}, **tokens)


Option = tuple[str, Any]
"""An entry of a configuration, and a value that is not its default."""
CLIPS = ("clip_qkv",)
"""Numbers that are None by default, and change what is computed."""


KINDS = ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "return_dict")
"""Entries that make another kind of model, or other outputs."""


def options(kind: str) -> list[Option]:
    """The yes-or-no entries of a kind's configuration, each turned round, and the numbers of `CLIPS`."""
    cls = CONFIG_MAPPING[kind]
    entries = cls().get_text_config().to_dict()
    flags = [(name, not value) for name, value in entries.items() if isinstance(value, bool) and name not in KINDS]
    return [*flags, *((name, 0.5) for name in CLIPS if name in entries)]


def made(kind: str, auto: str, wanted: dict[str, int], option: Option | None = None) -> Model | str:
    """A small random model that runs; or why there is none."""
    create = getattr(transformers, auto).from_config
    is_image = auto == IMAGES
    try:
        config = small(kind, wanted, option, is_image)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in create(config).parameters())
        if size > LARGEST:
            text = config.get_text_config().model_type
            return f"not made small; its text part is `{text}`" if text != kind else "not made small"
        torch.manual_seed(0)
        net = create(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in net.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 0.2)
            inputs = {"decoder_input_ids": torch.tensor([IDS])} if config.is_encoder_decoder else {}
            if "use_cache" in inspect.signature(type(net).forward).parameters:
                inputs["use_cache"] = False
            net(torch.randn(1, 3, 16, 16) if is_image else torch.tensor([IDS]), **inputs)
    except Exception as error:  # whatever a configuration of another's may raise
        return f"not made small ({type(error).__name__})"
    try:
        return Model(net, Ids() if auto == "AutoModelForMaskedLM" else None, name=kind)
    except IcebearError as error:
        return f"refused: {str(error).split('; ')[0]}"


def small_model(kind: str, auto: str = "AutoModelForCausalLM", option: Option | None = None) -> Model | str:
    """The first small model that runs."""
    tried = (made(kind, auto, wanted, option) for wanted in (SMALL | MORE, SMALL, SMALL | LESS))
    return next((one for one in tried if not isinstance(one, str)), None) or made(kind, auto, SMALL, option)


def broken(model: Model) -> list[str]:
    """What the self-test of a model finds that neither holds nor is refused by name."""
    try:
        found = selftest(model, IDS)
    except IcebearError:
        return []
    troubles = [law.name for law in found.laws if law.holds is False]
    if found.parity > TOLERANCE[torch.float32]:
        troubles.append("parity")
    share = abs(found.conserved.remainder) / max(abs(found.conserved.target), abs(found.conserved.tokens))
    if not (found.missing or model.has_scan) and share > TOLERANCE[torch.float32]:
        troubles.append("conservation")
    return troubles


class Row(NamedTuple):
    """What works for a kind."""

    kind: str
    tokens: str
    counterfactual: str = ""
    neurons: str = ""
    laws: str = ""


def row_of(kind: str, auto: str = "AutoModelForCausalLM") -> Row:
    """Run the self-test of a kind."""
    model = small_model(kind, auto)
    if isinstance(model, str):
        return Row(kind, model)
    try:
        found = selftest(model, IDS) if model.task.reads_text else selftest(model)
    except IcebearError as error:
        return Row(kind, f"refused: {str(error).split('; ')[0]}")
    except Exception as error:
        return Row(kind, f"fails ({type(error).__name__})")
    laws = {law.name: law for law in found.laws}
    broken = [law.name for law in found.laws if law.holds is False and law.name != "counterfactual"]
    compared = laws["counterfactual"]
    cell = compared.finding if compared.holds is None else "yes, " * compared.holds + compared.finding
    cell = cell.replace("yes, differs by ", "yes, ")
    return Row(kind, tokens(model, found), cell, ", ".join(found.sites), ", ".join(broken) or "all")


def tokens(model: Model, found: SelfTest) -> str:
    """The cell of tokens."""
    if model.has_scan:
        works = next(law.holds for law in found.laws if law.name == "counterfactual")
        return "with a counterfactual" if works else "refused: scan over tokens"
    if found.missing:
        return f"refused: {'; '.join(dict.fromkeys(_without_layer(entry) for entry in found.missing))}"
    share = abs(found.conserved.remainder / found.conserved.target)
    good = found.parity <= TOLERANCE[torch.float32] and share <= TOLERANCE[torch.float32]
    return f"{'yes' if good else 'unconserved'}, {share:.0e}"


def _without_layer(entry: str) -> str:
    """``torch.logsumexp (GraniteSWAAttention)`` of ``torch.logsumexp in model.layers.0.self_attn (...)``."""
    operation, _, place = entry.partition(" in ")
    return f"{operation} ({place.rpartition('(')[2]}"


def rows() -> Iterator[tuple[str, ...]]:
    for auto, task in AUTO_CLASSES.items():
        for kind in KINDS[auto]:
            print(row := (task, *row_of(kind, auto)), flush=True)
            yield row
    yield from rows_of_images_and_text()
    yield from rows_of_two_towers()


def rows_of_images_and_text() -> Iterator[tuple[str, ...]]:
    """Measure the laws of prompts with an image, in float64, on the small models of tests/pictured.py."""
    sys.path.insert(0, str(FILE.parents[2] / "tests"))
    import pictured
    from conftest import Double  # transformers computes some parts in float32

    for kind in pictured.CONFIGS:
        with Double():
            model = pictured.made(kind)
            laws = image_laws(model, [pictured.prompt(kind, seed) for seed in (0, 1)])
        broken = [law for law, deviation in laws.items() if deviation > IMAGE_TOLERANCE]
        cells = [
            f"{'yes' if laws[law] <= IMAGE_TOLERANCE else 'no'}, {laws[law]:.0e}" for law in ("sums", "differences")
        ]
        yield "Images and text", kind, *cells, ", ".join(model.sites), ", ".join(broken) or "all"


def rows_of_two_towers() -> Iterator[tuple[str, ...]]:
    """Measure the laws of the similarity of a text and an image, in float64, on the small models of tests/towers.py."""
    sys.path.insert(0, str(FILE.parents[2] / "tests"))
    import towers
    from conftest import Double

    for kind in towers.KINDS:
        with Double():
            laws = similarity_laws(towers.made(kind), torch.tensor(towers.IDS), towers.images())
        broken = [law for law, deviation in laws.items() if deviation > IMAGE_TOLERANCE]
        sums = f"{'yes' if laws['sums'] <= IMAGE_TOLERANCE else 'no'}, {laws['sums']:.0e}"
        yield "Text and image towers", kind, sums, "refused", "", ", ".join(broken) or "all"


IMAGE_TOLERANCE = 1e-6


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    with FILE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("task", "kind", "tokens", "counterfactual", "neurons", "laws"), *rows()]
        )
