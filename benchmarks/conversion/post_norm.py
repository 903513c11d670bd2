"""Two ways to make post-norm blocks reversible: growth of the streams and reconstruction error in float32.

    python benchmarks/conversion/post_norm.py

"minus input" uses N(x + f(x)) - x as the residual function; "pre-norm" is the way of petra.make_reversible.
"""

import torch
from torch import nn

import petra
from petra.formatting import render


class MinusInput(nn.Module):
    """N(x + f(x)) - x, with f the attention or the perceptron of a block."""

    def __init__(self, block, attention):
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x):
        if self.attention:
            return self.block.norm1(x + self.block._sa_block(x, None, None)) - x
        return self.block.norm2(x + self.block._ff_block(x)) - x


def encoder(depth, width=64, spread=0.1):
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    network = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).eval()
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.add_(spread * torch.randn_like(parameter))
        elif parameter.ndim > 1:
            parameter.normal_(0, 0.02)  # BERT's initialization
    return network


def there_and_back(layers, x):
    """Return the standard deviation of the output streams, and the largest error of the reconstructed inputs."""
    streams = (x, x)
    for layer in layers:
        streams = layer(*streams)
    top = max(float(s.std()) for s in streams)
    for layer in reversed(layers):
        streams = layer.inverse(*streams)
    return top, max(float((s - x).abs().max()) for s in streams)


@torch.no_grad()
def main() -> None:
    rows = []
    for depth in (6, 12, 24):
        torch.manual_seed(0)
        network = encoder(depth)
        x = nn.functional.layer_norm(torch.randn(4, 16, 64), (64,))
        minus = [petra.ReversibleBlock(MinusInput(b, True), MinusInput(b, False)) for b in network.layers]
        pre = petra.make_reversible(network).layers[0].layers
        found = (*there_and_back(minus, x), *there_and_back(pre, x))
        rows.append([depth, *(f"{value:.0e}" for value in found)])
    print(render(["blocks", "minus input: spread", "error", "pre-norm: spread", "error"], rows))


if __name__ == "__main__":
    main()
