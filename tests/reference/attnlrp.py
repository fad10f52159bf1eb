"""The slow, obvious implementation: relevance as explicit messages, operation by operation, without autograd.

Every rule is written as its equation (AttnLRP: Achtibat et al. 2024; PA-LRP: Bakish et al. 2025). A message never sees
a gradient: it takes the values of the forward pass and the relevance R of an output, and returns the inputs' relevance.
"""

import torch

from icebear.lrp.linear_rules import AlphaBeta, Epsilon, Gamma, ZPlus


class Value:
    """A tensor on the tape; `messages(R)` gives the relevance of each of `sources`."""

    def __init__(self, tape, x, sources=(), messages=None):
        self.x, self.sources, self.messages = x, sources, messages
        self.R = torch.zeros_like(x)
        tape.values.append(self)


class Tape:
    """Writes a forward pass down, then sends relevance back through it."""

    def __init__(self, method):
        self.method = method
        self.values, self.sites, self.positions = [], {}, {}
        self.rules = {}
        """By the id of a module, its rule, if it is not that of linear maps."""
        self.retained = {"softmax": 0.0, "biases": 0.0, "positions": 0.0}

    # --- leaves and constants ---

    def leaf(self, x):
        return Value(self, x)

    def position(self, x, layer, axis):
        """A position's values: a sink of its own in PA-LRP, else a constant whose share is booked."""
        value = Value(self, x)
        self.positions.setdefault(layer, []).append((value, axis))
        return value

    def tag(self, site, layer, value):
        self.sites.setdefault(site, {})[layer] = value
        return value

    # --- rules ---

    def linear(self, v, weight, bias=None, rule=None):
        """z_ij = W_ji x_i and the bias as one more input; a share of R_j for each, by the rule. weight (J, I)."""
        x = v.x.reshape(-1, v.x.shape[-1])
        extra = torch.zeros(len(weight), dtype=x.dtype) if bias is None else bias
        z = torch.cat((torch.einsum("ti,ji->tji", x, weight), extra.expand(len(x), -1)[..., None]), -1)
        y = z.sum(-1)

        def messages(R):
            shares = linear_shares(z, rule or self.method.linear) * R.reshape(y.shape)[..., None]
            self.retained["biases"] += shares[..., -1].sum().item()
            return [shares[..., :-1].sum(1).reshape(v.x.shape)]

        return Value(self, y.reshape(*v.x.shape[:-1], len(weight)), [v], messages)

    def add(self, *parts):
        """Eq. 8 for a sum: a / (a + b) R."""
        total = sum(part.x for part in parts)
        ratio = lambda R: torch.where(R == 0, 0, R / total)  # noqa: E731  a masked score has no relevance
        return Value(self, total, parts, lambda R: [_summed(masked(p.x) * ratio(R), p.x.shape) for p in parts])

    def constant(self, v, c, name):
        """v + c with a constant: Eq. 8, its share is booked."""
        total = v.x + c

        def messages(R):
            ratio = torch.where(R == 0, 0, R / total)
            self.retained[name] += (masked(c.expand(total.shape)) * ratio).sum().item()
            return [v.x * ratio]

        return Value(self, total, [v], messages)

    def scale(self, v, c):
        """A product with a constant passes relevance on."""
        return Value(self, v.x * c, [v], lambda R: [R])

    def choose(self, v, chosen):
        """The scores of the chosen experts, 0 for others."""
        return self.scale(v, chosen)

    def normalize(self, v):
        """Eq. 19: a sum of weights is a constant."""
        return self.scale(v, 1 / v.x.sum(-1, keepdim=True))

    def weigh(self, written, weight, chosen):
        """What an expert writes, times its weight, which is 0 where it is not chosen."""
        return self.mul(written, weight)

    def mul(self, a, b):
        """Eq. 15: each factor gets half."""
        return Value(self, a.x * b.x, [a, b], lambda R: [_summed(R / 2, a.x.shape), _summed(R / 2, b.x.shape)])

    def matmul(self, A, V):
        """Eq. 14 for O = A V: R_ji = sum_p  A_ji V_ip / (2 O_jp)  R_jp, and likewise for V."""
        O = A.x @ V.x

        def messages(R):
            ratio = R / O
            share = torch.einsum("...ji,...ip,...jp->...jip", A.x, V.x, ratio / 2)
            return [share.sum(-1), share.sum(-3)]

        return Value(self, O, [A, V], messages)

    def weighted(self, A, V):
        """O = A V with attention as a constant (CP-LRP): linear in V."""
        O = A @ V.x
        return Value(self, O, [V], lambda R: [torch.einsum("...ji,...ip,...jp->...ip", A, V.x, R / O)])

    def softmax(self, v):
        """Eq. 13: R_i = x_i (R_i - s_i sum_j R_j); or z+ on the expansion that it comes from."""
        s = v.x.softmax(-1)
        x = masked(v.x)

        def messages(R):
            if self.method.softmax == "taylor":
                relevance = x * (R - s * R.sum(-1, keepdim=True))
            else:
                jacobian = torch.diag_embed(s) - s[..., :, None] * s[..., None, :]  # J_ji
                z = (jacobian * x[..., None, :]).clamp(min=0)  # z_ji+
                share = z / z.sum(-1, keepdim=True)
                relevance = (torch.nan_to_num(share) * R[..., None]).sum(-2)
            self.retained["softmax"] += (R.sum() - relevance.sum()).item()
            return [relevance]

        return Value(self, s, [v], messages)

    def act(self, v, f):
        """Eq. 9: relevance passes as it is."""
        return Value(self, f(v.x), [v], lambda R: [R])

    def rms(self, v, gain, eps):
        """Eq. 19."""
        return self.act(v, lambda x: x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * gain)

    def layer_norm(self, v, norm):
        """Eq. 8 for the mean's subtraction, Eq. 19 for the division, Eq. 8 for the bias."""
        D = v.x.shape[-1]
        centred = self.linear(v, torch.eye(D, dtype=v.x.dtype) - 1 / D, rule=Epsilon())
        deviation = torch.sqrt(v.x.var(-1, correction=0, keepdim=True) + norm.eps)
        return self.constant(self.scale(centred, norm.weight / deviation), norm.bias, "biases")

    # --- no arithmetic ---

    def move(self, v, f):
        """Whatever only moves, copies or leaves out elements: f works on their numbers too."""
        places = f(torch.arange(v.x.numel()).view(v.x.shape))
        back = lambda R: [torch.zeros(v.x.numel(), dtype=R.dtype).index_add(0, places.flatten(), R.flatten())]  # noqa: E731
        return Value(self, v.x.flatten()[places], [v], lambda R: [back(R)[0].view(v.x.shape)])

    def join(self, parts, dim):
        sizes = [part.x.shape[dim] for part in parts]
        return Value(self, torch.cat([p.x for p in parts], dim), parts, lambda R: list(R.split(sizes, dim)))

    # --- blocks that many models share ---

    def heads(self, v, count):
        """(T, count * d) -> (count, T, d)"""
        return self.move(v, lambda x: x.view(len(x), count, -1).transpose(0, 1))

    def rotate(self, v, cos, sin, layer, pairs=False):
        """Rotary embedding of (H, T, d): v cos + rotated v sin, of the first dimensions; `pairs` turns neighbours, not
        halves. In PA-LRP cos and sin are sinks (Eq. 15)."""
        n = cos.shape[-1]
        if n < v.x.shape[-1]:
            first, rest = self.move(v, lambda x: x[..., :n]), self.move(v, lambda x: x[..., n:])
            return self.join([self.rotate(first, cos, sin, layer, pairs), rest], -1)
        if pairs:
            rotated = self.move(v, lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
            sign = torch.tensor([-1.0, 1.0]).repeat(n // 2)
        else:
            rotated = self.move(v, lambda x: torch.cat((x[..., n // 2 :], x[..., : n // 2]), -1))
            sign = torch.tensor([-1.0, 1.0]).repeat_interleave(n // 2)
        rotated = self.scale(rotated, sign.to(v.x.dtype))
        if self.method.positions:
            sinks = [self.position(c, layer, -2) for c in (cos, sin)]
            return self.add(self.mul(v, sinks[0]), self.mul(rotated, sinks[1]))
        return self.add(self.scale(v, cos), self.scale(rotated, sin))

    def bias(self, scores, value, layer):
        """Adds positions (broadcast to H, T, T) to the scores."""
        if not self.method.positions:
            return self.constant(scores, value.expand(scores.x.shape), "positions")
        return self.add(scores, self.position(value, layer, -1))

    def softcap(self, v, cap):
        return self.act(v, lambda x: torch.tanh(x / cap) * cap) if cap else v

    def booked(self, x, name):
        """A constant whose relevance is booked."""

        def messages(R):
            self.retained[name] += R.sum().item()
            return []

        return Value(self, x, [], messages)

    def attention(self, q, k, v, mask=None, scale=1.0, bias=None, layer=0, cap=None, sinks=None):
        """(H, T, d) each, mask (T, T) True where to look, sinks (H, T, 1) scores of nothing; returns (T, H * d)."""
        group = torch.arange(q.x.shape[0]) // (q.x.shape[0] // k.x.shape[0])
        k, v = (self.move(x, lambda n: n[group]) for x in (k, v))
        if self.method.softmax == "constant":
            scores = q.x @ k.x.transpose(1, 2) * scale
            scores = (torch.tanh(scores / cap) * cap if cap else scores) + (0 if bias is None else bias)
            scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
            weights = (scores if sinks is None else torch.cat((scores, sinks), -1)).softmax(-1)
            O = self.weighted(weights[..., : scores.shape[-1]], v)
        else:
            product = self.matmul(q, self.move(k, lambda n: n.transpose(1, 2)))
            scores = self.softcap(self.scale(product, scale), cap)
            if bias is not None:
                scores = self.bias(scores, bias, layer)
            if mask is not None:
                scores = self.constant(
                    scores, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).to(q.x.dtype), "biases"
                )
            if sinks is None:
                weights = self.softmax(scores)
            else:
                weights = self.softmax(self.join([scores, self.booked(sinks, "biases")], -1))
                weights = self.move(weights, lambda n: n[..., :-1])
            O = self.matmul(weights, v)
        return self.move(O, lambda n: n.transpose(0, 1).flatten(1))

    # --- back ---

    def back(self, value, place):
        """Start with the value of one element of `value`, and send it back to where it came from."""
        value.R[place] = value.x[place]
        for v in reversed(self.values):
            if v.messages and v.R.any():
                for source, R in zip(v.sources, v.messages(v.R), strict=True):
                    source.R = source.R + R
        return value.x[place].item()

    def site(self, name, layers, tokens):
        """(L, T, N) relevance, with zeros in layers that do not have the site or do not read the token."""
        by_layer = self.sites[name]
        width = next(iter(by_layer.values())).x.shape[-1]
        out = torch.zeros(layers, tokens.stop if isinstance(tokens, slice) else tokens, width, dtype=torch.float64)
        for layer, value in by_layer.items():
            start = getattr(value, "start", 0)
            out[layer, start : start + value.x.shape[0]] = value.R
        return out

    def position_relevance(self, layers, tokens):
        """(L, T)"""
        out = torch.zeros(layers, tokens, dtype=torch.float64)
        for layer, sinks in self.positions.items():
            for value, axis in sinks:
                share = value.R.transpose(axis, -1).reshape(-1, value.R.shape[axis]).sum(0)
                start = getattr(value, "start", 0)
                out[layer, start : start + len(share)] += share
        return out


def linear_shares(z, rule):
    """Of contributions z (..., J, I): what part of R_j goes to each. The rules as their papers write them."""
    plus, minus, y = z.clamp(min=0), z.clamp(max=0), z.sum(-1, keepdim=True)
    own = torch.where(y > 0, plus, minus)  # of the output's own sign
    if isinstance(rule, Epsilon):
        return z / (y + rule.eps * y.sign())
    if isinstance(rule, Gamma):
        return (z + rule.gamma * own) / (y + rule.gamma * own.sum(-1, keepdim=True))
    if isinstance(rule, ZPlus):
        return own / own.sum(-1, keepdim=True)
    assert isinstance(rule, AlphaBeta)
    raised, lowered = (torch.nan_to_num(part / part.sum(-1, keepdim=True)) for part in (plus, minus))
    one_sign = (plus.sum(-1, keepdim=True) == 0) | (minus.sum(-1, keepdim=True) == 0)
    return torch.where(one_sign, raised + lowered, rule.alpha * raised - (rule.alpha - 1) * lowered)


def masked(x):
    return torch.where(torch.isinf(x), 0, x)


def _summed(R, shape):
    """Relevance of something that was broadcast."""
    while R.dim() > len(shape):
        R = R.sum(0)
    for axis, size in enumerate(shape):
        if size == 1:
            R = R.sum(axis, keepdim=True)
    return R
