"""A rank of `examples/torchrun_script.py`, and of a trainer that writes a distributed checkpoint."""

import os
import runpy
import warnings
from pathlib import Path

import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_script(rank, world, port, folder):
    """Run the script as torchrun does, in a process of its own."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in names.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    with open(folder / f"rank{rank}.log", "w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    runpy.run_path(str(EXAMPLES / "torchrun_script.py"))["main"](["--smoke", "--out", str(folder)])
    save_checkpoint(rank, world, port, folder)


def trained(transport=None):
    """A trainer after a few updates."""
    import petra

    torch.manual_seed(0)
    network = petra.models.create("revnet18", in_channels=1, num_classes=4, width=4, depths=(1, 1))
    trainer = petra.Trainer(
        network,
        stages=4,
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        transport=transport,
    )
    for seed in range(4):
        x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        trainer.step(x, torch.arange(4))
    trainer.drain()
    return trainer


def save_checkpoint(rank, world, port, folder):
    """Write the weights of two ranks into one checkpoint."""
    from petra.distributed import join
    from petra.integrations import save_distributed

    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # another job in the same store
    warnings.simplefilter("ignore")
    with join(torch.device("cpu")) as transport:
        save_distributed(trained(transport), folder / "dcp")
