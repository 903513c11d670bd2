"""A stand-in for CUDA graphs on a CPU: records the operations of a piece of work, and repeats them in the same memory.

As with a graph, nothing of the host's part is done again, and numbers that the host reads are an error.
"""

from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.overwritten = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            raise RuntimeError("the host reads a number while work is recorded")
        kwargs = kwargs or {}
        written = [given for said, given in zip(func._schema.arguments, args, strict=False) if said.is_write]
        if func is torch.ops.aten.native_batch_norm.default:  # its schema does not tell of running statistics
            written = args[3:5]
        self.overwritten += [(x.detach(), x.detach().clone()) for x in tree_leaves(written) if x is not None]
        outputs = func(*args, **kwargs)
        returns = func._schema.returns
        if not returns or any(r.alias_info is None or r.alias_info.is_write for r in returns):
            # Else it is a view of memory that stays where it is.
            made = (outputs,) if len(returns) == 1 else outputs or ()
            new = [i for i, said in enumerate(returns) if said.alias_info is None]
            made = [(i, tree_leaves(made[i])) for i in new]
            # Memory is remembered, not tensors, for a tensor may be given other memory later.
            call = tree_map_only(Tensor, Tensor.detach, (args, kwargs, made))
            self.calls.append((func, len(returns) == 1, *call))
        return outputs

    @torch.no_grad()
    def undo(self):
        for x, before in reversed(self.overwritten):
            x.copy_(before)

    @torch.no_grad()
    def repeat(self):
        for func, single, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for i, old in made:
                new = again if single else again[i]
                for a, b in zip(old, [new] if isinstance(new, Tensor) else tree_leaves(new), strict=True):
                    if isinstance(a, Tensor):
                        a.copy_(b)


class OperationCapture:
    """A recorder for `TickCapture`; branches run one after the other."""

    def __init__(self):
        self.recorded = 0

    def capture(self, work):
        self.recorded += 1
        seeding = patch(
            "petra.methods.stage_layers.seed_generators", side_effect=RuntimeError("not while work is recorded")
        )
        try:
            with Recording() as capturing, seeding:
                work()
        except Exception:
            capturing.undo()
            raise
        capturing.overwritten.clear()
        return capturing.repeat

    def branch(self, number):
        return nullcontext()

    def after(self, number, other):
        pass

    def join(self):
        pass
