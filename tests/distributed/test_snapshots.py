"""Snapshots: what is sent between processes arrives unchanged, and all agree on the last one that is complete."""

import json
import pickle
import signal
import sys
import threading
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import fork_server
from hypothesis import given
from hypothesis import strategies as st

from petra.distributed import LostRank, ProcessTransport, RankPosition, SingleProcess, Snapshots, membership
from petra.distributed.io_thread import IOThread
from petra.distributed.membership import DONE, JobEnded, Membership, Roster, lost_key, publish
from petra.distributed.packed_state import HostMemory, PackedState, StatePacker
from petra.distributed.snapshots import Snapshot, SnapshotMemory, join, needed, neighbours, split
from petra.distributed.state_exchange import Ring, StateChannel
from petra.runs.resume import restore
from petra.trainer.progress import RunProgress


class DictStore(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


def sent(*states):
    """States after they went through a channel together."""
    wire = deque()
    packed = [StatePacker().pack(state) for state in states]
    StateChannel(lambda t: wire.append(t.clone())).send(packed)
    received = StateChannel(lambda t: t.copy_(wire.popleft())).receive([HostMemory() for _ in range(2)])
    assert not wire
    return [one.unpack() for one in received]


def test_a_state_arrives_with_its_bits_layouts_and_plain_values():
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "stages": {0: {"images": images, "none": None, "shape": torch.Size([2, 3])}, 3: [torch.tensor(True), 1.5]},
        "half": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 3),
        "count": torch.tensor(5),
        "dtype": torch.float64,
        "row": torch.randn(4, 6)[:, 2],
        "expanded": torch.randn(1, 3).expand(4, 3),
    }
    (received,) = sent(state)
    assert received["stages"][0]["images"].stride() == images.stride()
    assert received["stages"][0]["shape"] == torch.Size([2, 3])
    assert received["dtype"] is torch.float64
    for name in ("half", "empty", "count", "row", "expanded"):
        assert received[name].dtype == state[name].dtype
        assert torch.equal(received[name], state[name])
    assert torch.equal(received["stages"][0]["images"], images)
    assert received["stages"][3][0].item() is True


def test_states_are_sent_together():
    shared = torch.randn(3)
    sparse = torch.eye(3).to_sparse()
    first, second = sent({"a": shared, "b": shared, "size": torch.device("cpu")}, [sparse, {}])
    assert torch.equal(first["a"], shared)
    assert first["a"] is first["b"]
    assert first["size"] == torch.device("cpu")
    assert torch.equal(second[0].to_dense(), torch.eye(3))
    assert sent([1]) == [[1]]


def test_memory_is_used_again_and_follows_the_state():
    packer = StatePacker()
    before = packer.pack([torch.ones(5), torch.ones(2, dtype=torch.int8)])
    after = packer.pack([torch.full((5,), 2.0), torch.ones(2, dtype=torch.int8)])
    assert after.data.data_ptr() == before.data.data_ptr()
    assert torch.equal(before.unpack()[0], torch.full((5,), 2.0))  # overwritten
    kept = after.unpack()
    packer.pack([torch.full((5,), 3.0), torch.ones(2, dtype=torch.int8)])
    larger = packer.pack({"other": torch.arange(1000), "more": torch.ones(3)})
    assert torch.equal(larger.unpack()["other"], torch.arange(1000))
    assert torch.equal(packer.pack(torch.zeros(())).unpack(), torch.zeros(()))
    assert torch.equal(kept[0], torch.full((5,), 2.0))  # a copy


def test_only_plain_values_are_packed_and_read():
    with pytest.raises(TypeError, match="an object of type Counter"):
        StatePacker().pack({"counts": Counter("a")})
    with pytest.raises(TypeError, match="a state holds"):
        StatePacker().pack({"function": print})
    harmful = torch.frombuffer(bytearray(pickle.dumps(print)), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        PackedState(harmful, torch.empty(0, dtype=torch.uint8)).unpack()


@given(ranks=st.integers(1, 5), replicas=st.integers(1, 4))
def test_every_process_has_one_neighbour_that_holds_its_state(ranks, replicas):
    positions = [RankPosition(a, ranks, b, replicas) for a in range(ranks) for b in range(replicas)]
    to = {(p.rank, p.replica): neighbours(p)[0] for p in positions}
    assert sorted(to.values()) == sorted(to)
    for p in positions:
        assert to[neighbours(p)[1]] == (p.rank, p.replica)
        if replicas > 1:
            assert to[p.rank, p.replica][0] == p.rank  # a twin, which has the same weights


def test_a_twin_adds_its_weights():
    state = {"run": 1, "stages": {2: {"weights": "shared", "flight": "own"}}}
    twin = {"run": 2, "stages": {2: {"weights": "shared", "flight": "other"}}}
    assert split(state)[0] == {"run": 1, "stages": {2: {"flight": "own"}}}
    assert join(split(state)[0], split(twin)[1]) == state
    from_twin, to_twin = deque(), []
    StateChannel(from_twin.append).send(SnapshotMemory().pack(twin)[:1])
    snapshots = Snapshots(50, Membership(DictStore(), 0))
    snapshots._transport = SimpleNamespace(position=RankPosition(0, 1, 0, 2))
    source = StateChannel(lambda t: t.copy_(from_twin.popleft()))
    snapshots._ring = Ring(StateChannel(to_twin.append), source, lambda: None)
    snapshots._threads = IOThread("to"), IOThread("from")
    snapshots.after_tick(5, lambda: state)
    for task in snapshots._tasks:
        task.result(10.0)
    assert snapshots.pending.state((0, 0)) == state
    assert snapshots.pending.state((0, 1)) == twin
    assert [size for size in to_twin[0].tolist() if size >= 0] == [to_twin[1].numel(), 0]  # no weights


def test_a_late_copy_is_waited_for_before_more_ticks_would_have_to_be_repeated():
    snapshots = Snapshots(10, Membership(DictStore(), 0))
    snapshots._transport = SimpleNamespace(
        position=RankPosition(0, 2, 0, 1), maximum_async=lambda values: lambda: values, wait_for=Future.result
    )
    snapshots.complete, snapshots.pending = Snapshot(5, 2, 1), Snapshot(11, 2, 1)
    late = Future()
    snapshots._tasks = [late]
    for tick in range(12, 15):
        snapshots.after_tick(tick, dict)
        assert snapshots.complete.tick == 5
    threading.Timer(0.05, late.set_result, [None]).start()
    snapshots.after_tick(15, dict)
    assert snapshots.complete.tick == 11
    assert snapshots.pending is None


@pytest.mark.parametrize(
    ("lost", "tick"), [([], 20), ([1], 20), ([1, 3], 20), ([0, 1], None), ([3, 0], None), ([0, 1, 2, 3], None)]
)
def test_the_last_snapshot_that_is_complete_counts(lost, tick):
    """Four ranks hold snapshots of ticks 10 and 20, each its own state and that of the rank before it."""
    reports = []
    for rank in range(4):
        parts = [[rank, 0], [(rank - 1) % 4, 0]]
        held = [] if rank in lost else [[20, 4, 1, parts], [10, 4, 1, parts]]
        reports.append([True, held])
    found, begun = recovered(reports, 0)
    assert (found.tick if found else None) == tick
    assert begun


def test_a_snapshot_that_has_not_arrived_everywhere_does_not_count():
    """Rank 1 is lost while its last copy is on its way."""
    old = [[[0, 0], [1, 0]], [[1, 0], [0, 0]]]
    reports = [[True, [[20, 2, 1, [[0, 0]]], [10, 2, 1, old[0]]]], [False, []]]
    found, begun = recovered(reports, 0)
    assert found.tick == 10
    assert begun


def test_after_a_recovery_each_part_is_in_two_processes_again():
    parts = [[[rank, 0], [(rank - 1) % 4, 0]] for rank in range(4)]
    reports = [[True, [] if rank == 1 else [[20, 4, 1, parts[rank]]]] for rank in range(4)]
    for rank in range(4):
        found, _ = recovered(reports, rank)
        assert sorted(found.parts) == sorted(map(tuple, parts[rank]))


def recovered(reports, process):
    class Transport:
        position = RankPosition(process, len(reports))

        def gather(self, value):
            return reports

        def positions(self):
            return [RankPosition(rank, len(reports)) for rank in range(len(reports))]

        def move_state(self, state, source, to):
            return {"moved": source} if to == process else None

    snapshots = Snapshots(50, Membership(DictStore(), 0))
    for tick, ranks, replicas, parts in reports[process][1]:
        snapshot = Snapshot(tick, ranks, replicas, {tuple(part): {} for part in parts})
        if tick == 20:
            snapshots.pending = snapshot
        else:
            snapshots.complete = snapshot
    return snapshots.recover(Transport())


def test_a_rank_that_is_lost_while_others_restore_a_state_is_no_damage_of_the_state():
    class Source:
        folder = "the snapshot"

        def run(self):
            return {"data": "same", "progress": asdict(RunProgress()), "layout": {}}

        def stage(self, index, replica=0):
            raise LostRank("cannot receive")

    trainer = SimpleNamespace(transport=SingleProcess(), layout={}, stages=[SimpleNamespace(index=0)])
    with pytest.raises(LostRank):
        restore(Source(), trainer, SimpleNamespace(), "same")


def test_an_interrupted_transport_opens_no_channels():
    """They would be opened with processes of another generation, or wait for them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        transport = ProcessTransport()
        transport.open_ring((0, 0), (0, 0)).close()
        transport.interrupt()
        with pytest.raises(LostRank, match="another generation"):
            transport.open_ring((0, 0), (0, 0))
    finally:
        dist.destroy_process_group()


def test_other_ranks_need_the_parts_of_all_ranks():
    assert needed(RankPosition(1, 2, 0, 1), 2, 1) == [(1, 0)]
    assert needed(RankPosition(1, 2, 1, 2), 3, 2) == [(0, 1), (1, 1), (2, 1)]


def replace_without_stderr():
    sys.stderr.close()
    Membership(DictStore(), 0).replace_this_process("rank 0 is stuck")


class TestMembership:
    def test_a_process_is_replaced_even_if_nobody_reads_why(self):
        process = fork_server.start(replace_without_stderr)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL

    def test_a_process_waits_for_a_roster_with_itself_and_for_all_others(self):
        store = DictStore()
        publish(store, Roster(0, (0, 1)))
        publish(store, Roster(1, (0, 2)))
        store["petra/ready/1/0"] = b""
        assert Membership(store, 2).wait(None, 60.0) == Roster(1, (0, 2))

    def test_a_process_that_does_not_get_ready_is_reported(self, monkeypatch):
        store = DictStore()
        publish(store, Roster(1, (0, 2, 3)))
        store["petra/started/3"] = b""
        monkeypatch.setattr(membership, "START_LIMIT", 0.2)

        def give_up(seconds):
            if lost_key(1) in store:
                publish(store, Roster(2, ()))

        monkeypatch.setattr(membership.time, "sleep", give_up)
        with pytest.raises(JobEnded):
            Membership(store, 0).wait(None, timeout=0.1)
        assert json.loads(store[lost_key(1)])[0] == 3  # it was there before, so it has less time than a new one

    def test_a_new_process_that_gets_ready_while_others_look_is_not_late(self):
        class SlowStore(DictStore):
            def check(self, keys):
                found = super().check(keys)
                if any(key.endswith("/3") for key in keys):
                    self.update({"petra/ready/1/3": b"", "petra/started/3": b""})
                return found

        store = SlowStore()
        Membership(store, 0)._report_late(Roster(1, (3,)), 3.0, timeout=2.0)
        assert lost_key(1) not in store

    def test_the_end_of_a_job_ends_the_processes_that_wait(self):
        store = DictStore()
        publish(store, Roster(3, ()))
        with pytest.raises(JobEnded):
            Membership(store, 2).wait(Roster(2, (2,)), 60.0)

    def test_after_the_work_nobody_is_waited_for(self):
        store = DictStore()
        publish(store, Roster(0, (0, 1)))
        store.set(DONE, "")
        with pytest.raises(JobEnded):
            Membership(store, 0).wait(None, 60.0)

    def test_a_generation_that_stays_is_waited_for_no_longer_than_asked(self):
        store = DictStore()
        publish(store, Roster(0, (0, 1)))
        assert not Membership(store, 0).wait_for_change(0, 0.05)
        publish(store, Roster(1, (0, 2)))
        assert Membership(store, 0).wait_for_change(0, 0.05)
