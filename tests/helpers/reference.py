"""The methods as plainly as the papers write them: slow, obvious, and sharing no code with the engine.

A stage is a list of layers. Time goes in steps; in each step some stages act, and a stage reads only
what was sent in the step before. Gradients go through ``torch.autograd.grad``, updates through
``torch.optim``; nothing else of PyTorch is clever here.
"""

import copy
import hashlib

import torch
from torch import nn

from petra import ReversibleBlock, ReversibleResidual


def seed(*key):
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(number)


def is_reversible(layer):
    return isinstance(layer, ReversibleResidual | ReversibleBlock)


class ReferenceStage:
    def __init__(self, layers, first, make_optimizer, k, key):
        self.layers, self.first, self.k, self.key = layers, first, k, key
        self.parameters = [p for layer in layers for p in layer.parameters()]
        self.optimizer = make_optimizer(self.parameters)
        self.delta = None  # Δ_j
        self.copied = None
        self.t = 0

    # F_j, layer by layer. Every residual function and every ordinary layer has a random state of its own.
    def layer(self, i, x, m, layers=None):
        layer = (layers or self.layers)[i]
        if isinstance(layer, ReversibleResidual):
            seed(self.key, self.first + i, 0, m)
            return x[1] + layer.f(x[0]), x[0]
        if isinstance(layer, ReversibleBlock):
            seed(self.key, self.first + i, 0, m)
            y1 = x[0] + layer.f(x[1])
            seed(self.key, self.first + i, 1, m)
            return y1, x[1] + layer.g(y1)
        seed(self.key, self.first + i, 0, m)
        y = layer(*x)
        return y if isinstance(y, tuple) else (y,)

    def forward(self, x, m):
        """Outputs, and the inputs of all layers; running statistics stay as they were."""
        saved = [(b, b.clone()) for layer in self.layers for b in layer.buffers()]
        inputs = []
        with torch.no_grad():
            for i in range(len(self.layers)):
                inputs.append(x)
                x = self.layer(i, x, m)
            for b, value in saved:
                b.copy_(value)
        return x, inputs

    def differentiate(self, lowest, highest, x, delta, m, layers=None):
        """vjp of layers lowest … highest at x."""
        x = tuple(v.detach().requires_grad_() for v in x)
        y = x
        used = layers or self.layers
        for i in range(lowest, highest + 1):
            y = self.layer(i, y, m, used)
        parameters = [p for i in range(lowest, highest + 1) for p in used[i].parameters()]
        grads = torch.autograd.grad(y, [*x, *parameters], delta)
        return grads[: len(x)], list(grads[len(x) :])

    def reverse(self, i, y, delta, m):
        """Eq. 4 for one reversible layer: the residual function runs once."""
        layer = self.layers[i]
        if isinstance(layer, ReversibleResidual):
            x = y[1].detach().requires_grad_()
            seed(self.key, self.first + i, 0, m)
            f = layer.f(x)
            grads = torch.autograd.grad(f, [x, *layer.f.parameters()], delta[0])
            return (x.detach(), y[0] - f.detach()), (delta[1] + grads[0], delta[0]), list(grads[1:])
        y1 = y[0].detach().requires_grad_()
        seed(self.key, self.first + i, 1, m)
        g = layer.g(y1)
        x2 = y[1] - g.detach()
        g_grads = torch.autograd.grad(g, [y1, *layer.g.parameters()], delta[1])
        d1 = delta[0] + g_grads[0]
        x2 = x2.requires_grad_()
        seed(self.key, self.first + i, 0, m)
        f = layer.f(x2)
        x1 = y[0].detach() - f.detach()
        f_grads = torch.autograd.grad(f, [x2, *layer.f.parameters()], d1)
        return (x1, x2.detach()), (d1, delta[1] + f_grads[0]), [*f_grads[1:], *g_grads[1:]]

    def residual_with_old_weights(self, i, part, name, old, x, delta, m):
        """A residual function at x: its current value, and its vjp with old weights."""
        function = getattr(self.layers[i], name)
        saved = [(b, b.clone()) for b in function.buffers()]
        seed(self.key, self.first + i, part, m)
        with torch.no_grad():
            value = function(x)
            for b, was in saved:
                b.copy_(was)
        x = x.detach().requires_grad_()
        function = getattr(old[i], name)
        seed(self.key, self.first + i, part, m)
        grads = torch.autograd.grad(function(x), [x, *function.parameters()], delta)
        return value, grads[0], list(grads[1:])

    def reverse_with_old_weights(self, i, y, delta, m, old):
        """Table 4, line 4: inputs from current weights, gradients from old ones, one residual at a time."""
        if isinstance(self.layers[i], ReversibleResidual):
            f, through, grads = self.residual_with_old_weights(i, 0, "f", old, y[1], delta[0], m)
            return (y[1], y[0] - f), (delta[1] + through, delta[0]), grads
        g, through, g_grads = self.residual_with_old_weights(i, 1, "g", old, y[0], delta[1], m)
        x2, d1 = y[1] - g, delta[0] + through
        f, through, f_grads = self.residual_with_old_weights(i, 0, "f", old, x2, d1, m)
        return (y[0] - f, x2), (d1, delta[1] + through), f_grads + g_grads

    def snapshot(self):
        """A copy of the weights that shares the running statistics; the same one until they change."""
        if self.copied is not None:
            return self.copied
        layers = copy.deepcopy(self.layers)
        for old, new in zip(self.layers, layers, strict=True):
            for (_, module), (_, twin) in zip(old.named_modules(), new.named_modules(), strict=True):
                twin._buffers = module._buffers
        self.copied = layers
        return layers

    # Backward, from the top layer down.
    def backward(self, method, kept, y, delta, m):
        inputs, old = kept
        grads = []
        i = len(self.layers) - 1
        if method in ("delayed", "checkpointed"):
            x = inputs[0]
            delta, grads = self.differentiate(0, i, x, delta, m, old if method == "delayed" else None)
        else:
            while i >= 0:
                if is_reversible(self.layers[i]):
                    if method == "petra-stashed":
                        x, delta, found = self.reverse_with_old_weights(i, y, delta, m, old)
                    else:
                        x, delta, found = self.reverse(i, y, delta, m)
                    i -= 1
                else:
                    top = i
                    while i > 0 and not is_reversible(self.layers[i - 1]):
                        i -= 1
                    x = inputs[i]  # the buffer of a run of layers that are not reversible
                    stashed = old if method == "petra-stashed" else None
                    delta, found = self.differentiate(i, top, x, delta, m, stashed)
                    i -= 1
                grads = found + grads
                y = x
        self.accumulate(grads)
        return x, delta

    def accumulate(self, grads):
        self.delta = grads if self.delta is None else [d + g for d, g in zip(self.delta, grads, strict=True)]
        self.t += 1

    def update(self, flush=False):
        if self.t == self.k or (flush and self.t > 0):
            for p, d in zip(self.parameters, self.delta, strict=True):
                p.grad = d / self.t if self.t > 1 else d
            self.optimizer.step()
            self.delta, self.t, self.copied = None, 0, None

    def update_with_zero(self):
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.copied = None


def train_pipelined(network, cuts, batches, method, schedule, make_optimizer, k, key):
    """Yields the losses so far and the stages after every tick, and once more at the end."""
    stages = [ReferenceStage([network[i] for i in cut], cut[0], make_optimizer, k, key) for cut in cuts]
    J = len(stages)
    ups, downs = {}, {}  # (stage, micro-batch) -> message sent in the step before
    kept = {}
    losses = {}
    data = list(batches)
    done = 0
    step = 0
    while done < len(data) or (schedule != "lock-step" and step % 2):  # whole ticks
        sent_up, sent_down = {}, {}
        if schedule == "lock-step":
            active, reads = range(J), step
        else:
            active, reads = [j for j in range(J) if j % 2 == step % 2], step // 2 if step % 2 == 0 else len(data)
        for j in active:
            stage = stages[j]
            # forward, with the weights of the start of the tick
            m = reads if j == 0 else next((m for (s, m) in ups if s == j), None)
            if m is not None and m < len(data):
                x = (data[m][0],) if j == 0 else ups.pop((j, m))
                if j < J - 1:
                    y, inputs = stage.forward(x, m)
                    sent_up[j + 1, m] = y
                    kept[j, m] = inputs, stage.snapshot() if method in ("delayed", "petra-stashed") else None
                else:  # the last stage: loss and backward at once, from one graph where nothing is reversible
                    losses[m], x, delta = last_stage(stage, method, x, data[m][1], m)
                    if j > 0:
                        sent_down[j - 1, m] = x, delta
                    else:
                        done += 1
                    stage.update()
            # backward, with the same weights; then update
            m = next((m for (s, m) in downs if s == j), None)
            if m is not None:
                y, delta = downs.pop((j, m))
                message = stage.backward(method, kept.pop((j, m)), y, delta, m)
                if j > 0:
                    sent_down[j - 1, m] = message
                else:
                    done += 1
                stage.update()
        assert not ups
        assert not downs
        ups, downs = sent_up, sent_down
        step += 1
        if schedule == "lock-step" or step % 2 == 0:
            yield dict(losses), stages
    for stage in stages:
        stage.update(flush=True)
    yield dict(losses), stages


def train_locked(network, cuts, batches, method, make_optimizer, k, key):
    """Alg. 1 of Features Replay with the backward of any method; yields like `train_pipelined`."""
    stages = [ReferenceStage([network[i] for i in cut], cut[0], make_optimizer, k, key) for cut in cuts]
    J = len(stages)
    found, kept, losses = {}, {}, {}  # what each stage gave to the one below in the iteration before
    data = list(batches)
    for t in range(len(data) + J - 1):
        if t < len(data):
            x = (data[t][0],)
            for j, stage in enumerate(stages[:-1]):
                y, inputs = stage.forward(x, t)
                kept[j, t] = inputs, stage.snapshot() if method in ("delayed", "petra-stashed") else None
                x = y
        finding = {}
        for j, stage in enumerate(stages):
            m = t - (J - 1 - j)
            if m >= len(data):
                continue
            if j == J - 1:
                losses[m], *finding[j] = last_stage(stage, method, x, data[m][1], m)
                stage.update()
            elif m >= 0:
                finding[j] = stage.backward(method, kept.pop((j, m)), *found[j + 1], m)
                stage.update()
            elif (m + 1) % k == 0:  # gradients before the first micro-batch are zero
                stage.update_with_zero()
        found = finding
        yield dict(losses), stages
    for stage in stages:
        stage.update(flush=True)
    yield dict(losses), stages


def last_stage(stage, method, x, target, m):
    """Forward, loss and backward in one go."""
    n = len(stage.layers)
    if method in ("delayed", "checkpointed"):
        start = 0
    else:
        start = n
        while start > 0 and not is_reversible(stage.layers[start - 1]):
            start -= 1
    inputs = []
    saved = [(b, b.clone()) for layer in stage.layers[:start] for b in layer.buffers()]
    with torch.no_grad():
        for i in range(start):
            inputs.append(x)
            x = stage.layer(i, x, m)
        for b, value in saved:
            b.copy_(value)
    top = tuple(v.detach().requires_grad_() for v in x)
    y = top
    for i in range(start, n):
        y = stage.layer(i, y, m)
    loss = nn.functional.cross_entropy(y[0], target)
    parameters = [p for i in range(start, n) for p in stage.layers[i].parameters()]
    grads = torch.autograd.grad(loss, [*top, *parameters])
    delta, found = grads[: len(top)], list(grads[len(top) :])
    y = tuple(v.detach() for v in top)
    i = start - 1
    while i >= 0:
        if is_reversible(stage.layers[i]):
            y, delta, more = stage.reverse(i, y, delta, m)
            i -= 1
        else:
            highest = i
            while i > 0 and not is_reversible(stage.layers[i - 1]):
                i -= 1
            y = inputs[i]
            delta, more = stage.differentiate(i, highest, y, delta, m)
            i -= 1
        found = more + found
    stage.accumulate(found)
    return loss.detach(), y, delta


def train_sequential(network, batches, make_optimizer, k, key, reversible):
    """Backprop (or RevNet's) one micro-batch at a time; yields like `train_pipelined`."""
    stage = ReferenceStage(list(network), 0, make_optimizer, k, key)
    losses = {}
    for m, (x, target) in enumerate(batches):
        losses[m], _, _ = last_stage(stage, "reversible" if reversible else "checkpointed", (x,), target, m)
        stage.update()
        yield dict(losses), [stage]
    stage.update(flush=True)
    yield dict(losses), [stage]
