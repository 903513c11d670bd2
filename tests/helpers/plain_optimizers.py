"""Optimizers of one weight each, as their formulas say, without batches; they share no code with petra.optim."""

import math

import torch


class PlainMuon:
    def __init__(self, momentum=0.95, nesterov=True, decay=0.0, steps=5):
        self.m, self.nesterov, self.decay, self.steps, self.b = momentum, nesterov, decay, steps, None

    def step(self, w, g, lr):
        self.b = (1 - self.m) * g + (0 if self.b is None else self.m * self.b)
        return (
            w - lr * self.decay * w - lr * self.scaled(self.m * self.b + (1 - self.m) * g if self.nesterov else self.b)
        )

    def direction(self):
        return None if self.b is None else self.scaled(self.b)

    def scaled(self, u):
        rows, columns = u.shape[0], math.prod(u.shape[1:])
        x = u.reshape(rows, columns)
        x = x / max(x.square().sum().sqrt().item(), 1e-7)
        for _ in range(self.steps):  # whichever side is longer, the polynomial is the same
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        return (0.2 * math.sqrt(max(rows, columns)) * x).reshape(u.shape)


class PlainAdamW:
    def __init__(self, betas=(0.9, 0.95), eps=1e-8, decay=0.0):
        self.betas, self.eps, self.decay, self.t, self.first, self.second = betas, eps, decay, 0, 0.0, 0.0

    def step(self, w, g, lr):
        self.add(g)
        return w - lr * self.decay * w - lr * self.direction()

    def add(self, g):
        (b1, b2), self.t = self.betas, self.t + 1
        self.first = b1 * self.first + (1 - b1) * g
        self.second = b2 * self.second + (1 - b2) * g * g

    def direction(self):
        if self.t == 0:
            return None
        first, second = (x / (1 - b**self.t) for x, b in zip((self.first, self.second), self.betas, strict=True))
        return first / (second.sqrt() + self.eps)


class PlainNAdamW(PlainAdamW):
    psi, product = 4e-3, 1.0

    def mu(self, t):
        return self.betas[0] * (1 - 0.5 * 0.96 ** (self.psi * t))

    def step(self, w, g, lr):
        self.add(g)
        self.product *= self.mu(self.t)
        ahead = self.mu(self.t + 1)
        now, then = (1 - self.mu(self.t)) / (1 - self.product), ahead / (1 - self.product * ahead)
        size = (self.second / (1 - self.betas[1] ** self.t)).sqrt() + self.eps
        return w - lr * self.decay * w - lr * (now * g + then * self.first) / size


class PlainSOAP:
    """The algorithm of the paper for a matrix, sorted before each QR decomposition as in its authors' code."""

    def __init__(self, betas=(0.95, 0.95), eps=1e-8, decay=0.0, frequency=10, largest=4096):
        self.betas, self.eps, self.decay, self.frequency, self.largest = betas, eps, decay, frequency, largest
        self.updates, self.m = 0, 0.0

    def step(self, w, g, lr):
        g = g.reshape(g.shape[0], -1)
        b1, b2 = self.betas
        if self.updates == 0:
            rows, columns = g.shape
            self.v = torch.zeros_like(g)
            self.l = (1 - b2) * (g @ g.T) if 1 < rows <= self.largest else None
            self.r = (1 - b2) * (g.T @ g) if 1 < columns <= self.largest else None
            self.ql = torch.eye(rows, dtype=g.dtype) if self.l is None else largest_first(self.l)
            self.qr = torch.eye(columns, dtype=g.dtype) if self.r is None else largest_first(self.r)
            self.updates = 1
            return w
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * (self.ql.T @ g @ self.qr) ** 2
        self.updates += 1
        w = w - lr * self.decay * w - lr * self.direction().reshape(w.shape)
        if self.l is not None:
            self.l = b2 * self.l + (1 - b2) * (g @ g.T)
        if self.r is not None:
            self.r = b2 * self.r + (1 - b2) * (g.T @ g)
        if (self.updates - 1) % self.frequency == 0:
            if self.l is not None:
                order = sorted(range(len(self.l)), key=lambda i: -float(self.ql[:, i] @ self.l @ self.ql[:, i]))
                self.v = self.v[order]
                self.ql = torch.linalg.qr(self.l @ self.ql[:, order])[0]
            if self.r is not None:
                order = sorted(range(len(self.r)), key=lambda i: -float(self.qr[:, i] @ self.r @ self.qr[:, i]))
                self.v = self.v[:, order]
                self.qr = torch.linalg.qr(self.r @ self.qr[:, order])[0]
        return w

    def direction(self):
        """As a matrix; None before the first step."""
        if self.updates < 2:
            return None
        (b1, b2), t = self.betas, self.updates - 1
        m, v = self.ql.T @ (self.m / (1 - b1**t)) @ self.qr, self.v / (1 - b2**t)
        return self.ql @ (m / (v.sqrt() + self.eps)) @ self.qr.T


def largest_first(matrix):
    return torch.linalg.eigh(matrix)[1].flip(1)
