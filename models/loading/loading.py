"""`load_model`: presets, folders, LoRA adapters, GGUF files and hub ids."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode

from icebear.cache import cache_folder, hub_reachable
from icebear.errors import IcebearError, InputError, ModelError, UnknownName, known_error, nearest, need
from icebear.models.loading import hooked
from icebear.models.loading.conversion import converted, fetch
from icebear.models.loading.presets import DEFAULT, PRESETS
from icebear.models.model import Model
from icebear.models.parts.families import FAMILIES
from icebear.models.parts.vision import VISION
from icebear.models.tasks import TASKS, ModelTask, auto_class_of, task_of
from icebear.paths import check_model_path, local
from icebear.values import shown, text_of


def load_model(
    name: str = DEFAULT,
    *,
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    bits: int | None = None,
    dtype: str | torch.dtype | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    accept_terms: bool = False,
    config: str | Path | Mapping[str, Any] | None = None,
) -> Model:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name
        A preset, a folder (also of a LoRA adapter, or in TransformerLens' format), a .gguf file, a .pt file of a state
        dict in TransformerLens' format, or a hub id.
    device
        ``auto`` takes cuda, then mps, then cpu.
    device_map
        Instead of a device: ``auto`` fills the GPUs, then memory, then the disk; ``disk`` keeps all weights on the disk
        until they are used; or a dictionary from module to device, as in transformers.
    bits
        8 or 4: quantize the weights of linear maps with bitsandbytes (LLM.int8 or NF4).
    dtype
        By default bfloat16 on cuda if supported, else float32; float32 for TransformerLens' format.
    attention
        ``sdpa``, ``eager``, or None for the model's default.
    trust_remote_code
        Run code that a hub model brings along.
    accept_terms
        Accept the terms of use of a preset (gemma3-270m).
    config
        For TransformerLens' format: the fields of `HookedTransformerConfig`, or a JSON file of them; the default is the
        .json file next to the weights.

    Returns
    -------
    Model

    Raises
    ------
    ModelError, DownloadError
        If the model cannot be loaded or downloaded.
    InputError, UnknownName
        For an unknown name, device or dtype, or options that exclude each other.
    """
    from huggingface_hub import snapshot_download

    torch_device = device_of(device)
    path = str(local(name))
    name = path if str(name).startswith("~") else str(name)  # a hub id is no path
    gguf = name.lower().endswith(".gguf")
    check_model_path(name)
    source = str(fetch(PRESETS[name], accept_terms)) if name in PRESETS else name
    with explained(name):
        read = _reader(source)
        is_hooked = read is hooked.read
        if config is not None and not is_hooked:
            raise InputError(
                f"{name} is not in TransformerLens' format and has its own configuration; leave out config."
            )
        kind = dtype_of("float32" if dtype is None and is_hooked else dtype, torch_device)
        weights = _weight_options(device, device_map, bits, kind)
        if weights and read is not _read:
            kinds: dict[Any, str] = {_read_adapter: "a LoRA adapter", hooked.read: "in TransformerLens' format"}
            raise InputError(
                f"{name} is {kinds[read]}, which cannot be quantized or split among devices; leave out bits and "
                "device_map."
            )
        if not os.path.exists(source) and not gguf and not hub_reachable():
            source = snapshot_download(name, local_files_only=True)
        if gguf:
            source = str(converted(Path(name), kind))
        weights |= {"dtype": kind, "attn_implementation": attention, "use_safetensors": True}
        options: Any = config if is_hooked else {"trust_remote_code": trust_remote_code}
        with _Unfilled() if name in PRESETS else nullcontext():
            net, tokenizer, processor = read(source, weights, options)
        if not (device_map or getattr(net, "is_quantized", False)):
            net = net.to(torch_device)
        model = Model(net, tokenizer, name, processor)
    if name in PRESETS and PRESETS[name].kind == "gguf":
        model.weights_note = "4-bit weights, dequantized"
    elif gguf:
        model.weights_note = "weights of a GGUF file, dequantized"
    if bits:
        model.weights_note += f", then quantized to {bits} bits"
    return model


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Make whatever libraries raise while they load a model one sentence, and quiet them for presets."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    loud = logging.get_verbosity()
    if name in PRESETS:  # which load, despite transformers' warnings
        logging.set_verbosity_error()
    try:
        yield
    except IcebearError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of tokenizers, in Rust
            raise
        raise _loading_error(name, error) from error
    finally:
        logging.set_verbosity(loud)


class _Unfilled(TorchFunctionMode):
    """Leaves tensors of the meta device, which have no values, without random ones, and makes ranges on the CPU:
    PyTorch imports sympy for both, which takes longer than the weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if func is torch.arange and kwargs.get("device") == torch.device("meta"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


Reader = Callable[[str, dict[str, Any], Any], tuple[Any, Any, Any]]


def _reader(source: str) -> Reader:
    """Return the function that reads a folder or a hub id."""
    if (Path(source) / "adapter_config.json").is_file():
        return _read_adapter
    return hooked.read if hooked.matches(source) else _read


def _read(source: str, weights: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the network, and its tokenizer or image processor.

    weights: options of the network's weights; options: of everything that is read.
    """
    import transformers

    check_weight_index(source)
    auto, task = _auto_class(source, options)
    if not task.reads_text:
        need("images")
    labels = {"num_labels": 0} if _lacks_labels(source, options, task) else {}
    net = complete(getattr(transformers, auto), source, **weights, **options, **labels)
    if not task.reads_text:
        return net, None, image_processor(source, options)
    if _lacks_tokenizer(Path(source)):
        return net, None, None
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    if net.config.model_type not in VISION:
        return net, tokenizer, None
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = _old_template(source, options)
    has_images = find_spec("PIL") is not None  # else a prompt with an image says what is missing
    return net, tokenizer, image_processor(source, options) if has_images else None


def _old_template(source: str, options: dict[str, Any]) -> str | None:
    """Return the chat template that older models of images and text have in a file of their processor."""
    from transformers.utils import cached_file

    path = cached_file(source, "chat_template.json", _raise_exceptions_for_missing_entries=False, **options)
    template = json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template") if path else None
    return template if isinstance(template, str) else None


def complete(kind: Any, source: str, **options: Any) -> Any:
    """Load a network that has all its weights: transformers fills missing ones with random numbers.

    kind: an auto class of transformers. Raises `ModelError`.
    """
    net, report = kind.from_pretrained(source, output_loading_info=True, **options)
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ModelError(
            f"{source} lacks {len(lacking)} weights of a {type(net).__name__}, such as {lacking[0]}; download it "
            "again, or correct the model_type and architectures of its config.json."
        )
    return net


def _auto_class(source: str, options: dict[str, Any], wanted: str | None = None) -> tuple[str, ModelTask]:
    """Return the auto class of transformers that loads a model, and its task. Raises `ModelError`.

    wanted: the auto class, if another one than that of the saved model.
    """
    from transformers import AutoConfig

    if wanted:
        return wanted, next(task for task in TASKS.values() if task.auto_class == wanted)
    config = AutoConfig.from_pretrained(source, **options)
    _check_integers(config.to_dict(), source)
    saved = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    if _is_bare_vision(config):
        saved = "ForImageClassification"
    task = task_of(saved, config.is_encoder_decoder)
    return auto_class_of(saved) or task.auto_class, task


def _is_bare_vision(config: Any) -> bool:
    """Return whether a model of images was saved without a map to labels, such as a Dinov2Model."""
    family, saved = FAMILIES.get(config.model_type), (getattr(config, "architectures", None) or [""])[0]
    return family is not None and family.own_tokens is not None and saved.endswith("Model")


def _lacks_labels(source: str, options: dict[str, Any], task: ModelTask) -> bool:
    from transformers import AutoConfig

    return not task.reads_text and _is_bare_vision(AutoConfig.from_pretrained(source, **options))


def image_processor(source: str, options: dict[str, Any]) -> Any:
    """Return the image processor; None if a folder has none. With Pillow it makes the same pixels on every machine."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.12's other name needs torchvision

    if Path(source).is_dir() and not any(Path(source).glob("*processor_config.json")):
        return None
    return AutoImageProcessor.from_pretrained(source, backend="pil", **options)


def _check_integers(value: Any, source: str, name: str = "") -> None:
    """Raise `ModelError` for an integer of more than 64 bits in a configuration, of which torch computes nothing."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ModelError(f"The configuration of {source} has {name} = {shown(value)}, which is too large; correct it.")
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in rows:
        _check_integers(part, source, f"{name}.{key}".removeprefix("."))


def _lacks_tokenizer(folder: Path) -> bool:
    names = ("*token*", "vocab*", "merges.txt", "*.model")
    return folder.is_dir() and not any(next(folder.glob(name), None) for name in names)


def _read_adapter(source: str, weights: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, None]:
    import transformers

    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise ModelError(f"{source} is a LoRA adapter; pip install peft to load it.") from None
    config = PeftConfig.from_pretrained(source)
    if config.is_prompt_learning:
        raise ModelError(
            f"{source} is {config.peft_type.replace('_', ' ').lower()}, which adds vectors to the input and changes no "
            "weight, so that it cannot be merged; icebear loads adapters of weights, such as LoRA."
        )
    base, adapted = config.base_model_name_or_path, _adapter_weights(source)
    check_weight_index(base)
    options = {**options, **({"revision": config.revision} if config.revision else {})}  # of the base model
    auto, task = _auto_class(base, options, TASK_TYPES.get(config.task_type or ""))
    heads = [weight for name, weight in adapted.items() if name.endswith(HEADS)] if task.labelled else []
    labels = {"num_labels": heads[-1][0]} if heads else {}
    kind = getattr(transformers, auto)
    if heads:  # the adapter has the head that the base model lacks
        net = kind.from_pretrained(base, **weights, **options, **labels)
    else:
        net = complete(kind, base, **weights, **options)
    has_tokenizer = (Path(source) / "tokenizer_config.json").is_file()  # it may have tokens that the base model lacks
    tokenizer: Any = None
    if has_tokenizer or not _lacks_tokenizer(Path(base)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source if has_tokenizer else base, **options)
    known = net.get_input_embeddings().weight.shape[0]
    if has_tokenizer and len(tokenizer) > known:
        net.resize_token_embeddings(len(tokenizer))
    tokens = max((shape[0] for name, shape in adapted.items() if name.endswith(VOCABULARY)), default=known)
    if tokens > known and not has_tokenizer:
        raise ModelError(
            f"The adapter {source} has {tokens} tokens and its base model {known}; save its tokenizer with it."
        )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of tied weights, which are untied
        adapter = PeftModel.from_pretrained(net, source)
    _untie(adapter)
    return adapter.merge_and_unload(), tokenizer, None


TASK_TYPES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
"""The model that an adapter was trained for, where its base model may have been saved as another."""
HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight", "classification_head.out_proj.weight")
"""The maps to labels, whose rows an adapter has itself."""
VOCABULARY = ("embed_tokens.weight", "wte.weight", "lm_head.weight", "word_embeddings.weight", "shared.weight")


def _adapter_weights(source: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's weights, by name."""
    from safetensors import safe_open

    path = Path(source) / "adapter_model.safetensors"
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _untie(adapter: Any) -> None:
    """Copy the shared weights of adapted modules: merged into shared ones, a change would act twice."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module.get_base_layer() for module in adapter.modules() if isinstance(module, BaseTunerLayer)]
    owners = Counter(id(module._parameters.get("weight")) for module in adapter.modules())
    for module in adapted:
        if owners[id(module.weight)] > 1:
            module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def _weight_options(
    device: str, device_map: str | dict[str, Any] | None, bits: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the options of `from_pretrained` for several devices and for quantized weights."""
    options: dict[str, Any] = {}
    if device_map is not None:
        if device != "auto":
            raise InputError("Give either device or device_map, not both.")
        need("devices")
        options["device_map"] = {"": "disk"} if device_map == "disk" else device_map
        options["offload_folder"] = str(cache_folder() / "offload")  # stays empty: .safetensors are read in place
    if bits is not None:
        if bits not in (4, 8):
            raise InputError(f"bits must be 8 or 4, not {bits}.")
        need("bits")
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # each pass says that inputs are cast to float16
        from transformers import BitsAndBytesConfig

        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        options["quantization_config"] = BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    return options


def _loading_error(name: str, error: BaseException) -> IcebearError:
    from huggingface_hub import errors

    def says(*kinds: type) -> bool:
        return isinstance(error, kinds) or isinstance(error.__cause__, kinds)

    reason = " ".join(str(error).split())[:200].rstrip(". ")
    if not says(OSError, ValueError):  # such as KeyError: 'rope_theta'
        reason = f"{type(error).__name__}: {reason}"
    where = "It is not a preset, a folder or a .gguf file, and {}; `icebear doctor` lists the presets."
    if full := known_error(error):
        return full
    if says(errors.GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name} and log in with `hf auth login`."
        )
    if says(errors.RepositoryNotFoundError, errors.HFValidationError):
        shown = "the model hub has no model of that name (or shows it only after `hf auth login`)"
        return UnknownName("model", name, PRESETS, where.format(shown))
    if says(errors.LocalEntryNotFoundError):
        return UnknownName("model", name, PRESETS, where.format("no model hub that has it could be reached"))
    if says(SafetensorError):
        return ModelError(f"A file of {name} is damaged or cut short ({reason}); download it again.")
    if "model.safetensors" in reason:
        return ModelError(
            f"{name} has no weights as .safetensors, the format that cannot run code; save them again with "
            "save_pretrained."
        )
    return ModelError(
        f"{name} could not be loaded ({reason}); check that it is a complete model, and that transformers "
        f"{version('transformers')} knows its kind. ICEBEAR_DEBUG=1 shows the whole error."
    )


def device_of(name: str) -> torch.device:
    available = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(available[0] if name == "auto" else text_of(name))
    if device is None or device.type not in available:
        absent = device is not None and device.type in ("cuda", "mps")
        why = f"PyTorch sees no {name} device on this machine" if absent else f"{shown(name)} is not a device"
        also = nearest(text_of(name), ("cuda", "mps", "cpu")) * (not absent)
        raise InputError(f"{why}; leave the device out, or use one of: {', '.join(available)}.{also}")
    return device


def dtype_of(wanted: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if wanted is None:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    dtype = wanted if isinstance(wanted, torch.dtype) else getattr(torch, str(wanted), None)
    known = ("float32", "bfloat16", "float16", "float64")
    if not isinstance(dtype, torch.dtype):
        raise UnknownName("dtype", str(wanted), known, f"Use one of {', '.join(known)}.")
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        if not dtype.is_floating_point:
            raise TypeError
        (ones @ ones).softmax(-1)
    except (RuntimeError, TypeError):
        raise InputError(f"{device.type} cannot compute in {wanted}; use --dtype float32.") from None
    return dtype


def check_weight_index(folder: str | Path) -> None:
    """Raise `ModelError` if ``*.safetensors.index.json`` of a folder names a file outside of it, or of another format.

    transformers would open ``../../etc/passwd``, and unpickle a ``.bin``.
    """
    for index in sorted(Path(folder).glob("*.safetensors.index.json")):
        try:
            names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ModelError(f"{index} is not an index of weights; download the model again.") from None
        for name in names:
            parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
            rooted = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
            if rooted or ".." in parts or not name.endswith(".safetensors"):
                raise ModelError(
                    f"{index} names the file {name!r}, which is no .safetensors file of its folder; download the model "
                    "again."
                )
