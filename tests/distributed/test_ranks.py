"""One process, two ranks and four ranks give the same bits; real processes, gloo on loopback."""

import json
from functools import cache

import pytest
import torch
from helpers.rank_worker import TICKS, gifts, plain, run
from helpers.ranks import run_ranks
from helpers.replicas import train_replicas

pytestmark = pytest.mark.slow

CASES = [
    {
        "options": {"method": method, "stages": 4, "accumulate": k, **schedule},
        "ticks": TICKS if method == "petra" else 10,
    }
    for k in (1, 2)
    for method, schedule in [
        ("petra", {"schedule": "lock-step"}),
        ("petra", {"schedule": "low-staleness"}),
        ("delayed", {"schedule": "lock-step"}),
        ("checkpointed", {"schedule": "low-staleness"}),
        ("petra-stashed", {"schedule": "low-staleness"}),
        ("backprop", {}),
        ("reversible", {}),
        ("backprop", {"schedule": "gpipe"}),
        ("backprop", {"schedule": "1f1b"}),
        ("reversible", {"schedule": "gpipe"}),
        ("reversible", {"schedule": "1f1b"}),
        ("reversible", {"schedule": "interleaved:2"}),  # on two ranks: stages 0 and 2, and 1 and 3
        ("petra", {"schedule": "flush:2"}),
        ("petra", {"flush_until": 3}),
        ("features-replay", {}),
        ("ddg", {}),
        ("dni", {}),
    ]
    if schedule != {"schedule": "flush:2"} or k == 1
    if schedule != {"flush_until": 3} or k == 2
    if k == 1 or schedule or method not in ("backprop", "reversible", "ddg", "dni")  # k does not affect messages
]
CASES.append({"options": {"method": "petra", "stages": 4, "comm_dtype": "bf16"}})
CASES += [
    {"options": {"method": "petra", "stages": 4, "comm_dtype": "int8"}, "resume_after": 9},
    {"options": {"method": "petra", "stages": 4, "comm_dtype": "streams=bf16,gradients=fp8"}},
]
CLIPPED = {"method": "petra", "stages": 4, "clip_norm": 0.1, "clip": "global"}
CASES += [{"options": CLIPPED, "ticks": 10}, {"options": {**CLIPPED, "schedule": "1f1b", "accumulate": 2}, "ticks": 10}]
SCATTERED = {2: [0, 1, 0, 1], 4: [2, 0, 1, 3]}


def cases_of(world):
    """The cases for a number of ranks.

    PETRA runs with both k and both schedules, and each other method and each flush once: with two micro-batches per
    update where one would be no pipeline. Four ranks run PETRA and the exact schedules.
    """
    twice = ("gpipe", "1f1b", "interleaved:2")
    return [
        case
        for case in CASES
        if world == 2 or case["options"].get("schedule") != "interleaved:2"  # of two ranks
        if world == 2 or case["options"]["method"] == "petra" or case["options"].get("schedule") in twice
        if case["options"]["method"] == "petra"
        or case["options"].get("accumulate", 1) == (2 if case["options"].get("schedule") in twice else 1)
    ]


@cache
def one_process(number):
    """The result of a case in one process; only the cases that are needed are run."""
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


def test_tensors_of_all_ranks_are_gathered_on_the_last(tmp_path):
    cases = [{"brings": True, "options": {}, "replicas": replicas} for replicas in (1, 2)]
    alone, twice = zip(*run_ranks(4, cases, tmp_path), strict=True)
    expected = [json.loads(json.dumps(plain(gifts(process)))) for process in range(4)]
    assert alone == ([{}] * 4,) * 3 + (expected,)
    assert twice == ([{}] * 2, [{}] * 2, [expected[0], expected[2]], [{}] * 2)  # ranks by replicas


@pytest.mark.parametrize("world", [2, 3])
def test_decoupled_methods_with_one_module_per_rank(world, tmp_path):
    """Four modules on four ranks are among the cases above."""
    cases = [{"options": {"method": method, "stages": world}} for method in ("features-replay", "ddg", "dni")]
    ranks = run_ranks(world, cases, tmp_path)
    for number, case in enumerate(cases):
        assert_same([rank[number] for rank in ranks], json.loads(json.dumps(run(case))), case)


def test_ranks_resume_in_flight_and_errors_are_detected(tmp_path):
    cases = [
        {**CASES[1], "resume_after": 9},
        {**CASES[2], "resume_after": 8},
        {**CASES[1], "other_weights_on": 1},
        {**CASES[1], "broken": True},  # must be the last case, because the transport stays broken
    ]
    ranks = run_ranks(2, cases, tmp_path)
    ends = [{**ranks[0][case]["ticks"][-1], **ranks[1][case]["ticks"][-1]} for case in (0, 1, 3)]
    assert ends[0] == one_process(1)["ticks"][-1]
    assert ends[1] == one_process(2)["ticks"][-1]
    for rank in ranks:
        assert "rank 1 has weights" in rank[2]["error"]
    assert ends[2] != one_process(1)["ticks"][-1]


@pytest.mark.parametrize("world", [2, 4])
def test_two_replicas_equal_one_process_with_all_samples(world, tmp_path):
    """Pipeline and data parallelism, in float64 to 1e-10."""
    options = {"stages": 3, "accumulate": 2, "uneven": True}
    expected = train_replicas(**options)
    for rank in run_ranks(world, [{"options": options, "replicas": 2}], tmp_path):
        for name, value in rank[0].items():
            assert torch.allclose(torch.tensor(value, dtype=torch.float64), expected[name], rtol=0, atol=1e-10)
