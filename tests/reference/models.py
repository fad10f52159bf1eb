"""Forward passes of small models on the tape of `tests/reference/attnlrp.py`, written out from their papers."""

import math
import re
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from icebear.lrp.linear_rules import Epsilon
from reference.attnlrp import Tape


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def squared_relu(x):
    return F.relu(x) ** 2


def apply(tape, module, v):
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    return tape.linear(v, weight, getattr(module, "bias", None), tape.rules.get(id(module)))


def causal(T):
    return torch.ones(T, T).tril().bool()


def place(value, start):
    """Where the value's tokens begin among all tokens."""
    value.start = start
    return value


def norm(tape, v, module):
    """LayerNorm, or RMSNorm; the gain is 1 + weight in Gemma and Nemotron. OLMo's has none."""
    kind = type(module).__name__
    if "LayerNorm" in kind:
        weight = getattr(module, "weight", torch.ones(v.x.shape[-1])) + ("1P" in kind)
        bias = getattr(module, "bias", None)
        eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), 1e-5)
        return tape.layer_norm(v, SimpleNamespace(weight=weight, bias=0 * weight if bias is None else bias, eps=eps))
    eps = next(getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name))
    return tape.rms(v, module.weight + ("Gemma" in kind), eps)


BEHIND = {"olmo2", "olmo3", "exaone4"}
"""Their norms are behind attention and FFN only."""
PAIRS = {"cohere", "cohere2", "helium", "glm", "glm4", "ernie4_5", "deepseek_v3"}
"""Their rotary embedding turns neighbours."""
WITH_DENSE = {"glm4_moe", "deepseek_v3"}
"""Their first layers have an FFN in place of the experts."""
ONLY_SLIDING = {"cohere2", "exaone4"}
"""Only their sliding layers are rotated."""
F_OF = {"starcoder2": gelu_tanh, "arcee": squared_relu, "nemotron": squared_relu}


@torch.no_grad()
def llama(tape, net, ids):
    """Llama and what is built like it, also as a mixture of experts."""
    core, config, model = net.model, net.config, net.config.model_type
    H, KV, T = config.num_attention_heads, config.num_key_value_heads, len(ids)
    d = getattr(config, "head_dim", None) or config.hidden_size // H
    scale = getattr(config, "attention_multiplier", getattr(config, "query_pre_attn_scalar", d) ** -0.5)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    leaf = tape.leaf(core.embed_tokens(torch.tensor(ids)))
    h = tape.scale(leaf, getattr(config, "embedding_multiplier", 1.0))
    residual = getattr(config, "residual_multiplier", 1.0)
    for number, layer in enumerate(core.layers):
        attention, mlp = layer.self_attn, layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        first, between, second, behind = norms_of(layer, model)
        n = norm(tape, h, first) if first else h
        position = rotation(tape, core, config, h, number, kinds[number])
        if model == "deepseek_v3":
            parts, scale = latent(tape, attention, config, n, H, position), attention.scaling
        else:
            raw = qkv_of(tape, attention, n, H, KV, d)
            for name, part in zip("qkv", raw, strict=True):
                tape.tag(name, number, part)
            parts = [query_or_key(tape, attention, "qk"[i], raw[i], (H, KV)[i], d, position) for i in range(2)]
            parts.append(tape.heads(raw[2], KV))
        mask = causal(T)
        window = config.sliding_window if "sliding" in kinds[number] or model == "mistral" else 0
        if window:
            mask &= ~torch.ones(T, T).tril(-window).bool()
        cap = getattr(config, "attn_logit_softcapping", None)
        sinks = attention.sinks.view(-1, 1, 1).expand(-1, T, 1) if hasattr(attention, "sinks") else None
        heads = tape.attention(*parts, mask, scale, cap=cap, sinks=sinks)
        o = apply(tape, attention.o_proj, tape.tag("attn", number, heads))
        o = tape.scale(norm(tape, o, between) if between else o, residual)
        if model not in ("cohere", "cohere2"):  # they compute both from the same
            h, o = tape.add(h, o), None
        n = norm(tape, h, second) if second else h
        if hasattr(mlp, "experts"):
            down = mixture(tape, mlp, n, number, config)
        else:  # of a mixture, a layer without experts has no neurons
            down = ffn(tape, mlp, n, number, model, "dense" if model in WITH_DENSE else "ffn")
        down = tape.scale(norm(tape, down, behind) if behind else down, residual)
        h = tape.add(*([h, down] if o is None else [h, o, down]))
    final = tape.move(norm(tape, h, core.norm), lambda n: n[-1])
    logits = tape.linear(final, net.lm_head.weight)
    logits = tape.scale(logits, getattr(config, "logit_scale", 1 / getattr(config, "logits_scaling", 1)))
    return [leaf], tape.softcap(logits, getattr(config, "final_logit_softcapping", None))


def norms_of(layer, model):
    """Before and behind attention, before and behind the FFN; None where there is none."""
    named = lambda *names: next((getattr(layer, name) for name in names if hasattr(layer, name)), None)  # noqa: E731
    if model in ("cohere", "cohere2"):
        return layer.input_layernorm, None, layer.input_layernorm, None
    if model in BEHIND:
        return None, layer.post_attention_layernorm, None, layer.post_feedforward_layernorm
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 2 and 3
        between, second = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
    else:
        between = named("post_self_attn_layernorm")  # GLM 4
        second = named("post_attention_layernorm", "feedforward_layernorm")
    behind = named("post_feedforward_layernorm", "post_mlp_layernorm")
    return named("input_layernorm", "attention_layernorm"), between, second, behind


def qkv_of(tape, attention, n, H, KV, d):
    if not hasattr(attention, "qkv_proj"):
        return [apply(tape, getattr(attention, f"{name}_proj"), n) for name in "qkv"]
    fused = apply(tape, attention.qkv_proj, n)
    bounds = [0, H * d, (H + KV) * d, (H + 2 * KV) * d]
    return [tape.move(fused, lambda x, i=i: x[:, bounds[i] : bounds[i + 1]]) for i in range(3)]


def rotation(tape, core, config, h, number, kind):
    """What turns queries and keys of a layer; nothing where positions do not come in."""
    model, T = config.model_type, len(h.x)
    if model == "smollm3" and not config.no_rope_layers[number]:
        return lambda part: part
    if model in ONLY_SLIDING and "sliding" not in kind:
        return lambda part: part
    own = [kind] if model in ("gemma3_text", "olmo3") else []
    cos, sin = (x[0] for x in core.rotary_emb(h.x[None], torch.arange(T)[None], *own))
    if model == "gpt_oss":  # told once for both halves
        cos, sin = (torch.cat((x, x), -1) for x in (cos, sin))
    if model in PAIRS and "cohere" not in model:  # Cohere's are made so
        cos, sin = (x[:, : x.shape[1] // 2].repeat_interleave(2, 1) for x in (cos, sin))
    return lambda part: tape.rotate(part, cos, sin, number, pairs=model in PAIRS)


def query_or_key(tape, attention, name, part, count, d, position):
    normed = getattr(attention, f"{name}_norm", None)
    wide = normed is not None and normed.weight.shape[0] > d  # OLMo 2: of all heads together
    part = norm(tape, part, normed) if wide else part
    part = tape.heads(part, count)
    part = position(norm(tape, part, normed) if normed is not None and not wide else part)
    late = getattr(attention, {"q": "query_layernorm", "k": "key_layernorm"}[name], None)  # Hunyuan
    return norm(tape, part, late) if late is not None else part


def latent(tape, attention, config, n, H, position):
    """DeepSeek's: queries, keys and values out of a few numbers each; a part of queries and of one key is rotated."""
    own, rank = config.qk_nope_head_dim, config.kv_lora_rank
    part = lambda v, start, stop: tape.move(v, lambda x: x[..., start:stop])  # noqa: E731
    q = apply(tape, attention.q_b_proj, norm(tape, apply(tape, attention.q_a_proj, n), attention.q_a_layernorm))
    q = tape.heads(q, H)
    q = tape.join([part(q, 0, own), position(part(q, own, None))], -1)
    small = apply(tape, attention.kv_a_proj_with_mqa, n)
    shared = position(tape.heads(part(small, rank, None), 1))
    kv = tape.heads(apply(tape, attention.kv_b_proj, norm(tape, part(small, 0, rank), attention.kv_a_layernorm)), H)
    k = tape.join([part(kv, 0, own), tape.move(shared, lambda x: x.expand(H, -1, -1))], -1)
    return [q, k, part(kv, own, None)]


def ffn(tape, mlp, n, number, model, site="ffn"):
    f = F_OF.get(model, gelu_tanh if "gemma" in model else F.silu)
    f = mlp.act_fn if model == "apertus" else f  # it is learned
    if hasattr(mlp, "gate_up_proj"):
        fused = apply(tape, mlp.gate_up_proj, n)
        gate, up = (tape.move(fused, lambda x, i=i: x.chunk(2, -1)[i]) for i in range(2))
    elif hasattr(mlp, "gate_proj"):
        gate, up = apply(tape, mlp.gate_proj, n), apply(tape, mlp.up_proj, n)
    else:
        gate, up = apply(tape, getattr(mlp, "c_fc" if model == "starcoder2" else "up_proj"), n), None
    inner = tape.act(gate, f) if up is None else tape.mul(tape.act(gate, f), up)
    return apply(tape, getattr(mlp, "c_proj", None) or mlp.down_proj, tape.tag(site, number, inner))


def mixture(tape, mlp, n, number, config):
    """Every expert on every token, times its weight (0 where it is not chosen), and the one that all tokens take."""
    experts, D, model = mlp.experts, n.x.shape[-1], config.model_type
    weights, chosen, constant = routed(tape, getattr(mlp, "gate", None) or mlp.router, n, config)
    tape.tag("router", number, weights)
    neurons, outputs = [], []
    for e in range(len(experts.down_proj)):
        neurons.append(tape.scale(expert(tape, experts, n, e), chosen[:, e, None]))
    joined, width = tape.tag("ffn", number, tape.join(neurons, -1)), neurons[0].x.shape[-1]
    for e in range(len(experts.down_proj)):
        x = tape.move(joined, lambda places, e=e: places[:, e * width : (e + 1) * width])
        x = silent_linear(tape, x, *expert_map(experts, "down", e))
        weight = tape.move(weights, lambda places, e=e: places[:, e, None].expand(-1, D))
        outputs.append(tape.scale(x, weight.x) if constant else tape.weigh(x, weight, chosen[:, e, None]))
    shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
    if shared is not None:
        own = ffn(tape, shared, n, number, model, "shared")
        if model == "qwen2_moe":
            own = tape.mul(own, tape.act(apply(tape, mlp.shared_expert_gate, n), torch.sigmoid))
        outputs.append(own)
    return tape.add(*outputs)


def routed(tape, router, n, config):
    """The experts' weights (T, E), which are chosen, and whether the weights are constants."""
    held, model = tape.method.softmax == "constant", config.model_type
    logits = tape.linear(n, router.weight, getattr(router, "bias", None))
    if model in ("gpt_oss", "granitemoe"):  # a softmax of those that are chosen
        chosen = torch.zeros_like(logits.x).scatter(1, logits.x.topk(router.top_k, -1).indices, 1.0)
        excluded = torch.zeros_like(logits.x).masked_fill(chosen == 0, -torch.inf)
        if held:
            return tape.leaf((logits.x + excluded).softmax(-1)), chosen, True
        return tape.softmax(tape.constant(logits, excluded, "biases")), chosen, False
    if model in WITH_DENSE:
        s = tape.act(logits, torch.sigmoid)
        groups = s.x.view(len(s.x), router.num_group, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(router.topk_group, -1).indices
        inside = torch.zeros(groups.shape[:2]).scatter(1, best, 1.0)[..., None].expand(groups.shape).flatten(1)
        among, held = s.x.masked_fill(inside == 0, -torch.inf), False
    else:
        s = tape.leaf(logits.x.softmax(-1)) if held else tape.softmax(logits)
        among = s.x
    chosen = torch.zeros_like(s.x).scatter(1, among.topk(router.top_k, -1).indices, 1.0)
    weights = tape.choose(s, chosen)
    weights = tape.normalize(weights) if getattr(config, "norm_topk_prob", True) else weights
    return tape.scale(weights, getattr(config, "routed_scaling_factor", 1)), chosen, held


def expert_map(experts, name, e):
    """(out, in), and the bias."""
    weight, bias = getattr(experts, f"{name}_proj")[e], getattr(experts, f"{name}_proj_bias", None)
    return (weight, None) if bias is None else (weight.T, bias[e])  # GPT-OSS


def expert(tape, experts, n, e):
    both = tape.linear(n, *expert_map(experts, "gate_up", e))
    if not hasattr(experts, "gate_up_proj_bias"):
        gate, up = (tape.move(both, lambda x, i=i: x.chunk(2, -1)[i]) for i in range(2))
        return tape.mul(tape.act(gate, F.silu), up)
    gate, up = (tape.move(both, lambda x, i=i: x[:, i::2]) for i in range(2))  # GPT-OSS
    gate = tape.act(gate, lambda x: x.clamp(max=7))
    up = tape.constant(tape.act(up, lambda x: x.clamp(-7, 7)), torch.ones(()), "biases")
    return tape.mul(up, tape.mul(gate, tape.act(tape.scale(gate, 1.702), torch.sigmoid)))


def silent_linear(tape, v, weight, bias):
    """A linear map of rows that may all be zero, which get nothing."""
    rows = (v.x != 0).any(-1).nonzero().flatten()
    part = tape.linear(tape.move(v, lambda n: n[rows]), weight, bias)
    empty = tape.leaf(torch.zeros(1, part.x.shape[-1], dtype=v.x.dtype))
    where = torch.full((len(v.x),), len(rows)).scatter(0, rows, torch.arange(len(rows)))
    return tape.move(tape.join([part, empty], 0), lambda n: n[where])


def bloom_gelu(x):
    return x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))  # its constants are rounded


GPTS = {
    "gpt2": {
        "core": "transformer",
        "embed": "wte",
        "layers": "h",
        "norms": ("ln_1", "ln_2"),
        "final": "ln_f",
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "fc": ("mlp.c_fc", "mlp.c_proj"),
        "f": gelu_tanh,
    },
    "gptj": {
        "core": "transformer",
        "embed": "wte",
        "layers": "h",
        "norms": ("ln_1", "ln_1"),
        "final": "ln_f",
        "qkv": "attn.{}_proj",
        "o": "attn.out_proj",
        "fc": ("mlp.fc_in", "mlp.fc_out"),
        "f": gelu_tanh,
        "parallel": True,
    },
    "phi": {
        "core": "model",
        "embed": "embed_tokens",
        "layers": "layers",
        "norms": ("input_layernorm",) * 2,
        "final": "final_layernorm",
        "qkv": "self_attn.{}_proj",
        "o": "self_attn.dense",
        "fc": ("mlp.fc1", "mlp.fc2"),
        "f": gelu_tanh,
        "parallel": True,
    },
    "gpt_neox": {
        "core": "gpt_neox",
        "embed": "embed_in",
        "layers": "layers",
        "norms": ("input_layernorm", "post_attention_layernorm"),
        "final": "final_layer_norm",
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "fc": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "f": F.gelu,
    },
    "opt": {
        "core": "model.decoder",
        "embed": "embed_tokens",
        "layers": "layers",
        "norms": ("self_attn_layer_norm", "final_layer_norm"),
        "final": "final_layer_norm",
        "qkv": "self_attn.{}_proj",
        "o": "self_attn.out_proj",
        "fc": ("fc1", "fc2"),
        "f": F.relu,
    },
    "bloom": {
        "core": "transformer",
        "embed": "word_embeddings",
        "layers": "h",
        "norms": ("input_layernorm", "post_attention_layernorm"),
        "final": "ln_f",
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "fc": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "f": bloom_gelu,
    },
    "falcon": {
        "core": "transformer",
        "embed": "word_embeddings",
        "layers": "h",
        "norms": ("input_layernorm",) * 2,
        "final": "ln_f",
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "fc": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "f": F.gelu,
        "parallel": True,
    },
}


@torch.no_grad()
def gpt(tape, net, ids):
    """The families with LayerNorm and a plain FFN, by `GPTS`."""
    config, T = net.config, len(ids)
    kind, spec, H = config.model_type, GPTS[config.model_type], config.num_attention_heads
    core = net.get_submodule(spec["core"])
    parallel = getattr(config, "use_parallel_residual", spec.get("parallel", False))
    leaf = h = tape.leaf(core.get_submodule(spec["embed"])(torch.tensor(ids)))
    behind = not getattr(config, "do_layer_norm_before", True)  # OPT-350m
    if kind == "gpt2":
        h = learned(tape, h, core.wpe.weight[:T])
    if kind == "opt":
        h = apply(tape, core.project_in, h) if core.project_in else h
        h = learned(tape, h, core.embed_positions.weight[2 : T + 2])
    if kind == "bloom":
        h = tape.layer_norm(h, core.word_embeddings_layernorm)
    d = config.hidden_size // H
    bias = None
    if kind == "bloom" or getattr(config, "alibi", False):  # a slope times the key's position
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / H) for head in range(H)], dtype=torch.float64)[:, None, None]
        rounded = kind == "falcon"  # which computes it in bfloat16, and divides it like the scores
        bias = (slopes.bfloat16() * torch.arange(T)).double() / d**0.5 if rounded else slopes * torch.arange(T)
    for number, layer in enumerate(core.get_submodule(spec["layers"])):
        first, second = spec["norms"]
        if hasattr(layer, "ln_attn"):
            first, second = "ln_attn", "ln_mlp"
        n = h if behind else tape.layer_norm(h, getattr(layer, first))
        if "{}" in spec["qkv"]:
            raw = [apply(tape, layer.get_submodule(spec["qkv"].format(name)), n) for name in "qkv"]
        else:
            raw = split(tape, apply(tape, layer.get_submodule(spec["qkv"]), n), kind, H, d)
        parts = []
        for name, part in zip("qkv", raw, strict=True):
            part = tape.heads(tape.tag(name, number, part), part.x.shape[-1] // d)
            parts.append(part if name == "v" else rotated(tape, core, layer, part, number))
        heads = tape.tag("attn", number, tape.attention(*parts, causal(T), d**-0.5, bias, number))
        o = apply(tape, layer.get_submodule(spec["o"]), heads)
        if not parallel:
            h = tape.add(h, o)
        h = tape.layer_norm(h, getattr(layer, first)) if behind else h
        n = h if behind else tape.layer_norm(h, getattr(layer, second))
        up, down = (layer.get_submodule(path) for path in spec["fc"])
        written = apply(tape, down, tape.tag("ffn", number, tape.act(apply(tape, up, n), spec["f"])))
        h = tape.add(h, o, written) if parallel else tape.add(h, written)
        h = tape.layer_norm(h, getattr(layer, second)) if behind else h
    h = h if behind else tape.layer_norm(h, core.get_submodule(spec["final"]))
    final = tape.move(h, lambda n: n[-1])
    if getattr(core, "project_out", None):
        final = apply(tape, core.project_out, final)
    head = net.get_output_embeddings()
    return [leaf], apply(tape, head, final)


def split(tape, fused, kind, H, d):
    """q, k and v of one map."""
    T, total = fused.x.shape
    if kind == "gpt2":
        return [tape.move(fused, lambda x, i=i: x.chunk(3, -1)[i]) for i in range(3)]
    groups = (total // d - H) // 2  # each has its query heads, one key and one value
    each = H // groups
    places = [slice(0, each), slice(each, each + 1), slice(each + 1, each + 2)]
    return [tape.move(fused, lambda x, p=p: x.view(T, groups, each + 2, d)[:, :, p].flatten(1)) for p in places]


def rotated(tape, core, layer, part, number):
    T = part.x.shape[1]
    if hasattr(layer, "attn") and hasattr(layer.attn, "embed_positions"):  # GPT-J
        sin, cos = (x.repeat_interleave(2, -1) for x in layer.attn.embed_positions[:T].double().chunk(2, -1))
        return tape.rotate(part, cos, sin, number, pairs=True)
    if not hasattr(core, "rotary_emb") or getattr(core, "use_alibi", False):
        return part
    cos, sin = core.rotary_emb(part.x, torch.arange(T)[None])
    return tape.rotate(part, cos[0], sin[0], number)


def learned(tape, v, positions):
    if tape.method.positions:
        return tape.add(v, tape.position(positions, 0, -2))
    return tape.constant(v, positions, "positions")


@torch.no_grad()
def t5(tape, net, ids, written=(0,)):
    """An encoder, and a decoder that looks at it; relative bias on the scores, no scale."""
    config, start = net.config, len(ids)
    memory = None
    leaves = []
    for stack, tokens in ((net.encoder, list(ids)), (net.decoder, list(written))):
        T, first = len(tokens), memory is not None
        h = tape.leaf(stack.embed_tokens(torch.tensor(tokens)))
        leaves.append(h)
        bias = relative_bias(stack.block[0].layer[0].SelfAttention, T)
        for number, block in enumerate(stack.block, start=config.num_layers * first):
            offset = start * first
            h = t5_attention(tape, block.layer[0], h, None, bias, number, offset, causal(T) if first else None)
            if first:
                h = t5_attention(tape, block.layer[1], h, memory, None, number, offset, None)
            n = tape.rms(h, block.layer[-1].layer_norm.weight, config.layer_norm_epsilon)
            ffn = block.layer[-1].DenseReluDense
            if config.is_gated_act:
                inner = tape.mul(tape.act(apply(tape, ffn.wi_0, n), gelu_tanh), apply(tape, ffn.wi_1, n))
            else:
                inner = tape.act(apply(tape, ffn.wi, n), F.relu)
            inner = place(tape.tag("ffn", number, inner), offset)
            h = tape.add(h, apply(tape, ffn.wo, inner))
        memory = tape.rms(h, stack.final_layer_norm.weight, config.layer_norm_epsilon)
    final = tape.move(memory, lambda n: n[-1])
    if config.scale_decoder_outputs:
        final = tape.scale(final, config.d_model**-0.5)
    return leaves, tape.linear(final, net.lm_head.weight)


def t5_attention(tape, part, h, memory, bias, number, offset, mask):
    n = tape.rms(h, part.layer_norm.weight, part.layer_norm.variance_epsilon)
    attention = part.EncDecAttention if memory else part.SelfAttention
    parts = [apply(tape, getattr(attention, "qkv"[i]), memory if memory and i else n) for i in range(3)]
    if memory is None:
        for name, value in zip("qkv", parts, strict=True):
            place(tape.tag(name, number, value), offset)
    before = len(tape.positions.get(number, ()))
    out = tape.attention(*(tape.heads(x, attention.n_heads) for x in parts), mask, 1.0, bias, number)
    for sink, _ in tape.positions.get(number, ())[before:]:
        place(sink, offset)
    place(tape.tag("cross" if memory else "attn", number, out), offset)
    return tape.add(h, apply(tape, attention.o, out))


def relative_bias(attention, T):
    """(H, T, T) a learned bias by bucket of the distance: the first half exact, the others logarithmic."""
    count, max_distance = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    bias = torch.zeros(attention.n_heads, T, T, dtype=torch.float64)
    for i in range(T):
        for j in range(T):
            buckets, bucket, distance = count, 0, i - j
            if not attention.is_decoder:
                buckets //= 2
                bucket, distance = (buckets, j - i) if j > i else (0, i - j)
            distance = max(distance, 0)
            exact = buckets // 2
            if distance >= exact:
                far = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
                distance = min(exact + int(far), buckets - 1)
            bias[:, i, j] = attention.relative_attention_bias.weight[bucket + distance]
    return bias


@torch.no_grad()
def bert(tape, net, ids):
    """BERT and DistilBERT: norms on the stream behind each part, no mask; a masked language model at the mask (49)."""
    T, H, old = len(ids), net.config.num_attention_heads, net.config.model_type == "bert"
    core = net.bert if old else net.distilbert
    leaf = h = tape.leaf(core.embeddings.word_embeddings(torch.tensor(ids)))
    if old:
        h = tape.constant(h, core.embeddings.token_type_embeddings.weight[0].expand(T, -1), "biases")
    h = learned(tape, h, core.embeddings.position_embeddings.weight[:T])
    h = tape.layer_norm(h, core.embeddings.LayerNorm)
    for number, layer in enumerate(core.encoder.layer if old else core.transformer.layer):
        if old:
            maps, out = layer.attention.self, layer.attention.output
            q, k, v, o, first = maps.query, maps.key, maps.value, out.dense, out.LayerNorm
            up, down, second = layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm
        else:
            maps = layer.attention
            q, k, v, o, first = maps.q_lin, maps.k_lin, maps.v_lin, maps.out_lin, layer.sa_layer_norm
            up, down, second = layer.ffn.lin1, layer.ffn.lin2, layer.output_layer_norm
        parts = [tape.heads(tape.tag(n, number, apply(tape, m, h)), H) for n, m in zip("qkv", (q, k, v), strict=True)]
        heads = tape.tag("attn", number, tape.attention(*parts, None, (net.config.hidden_size // H) ** -0.5))
        h = tape.layer_norm(tape.add(apply(tape, o, heads), h), first)
        inner = tape.tag("ffn", number, tape.act(apply(tape, up, h), F.gelu))
        h = tape.layer_norm(tape.add(apply(tape, down, inner), h), second)
    at = tape.move(h, lambda n: n[ids.index(49)])
    head = net.cls.predictions if old else None
    change, after = (
        (head.transform.dense, head.transform.LayerNorm) if old else (net.vocab_transform, net.vocab_layer_norm)
    )
    last = tape.layer_norm(tape.act(apply(tape, change, at), F.gelu), after)
    return [leaf], apply(tape, head.decoder if old else net.vocab_projector, last)


def patches(tape, conv, pixels):
    """Patches by a convolution written as the matrix it is: (leaf of the pixels, (patches, D))."""
    P = conv.kernel_size[0]
    leaf = tape.leaf(pixels)
    rows, columns = pixels.shape[1] // P, pixels.shape[2] // P
    cut = tape.move(leaf, lambda x: x.view(3, rows, P, columns, P).permute(1, 3, 0, 2, 4).reshape(rows * columns, -1))
    return leaf, tape.linear(cut, conv.weight.flatten(1), conv.bias, tape.method.conv or tape.method.linear)


def own(tape, embeddings, *names):
    """The model's own tokens: the weights (1, N, D) or (D,) of these that it has; their relevance counts as biases."""
    weights = [getattr(embeddings, name) for name in names if hasattr(embeddings, name)]
    tape.own = [tape.leaf(weight.reshape(-1, weight.shape[-1])) for weight in weights]
    return tape.own


def vision_layer(tape, number, h, norms, attention, mlp, H, scales=(1, 1)):
    """One layer; mlp takes the normalized stream. scales: those of DINOv2's layer scales."""
    n = norm(tape, h, norms[0])
    maps = [getattr(attention, f"{name}_proj") for name in "qkv"]
    parts = [tape.heads(tape.tag(name, number, apply(tape, m, n)), H) for name, m in zip("qkv", maps, strict=True)]
    heads = tape.tag("attn", number, tape.attention(*parts, None, (h.x.shape[-1] // H) ** -0.5))
    output = attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj
    h = tape.add(h, tape.scale(apply(tape, output, heads), scales[0]))
    return tape.add(h, tape.scale(mlp(norm(tape, h, norms[1])), scales[1]))


def ungated(tape, number, mlp, f):
    return lambda n: apply(tape, mlp.fc2, tape.tag("ffn", number, tape.act(apply(tape, mlp.fc1, n), f)))


def mean_of(tape, v):
    """The mean (D,) of tokens (T, D), a linear map of each column: Eq. 8 whatever the rule of linear maps."""
    T = len(v.x)
    columns = tape.linear(tape.move(v, lambda x: x.T), torch.full((1, T), 1 / T, dtype=v.x.dtype), rule=Epsilon())
    return tape.move(columns, lambda x: x[:, 0])


@torch.no_grad()
def vit(tape, net, pixels):
    """ViT and DeiT: the [CLS] token is classified."""
    core, H = net.base_model, net.config.num_attention_heads
    embeddings = core.embeddings
    leaf, embedded = patches(tape, embeddings.patch_embeddings.projection, pixels)
    first = own(tape, embeddings, "cls_token", "distillation_token")
    h = learned(tape, tape.join([*first, embedded], 0), embeddings.position_embeddings[0])
    for number, layer in enumerate(core.layers):
        norms = layer.layernorm_before, layer.layernorm_after
        h = vision_layer(tape, number, h, norms, layer.attention, ungated(tape, number, layer.mlp, F.gelu), H)
    final = tape.move(tape.layer_norm(h, core.layernorm), lambda n: n[0])
    return [leaf], tape.linear(final, net.classifier.weight, net.classifier.bias)


@torch.no_grad()
def dinov2(tape, net, pixels):
    """Positions fitted to the image, layer scales, registers without positions; reads [CLS] and the patches' mean."""
    core, H = net.base_model, net.config.num_attention_heads
    embeddings = core.embeddings
    leaf, embedded = patches(tape, embeddings.patch_embeddings.projection, pixels)
    first, *registers = own(tape, embeddings, "cls_token", "register_tokens")
    count = 1 + sum(len(part.x) for part in registers)
    tokens = tape.join([first, embedded], 0)
    fitted = embeddings.interpolate_pos_encoding(tokens.x[None], *pixels.shape[1:])[0]
    parts = [first, *registers, embedded]
    for index, start, positions in ((0, 0, fitted[:1]), (-1, count, fitted[1:])):
        if tape.method.positions:
            parts[index] = tape.add(parts[index], place(tape.position(positions, 0, -2), start))
        else:
            parts[index] = tape.constant(parts[index], positions, "positions")
    h = tape.join(parts, 0)
    for number, layer in enumerate(core.encoder.layer):
        mlp = ungated(tape, number, layer.mlp, F.gelu)
        if net.config.use_swiglu_ffn:
            mlp = partial(swiglu, tape, number, layer.mlp)
        scales = layer.layer_scale1.lambda1, layer.layer_scale2.lambda1
        h = vision_layer(tape, number, h, (layer.norm1, layer.norm2), layer.attention, mlp, H, scales)
    n = tape.layer_norm(h, core.layernorm)
    means = mean_of(tape, tape.move(n, lambda x: x[count:]))
    final = tape.join([tape.move(n, lambda x: x[0]), means], 0)
    return [leaf], tape.linear(final, net.classifier.weight, net.classifier.bias)


def swiglu(tape, number, mlp, n):
    gate = tape.act(apply(tape, mlp.gate_proj, n), F.silu)
    return apply(tape, mlp.down_proj, tape.tag("ffn", number, tape.mul(gate, apply(tape, mlp.up_proj, n))))


@torch.no_grad()
def clip(tape, net, pixels):
    """Vision towers: CLIP's has no final norm, and a [CLS] token that the classifier does not read; SigLIP's."""
    core, H = net.vision_model, net.config.vision_config.num_attention_heads
    embeddings = core.embeddings
    leaf, h = patches(tape, embeddings.patch_embedding, pixels)
    first = own(tape, embeddings, "class_embedding")
    h = learned(tape, tape.join([*first, h], 0), embeddings.position_embedding.weight)
    if first:
        h = tape.layer_norm(h, core.pre_layrnorm)
    for number, layer in enumerate(core.encoder.layers):
        mlp = ungated(tape, number, layer.mlp, layer.mlp.activation_fn)
        h = vision_layer(tape, number, h, (layer.layer_norm1, layer.layer_norm2), layer.self_attn, mlp, H)
    h = tape.move(h, lambda x: x[1:]) if first else tape.layer_norm(h, core.post_layernorm)
    return [leaf], tape.linear(mean_of(tape, h), net.classifier.weight, net.classifier.bias)


INTO = re.compile(r"(^|\.)(c_attn|query_key_value|query|key|value|qkv_proj|([qkv](_proj|_lin)?))$")
OUT_OF = re.compile(r"(attn|attention|Attention)\.(output\.)?(c_proj|out_proj|o_proj|out_lin|dense|o)$")


def attention_rule(method, name):
    """The rule of a projection into or out of attention, by its name."""
    return method.attention_in if INTO.search(name) else method.attention_out if OUT_OF.search(name) else None


def explain(build, method, net, prompt, target, **options):
    """(tokens (T,), the tape, the logits): the whole of it."""
    tape = Tape(method)
    tape.rules = {id(module): attention_rule(method, name) for name, module in net.named_modules()}
    leaves, logits = build(tape, net, prompt, **options)
    tape.back(logits, target)
    return leaves, tape, logits.x
