"""Models with scans on the tape of `tests/reference/differences.py`: loops over tokens, as the papers write the state
(Yang et al. 2025, "Gated Delta Networks"; Gu and Dao 2024, "Mamba")."""

import torch
import torch.nn.functional as F

from reference.models import apply


def rms(tape, v, module, offset=0.0):
    return tape.rms(v, module.weight + offset, module.variance_epsilon if offset == 0 else module.eps)


def columns(tape, v, start, stop):
    return tape.move(v, lambda n: n[:, start:stop])


def convolved(tape, v, conv):
    """Each channel's weighted sum over the last tokens, and SiLU."""
    K, T = conv.weight.shape[-1], len(v.x)
    padded = tape.join([tape.leaf(torch.zeros(K - 1, v.x.shape[1], dtype=v.x.dtype)), v], 0)
    parts = [tape.scale(tape.move(padded, lambda n, j=j: n[j : j + T]), conv.weight[:, 0, j]) for j in range(K)]
    total = tape.add(*parts)
    return tape.act(total if conv.bias is None else tape.constant(total, conv.bias, "biases"), F.silu)


@torch.no_grad()
def qwen(tape, net, ids):
    """Qwen3.5 of gated delta nets only."""
    core = net.model
    leaf = h = tape.leaf(core.embed_tokens(torch.tensor(ids)))
    for number, layer in enumerate(core.layers):
        n = rms(tape, h, layer.input_layernorm, 1.0)
        h = tape.add(h, delta_net(tape, layer.linear_attn, n, number))
        n = rms(tape, h, layer.post_attention_layernorm, 1.0)
        gate, up = tape.act(apply(tape, layer.mlp.gate_proj, n), F.silu), apply(tape, layer.mlp.up_proj, n)
        h = tape.add(h, apply(tape, layer.mlp.down_proj, tape.tag("ffn", number, tape.mul(gate, up))))
    final = tape.move(rms(tape, h, core.norm, 1.0), lambda n: n[-1])
    return [leaf], tape.linear(final, net.lm_head.weight)


def delta_net(tape, mixer, n, number):
    mixed = convolved(tape, apply(tape, mixer.in_proj_qkv, n), mixer.conv1d)
    beta = tape.act(apply(tape, mixer.in_proj_b, n), torch.sigmoid)
    step = tape.act(tape.constant(apply(tape, mixer.in_proj_a, n), mixer.dt_bias, "biases"), F.softplus)
    decay = tape.act(tape.scale(step, -mixer.A_log.exp()), torch.exp)
    z = apply(tape, mixer.in_proj_z, n)
    dk, dv, outputs = mixer.head_k_dim, mixer.head_v_dim, []
    for head in range(mixer.num_v_heads):
        group = head // (mixer.num_v_heads // mixer.num_k_heads)
        q, k = (columns(tape, mixed, at + group * dk, at + (group + 1) * dk) for at in (0, mixer.key_dim))
        # x / sqrt(sum(x^2) + eps), by the mean
        q, k = (tape.rms(x, torch.tensor(dk**-0.5, dtype=x.x.dtype), 1e-6 / dk) for x in (q, k))
        v = columns(tape, mixed, 2 * mixer.key_dim + head * dv, 2 * mixer.key_dim + (head + 1) * dv)
        out = delta_rule(
            tape, tape.scale(q, dk**-0.5), k, v, *(columns(tape, x, head, head + 1) for x in (decay, beta))
        )
        gate = tape.act(columns(tape, z, head * dv, (head + 1) * dv), F.silu)
        outputs.append(tape.mul(rms(tape, out, mixer.norm), gate))
    return apply(tape, mixer.out_proj, tape.tag("mixer", number, tape.join(outputs, 1)))


def delta_rule(tape, q, k, v, decay, beta):
    """S <- decay S + k (beta (v - k^T decay S))^T, and q^T S."""
    state, outputs = None, []
    for t in range(len(q.x)):
        query, row, value, a, b = (tape.move(x, lambda n, t=t: n[t : t + 1]) for x in (q, k, v, decay, beta))
        if state is not None:
            state = tape.mul(state, a)
            value = tape.add(value, tape.scale(tape.matmul(row, state), -1))
        written = tape.matmul(tape.move(row, lambda n: n.T), tape.mul(value, b))
        state = written if state is None else tape.add(state, written)
        outputs.append(tape.matmul(query, state))
    return tape.join(outputs, 0)


@torch.no_grad()
def mamba(tape, net, ids):
    core = net.backbone
    leaf = h = tape.leaf(core.embeddings(torch.tensor(ids)))
    for number, block in enumerate(core.layers):
        h = tape.add(h, selective_scan(tape, block.mixer, rms(tape, h, block.norm), number))
    final = tape.move(rms(tape, h, core.norm_f), lambda n: n[-1])
    return [leaf], tape.linear(final, net.lm_head.weight)


def selective_scan(tape, mixer, n, number):
    """S <- exp(A dt) S + dt B x, and C S + D x, times a gate."""
    width, size, rank = mixer.intermediate_size, mixer.ssm_state_size, mixer.time_step_rank
    both = apply(tape, mixer.in_proj, n)
    x = convolved(tape, columns(tape, both, 0, width), mixer.conv1d)
    gate = tape.act(columns(tape, both, width, 2 * width), F.silu)
    read = apply(tape, mixer.x_proj, x)
    B, C = (columns(tape, read, start, start + size) for start in (rank, rank + size))
    dt = tape.act(apply(tape, mixer.dt_proj, columns(tape, read, 0, rank)), F.softplus)
    state, outputs = None, []
    for t in range(len(x.x)):
        here, step = (tape.move(v, lambda n, t=t: n[t][:, None]) for v in (x, dt))  # (I, 1)
        each = tape.move(step, lambda n: n.expand(-1, size))
        written = tape.mul(tape.mul(step, tape.move(B, lambda n, t=t: n[t : t + 1])), here)  # (I, N)
        if state is not None:
            written = tape.add(tape.mul(tape.act(tape.scale(each, -mixer.A_log.exp()), torch.exp), state), written)
        state = written
        out = tape.matmul(state, tape.move(C, lambda n, t=t: n[t][:, None]))
        outputs.append(tape.move(out, lambda n: n.T))
    total = tape.mul(tape.add(tape.join(outputs, 0), tape.scale(x, mixer.D)), gate)
    return apply(tape, mixer.out_proj, tape.tag("mixer", number, total))
