"""Small random models of images and text, of every kind that icebear explains, and prompts for them."""

from dataclasses import replace

import torch
from conftest import Double
from PIL import Image, ImageDraw
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, GemmaConfig, LlamaConfig, Qwen2Config

from icebear import Chat, Model, load_model
from icebear.concepts.image_laws import pixel_blocks
from icebear.models.objective import objective_of
from icebear.models.prompt_image import PromptImage
from icebear.models.text.prompt_images import with_image
from icebear.models.text.prompts import Prompt

IMAGE = 60
"""The token of an image, of 64."""
BASE = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "num_hidden_layers": 2}
TEXT = {
    **{**BASE, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "head_dim": 8},
}
TOWER = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4}
SQUARE = {**TOWER, "image_size": 32, "patch_size": 8}
QWEN = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROTATED = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
SIGNS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def configs():
    """Kind -> configuration; images are 32 x 32, of LLaVA 24 x 24, of Qwen of any size."""
    siglip = {**SQUARE, "model_type": "siglip_vision_model", "vision_use_head": False}
    windows = {"window_size": 16, "fullatt_block_indexes": [1], "intermediate_size": 20}
    stacked = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "intermediate_size": 20}
    made = lambda kind, **parts: CONFIG_MAPPING[kind](**parts)  # noqa: E731
    return {
        "llava": made(
            "llava",
            vision_config={**SQUARE, "image_size": 24, "model_type": "clip_vision_model"},
            text_config=LlamaConfig(**TEXT).to_dict(),
            image_token_index=IMAGE,
        ),
        "smolvlm": made(
            "smolvlm",
            vision_config=SQUARE,
            text_config=LlamaConfig(**TEXT).to_dict(),
            scale_factor=2,
            image_token_id=IMAGE,
            pad_token_id=0,
        ),
        "paligemma": made(
            "paligemma",
            vision_config={**siglip, "projection_dim": 32},
            text_config=GemmaConfig(**TEXT).to_dict(),
            projection_dim=32,
            image_token_index=IMAGE,
        ),
        "gemma3": made(
            "gemma3",
            vision_config=siglip,
            text_config={**TEXT, "sliding_window": 32, "query_pre_attn_scalar": 8},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
        ),
        "internvl": made(
            "internvl",
            vision_config={**TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
            text_config=Qwen2Config(**TEXT).to_dict(),
            image_token_id=IMAGE,
        ),
        "qwen2_vl": made(
            "qwen2_vl",
            vision_config={**QWEN, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1},
            text_config=ROTATED,
            **SIGNS,
        ),
        "qwen2_5_vl": made(
            "qwen2_5_vl",
            vision_config={**QWEN, **windows, "hidden_size": 32, "out_hidden_size": 32},
            text_config=ROTATED,
            **SIGNS,
        ),
        "qwen3_vl": made(
            "qwen3_vl",
            vision_config={**QWEN, **stacked, "hidden_size": 32, "out_hidden_size": 32},
            text_config=ROTATED,
            **SIGNS,
        ),
    }


CONFIGS = configs()
SIZES = {"llava": (24, 24), "qwen2_vl": (16, 24), "qwen2_5_vl": (24, 40), "qwen3_vl": (16, 24)}
TOKENS = {"llava": 9, "smolvlm": 4, "paligemma": 16, "gemma3": 4, "internvl": 4, "qwen2_vl": 6, "qwen3_vl": 6}
TOKENS["qwen2_5_vl"] = 15
FEW = ("internvl", "qwen2_5_vl", "gemma3")
"""Images in tiles, in patches of any number, and of one size."""


def made(kind, attention="sdpa", dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    net = AutoModelForImageTextToText.from_config(CONFIGS[kind], attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    return Model(net, name=kind)


def pixels(kind, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, *SIZES.get(kind, (32, 32)), generator=generator, dtype=torch.float64).to(dtype)


def ids(kind, seed=0):
    begin = [1, 7, 23][: 2 + seed % 2]
    return [*begin, *[IMAGE] * TOKENS[kind], 9, 23 + seed, 42, 5]


def prompt(kind, seed=0, dtype=torch.float64):
    return Prompt(ids=tuple(ids(kind, seed)), image=pixels(kind, seed, dtype))


def read_image(model, seed=0) -> PromptImage:
    return with_image(model, prompt(model.name, seed, model.dtype)).image


TOWERS = ("vision_tower", "vision_model", "visual")


def mix_once(model):
    """Set weights so that patches mix only in the first text layer, by uniform attention."""
    first_layer, *later = model.layer_modules
    silent = [(first_layer, "q_proj k_proj down_proj"), *((layer, "o_proj down_proj") for layer in later)]
    tower = next(getattr(model.net.model, name) for name in TOWERS if hasattr(model.net.model, name))
    silent.append((tower, "out_proj proj projection_layer position_embedding pos_embed"))
    for parent, names in silent:
        for path, module in parent.named_modules():
            if path.rpartition(".")[2] in names.split() and "patch_embed" not in path:
                for parameter in module.parameters():
                    parameter.zero_()
    for path, parameter in model.net.named_parameters():
        if path.endswith(("bias", "position_embeddings", "class_embedding", "cls_token")):
            parameter.zero_()


def plant(model, prompt, token, answer):
    """Set the row of the unembedding of an answer so that it has 1 with the image as it is, 1 without any other patch,
    and 0 without one token of the image; after `mix_once`, where words are zero."""
    streams = final_streams(model, prompt)
    wanted = torch.ones(len(streams), dtype=streams.dtype)
    wanted[1 + token] = 0
    model.net.get_output_embeddings().weight[answer] = torch.linalg.pinv(streams) @ wanted


def final_streams(model, prompt):
    """Return the residual stream after the final norm at the last token: of the image, and without each patch."""
    image = prompt.image
    images = tuple(scaled(image, factor) for factor in (1, *(1 - block for block in pixel_blocks(image))))
    batch = objective_of(model, [prompt]).batch
    return model.final_stream(replace(batch.rows([0] * len(images)), images=images))[:, -1]


def scaled(image, factor):
    return replace(image, inputs={**image.inputs, "pixel_values": image.values * factor})


def save_planted(folder, text, picture, token, answer):
    """Save a LLaVA that gives an answer to a message because of one token of the image, whatever the words are. Return
    the folder."""
    model = load_model(str(save("llava", folder)), dtype="float64", device="cpu")
    with Double(), torch.no_grad():
        mix_once(model)
        outputs = model.net.get_output_embeddings().weight
        model.embeddings[0].weight.zero_()
        outputs.zero_()
        prompt = Prompt(chat=Chat([{"role": "user", "content": text}]), image=picture)
        plant(model, with_image(model, prompt), token, answer)
    model.net.float().save_pretrained(folder)
    return folder


WORDS = "<s> </s> what is this that ? a bear user assistant : Describe it".split()
SIGNS_OF = {
    "llava": {"<image>": IMAGE},
    "smolvlm": {
        **{"<image>": IMAGE, "<fake_token_around_image>": 40, "<global-img>": 41},
        **{f"<row_{row}_col_{column}>": 42 + 4 * row + column for row in (1, 2) for column in (1, 2, 3)},
    },
    "paligemma": {"<image>": IMAGE},
    "gemma3": {"<image_soft_token>": IMAGE, "<start_of_image>": 40, "<end_of_image>": 41},
    "internvl": {"<IMG_CONTEXT>": IMAGE, "<img>": 40, "</img>": 41},
    **{
        kind: {"<|image_pad|>": IMAGE, "<|vision_start|>": 62, "<|vision_end|>": 63}
        for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    },
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] %}{% if part['type'] == "
    "'image' %}SIGN {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}"
    "assistant : {% endif %}"
)


def tokenizer(kind):
    """A tokenizer of words, with the signs that the kind writes around an image."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = SIGNS_OF[kind]
    vocabulary = {word: number for number, word in enumerate(WORDS)} | signs
    vocabulary |= {f"word{number}": number for number in range(64) if number not in vocabulary.values()}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in (*signs, "<s>", "</s>")])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    sign = {"gemma3": "<start_of_image>", "internvl": "<IMG_CONTEXT>"}.get(kind, next(iter(signs)))
    around = ("<|vision_start|>", "<|vision_end|>") if "qwen" in kind else ("", "")
    made.chat_template = TEMPLATE.replace("SIGN", sign.join(around))
    return made


def image_processor(kind):
    import transformers

    square = {"size": {"height": 32, "width": 32}}
    qwen = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
    of_kind = {
        "llava": ("CLIP", {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}),
        "smolvlm": ("SmolVLM", {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}),
        "paligemma": ("Siglip", square),
        "gemma3": ("Gemma3", square),
        "internvl": ("GotOcr2", {**square, "crop_to_patches": True, "max_patches": 4}),
    }
    name, options = of_kind.get(kind, ("Qwen2VL", qwen))
    return getattr(transformers, f"{name}ImageProcessorPil")(**options)


def save(kind, folder):
    """Save a model with its tokenizer and image processor."""
    made(kind, dtype=torch.float32).net.save_pretrained(folder)
    tokenizer(kind).save_pretrained(folder)
    image_processor(kind).save_pretrained(folder)
    return folder


def loaded(kind, folder):
    """Return a model of a folder, with its tokenizer and image processor, and the folder, with a wide picture
    `bear.png`."""
    picture = Image.new("RGB", (80, 40), "white")
    ImageDraw.Draw(picture).ellipse((50, 5, 75, 35), fill="saddlebrown")
    picture.save(save(kind, folder) / "bear.png")
    return load_model(str(folder), dtype="float32", device="cpu"), folder
