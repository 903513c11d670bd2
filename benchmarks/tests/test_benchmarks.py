"""Benchmarks: smoke runs store nothing, mistakes in options are reported, and the theory agrees with the engine."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.scripts import ROOT, import_scripts
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from petra import Trainer


@pytest.mark.parametrize("name", ["run", "sharing"])
def test_a_smoke_run_of_the_tick_stores_nothing(name, tmp_path, monkeypatch):
    (module,) = import_scripts("benchmarks/tick", name)
    for measured, found in (("processes", 1.0), ("streams", 1.0), ("measure", []), ("show", "")):
        if hasattr(module, measured):
            monkeypatch.setattr(module, measured, lambda *given, found=found: found)
    out = tmp_path / "out" if name == "run" else tmp_path / "out" / "sharing.json"
    for arguments, stored in ((["--smoke"], False), (["--device", "cpu"], True)):
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--out", str(out)])
        module.main()
        assert out.exists() == stored


def test_a_smoke_run_of_the_losses_stores_nothing(tmp_path, monkeypatch, capsys):
    (losses,) = import_scripts("benchmarks/slow_links", "losses")
    monkeypatch.setattr(sys, "argv", ["losses.py", "--smoke", "--out", str(tmp_path)])
    losses.main()
    assert not list(tmp_path.iterdir())
    assert "decoder   petra      int8" in capsys.readouterr().out


def test_too_few_updates_for_a_prediction_are_reported(tmp_path, monkeypatch, capsys):
    (module,) = import_scripts("benchmarks/prediction", "run")
    few = ["--model", "revnet18", "--width", "2", "--depths", "1", "--data", "synthetic:1x8x8:2:8", "--epochs", "1"]
    for arguments, words in ((few, "fewer updates"), ([*few, "--data", "nowhere"], "no data set or folder 'nowhere'")):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--quiet", "--device", "cpu", "--out", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            module.main()
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("corrections", ["none", "predict,inertia:4", "coast"])
def test_the_theory_of_stability_describes_the_engine(corrections):
    n, k, m, curvature, updates = 5, 2, 0.8, 0.7, 12
    weight = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    before = weight.weight.item()
    trainer = Trainer(
        nn.Sequential(weight, nn.Identity()),
        method="checkpointed",
        stages=2,
        schedule=(n, 0),
        accumulate=k,
        loss=lambda y, target: curvature * y.square().sum() / 2,
        optimizer=lambda p: torch.optim.SGD(p, 1 - m, momentum=m, nesterov=True),
        corrections=[] if corrections == "none" else corrections.split(","),
    )
    for _ in range(updates * k):
        trainer.step(*torch.ones(2, 1, 1, dtype=torch.float64))
    trainer.drain()
    (stability,) = import_scripts("benchmarks/prediction", "stability")
    update = stability.update_map(curvature, n, k, m, corrections, True)
    state = torch.tensor([before] * (len(update) // 2) + [0.0] * (len(update) // 2), dtype=torch.float64)
    assert weight.weight.item() == pytest.approx((torch.linalg.matrix_power(update, updates) @ state)[0].item())


def test_modules_of_the_same_name_in_two_folders_do_not_clash():
    (tick,) = import_scripts("benchmarks/tick", "run")
    (memory,) = import_scripts("benchmarks/memory", "run")
    assert tick.__file__ != memory.__file__
    assert "run" not in sys.modules


def test_optimizers_are_compared_in_a_smoke_run_that_stores_nothing(tmp_path, capsys):
    (module,) = import_scripts("benchmarks/optimizers", "run")
    module.main(["--smoke", "--out", str(tmp_path / "result.json")])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["adamw", "nadamw", "muon", "soap"]
    assert not (tmp_path / "result.json").exists()
    module.main(["--smoke", "--optimizers", "adamw", "adamw:bf16", "--out", str(tmp_path / "result.json")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["adamw", "adamw:bf16"]
    assert [row[-2] for row in rows] == ["MiB", "MiB"]
    assert float(rows[0][-3]) == pytest.approx(2 * float(rows[1][-3]), abs=0.02)


def test_the_stall_of_a_checkpoint_is_measured_in_a_smoke_run_that_stores_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (module,) = import_scripts("benchmarks/checkpoints", "run")
    module.main(["--smoke", "--out", str(tmp_path / "result.json")])
    *_, row, stall, _ = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "1"
    assert stall.startswith(f"1 process: the stall is {row.split()[-1]} (target: at most 10%")
    assert list(tmp_path.iterdir()) == []


def test_recovery_is_measured_in_a_smoke_run_that_stores_nothing(tmp_path, monkeypatch, capsys):
    (module,) = import_scripts("benchmarks/recovery", "run")

    def train(size, folder, *more, **environ):
        if environ:  # a tick takes 10 ms, and 2 % more with snapshots
            folder.mkdir()
            block = int(environ["PETRA_BLOCK"])
            for rank in range(2):
                moments = [0.0]
                for tick in range(1, size.samples // size.batch_size):
                    moments.append(moments[-1] + (0.0102 if tick // block % 2 else 0.01))
                lines = [f"tick 1 {moment} {tick} {moment}\n" for tick, moment in enumerate(moments)]
                (folder / f"{rank}.txt").write_text("".join(lines))
        return {"weights_sha256": "same"}

    found = [module.Fault(0, 3.5, 20), module.Fault(1, 4.5, 40), module.Fault(0, 4.0, 30)]
    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "faults", lambda *given: (found, "same"))
    for arguments, cases in ((["--smoke"], 1), ([], 5)):
        out = tmp_path / "-".join(["result", *arguments])
        module.main([*arguments, "--out", str(out)])
        said = capsys.readouterr().out.splitlines()
        rows = [line.split()[-5:] for line in said if "killed" in line or "stopped" in line]
        assert rows[-cases:] == [["3", "4.00", "4.50", "40", "True"]] * cases
        assert any(line.split()[-4:] == ["2.0", "%", "2.0", "%"] for line in said)
        assert out.exists() == (not arguments)


def test_the_time_of_a_recovery_is_that_of_the_last_rank(tmp_path):
    (module,) = import_scripts("benchmarks/recovery", "run")
    (tmp_path / "0.txt").write_text("start 1 1.0 0 0\ntick 1 2.0 70 0\nstart 1 5.0 48 0\ntick 1 5.5 48 0\n")
    (tmp_path / "1.txt").write_text("start 2 1.0 0 0\ntick 2 2.0 70 0\n")
    assert module.recovered(tmp_path, 2, since=3.0) is None
    with (tmp_path / "1.txt").open("a") as file:
        file.write("start 3 5.1 48 0\ntick 3 5.9 48 0\ntick 3 6.")  # a line that is being written
    assert module.recovered(tmp_path, 2, since=3.0) == (5.9, 48)


@pytest.mark.slow
def test_the_input_pipeline_is_measured_in_a_smoke_run_that_stores_nothing(tmp_path, monkeypatch, capsys):
    (module,) = import_scripts("benchmarks/input_pipeline", "run")
    monkeypatch.setattr(module, "ProcessPoolExecutor", ThreadPoolExecutor)
    arguments = ["run", "--smoke", "--device", "cpu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()
    shown = capsys.readouterr().out
    assert "data in memory" in shown
    assert "limit: " in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_network_of_ones_own_learns_with_petra_at_the_default_settings():
    (module,) = import_scripts("benchmarks/guidance", "run")
    found = module.train("defaults, PETRA", seed=1, epochs=6)
    assert max(found["accuracy"]) > 0.7  # 85 % on average; at a constant learning rate of 0.1 it is 30 %


@pytest.mark.slow
def test_schedules_of_torch_have_the_gradients_of_backprop_in_a_smoke_run_that_stores_nothing(tmp_path):
    names = ["reversible 1f1b", "torch zbv"]
    script = ROOT / "benchmarks/pipeline_speed/peers.py"
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, script, "--smoke", "--cases", "transformer", "--schedules", *names, "--out", out],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(tuple(names))]
    assert len(rows) == len(names)
    assert not out.exists()


def test_the_time_to_a_loss_is_that_of_the_first_average_below_it():
    (module,) = import_scripts("benchmarks/pipeline_speed", "time_to_loss")
    updates = [8.0 - 0.1 * i for i in range(30)]  # of two micro-batches each, one of which is still in flight
    losses = [loss + change for loss in updates for change in (-0.5, 0.5)] + [1.0]
    averages = module.smoothed(losses, 2)
    assert averages[0] == 8.0
    assert averages[20] == pytest.approx(sum(updates[5:21]) / 16)
    run = {"name": "one", "updates": 31, "seconds": [float(i) for i in range(31)], "losses": losses}
    assert module.reached(run, 6.76, 2) == (21, 21.0)  # one update later than its losses are known
    assert module.reached(run, 7.9, 2) == (16, 16.0)  # not before there are enough to average
    assert module.reached(run, 1.0, 2) is None
    assert "not reached" in module.report([run], 1.0, 2)


def test_the_peak_of_memory_is_that_of_the_allocator():
    (module,) = import_scripts("benchmarks/pipeline_speed", "peak_memory")
    before = module.bytes_in_use()
    with module.PeakMemory() as peak:
        block = torch.ones(2**24)
        block.sqrt()
        del block
    assert 2**26 <= peak.bytes - before < 2**28
    assert module.bytes_in_use() - before < 2**25


def test_a_peer_that_fails_is_reported_and_the_others_are_measured(monkeypatch, tmp_path):
    (module,) = import_scripts("benchmarks/pipeline_speed", "peers")
    measured = []

    def launch(options, measure):
        ((case, size, names),) = options.groups
        measured.append(names)
        said = json.loads(options.path.read_text())
        said["runs"] += [{"case": case, "microbatches": size, "name": name} for name in names]
        said["current"] = [case, size, "torch zbv"] if "torch zbv" in names else None
        options.path.write_text(json.dumps(said))
        if said["current"]:
            raise SystemExit("rank 1 failed first:\nTraceback\nValueError: it broke\n\nrank 0: done")

    shown = []
    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "report", lambda runs: shown.extend(runs))
    names = ["torch gpipe", "torch zbv"]
    module.main(["--cases", "revnet", "--microbatches", "4", "--schedules", *names, "--out", str(tmp_path)])
    assert measured == [names, ["torch gpipe"]]
    assert {run["name"]: run.get("error") for run in shown} == {
        "torch gpipe": None,
        "torch zbv": "ValueError: it broke",
    }


@pytest.mark.slow
def test_ticks_of_ranks_are_measured_in_a_smoke_run_that_stores_nothing(tmp_path, monkeypatch, capsys):
    (module,) = import_scripts("benchmarks/tick", "ranks")
    monkeypatch.setattr(sys, "argv", ["ranks.py", "--smoke", "--out", str(tmp_path / "ranks.json")])
    module.main()
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["2", "eager"]
    assert not (tmp_path / "ranks.json").exists()


@pytest.mark.slow
def test_the_host_time_of_a_tick_is_measured_in_a_smoke_run_that_stores_nothing(tmp_path, monkeypatch, capsys):
    (module,) = import_scripts("benchmarks/tick", "host_time")
    out = str(tmp_path / "host-time.json")
    monkeypatch.setattr(sys, "argv", ["host_time.py", "--smoke", "--ways", "no communication", "--out", out])
    module.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("no communication")
    assert not (tmp_path / "host-time.json").exists()


def test_a_simulated_pipeline_is_predicted_from_costs_of_its_stages_alone():
    (module,) = import_scripts("benchmarks/simulation", "run")
    costs = {"forward": 0.01, "backward": 0.02, "update": 0.0, "jitter": 0.0, "messages": [1000, 1000]}
    assert str(module.Configuration.parse("4:blocks:backprop:gpipe:4:30")) == "4:blocks:backprop:gpipe:4:30"
    # A bubble of 3/7 leaves 9/7 of the three other ranks at work, so that a rank is faster than among four that work.
    for delay, factor in ((0, 0.5 + 0.5 * (4 * 4 / 7 - 1) / 3), (30, 0.5)):
        configuration = module.Configuration.parse(f"4:blocks:backprop:gpipe:4:{delay}")
        found, slowed = module.predict(configuration, [costs] * 4, 0.5, (0.0, 1e9, 0.0))
        assert slowed == pytest.approx(factor, rel=1e-3)
        assert found.seconds_per_update == pytest.approx(7 * 0.03 * factor + 6 * delay / 1e3, rel=1e-3)
    with pytest.raises(ValueError, match="give RANKS:NETWORK"):
        module.Configuration.parse("4:blocks")
    with pytest.raises(ValueError, match="choose from blocks, transformer, waits"):
        module.Configuration.parse("4:block:backprop:gpipe:4:30")


def test_a_stage_that_does_not_fit_is_marked_in_the_scaling_table():
    (module,) = import_scripts("benchmarks/simulation", "scaling")
    decoder, curves = module.DECODERS[0], {}
    for method in module.METHODS:
        curves[decoder.name, method.name, 10_000] = module.run(decoder, method, 1250, 0.0)
    table = module.section(decoder, [1250], curves)
    assert "| PETRA |" in table
    assert "!" not in table
    curves[decoder.name, "ZBV", 10_000] = (1.0, 0.5, 81e9)
    assert "| ZBV | 81! |" in module.section(decoder, [1250], curves)


def test_a_smoke_run_of_the_memory_limit_stores_nothing(tmp_path, monkeypatch, capsys):
    (module,) = import_scripts("benchmarks/memory_limit", "run")
    monkeypatch.setattr("petra.memory.step_cost._SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["run.py", "--smoke", "--out", str(tmp_path / "out")])
    module.main()
    assert not (tmp_path / "out").exists()
    assert "full checkpointing" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "expected"), [(99, 0), (100, 1), (1000, 10), (10**6, 9900), (10**9, 12000)])
def test_the_largest_size_that_fits(limit, expected):
    """With 100 bytes for each unit, on a device with memory for 12000."""
    _, capacity = import_scripts("benchmarks/memory_limit", "run", "capacity")
    measured = []

    def peak(size):
        measured.append(size)
        return 100 * size if size <= 12000 else None

    found = capacity.largest(peak, [limit, 50], 1)[-1]
    assert expected * (1 - 1.5 * capacity.CLOSE) <= found <= max(expected, limit // 100)
    assert found <= 12000
    assert len(measured) == len(set(measured)) <= 20


@given(st.integers(0, 500), st.integers(1, 100), st.integers(0, 60), st.integers(1, 5000), st.randoms())
def test_the_largest_size_is_found_with_few_measurements(base, slope, noise, most, random):
    """Peaks grow linearly, but for noise: the size that is found fits, and one that is 3 % larger does not."""
    _, capacity = import_scripts("benchmarks/memory_limit", "run", "capacity")
    peaks = {}

    def peak(size):
        assert size not in peaks
        peaks[size] = base + slope * size + random.randint(0, noise) if size <= most else None
        return peaks[size]

    limits = sorted(random.randint(1, 6000) for _ in range(4))
    found = capacity.largest(peak, limits, 1)
    assert len(peaks) <= 60
    for size, limit in zip(found, limits, strict=True):
        assert size == 0 or peaks[size] <= limit
        assert any(
            size < larger <= size + max(1, capacity.CLOSE * size) and (own is None or own > limit)
            for larger, own in peaks.items()
        )


def test_a_smoke_run_of_capacities_stores_nothing(tmp_path, monkeypatch, capsys):
    _, module = import_scripts("benchmarks/memory_limit", "run", "capacity")
    monkeypatch.setattr(module, "CLOSE", 0.6)
    monkeypatch.setattr(sys, "argv", ["capacity.py", "--smoke", "--out", str(tmp_path / "out")])
    module.main()
    assert not (tmp_path / "out").exists()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["backprop", "reversible"]
    assert int(rows[1][-1]) >= int(rows[0][-1]) > 0


@pytest.mark.slow
def test_slow_links_are_emulated_in_a_smoke_run_that_stores_nothing(tmp_path):
    script = ROOT / "benchmarks/slow_links/run.py"
    command = [sys.executable, script, "--smoke", "--dtypes", "bf16", "--out", tmp_path / "results"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if not done.stdout.startswith("skipped"):
        lines = [line for line in done.stdout.splitlines() if line.startswith("20 ms, 200 Mb/s")]
        assert [line.split()[4:6] for line in lines] == [["lock-step", "bf16"], ["adapted", "bf16"]]
    assert not (tmp_path / "results").exists()


def test_slow_links_are_skipped_where_they_cannot_be_emulated(monkeypatch, capsys):
    (module,) = import_scripts("benchmarks/slow_links", "run")
    monkeypatch.setenv("PATH", "")
    module.main(["--smoke"])
    assert capsys.readouterr().out == (
        "skipped: links cannot be emulated here, because the program ip is missing: install iproute2\n"
    )
    with pytest.raises(SystemExit, match="--dtypes has 'fp8': choose from none, bf16"):
        module.main(["--dtypes", "fp8"])


def test_the_speed_of_an_emulated_link():
    (network,) = import_scripts("benchmarks/slow_links", "network")
    link = network.Link(0.05, 2e8)
    assert str(link) == "50 ms, 200 Mb/s"
    assert network.netem(link) == ["netem", "limit", "10000", "delay", "50000us", "rate", "200000000bit"]
    assert network.netem(network.Link(0.001)) == ["netem", "limit", "10000", "delay", "1000us"]
