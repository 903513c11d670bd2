"""One process, two ranks and four ranks give the same bits; real processes, gloo on loopback."""

import json
import time
from functools import cache

import forked
import pytest
import rank_worker
import torch
from rank_worker import TICKS, gifts, plain, run
from replicas import train_replicas
from torch.distributed import TCPStore

WHOLE = ("petra", "checkpointed", "delayed")
FEWER = ("petra-stashed", "backprop", "reversible", "gpipe", "1f1b")
CASES = [
    {"options": {"method": method, "stages": 4, "accumulate": k, **order}, "ticks": 18 if method in FEWER else TICKS}
    for k in (1, 2)
    for method, order in [
        ("petra", {"order": "lock-step"}),
        ("petra", {"order": "low-staleness"}),
        ("delayed", {"order": "lock-step"}),
        ("checkpointed", {"order": "low-staleness"}),
        ("petra-stashed", {"order": "low-staleness"}),
        ("backprop", {}),
        ("reversible", {}),
        ("gpipe", {}),
        ("1f1b", {}),
        ("features-replay", {}),
        ("ddg", {}),
        ("dni", {}),
    ]
    if k == 1 or method not in ("backprop", "reversible", "ddg", "dni")  # in which k says nothing of who waits for whom
]
CASES.append({"options": {"method": "petra", "stages": 4, "message_dtype": "bf16"}})
SCATTERED = {2: [0, 1, 0, 1], 4: [2, 0, 1, 3]}


def cases_of(world):
    """Four ranks do three methods with both k, PETRA in both orders, and each of the others once.

    With two micro-batches an update where one would be no pipeline.
    """
    if world == 2:
        return CASES
    twice = ("gpipe", "1f1b")
    return [
        case
        for case in CASES
        if case["options"]["method"] in WHOLE
        or case["options"].get("accumulate", 1) == (2 if case["options"]["method"] in twice else 1)
    ]


def run_ranks(world, cases, folder, limit=150):
    """Start one process a rank; return what each wrote. Nothing hangs: all are killed when time is up."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forked.start(rank_worker.main, rank, world, store.port, cases, folder) for rank in range(world)]
    try:
        end = time.monotonic() + limit
        for process in ranks:
            process.join(max(1.0, end - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    errors = [(folder / f"rank{rank}.log").read_text() for rank in range(world)]
    assert [process.exitcode for process in ranks] == [0] * world, "\n".join(errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


@cache
def one_process(number):
    """What a case gives in one process; only those that are asked for are run."""
    return json.loads(json.dumps(run(CASES[number])))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_process_bit_for_bit(world, tmp_path):
    cases = cases_of(world)
    scattered = {"options": {**CASES[0]["options"], "placement": SCATTERED[world]}}
    ranks = run_ranks(world, [*cases, scattered], tmp_path)
    for number, case in enumerate([*cases, scattered]):
        assert_same([rank[number] for rank in ranks], one_process(0 if case is scattered else CASES.index(case)), case)


def assert_same(results, expected, case):
    assert len(expected["ticks"]) == case.get("ticks", TICKS) + 1
    for tick in range(len(expected["ticks"])):
        merged = {stage: value for result in results for stage, value in result["ticks"][tick].items()}
        assert merged == expected["ticks"][tick], (case, tick)
    losses = {m: value for result in results for m, value in result["losses"].items()}
    assert losses == expected["losses"], case
    assert all(result["evaluation"] == expected["evaluation"] for result in results), case
    assert [result["weights"] for result in results] == [None] * (len(results) - 1) + [expected["weights"]], case


def test_what_ranks_bring_to_the_last(tmp_path):
    cases = [{"brings": True, "options": {}, "replicas": replicas} for replicas in (1, 2)]
    alone, twice = zip(*run_ranks(4, cases, tmp_path), strict=True)
    expected = [json.loads(json.dumps(plain(gifts(process)))) for process in range(4)]
    assert alone == ([{}] * 4,) * 3 + (expected,)
    assert twice == ([{}] * 2, [{}] * 2, [expected[0], expected[2]], [{}] * 2)  # ranks by replicas


@pytest.mark.parametrize("world", [2, 3])
def test_methods_that_replay_with_a_module_a_rank(world, tmp_path):
    """Four modules on four ranks are among the cases above."""
    cases = [{"options": {"method": method, "stages": world}} for method in ("features-replay", "ddg", "dni")]
    ranks = run_ranks(world, cases, tmp_path)
    for number, case in enumerate(cases):
        assert_same([rank[number] for rank in ranks], json.loads(json.dumps(run(case))), case)


def test_ranks_resume_in_flight_and_what_is_wrong_is_noticed(tmp_path):
    cases = [
        {**CASES[1], "resume_after": 17},
        {**CASES[2], "resume_after": 18},
        {**CASES[1], "other_weights_on": 1},
        {**CASES[1], "broken": True},  # it stays so: the last one
    ]
    ranks = run_ranks(2, cases, tmp_path)
    ends = [{**ranks[0][case]["ticks"][-1], **ranks[1][case]["ticks"][-1]} for case in (0, 1, 3)]
    assert ends[0] == one_process(1)["ticks"][-1]
    assert ends[1] == one_process(2)["ticks"][-1]
    for rank in ranks:
        assert "rank 1 has weights" in rank[2]["error"]
    assert ends[2] != one_process(1)["ticks"][-1]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_in_two_replicas_equal_one_with_all_samples(world, tmp_path):
    """Pipeline × data parallel, in float64 to 1e-10."""
    options = {"stages": 3, "accumulate": 2, "uneven": True}
    expected = train_replicas(**options)
    for rank in run_ranks(world, [{"options": options, "replicas": 2}], tmp_path):
        for name, value in rank[0].items():
            assert torch.allclose(torch.tensor(value, dtype=torch.float64), expected[name], rtol=0, atol=1e-10)
