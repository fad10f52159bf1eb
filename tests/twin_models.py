"""Forward passes of small models on the twin's tape (tests/twin.py), written out from their papers."""

import math

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D
from twin import Tape


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def apply(tape, module, v):
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    return tape.linear(v, weight, getattr(module, "bias", None))


def causal(T):
    return torch.ones(T, T).tril().bool()


def place(value, start):
    """Where the value's tokens begin among all tokens."""
    value.start = start
    return value


def norm(tape, v, module):
    """LayerNorm, or RMSNorm, whose gain is 1 + weight in Gemma."""
    if isinstance(module, torch.nn.LayerNorm):
        return tape.layer_norm(v, module)
    eps = next(getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name))
    return tape.rms(v, module.weight + ("Gemma" in type(module).__name__), eps)


@torch.no_grad()
def llama(tape, net, ids):
    """Llama, Mistral, Qwen 2 and 3, OLMo 2, StableLM, Phi 3, Gemma 2 and 3, Mixtral, Qwen3-MoE."""
    core, config = net.model, net.config
    H, KV, T = config.num_attention_heads, config.num_key_value_heads, len(ids)
    d = getattr(config, "head_dim", None) or config.hidden_size // H
    scale = getattr(config, "query_pre_attn_scalar", d) ** -0.5
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    h = leaf = tape.leaf(core.embed_tokens(torch.tensor(ids)))
    for number, layer in enumerate(core.layers):
        attention, mlp = layer.self_attn, layer.mlp
        before = ["input_layernorm"]
        between = {"before": "post_attention_layernorm"}
        if hasattr(layer, "pre_feedforward_layernorm"):  # sandwich norms
            between = {"after": "post_attention_layernorm", "before": "pre_feedforward_layernorm"}
        elif config.model_type == "olmo2":  # norms behind attention and FFN only
            before, between = [], {"after": "post_attention_layernorm"}
        n = norm(tape, h, layer.input_layernorm) if before else h
        kind = [kinds[number]] if config.model_type == "gemma3_text" else []
        cos, sin = core.rotary_emb(h.x[None], torch.arange(T)[None], *kind)
        if config.model_type == "phi3":
            fused = apply(tape, attention.qkv_proj, n)
            bounds = [0, H * d, (H + KV) * d, (H + 2 * KV) * d]
            raw = [tape.move(fused, lambda x, i=i: x[:, bounds[i] : bounds[i + 1]]) for i in range(3)]
        else:
            raw = [apply(tape, getattr(attention, f"{name}_proj"), n) for name in "qkv"]
        parts = []
        for name, part, count in zip("qkv", raw, (H, KV, KV), strict=True):
            tape.tag(name, number, part)
            normed = getattr(attention, f"{name}_norm", None)
            wide = normed is not None and normed.weight.shape[0] > d  # OLMo 2: of all heads together
            part = norm(tape, part, normed) if wide else part
            part = tape.heads(part, count)
            part = norm(tape, part, normed) if normed is not None and not wide else part
            parts.append(part if name == "v" else tape.rotate(part, cos[0], sin[0], number))
        mask = causal(T)
        window = config.sliding_window if "sliding" in kinds[number] or config.model_type == "mistral" else 0
        if window:
            mask &= ~torch.ones(T, T).tril(-window).bool()
        cap = getattr(config, "attn_logit_softcapping", None)
        heads = tape.tag("attn", number, tape.attention(*parts, mask, scale, cap=cap))
        o = apply(tape, attention.o_proj, heads)
        h = tape.add(h, norm(tape, o, getattr(layer, between["after"])) if "after" in between else o)
        n = norm(tape, h, getattr(layer, between["before"])) if "before" in between else h
        if hasattr(mlp, "experts"):
            h = tape.add(h, mixture(tape, mlp, n, number, getattr(config, "norm_topk_prob", True)))
            continue
        f = gelu_tanh if "gemma" in config.model_type else F.silu
        if config.model_type == "phi3":
            fused = apply(tape, mlp.gate_up_proj, n)
            gate, up = (tape.move(fused, lambda x, i=i: x.chunk(2, -1)[i]) for i in range(2))
        else:
            gate, up = apply(tape, mlp.gate_proj, n), apply(tape, mlp.up_proj, n)
        down = apply(tape, mlp.down_proj, tape.tag("ffn", number, tape.mul(tape.act(gate, f), up)))
        after = getattr(layer, "post_feedforward_layernorm", None)
        h = tape.add(h, norm(tape, down, after) if after is not None else down)
    final = tape.move(norm(tape, h, core.norm), lambda n: n[-1])
    logits = tape.linear(final, net.lm_head.weight)
    return [leaf], tape.softcap(logits, getattr(config, "final_logit_softcapping", None))


def mixture(tape, mlp, n, number, sum_to_1):
    """Every expert on every token, times its weight, which is 0 where it is not chosen."""
    experts, K, D = mlp.experts, mlp.gate.top_k, n.x.shape[-1]
    logits = tape.linear(n, mlp.gate.weight)
    s = tape.leaf(logits.x.softmax(-1)) if tape.method.softmax == "constant" else tape.softmax(logits)
    chosen = torch.zeros_like(s.x).scatter(1, s.x.topk(K, -1).indices, 1.0)
    kept = tape.scale(s, chosen)
    total = kept.x.sum(-1, keepdim=True) if sum_to_1 else 1
    weights = tape.tag("router", number, tape.scale(kept, 1 / total))  # Eq. 19
    neurons, outputs = [], []
    for e in range(len(experts.down_proj)):
        width = experts.down_proj.shape[2]
        gate = tape.linear(n, experts.gate_up_proj[e, :width])
        up = tape.linear(n, experts.gate_up_proj[e, width:])
        x = tape.scale(tape.mul(tape.act(gate, F.silu), up), chosen[:, e, None])
        neurons.append(x)
    joined = tape.tag("ffn", number, tape.join(neurons, -1))
    for e in range(len(experts.down_proj)):
        x = tape.move(joined, lambda places, e=e: places[:, e * width : (e + 1) * width])
        x = silent_linear(tape, x, experts.down_proj[e])
        weight = tape.move(weights, lambda places, e=e: places[:, e, None].expand(-1, D))
        out = tape.scale(x, weight.x) if tape.method.softmax == "constant" else tape.mul(x, weight)
        outputs.append(out)
    return tape.add(*outputs)


def silent_linear(tape, v, weight):
    """A linear map of rows that may all be zero, which get nothing."""
    rows = (v.x != 0).any(-1).nonzero().flatten()
    part = tape.linear(tape.move(v, lambda n: n[rows]), weight)
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
            parts.append(part if name == "v" else turned(tape, core, layer, part, number))
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


def turned(tape, core, layer, part, number):
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
    count, furthest = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
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
                far = math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
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


@torch.no_grad()
def vit(tape, net, pixels):
    """ViT and DeiT: patches by a convolution written as the matrix it is; the [CLS] token is classified."""
    core, config = net.base_model, net.config
    P, H = config.patch_size, config.num_attention_heads
    leaf = tape.leaf(pixels)
    rows, columns = pixels.shape[1] // P, pixels.shape[2] // P
    patches = tape.move(
        leaf, lambda x: x.view(3, rows, P, columns, P).permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    )
    conv = core.embeddings.patch_embeddings.projection
    embedded = tape.linear(patches, conv.weight.flatten(1), conv.bias, tape.method.conv or tape.method.linear)
    names = [name for name in ("cls_token", "distillation_token") if hasattr(core.embeddings, name)]
    tape.own = [tape.leaf(getattr(core.embeddings, name)[0]) for name in names]
    h = learned(tape, tape.join([*tape.own, embedded], 0), core.embeddings.position_embeddings[0])
    for number, layer in enumerate(core.layers):
        own = layer.attention
        n = tape.layer_norm(h, layer.layernorm_before)
        parts = [tape.heads(tape.tag(name, number, apply(tape, getattr(own, f"{name}_proj"), n)), H) for name in "qkv"]
        heads = tape.tag("attn", number, tape.attention(*parts, None, (config.hidden_size // H) ** -0.5))
        h = tape.add(h, apply(tape, own.o_proj, heads))
        n = tape.layer_norm(h, layer.layernorm_after)
        inner = tape.tag("ffn", number, tape.act(apply(tape, layer.mlp.fc1, n), F.gelu))
        h = tape.add(h, apply(tape, layer.mlp.fc2, inner))
    final = tape.move(tape.layer_norm(h, core.layernorm), lambda n: n[0])
    return [leaf], tape.linear(final, net.classifier.weight, net.classifier.bias)


def explain(build, method, net, prompt, target, **options):
    """(tokens (T,), the tape, the logits): the whole of it."""
    tape = Tape(method)
    leaves, logits = build(tape, net, prompt, **options)
    tape.back(logits, target)
    return leaves, tape, logits.x
