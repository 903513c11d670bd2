"""The logits of a GPT from its weights, by the formulas, one head at a time: slow and plain."""

import torch

EPSILON = {"layernorm": 1e-5, "rmsnorm": 1e-6}


def normalise(kind, x, weight, bias=None):
    if kind == "layernorm":
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + EPSILON[kind]).sqrt()
    else:
        y = x / (x.square().mean(-1, keepdim=True) + EPSILON[kind]).sqrt()
    return y * weight + (0 if bias is None else bias)


def rotated(x):
    """Pairs of channels as complex numbers, times e^(i · position · frequency); x has shape (tokens, channels)."""
    tokens, d = x.shape
    z = torch.complex(x[:, : d // 2], x[:, d // 2 :])
    for i in range(d // 2):
        for p in range(tokens):
            z[p, i] *= torch.exp(torch.tensor(1j * p * 10000.0 ** (-2 * i / d), dtype=torch.complex128))
    return torch.cat([z.real, z.imag], 1)


class Reference:
    """A decoder with the weights and the options of another one."""

    def __init__(self, state, *, heads, reversible, depth, **options):
        self.state, self.heads, self.reversible, self.depth, self.options = state, heads, reversible, depth, options

    def linear(self, name, x):
        bias = self.state.get(f"{name}.bias")
        return x @ self.state[f"{name}.weight"].mT + (0 if bias is None else bias)

    def norm(self, name, x):
        kind = self.options.get("norm", "layernorm")
        return normalise(kind, x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def attention(self, name, x):
        tokens, width = x.shape
        d, groups = width // self.heads, self.options.get("kv_heads") or self.heads
        qkv = self.linear(f"{name}.qkv", self.norm(f"{name}.norm", x))
        qs = list(qkv[:, :width].split(d, 1))
        ks, vs = (list(part.split(d, 1)) for part in qkv[:, width:].split(groups * d, 1))
        # Each head of keys and values is repeated for the consecutive heads of queries that share it.
        ks, vs = ([part for part in parts for _ in range(self.heads // groups)] for parts in (ks, vs))
        results = []
        for q, k, v in zip(qs, ks, vs, strict=True):
            if self.options.get("qk_norm"):
                q = normalise("rmsnorm", q, self.state[f"{name}.q_norm.weight"])
                k = normalise("rmsnorm", k, self.state[f"{name}.k_norm.weight"])
            if self.options.get("positions") == "rotary":
                q, k = rotated(q), rotated(k)
            later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            results.append((q @ k.mT / d**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v)
        return self.options.get("residual_scale", 1) * self.linear(f"{name}.out", torch.cat(results, 1))

    def mlp(self, name, x):
        y = self.linear(f"{name}.up", self.norm(f"{name}.norm", x))
        if self.options.get("mlp") == "swiglu":
            gate, up = y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]
            y = gate / (1 + torch.exp(-gate)) * up
        else:
            y = y * (1 + torch.erf(y / 2**0.5)) / 2
        return self.options.get("residual_scale", 1) * self.linear(f"{name}.down", y)

    def __call__(self, tokens):
        """The logits of one text."""
        x = self.state["stem.tokens.weight"][tokens]
        if self.options.get("positions", "learned") == "learned":
            x = x + self.state["stem.positions.weight"][: len(tokens)]
        if self.options.get("embedding_norm"):
            x = self.norm("stem.norm", x)
        x1 = x2 = x
        for i in range(self.depth):
            if self.reversible:
                x1 = x1 + self.attention(f"block{i}.f", x2)
                x2 = x2 + self.mlp(f"block{i}.g", x1)
            else:
                x1 = x1 + self.attention(f"block{i}.f", x1)
                x1 = x2 = x1 + self.mlp(f"block{i}.g", x1)
        return self.norm("head.norm", (x1 + x2) / 2) @ self.state["head.fc.weight"].mT
