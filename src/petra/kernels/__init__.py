"""Fused GPU kernels for batch norm, each with a fallback to the PyTorch operations that it replaces.

Start with `fused_norm.py`: `norm_relu` computes batch norm, an optional addition and ReLU, and decides whether the
fused kernels apply. Then:

- `conv_norm.py`: convolutions followed by a batch norm, whose bias has no effect in training and is skipped.
- `batch_norm_relu.py`: the autograd functions that launch the kernels, and how the kernels divide their work.
- `triton_batch_norm.py`: the Triton kernels. Importing it requires Triton.
"""
