"""The transport of a process that is alone."""

import pytest
import torch.distributed as dist

from petra.distributed import ProcessTransport


@pytest.fixture
def transport():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transport = ProcessTransport()
    try:
        yield transport
        transport.close_threads()
    finally:
        dist.destroy_process_group()
