"""Delayed training with corrections as the formulas say it: one micro-batch after the other, over histories of weights.

Shares no code with the engine. Stage s with n_s micro-batches in flight goes forward with micro-batch m when
floor((m - n_s)/k) updates have been made, and backward when floor(m/k) have. So there is no pipeline here, only
versions of weights.
"""

import math

import torch
from torch import nn

from helpers.plain_optimizers import PlainAdamW, PlainMuon, PlainNAdamW, PlainSOAP
from petra import Network, ReversibleBlock


class Lift(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(4, 2 * width)

    def forward(self, x):
        return self.fc(x).chunk(2, 1)


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(2 * width, 3)

    def forward(self, x, y):
        return self.fc(torch.cat([x, y], 1))


def network(blocks, width=3):
    """A layer a stage: a lift, reversible blocks, a head."""

    def f():
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())

    return Network(Lift(width), *(ReversibleBlock(f(), f()) for _ in range(blocks)), Head(width)).double()


def data(count):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(3, 4, generator=generator, dtype=torch.float64), torch.randint(3, (3,), generator=generator))
        for _ in range(count)
    ]


def lift(w, x):
    return (x[0] @ w[0].T + w[1]).chunk(2, 1)


def residual(w, b, x):
    return torch.tanh(x @ w.T + b)


def block(w, x):
    y1 = x[0] + residual(w[0], w[1], x[1])
    return y1, x[1] + residual(w[2], w[3], y1)


def unblock(w, y):
    x2 = y[1] - residual(w[2], w[3], y[0])
    return y[0] - residual(w[0], w[1], x2), x2


def head(w, x):
    return (torch.cat(x, 1) @ w[0].T + w[1],)


def vjp(function, w, x, grads):
    w = [v.detach().requires_grad_() for v in w]
    x = tuple(v.detach().requires_grad_() for v in x)
    found = torch.autograd.grad(function(w, x), [*x, *w], grads)
    return found[: len(x)], list(found[len(x) :])


class Stage:
    """Versions of weights, velocities and δ; ``c`` are the corrections: name -> parameter."""

    def __init__(self, function, weights, n, k, hyper, c):
        self.function, self.n, self.k, self.h, self.c = function, n, k, hyper, c
        self.tau = n / k
        self.versions = [[w.detach().clone() for w in weights]]
        self.velocity = [None]  # of each version
        self.delta = [torch.zeros_like(w) for w in weights]
        self.second = [torch.zeros_like(w) for w in weights]
        self.first = [torch.zeros_like(w) for w in weights]
        self.momentum = None
        self.gradients = []
        self.optimizers = None  # of each weight

    def m(self, u):
        m = self.h["momentum"]
        if "inertia" in self.c and self.n > 0:
            fall = min((2**-i for i in range(99)), key=lambda f: abs(math.log(f) - math.log(self.h["gamma"] ** u)))
            m = max(m, 1 - 1 / max(self.c["inertia"] * self.k * self.tau**2 * fall, 1))
        return m

    def lr(self, u):
        lr = self.h["lr"] * self.h["gamma"] ** u
        if "inertia" in self.c:
            lr = lr * (1 - self.m(u)) / (1 - self.h["momentum"])
        if "reschedule" in self.c and self.n > 0:
            p = 1 - min(u / self.c["reschedule"], 1)
            lr = lr / max(self.tau, 1) ** p
        if "damp" in self.c:
            lr = lr / (1 + self.c["damp"] * self.tau)
        return lr

    def forward_weights(self, base, m):
        u = base + max(m - self.n, 0) // self.k
        d = m // self.k - max(m - self.n, 0) // self.k
        w = self.versions[u]
        far = self.c.get("predict")  # the horizon, if it is given
        if {"predict", "coast"} & set(self.c) and d > 0 and (self.tau >= 1 or far) and self.velocity[u] is not None:
            steps = [(far or 1) * d if "predict" in self.c else self.coasting(d, u, i) for i in range(len(w))]
            moves = zip(w, steps, self.velocity[u], strict=True)
            w = [a if v is None else a - self.lr(u) * n * v.reshape(a.shape) for a, n, v in moves]
        return w

    def coasting(self, d, u, i):
        """Of weight number i."""
        kind = self.h["optimizer"]
        if self.hidden(i) or kind == "sgd":
            own, ahead = self.m(u), self.h["nesterov"]
        else:
            own, ahead = 0.9, kind == "nadamw"
        r = self.c["coast"] or own
        first = r * r if ahead else r
        return first * (1 - r**d) / (1 - r)

    def hidden(self, i):
        """Whether Muon orthogonalises weight number i: a matrix of a block."""
        return self.h["optimizer"] == "muon" and self.function is block and self.versions[0][i].ndim > 1

    def plain(self, i):
        """The optimizer of weight number i."""
        w, kind, rest = self.versions[0][i], self.h["optimizer"], ((0.9, 0.99), 1e-3, self.h["decay"])
        if self.hidden(i):
            return PlainMuon(self.h["momentum"], self.h["nesterov"], self.h["decay"])
        if kind == "soap" and w.ndim > 1 and 3 in w.shape:
            return PlainSOAP(*rest, frequency=2, largest=3)
        return PlainNAdamW(*rest) if kind == "nadamw" else PlainAdamW(*rest)

    def backward_weights(self, m):
        d = m // self.k - max(m - self.n, 0) // self.k
        w = self.versions[-1]
        if "discrepancy" in self.c and d > 0:
            w = [a - d * b for a, b in zip(w, self.delta, strict=True)]
        return w

    def update(self):
        g = [sum(column) / len(column) for column in zip(*self.gradients, strict=True)]
        self.gradients = []
        if "shrink" in self.c:
            g = [v * self.c["shrink"] ** self.tau for v in g]
        if self.h["clip"]:
            norm = sum(v.square().sum() for v in g) ** 0.5
            g = [v * min(1.0, float(self.h["clip"] / (norm + 1e-6))) for v in g]
        old, u = self.versions[-1], len(self.versions) - 1
        if self.h["optimizer"] == "sgd":
            new = self.sgd(old, g, u)
        elif self.h["optimizer"] == "adamw":
            new = self.adamw(old, g, u)
        else:
            self.optimizers = self.optimizers or [self.plain(i) for i in range(len(old))]
            each = zip(self.optimizers, old, g, strict=True)
            new = [one.step(w, v, self.lr(u)) for one, w, v in each]
            self.velocity.append([one.direction() for one in self.optimizers])
        if "discrepancy" in self.c and self.n > 0:
            gamma = self.c["discrepancy"] ** (1 / self.tau)
            self.delta = [gamma * d + (1 - gamma) * (b - a) for d, a, b in zip(self.delta, old, new, strict=True)]
        self.versions.append(new)

    def sgd(self, old, g, u):
        m, nesterov = self.m(u), self.h["nesterov"]
        g = [v + self.h["decay"] * w for v, w in zip(g, old, strict=True)]
        self.momentum = g if self.momentum is None else [m * b + v for b, v in zip(self.momentum, g, strict=True)]
        self.velocity.append(self.momentum)
        a, b = (m, 1) if nesterov else (1, 0)
        if "spike" in self.c:
            tau = self.tau + 1 if nesterov else self.tau
            a, b = m**tau, (1 - m**tau) / (1 - m)
        return [w - self.lr(u) * (a * v + b * x) for w, v, x in zip(old, self.momentum, g, strict=True)]

    def adamw(self, old, g, u):
        b1, b2, eps = 0.9, 0.99, 1e-3
        self.first = [b1 * a + (1 - b1) * v for a, v in zip(self.first, g, strict=True)]
        self.second = [b2 * a + (1 - b2) * v * v for a, v in zip(self.second, g, strict=True)]
        t = u + 1
        self.velocity.append(
            [a / (1 - b1**t) / ((b / (1 - b2**t)).sqrt() + eps) for a, b in zip(self.first, self.second, strict=True)]
        )
        return [
            w - self.lr(u) * self.h["decay"] * w - self.lr(u) * v for w, v in zip(old, self.velocity[-1], strict=True)
        ]


def train(network, in_flight, k, runs, method, hyper, corrections):
    """Weights of every stage after training on ``runs``, each of which fills and drains the pipeline."""
    functions = [lift, *[block] * (len(network) - 2), head]
    stages = [
        Stage(f, list(layer.parameters()), n, k, hyper, corrections)
        for f, layer, n in zip(functions, network, in_flight, strict=True)
    ]
    batches = iter(data(sum(runs)))
    for count in runs:
        bases = [len(stage.versions) - 1 for stage in stages]
        for m in range(count):
            x, target = next(batches)
            x = (x,)
            inputs, used = [], []
            for stage, base in zip(stages, bases, strict=True):
                inputs.append(x)
                used.append(stage.forward_weights(base, m))
                x = stage.function(used[-1], x)
            out = x[0].detach().requires_grad_()
            grads = torch.autograd.grad(nn.functional.cross_entropy(out, target), [out])
            for s in reversed(range(len(stages))):
                stage, w = stages[s], stages[s].backward_weights(m)
                if method == "delayed":
                    x, w = inputs[s], used[s]
                    grads, found = vjp(stage.function, w, x, grads)
                elif method == "checkpointed" or stage.function is not block:
                    x, w = inputs[s], used[s] if method == "petra-stashed" else w
                    grads, found = vjp(stage.function, w, x, grads)
                elif method == "petra":
                    x = unblock(w, x)
                    grads, found = vjp(block, w, x, grads)
                else:  # reconstructed with current weights, differentiated with those of the forward, part by part
                    x, grads, found = stashed(w, used[s], x, grads)
                stage.gradients.append(found)
                if (m + 1) % k == 0:
                    stage.update()
        if count % k:
            for stage in stages:
                stage.update()
    return [stage.versions[-1] for stage in stages]


def stashed(w, old, y, grads):
    def g(v, x):
        return (residual(v[0], v[1], x[0]),)

    x2 = y[1] - residual(w[2], w[3], y[0])
    through, last = vjp(g, old[2:], (y[0],), (grads[1],))
    d1 = grads[0] + through[0]
    x1 = y[0] - residual(w[0], w[1], x2)
    through, first = vjp(g, old[:2], (x2,), (d1,))
    return (x1, x2), (d1, grads[1] + through[0]), first + last
