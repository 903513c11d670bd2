"""Features Replay, DDG and DNI as their papers write them, iteration by iteration; shares no code with the engine.

A module is an ``nn.ModuleList`` of layers, with an optimizer and a scheduler of its own. Each function yields the
loss after every iteration. Modules count from 0, so the paper's K - k is ``K - 1 - k`` here. What is random in a layer
depends on the layer and the iteration alone, so that features are replayed as they were played.
"""

import copy
import hashlib

import torch
from torch import nn

from helpers.reference import seed as seed_generator
from petra import ReversibleBlock, ReversibleResidual


def cut(network, sizes, seed):
    layers, modules = iter(network), []
    for size in sizes:
        first = sum(len(module) for module in modules)
        modules.append(nn.ModuleList(next(layers) for _ in range(size)))
        modules[-1].keys = [(seed, first + i) for i in range(size)]
    return modules


def run(module, h, m):
    """F_G(k): all layers of a module, one after the other, on features of iteration m."""
    for layer, key in zip(module, module.keys, strict=True):
        seed_generator(*key, 0, m)
        if isinstance(layer, ReversibleResidual):
            h = (h[1] + layer.f(h[0]), h[0])
        elif isinstance(layer, ReversibleBlock):
            y = h[0] + layer.f(h[1])
            seed_generator(*key, 1, m)
            h = (y, h[1] + layer.g(y))
        else:
            h = layer(*h)
            h = h if isinstance(h, tuple) else (h,)
    return h


def uncounted(module, h, m):
    """The same, without a graph and with running statistics as they were."""
    saved = [b.clone() for b in module.buffers()]
    with torch.no_grad():
        h = run(module, h, m)
        for b, value in zip(module.buffers(), saved, strict=True):
            b.copy_(value)
    return h


def leaf(h):
    return tuple(x.detach().requires_grad_(x.is_floating_point()) for x in h)


def pull(outputs, inputs, parameters, delta):
    """Gradients of the inputs and of the parameters."""
    wanted = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(outputs, [*wanted, *parameters], delta)
    return found[: len(wanted)], found[len(wanted) :]


def step(optimizer, scheduler, parameters, gradients):
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g
    optimizer.step()
    scheduler.step()


def features_replay(modules, batches, loss, make_optimizer, make_scheduler):
    """Algorithm 1. After the last batch, iterations go on without a forward until nothing is left to replay."""
    K, T = len(modules), len(batches)
    optimizers = [make_optimizer(list(module.parameters())) for module in modules]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    history = [{} for _ in modules]  # iteration -> input
    deltas = [None] * K  # what each module was sent in the iteration before
    for t in range(T + K - 1):
        value = None
        if t < T:
            h = (batches[t][0],)
            for k in range(K):
                history[k][t] = h
                assert len(history[k]) <= K - k  # the paper's K - k + 1
                h = uncounted(modules[k], h, t)  # play
            value = loss(h[0], batches[t][1])
        sent = [None] * K
        for k in range(K):  # in parallel: nobody reads what another sends here
            m, parameters = t - (K - 1 - k), list(modules[k].parameters())
            if m >= T:
                continue
            if m < 0:  # zero features, and no error has come down yet
                h = leaf(torch.zeros_like(x) for x in history[k][0])
                saved = [b.clone() for b in modules[k].buffers()]
                out = run(modules[k], h, m)
                for b, was in zip(modules[k].buffers(), saved, strict=True):
                    b.data.copy_(was)  # no batch was seen
                delta = [torch.zeros_like(y) for y in out]
            else:
                h = leaf(history[k].pop(m))
                out = run(modules[k], h, m)  # replay
                delta = deltas[k]
                if k == K - 1:
                    top = out[0].detach().requires_grad_()
                    delta = torch.autograd.grad(loss(top, batches[m][1]), [top])
            sent[k], gradients = pull(out, h, parameters, delta)
            step(optimizers[k], schedulers[k], parameters, gradients)
        deltas = [*sent[1:], None]
        yield value


def ddg(modules, batches, loss, make_optimizer, make_scheduler):
    """Graphs of older iterations, each on the weights that it was made with, which are kept as a copy."""
    K, T = len(modules), len(batches)
    optimizers = [make_optimizer(list(module.parameters())) for module in modules]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    graphs = {}  # (module, iteration) -> inputs, outputs, parameters
    deltas = [None] * K
    for t in range(T + K - 1):
        value = None
        if t < T:
            h = (batches[t][0],)
            for k in range(K):
                then = copy.deepcopy(modules[k])
                inputs = leaf(h)
                outputs = run(then, inputs, t)
                for b, new in zip(modules[k].buffers(), then.buffers(), strict=True):
                    b.copy_(new)
                graphs[k, t] = inputs, outputs, list(then.parameters())
                h = tuple(y.detach() for y in outputs)
            value = loss(h[0], batches[t][1])
        sent = [None] * K
        for k in range(K):
            m, parameters = t - (K - 1 - k), list(modules[k].parameters())
            if m >= T:
                continue
            if m < 0:
                gradients = [torch.zeros_like(p) for p in parameters]
            else:
                inputs, outputs, old = graphs.pop((k, m))
                delta = deltas[k]
                if k == K - 1:
                    top = outputs[0].detach().requires_grad_()
                    delta = torch.autograd.grad(loss(top, batches[m][1]), [top])
                sent[k], gradients = pull(outputs, inputs, old, delta)
            step(optimizers[k], schedulers[k], parameters, gradients)
        deltas = [*sent[1:], None]
        yield value
    assert not graphs


def synthesizer(features, seed, above):
    """Two hidden 5×5 convolutions with batch norm and ReLU and a third one; linear ones with layer norm for tokens."""
    digest = hashlib.blake2b(f"{seed}/{above}".encode(), digest_size=8).digest()
    state = torch.get_rng_state()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
    if features.ndim == 4:
        c = features.shape[1]
        network = nn.Sequential(
            *(nn.Conv2d(c, c, 5, padding=2), nn.BatchNorm2d(c), nn.ReLU()),
            *(nn.Conv2d(c, c, 5, padding=2), nn.BatchNorm2d(c), nn.ReLU()),
            nn.Conv2d(c, c, 5, padding=2),
        )
    else:
        c = features.shape[-1]
        network = nn.Sequential(
            *(nn.Linear(c, c), nn.LayerNorm(c), nn.ReLU()),
            *(nn.Linear(c, c), nn.LayerNorm(c), nn.ReLU()),
            nn.Linear(c, c),
        )
    torch.set_rng_state(state)
    with torch.no_grad():
        network[-1].weight.zero_()
        network[-1].bias.zero_()
    return network


def dni(modules, batches, loss, make_optimizer, make_scheduler, seed, lr=1e-5):
    """Every module but the last goes backward with a synthetic gradient, which is then compared with its module's."""
    K = len(modules)
    optimizers = [make_optimizer(list(module.parameters())) for module in modules]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    makers, teachers = [None] * K, [None] * K
    above = [sum(len(module) for module in modules[: k + 1]) for k in range(K)]
    for t, (x, target) in enumerate(batches):
        h, predictions, sent = (x,), [], []
        for k in range(K):
            h = leaf(h)
            out = run(modules[k], h, t)
            if k == K - 1:
                value = loss(out[0], target)
                sent_down, gradients = pull([value], h, list(modules[k].parameters()), None)
            else:
                dim = 1 if out[0].ndim == 4 else -1
                features = torch.cat([y.detach() for y in out], dim)
                if makers[k] is None:
                    makers[k] = synthesizer(features, seed, above[k])
                    teachers[k] = torch.optim.Adam(makers[k].parameters(), lr=lr)
                predictions.append(makers[k](features))
                delta = predictions[k].detach().chunk(len(out), dim)
                sent_down, gradients = pull(out, h, list(modules[k].parameters()), delta)
            step(optimizers[k], schedulers[k], list(modules[k].parameters()), gradients)
            sent.append(sent_down)
            h = tuple(y.detach() for y in out)
        for k in range(K - 1):
            dim = 1 if sent[k + 1][0].ndim == 4 else -1
            teachers[k].zero_grad()
            (predictions[k] - torch.cat(sent[k + 1], dim)).square().sum().backward()
            teachers[k].step()
        yield value.detach()
