"""The slow, obvious implementation of difference rules: a tape records two forward passes, and multipliers go back
through both at once, operation by operation: m_x = J^T m_y, with J written out from docs/definitions-difference.md."""

from itertools import product
from math import log

import torch

from icebear import ATTNLRP
from reference.attnlrp import Tape, Value, _summed


class PairTape(Tape):
    """Its messages take the multipliers m of an output and the same value on the other prompt's tape."""

    def __init__(self):
        super().__init__(ATTNLRP)  # whose attention is written out

    def linear(self, v, weight, bias=None, rule=None):
        y = torch.nn.functional.linear(v.x, weight, bias)
        return Value(self, y, [v], lambda m, other: [m @ weight])

    def add(self, *parts):
        return Value(self, sum(p.x for p in parts), parts, lambda m, other: [_summed(m, p.x.shape) for p in parts])

    def constant(self, v, c, name):
        return Value(self, v.x + c, [v], lambda m, other: [m])

    def scale(self, v, c):
        return Value(self, v.x * c, [v], lambda m, other: [m * c])

    def mul(self, a, b):
        def messages(m, other):
            a_, b_ = (mean(mine.x, theirs.x) for mine, theirs in zip((a, b), other.sources, strict=True))
            return [_summed(m * b_, a.x.shape), _summed(m * a_, b.x.shape)]

        return Value(self, a.x * b.x, [a, b], messages)

    def choose(self, v, chosen):
        """The jump of a score where only one row chose the expert is that score's."""

        def messages(m, other):
            dx, dy = v.x - other.sources[0].x, v.x * chosen - other.x
            return [m * torch.where(dx == 0, chosen, dy / dx)]

        return Value(self, v.x * chosen, [v], messages)

    def normalize(self, v):
        total = self.linear(v, torch.ones(1, v.x.shape[-1], dtype=v.x.dtype))
        return self.mul(v, self.act(total, torch.reciprocal))

    def weigh(self, written, weight, chosen):
        """Where only one row chose the expert, all is the weight's."""
        result = self.mul(written, weight)
        result.chosen, both = chosen.bool(), result.messages

        def messages(m, other):
            alone = result.chosen != other.chosen
            through = torch.where(result.chosen, written.x, other.sources[0].x)
            to_written, to_weight = both(m, other)
            return [torch.where(alone, 0, to_written), torch.where(alone, m * through, to_weight)]

        result.messages = messages
        return result

    def matmul(self, A, V):
        def messages(m, other):
            A_, V_ = (mean(mine.x, theirs.x) for mine, theirs in zip((A, V), other.sources, strict=True))
            return [m @ V_.transpose(-1, -2), A_.transpose(-1, -2) @ m]

        return Value(self, A.x @ V.x, [A, V], messages)

    def softmax(self, v):
        """J = diag(l) - l l^T / sum(l), l the logarithmic means of both rows' weights."""

        def messages(m, other):
            there = other.sources[0].x
            result = torch.zeros_like(v.x)
            for place in product(*map(range, v.x.shape[:-1])):
                weights = zip(v.x[place].softmax(-1).tolist(), there[place].softmax(-1).tolist(), strict=True)
                means = torch.tensor([logarithmic_mean(p, q) for p, q in weights], dtype=v.x.dtype)
                result[place] = m[place] @ (torch.diag(means) - torch.outer(means, means) / means.sum())
            return [result]

        return Value(self, v.x.softmax(-1), [v], messages)

    def act(self, v, f):
        def messages(m, other):
            x, there = v.x.flatten().tolist(), other.sources[0].x.flatten().tolist()
            slopes = [slope(f, a, b) for a, b in zip(x, there, strict=True)]
            return [m * torch.tensor(slopes, dtype=m.dtype).view(m.shape)]

        return Value(self, f(v.x), [v], messages)

    def rms(self, v, gain, eps):
        """dy = mean(r) dx + mean(x) slope(r) mean((x + x') dx), times the gain."""

        def r(power):
            return 1 / torch.sqrt(power + eps)

        def messages(m, other):
            x, there = v.x, other.sources[0].x
            out = []
            for row, (a, b) in enumerate(zip(x, there, strict=True)):
                p, q = (a**2).mean(), (b**2).mean()
                steep = slope(r, p.item(), q.item())
                through = (m[row] * gain * mean(a, b)).sum()
                out.append(m[row] * gain * mean(r(p), r(q)) + through * steep * (a + b) / len(a))
            return [torch.stack(out)]

        return Value(self, v.x * r((v.x**2).mean(-1, keepdim=True)) * gain, [v], messages)

    def layer_norm(self, v, norm):
        D = v.x.shape[-1]
        centred = self.linear(v, torch.eye(D, dtype=v.x.dtype) - 1 / D)
        return self.constant(self.rms(centred, norm.weight, norm.eps), norm.bias, "biases")

    def move(self, v, f):
        result = super().move(v, f)
        alone = result.messages
        result.messages = lambda m, other: alone(m)
        return result

    def join(self, parts, dim):
        result = super().join(parts, dim)
        alone = result.messages
        result.messages = lambda m, other: alone(m)
        return result


def mean(a, b):
    return (a + b) / 2


def logarithmic_mean(p, q):
    """(Stolarsky 1975), of two weights."""
    return p if p == q else 0.0 if p * q == 0 else (p - q) / (log(p) - log(q))


def slope(f, a, b):
    """Of a function of one number between a and b; where they are the same, its derivative."""
    if a != b:
        x = torch.tensor([a, b], dtype=torch.float64)
        y = f(x)
        return ((y[0] - y[1]) / (x[0] - x[1])).item()
    with torch.enable_grad():
        x = torch.tensor(a, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(f(x), x)[0].item()


@torch.no_grad()
def explain(build, net, prompt, other, target, contrast):
    """(tokens (T,), the tape with all sites): relevance of the difference of logit[target] - logit[contrast]."""
    mine, theirs = PairTape(), PairTape()
    leaves, logits = build(mine, net, prompt)
    build(theirs, net, other)
    logits.R[target], logits.R[contrast] = 1, -1
    for v, w in zip(reversed(mine.values), reversed(theirs.values), strict=True):
        if v.messages and v.R.any():
            for source, m in zip(v.sources, v.messages(v.R, w), strict=True):
                source.R = source.R + m
    for v, w in zip(mine.values, theirs.values, strict=True):
        if v.x.shape != w.x.shape:  # the tokens of an expert
            continue
        v.R = v.R * (v.x - w.x)
    return leaves[0].R.sum(-1), mine
