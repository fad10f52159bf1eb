"""*Alone*, *without* and swaps by hooks on the modules of transformers, one row a pass, written apart from icebear."""

from contextlib import ExitStack

import torch
import torch.nn.functional as F

MODULES = {
    "llama": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj"),
    "gemma3_text": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj"),
    "gpt2": ("transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"),
    "bert": ("bert.encoder.layer.{}.attention.output.dense", "bert.encoder.layer.{}.output.dense"),
    "mixtral": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp"),
}
"""What reads heads, and what reads FFN neurons; of a mixture of experts, its block."""


def modules(net):
    """Return (kind, layer) -> the module; the layers of a decoder follow those of its encoder."""
    if net.config.model_type == "t5":
        read = {}
        for layer in range(2 * net.config.num_layers):
            stack, block = divmod(layer, net.config.num_layers)
            parts = (net.decoder if stack else net.encoder).block[block].layer
            read |= {("attn", layer): parts[0].SelfAttention.o, ("ffn", layer): parts[-1].DenseReluDense.wo}
            if stack:
                read["cross", layer] = parts[1].EncDecAttention.o
        return read
    paths = zip(("attn", "ffn"), MODULES[net.config.model_type], strict=True)
    layers = range(net.config.num_hidden_layers)
    return {(kind, layer): net.get_submodule(path.format(layer)) for kind, path in paths for layer in layers}


def mixture(block, x, change):
    """Run the block of a Mixtral, all experts on all tokens."""
    scores = F.softmax(F.linear(x, block.gate.weight), -1)
    best = scores.topk(block.gate.top_k, -1)
    weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    weights = change("router", weights)
    each = [F.linear(x, weight).chunk(2, -1) for weight in block.experts.gate_up_proj]
    silent = weights.repeat_interleave(block.experts.down_proj.shape[-1], -1) == 0
    neurons = torch.cat([F.silu(gate) * up for gate, up in each], -1).masked_fill(silent, 0)
    parts = change("ffn", neurons).chunk(len(each), -1)
    written = [F.linear(part, weight) for part, weight in zip(parts, block.experts.down_proj, strict=True)]
    return sum(part * weights[..., expert, None] for expert, part in enumerate(written))


@torch.no_grad()
def run(net, inputs, change):
    """Return the logits (T, V) where `change(kind, layer, x)` replaces the values of nodes (1, T, N)."""
    with ExitStack() as undo:
        for (kind, layer), module in modules(net).items():
            if hasattr(module, "experts"):
                inside = lambda part, x, layer=layer: change(part, layer, x)  # noqa: E731
                hook = lambda block, args, _, inside=inside: mixture(block, args[0], inside)  # noqa: E731
                undo.callback(module.register_forward_hook(hook).remove)
            else:
                hook = lambda _, args, kind=kind, layer=layer: (change(kind, layer, args[0]),)  # noqa: E731
                undo.callback(module.register_forward_pre_hook(hook).remove)
        return net(**inputs).logits[0]


class Reference:
    """Two prompts as inputs of the network, and the logits at an output position."""

    def __init__(self, net, prompt, counterfactual, output=-1):
        self.net, self.inputs, self.output, self.values = net, prompt, output, {}
        self.prompt = run(net, prompt, lambda kind, layer, x: x)[output]
        self.counterfactual = run(net, counterfactual, self._record)[output]

    def _record(self, kind, layer, x):
        self.values[kind, layer] = x
        return x

    def logits(self, free):
        """free: (kind, layer, T, N) -> the mask (T, N) of the values that are recomputed."""

        def change(kind, layer, x):
            return torch.where(free(kind, layer, *x.shape[1:]), x, self.values[kind, layer])

        return run(self.net, self.inputs, change)[self.output]
