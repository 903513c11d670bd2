"""`petra doctor` measures links and finds pipelines that do not compute what one process computes."""

import json

import pytest
import torch

from petra.cli.doctor import _as_text, _problems
from petra.cli.doctor_checks import LinkSpeed, PipelineCheck, compare_with_one_process, time_links
from petra.cli.main import main
from petra.distributed import run_together

CPU = torch.device("cpu")
MACHINE = {"host": "a", "device": "cpu", "backend": "gloo", "torch": "2.13", "processor": "x", "threads": 1, "cores": 2}
FINE = PipelineCheck(False, 20, 0, None, 1.0, None)


@pytest.mark.slow
def test_two_processes(capfd):
    assert (
        main(
            ["doctor", "--ranks", "2", "--device", "cpu", "--seconds", "0.05", "--mib", "0.1", "--ticks", "6", "--json"]
        )
        == 0
    )
    said = capfd.readouterr().out
    found = json.loads(said[said.index("{") :])
    assert [(link["source"], link["to"]) for link in found["links"]] == [(0, 1), (1, 0)]
    assert all(0 < link["latency"] < 1 and link["bandwidth"] > 1e5 for link in found["links"])
    assert [machine["backend"] for machine in found["ranks"]] == ["gloo", "gloo"]
    assert [check["difference"] for check in found["pipelines"]] == [None]
    assert found["problems"] == []


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_compute_the_bits_of_one_process(ranks):
    checks = run_together(lambda t: compare_with_one_process(t, CPU, 12, False), ranks)
    assert all(check == checks[0] for check in checks)
    assert (checks[0].difference, checks[0].ticks, checks[0].captured_ticks) == (None, 12, 0)


def test_a_message_that_arrives_changed():
    def work(transport):
        send = transport.send
        if transport.position.rank == 0:

            def change(to, action, tensors):
                send(to, action, tuple(None if t is None else t * 1.001 for t in tensors))

            transport.send = change
        return compare_with_one_process(transport, CPU, 12, False)

    check = run_together(work, 2)[1]
    assert check.difference.startswith("rank 0, stage 0: numbers differ by up to ")
    assert "differs from one process" in _problems([MACHINE] * 2, [check])[0]


def test_every_link_is_timed_in_both_directions():
    for links in run_together(lambda t: time_links(t, CPU, 4096, 0.01), 3):
        assert [(link.source, link.to) for link in links] == [(0, 1), (1, 0), (1, 2), (2, 1)]
        assert all(link.latency > 0 and link.bandwidth > 0 for link in links)


def test_problems_say_what_to_do():
    captured = PipelineCheck(True, 5, 0, None, 1.0, None)
    assert _problems([MACHINE, {**MACHINE, "torch": "2.11"}], [FINE]) == [
        "the ranks have different versions of PyTorch (2.11, 2.13): install the same"
    ]
    assert _problems([MACHINE], [captured]) == ["no tick was captured (5 ticks are too few: give more --ticks)"]
    assert _problems([MACHINE], [FINE]) == []
    text = _as_text([MACHINE] * 2, [LinkSpeed(0, 1, 2e-5, 3e9)], [FINE], [])
    assert "0 to 1    20 µs  3.00 GB/s" in text
    assert text.endswith("No problem was found.")


@pytest.mark.parametrize(("option", "value"), [("--ranks", "1"), ("--ticks", "0"), ("--mib", "0")])
def test_bad_options(option, value, capsys):
    assert main(["doctor", option, value]) == 2
    assert f"{option} is {float(value) if option == '--mib' else value}: give" in capsys.readouterr().err


def test_the_report_says_how_to_plan_for_the_links():
    links = [LinkSpeed(0, 1, 0.05, 2.5e7), LinkSpeed(1, 0, 0.001, 1e7)]
    assert "petra plan --latency 50 --bandwidth 0.08" in _as_text([MACHINE] * 2, links, [FINE], [])
