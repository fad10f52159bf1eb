"""Small random models with a tower for texts and one for images, and pairs for them."""

import torch
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

END = 63
TEXT = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": END, "bos_token_id": 0, "pad_token_id": 1},
}
VISION = {
    **{"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 32, "patch_size": 8},
}
KINDS = {"clip": (CLIPConfig, CLIPModel), "siglip": (SiglipConfig, SiglipModel)}
IDS = [[0, 5, 9, 12, END], [0, 7, 9, 2, END]]


def made(kind):
    config, model = KINDS[kind]
    more = {"projection_dim": 20} if kind == "clip" else {}
    torch.manual_seed(0)
    net = model(config(text_config={**TEXT, "projection_size": 24}, vision_config=VISION, **more)).double().eval()
    for parameter in net.parameters():
        parameter.data.normal_(0, 0.3)
    return net


def images(count=2):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
