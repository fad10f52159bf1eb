"""The slow, obvious twin: AttnLRP as explicit relevance messages, layer by layer, without autograd.

Every rule is written as its equation in Achtibat et al. 2024. A message never sees a gradient: it takes the
values of the forward pass and the relevance R of an output, and gives the relevance of the inputs.
"""

import math

import torch


def linear_rule(x, weight, z, R):
    """Eq. 8, eps -> 0: R_i = sum_j  W_ji x_i / z_j  R_j, z with its bias. weight (J, I), x (T, I), R (T, J)."""
    return torch.einsum("ti,ji,tj->ti", x, weight, R / z)


def sum_rule(a, b, R):
    """Eq. 8 for a sum a + b."""
    return a / (a + b) * R, b / (a + b) * R


def matmul_rule(A, V, O, R):
    """Eq. 14 for O = A V: R_ji = sum_p  A_ji V_ip / (2 O_jp)  R_jp, and likewise for V."""
    message = torch.einsum("...ji,...ip,...jp->...jip", A, V, R / (2 * O))
    return message.sum(-1), message.sum(-3)


def softmax_rule(x, s, R):
    """Eq. 13: R_i = x_i (R_i - s_i sum_j R_j); a masked score takes nothing."""
    return torch.where(s == 0, 0, x) * (R - s * R.sum(-1, keepdim=True))


def product_rule(R):
    """Eq. 15: each factor gets half."""
    return R / 2


def identity_rule(R):
    """Eq. 9 for an element-wise function, Eq. 19 for a norm: relevance passes as it is."""
    return R


def rms(x, gain, eps):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * gain


def rotation_matrix(cos, sin):
    """(T, d, d): the rotary embedding of each position as the linear map it is."""
    T, d = cos.shape
    half = d // 2
    M = torch.zeros(T, d, d, dtype=cos.dtype)
    for i in range(d):
        M[:, i, i] = cos[:, i]
        M[:, i, (i + half) % d] = -sin[:, i] if i < half else sin[:, i]
    return M


@torch.no_grad()
def relevance(model, ids, target, softmax="taylor"):
    """tokens (T,), sites {name: (L, T, N)}, and what the softmax rule's bias term and the biases keep."""
    net, config = model.net, model.net.config
    gemma = config.model_type == "gemma3_text"
    core = net.model
    T, H, KV = len(ids), config.num_attention_heads, config.num_key_value_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // H
    scale = (config.query_pre_attn_scalar if gemma else d) ** -0.5
    eps = config.rms_norm_eps
    gain = (lambda norm: 1 + norm.weight) if gemma else (lambda norm: norm.weight)
    f = (lambda x: torch.nn.functional.gelu(x, approximate="tanh")) if gemma else torch.nn.functional.silu
    position = torch.arange(T)[None]
    kept = {"softmax": 0.0, "biases": 0.0}

    def linear(module, x):
        bias = 0 if module.bias is None else module.bias
        return x @ module.weight.T + bias

    def keep_bias(module, z, R):
        if module.bias is not None:
            kept["biases"] += (module.bias / z * R).sum().item()

    # Forward, keeping everything.
    h = core.embed_tokens(torch.tensor(ids))  # (T, D)
    kept_layers = []
    for number, layer in enumerate(core.layers):
        s = {"h": h}
        attention, mlp = layer.self_attn, layer.mlp
        sliding = gemma and config.layer_types[number] == "sliding_attention"
        if gemma:
            cos, sin = core.rotary_emb(h[None], position, config.layer_types[number])
        else:
            cos, sin = core.rotary_emb(h[None], position)
        M = s["M"] = rotation_matrix(cos[0], sin[0])
        s["n1"] = rms(h, gain(layer.input_layernorm), eps)
        for name, count in (("q", H), ("k", KV), ("v", KV)):
            s[name] = linear(getattr(attention, f"{name}_proj"), s["n1"])  # (T, count d)
            heads = s[name].view(T, count, d)
            if gemma and name != "v":
                heads = rms(heads, gain(getattr(attention, f"{name}_norm")), eps)
            s[name + "_normed"] = heads
            s[name + "_heads"] = (torch.einsum("tij,thj->thi", M, heads) if name != "v" else heads).transpose(0, 1)
        group = torch.arange(H) // (H // KV)
        mask = torch.ones(T, T).tril().bool()
        if sliding:
            mask &= ~torch.ones(T, T).tril(-config.sliding_window).bool()
        K, V = s["k_heads"][group], s["v_heads"][group]  # (H, T, d)
        s["product"] = s["q_heads"] @ K.transpose(1, 2)  # (H, T, T)
        s["x"] = (s["product"] * scale).masked_fill(~mask, -math.inf)
        s["A"] = s["x"].softmax(-1)
        s["O"] = s["A"] @ V  # (H, T, d)
        s["attn"] = s["O"].transpose(0, 1).reshape(T, H * d)
        s["o"] = linear(attention.o_proj, s["attn"])
        s["o_normed"] = rms(s["o"], gain(layer.post_attention_layernorm), eps) if gemma else s["o"]
        s["mid"] = h + s["o_normed"]
        before_ffn = layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
        s["n2"] = rms(s["mid"], gain(before_ffn), eps)
        s["gate"], s["up"] = linear(mlp.gate_proj, s["n2"]), linear(mlp.up_proj, s["n2"])
        s["ffn"] = f(s["gate"]) * s["up"]
        s["down"] = linear(mlp.down_proj, s["ffn"])
        s["down_normed"] = rms(s["down"], gain(layer.post_feedforward_layernorm), eps) if gemma else s["down"]
        h = s["mid"] + s["down_normed"]
        kept_layers.append(s)
    final = rms(h, gain(core.norm), eps)
    logits = final[-1] @ net.lm_head.weight.T

    # Backward: messages.
    sites = {name: [] for name in ("ffn", "attn", "q", "k", "v")}
    R = torch.zeros_like(h)
    R[-1] = final[-1] * net.lm_head.weight[target]  # Eq. 8 for one logit that starts with its own value
    R = identity_rule(R)  # final norm
    for layer, s in zip(reversed(core.layers), reversed(kept_layers), strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        R_mid, R_down = sum_rule(s["mid"], s["down_normed"], R)
        R_down = identity_rule(R_down)  # sandwich norm
        keep_bias(mlp.down_proj, s["down"], R_down)
        R_ffn = linear_rule(s["ffn"], mlp.down_proj.weight, s["down"], R_down)
        sites["ffn"].append(R_ffn)
        half = product_rule(R_ffn)
        R_gate, R_up = identity_rule(half), half
        keep_bias(mlp.gate_proj, s["gate"], R_gate)
        keep_bias(mlp.up_proj, s["up"], R_up)
        R_mid = R_mid + identity_rule(
            linear_rule(s["n2"], mlp.gate_proj.weight, s["gate"], R_gate)
            + linear_rule(s["n2"], mlp.up_proj.weight, s["up"], R_up)
        )
        R_h, R_o = sum_rule(s["h"], s["o_normed"], R_mid)
        R_o = identity_rule(R_o)  # sandwich norm
        keep_bias(attention.o_proj, s["o"], R_o)
        R_attn = linear_rule(s["attn"], attention.o_proj.weight, s["o"], R_o)
        sites["attn"].append(R_attn)
        R_O = R_attn.view(T, H, d).transpose(0, 1)
        group = torch.arange(H) // (H // KV)
        K, V = s["k_heads"][group], s["v_heads"][group]
        if softmax == "taylor":
            R_A, R_V = matmul_rule(s["A"], V, s["O"], R_O)
            R_x = softmax_rule(s["x"], s["A"], R_A)
            kept["softmax"] += (R_A.sum() - R_x.sum()).item()
            R_q, R_K = matmul_rule(s["q_heads"], K.transpose(1, 2), s["product"], R_x)
            R_K = R_K.transpose(1, 2)
        else:  # CP-LRP: attention is a constant, the product linear in V
            R_V = torch.einsum("hji,hip,hjp->hip", s["A"], V, R_O / s["O"])
            R_q, R_K = torch.zeros_like(s["q_heads"]), torch.zeros_like(K)
        R_k, R_v = (torch.zeros_like(s[n]).index_add_(0, group, r) for n, r in (("k_heads", R_K), ("v_heads", R_V)))
        R_n1 = torch.zeros_like(s["n1"])
        for name, R_heads in (("q", R_q), ("k", R_k), ("v", R_v)):
            R_heads = R_heads.transpose(0, 1)  # (T, count, d)
            if name != "v":
                rotated, plain = s[name + "_heads"].transpose(0, 1), s[name + "_normed"]
                R_heads = torch.einsum("thj,tij,thi->thj", plain, s["M"], R_heads / rotated)  # Eq. 8
            R_name = identity_rule(R_heads).reshape(T, -1)  # q and k norms
            sites[name].append(R_name)
            module = getattr(attention, f"{name}_proj")
            keep_bias(module, s[name], R_name)
            R_n1 += linear_rule(s["n1"], module.weight, s[name], R_name)
        R = R_h + identity_rule(R_n1)
    stacked = {name: torch.stack(values[::-1]) for name, values in sites.items()}
    return R.sum(-1), stacked, kept, logits
