"""The memory pool of captured graphs. PyTorch rejects the handle of a pool whose graphs are all gone."""

import itertools

import torch

from petra.cudagraph.graph_capture import GraphMemory


class Graph:
    """Stands in for a CUDA graph."""


def test_graphs_share_a_pool_while_one_of_them_exists(monkeypatch):
    handles = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    memory = GraphMemory()
    graphs = [Graph(), Graph()]
    assert memory.pool() == (0, 0)
    memory.graphs.update(graphs)
    assert memory.pool() == (0, 0)
    del graphs[0]
    assert memory.pool() == (0, 0)
    graphs.clear()
    assert memory.pool() == (0, 1)
