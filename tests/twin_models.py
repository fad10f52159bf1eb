"""Forward passes of small models on the twin's tape (tests/twin.py), written out from their papers."""

import math

import torch
import torch.nn.functional as F
from twin import Tape


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def apply(tape, module, v):
    return tape.linear(v, module.weight, getattr(module, "bias", None))


def causal(T):
    return torch.ones(T, T).tril().bool()


def place(value, start):
    """Where the value's tokens begin among all tokens."""
    value.start = start
    return value


@torch.no_grad()
def llama(tape, net, ids):
    """Llama, Llama with biases, Gemma 3, Mixtral."""
    core, config = net.model, net.config
    gemma = config.model_type.startswith("gemma")
    H, KV, T = config.num_attention_heads, config.num_key_value_heads, len(ids)
    d = getattr(config, "head_dim", None) or config.hidden_size // H
    eps, gain = config.rms_norm_eps, (lambda norm: 1 + norm.weight) if gemma else (lambda norm: norm.weight)
    scale = (config.query_pre_attn_scalar if gemma else d) ** -0.5
    h = leaf = tape.leaf(core.embed_tokens(torch.tensor(ids)))
    for number, layer in enumerate(core.layers):
        attention = layer.self_attn
        kind = [config.layer_types[number]] if gemma else []
        cos, sin = core.rotary_emb(h.x[None], torch.arange(T)[None], *kind)
        n = tape.rms(h, gain(layer.input_layernorm), eps)
        parts = []
        for name, count in (("q", H), ("k", KV), ("v", KV)):
            part = tape.tag(name, number, apply(tape, getattr(attention, f"{name}_proj"), n))
            part = tape.heads(part, count)
            if gemma and name != "v":
                part = tape.rms(part, gain(getattr(attention, f"{name}_norm")), eps)
            parts.append(part if name == "v" else tape.rotate(part, cos[0], sin[0], number))
        mask = causal(T)
        if kind == ["sliding_attention"]:
            mask &= ~torch.ones(T, T).tril(-config.sliding_window).bool()
        heads = tape.tag("attn", number, tape.attention(*parts, mask, scale))
        o = apply(tape, attention.o_proj, heads)
        h = tape.add(h, tape.rms(o, gain(layer.post_attention_layernorm), eps) if gemma else o)
        n = tape.rms(h, gain(layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm), eps)
        if config.model_type == "mixtral":
            h = tape.add(h, mixture(tape, layer.mlp, n, number))
            continue
        f = gelu_tanh if gemma else F.silu
        gate, up = apply(tape, layer.mlp.gate_proj, n), apply(tape, layer.mlp.up_proj, n)
        down = apply(tape, layer.mlp.down_proj, tape.tag("ffn", number, tape.mul(tape.act(gate, f), up)))
        h = tape.add(h, tape.rms(down, gain(layer.post_feedforward_layernorm), eps) if gemma else down)
    final = tape.move(tape.rms(h, gain(core.norm), eps), lambda n: n[-1])
    return [leaf], tape.linear(final, net.lm_head.weight)


def mixture(tape, mlp, n, number):
    """Every expert on every token, times its weight, which is 0 where it is not chosen."""
    experts, K, D = mlp.experts, mlp.gate.top_k, n.x.shape[-1]
    logits = tape.linear(n, mlp.gate.weight)
    s = tape.leaf(logits.x.softmax(-1)) if tape.method.softmax == "constant" else tape.softmax(logits)
    chosen = torch.zeros_like(s.x).scatter(1, s.x.topk(K, -1).indices, 1.0)
    kept = tape.scale(s, chosen)
    weights = tape.tag("router", number, tape.scale(kept, 1 / kept.x.sum(-1, keepdim=True)))  # Eq. 19
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


@torch.no_grad()
def gpt2(tape, net, ids):
    core, T, H = net.transformer, len(ids), net.config.n_head
    leaf = tape.leaf(core.wte(torch.tensor(ids)))
    h = learned(tape, leaf, core.wpe.weight[:T])
    for number, layer in enumerate(core.h):
        n = tape.layer_norm(h, layer.ln_1)
        both = tape.linear(n, layer.attn.c_attn.weight.T, layer.attn.c_attn.bias)
        parts = [
            tape.heads(tape.tag(name, number, tape.move(both, lambda x, i=i: x.chunk(3, -1)[i])), H)
            for i, name in enumerate("qkv")
        ]
        heads = tape.tag("attn", number, tape.attention(*parts, causal(T), (net.config.n_embd // H) ** -0.5))
        h = tape.add(h, tape.linear(heads, layer.attn.c_proj.weight.T, layer.attn.c_proj.bias))
        n = tape.layer_norm(h, layer.ln_2)
        inner = tape.act(tape.linear(n, layer.mlp.c_fc.weight.T, layer.mlp.c_fc.bias), gelu_tanh)
        inner = tape.tag("ffn", number, inner)
        h = tape.add(h, tape.linear(inner, layer.mlp.c_proj.weight.T, layer.mlp.c_proj.bias))
    final = tape.move(tape.layer_norm(h, core.ln_f), lambda n: n[-1])
    return [leaf], tape.linear(final, net.lm_head.weight)


def learned(tape, v, positions):
    if tape.method.positions:
        return tape.add(v, tape.position(positions, 0, -2))
    return tape.constant(v, positions, "positions")


def bloom_gelu(x):
    return x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))  # its constants are rounded


@torch.no_grad()
def bloom(tape, net, ids):
    """ALiBi: a slope times the key's position is added to the scores."""
    core, T, H = net.transformer, len(ids), net.config.n_head
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / H) for head in range(H)], dtype=torch.float64)
    alibi = slopes[:, None, None] * torch.arange(T)
    leaf = tape.leaf(core.word_embeddings(torch.tensor(ids)))
    h = tape.layer_norm(leaf, core.word_embeddings_layernorm)
    for number, layer in enumerate(core.h):
        n = tape.layer_norm(h, layer.input_layernorm)
        both = apply(tape, layer.self_attention.query_key_value, n)
        parts = []
        for i, name in enumerate("qkv"):  # for each head its query, its key and its value
            part = tape.move(both, lambda x, i=i: x.view(T, H, 3, -1)[:, :, i].flatten(1))
            parts.append(tape.heads(tape.tag(name, number, part), H))
        d = parts[0].x.shape[-1]
        heads = tape.tag("attn", number, tape.attention(*parts, causal(T), d**-0.5, alibi, number))
        h = tape.add(h, apply(tape, layer.self_attention.dense, heads))
        n = tape.layer_norm(h, layer.post_attention_layernorm)
        inner = tape.tag("ffn", number, tape.act(apply(tape, layer.mlp.dense_h_to_4h, n), bloom_gelu))
        h = tape.add(h, apply(tape, layer.mlp.dense_4h_to_h, inner))
    final = tape.move(tape.layer_norm(h, core.ln_f), lambda n: n[-1])
    return [leaf], tape.linear(final, net.lm_head.weight)


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
    """Post-norm, no mask; the head of a masked language model at the mask (token 49)."""
    core, config, T = net.bert, net.config, len(ids)
    H = config.num_attention_heads
    leaf = tape.leaf(core.embeddings.word_embeddings(torch.tensor(ids)))
    typed = tape.constant(leaf, core.embeddings.token_type_embeddings.weight[0].expand(T, -1), "biases")
    h = tape.layer_norm(learned(tape, typed, core.embeddings.position_embeddings.weight[:T]), core.embeddings.LayerNorm)
    for number, layer in enumerate(core.encoder.layer):
        own = layer.attention.self
        parts = [
            tape.heads(tape.tag(name, number, apply(tape, module, h)), H)
            for name, module in zip("qkv", (own.query, own.key, own.value), strict=True)
        ]
        heads = tape.tag("attn", number, tape.attention(*parts, None, (config.hidden_size // H) ** -0.5))
        output = layer.attention.output
        h = tape.layer_norm(tape.add(apply(tape, output.dense, heads), h), output.LayerNorm)
        inner = tape.tag("ffn", number, tape.act(apply(tape, layer.intermediate.dense, h), F.gelu))
        h = tape.layer_norm(tape.add(apply(tape, layer.output.dense, inner), h), layer.output.LayerNorm)
    at = tape.move(h, lambda n: n[ids.index(49)])
    head = net.cls.predictions
    last = tape.layer_norm(tape.act(apply(tape, head.transform.dense, at), F.gelu), head.transform.LayerNorm)
    return [leaf], tape.linear(last, head.decoder.weight, head.decoder.bias)


@torch.no_grad()
def vit(tape, net, pixels):
    """Patches by a convolution written as the matrix it is; the [CLS] token is classified."""
    core, config = net.vit, net.config
    P, H = config.patch_size, config.num_attention_heads
    leaf = tape.leaf(pixels)
    rows, columns = pixels.shape[1] // P, pixels.shape[2] // P
    patches = tape.move(
        leaf, lambda x: x.view(3, rows, P, columns, P).permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    )
    conv = core.embeddings.patch_embeddings.projection
    embedded = tape.linear(patches, conv.weight.flatten(1), conv.bias, tape.method.conv or tape.method.linear)
    cls = tape.leaf(core.embeddings.cls_token[0])
    h = learned(tape, tape.join([cls, embedded], 0), core.embeddings.position_embeddings[0])
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
    tape.cls = cls
    return [leaf], tape.linear(final, net.classifier.weight, net.classifier.bias)


def explain(build, method, net, prompt, target, **options):
    """(tokens (T,), the tape, the logits): the whole of it."""
    tape = Tape(method)
    leaves, logits = build(tape, net, prompt, **options)
    tape.back(logits, target)
    return leaves, tape, logits.x
