"""AdamW with moments in bfloat16, one value at a time: in float64 and with integers of Python."""

import math

import numpy as np


def mixed(x):
    """The hash of a number of 32 bits."""
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ x >> 15


def random_bits(update, position, seed=0, block=2**16):
    """The 16 bits for each of the two moments of a value of a parameter."""
    number, position = divmod(position, block)
    both = mixed((update * 0x9E3779B1 + seed * 0x85EBCA6B + number) % 2**32)
    own = mixed(position) // 2**16
    return both % 2**16 ^ own, both // 2**16 ^ own


def rounded(x, bits):
    """One of the two neighbours of x in bfloat16; the further from zero if bits reach beyond the rest."""
    number = int(np.float32(x).view(np.uint32))
    rest = number % 2**16
    nearer = number - rest
    chosen = nearer + 2**16 if bits >= 2**16 - rest else nearer
    return float(np.uint32(chosen).view(np.float32))


class PlainAdamWBF16:
    """For one parameter, as a flat list of values."""

    def __init__(self, weights, lr, betas, eps, decay, seed=0, block=2**16):
        self.weights, self.lr, self.betas, self.eps, self.decay = list(weights), lr, betas, eps, decay
        self.seed, self.block, self.updates = seed, block, 0
        self.first, self.second = [0.0] * len(self.weights), [0.0] * len(self.weights)

    def step(self, gradients):
        (b1, b2), t = self.betas, self.updates + 1
        for i, g in enumerate(gradients):
            first = b1 * self.first[i] + (1 - b1) * g
            second = b2 * self.second[i] + (1 - b2) * g * g
            move = first / (1 - b1**t) / (math.sqrt(second / (1 - b2**t)) + self.eps)
            self.weights[i] -= self.lr * self.decay * self.weights[i] + self.lr * move
            of_first, of_second = random_bits(self.updates, i, self.seed, self.block)
            self.first[i], self.second[i] = rounded(first, of_first), rounded(second, of_second)
        self.updates = t
