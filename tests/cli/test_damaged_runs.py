"""Runs with a damaged, edited or lost file: each command gives the same result, or says which file it is."""

import json
import os
import random
import shutil

import pytest
from soak.damage import COMMON, METHOD, Attack, call, damage, table
from soak.options import all_calls

import petra

pytestmark = pytest.mark.slow

TRIALS = int(os.environ.get("PETRA_DAMAGE_TRIALS", "24"))
CALLS = int(os.environ.get("PETRA_OPTION_TRIALS", "20"))


@pytest.fixture(scope="module")
def attack(tmp_path_factory):
    return Attack(tmp_path_factory.mktemp("attack"))


@pytest.fixture
def copy(attack, tmp_path):
    """Copies the run of a target."""

    def of(name):
        [target] = [target for target in attack.targets if target.name == name]
        return shutil.copytree(target.folder / METHOD, tmp_path / name)

    return of


def replace(file, old, new):
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))


def resume(run):
    return call("train", "--resume", *COMMON, "--out", run)


def evaluate(run, *options):
    return call("evaluate", run, "--threads", "1", "--device", "cpu", *options)


def test_random_damage(attack):
    chance = random.Random(int(os.environ.get("PETRA_DAMAGE_SEED", "0")))
    trials = [attack.trial(chance) for _ in range(TRIALS)]
    print(table(trials))
    assert not [str(trial) for trial in trials if trial.failure is not None]
    assert len({trial.file for trial in trials}) > 5


def test_random_options():
    calls = list(all_calls(int(os.environ.get("PETRA_DAMAGE_SEED", "0")), CALLS))
    assert not [str(one) for one in calls if one.failure is not None]
    assert {0, 2} <= {one.code for one in calls}


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        ("images", "network.json", b"0", b"1"),
        ("images", "summary.json", b'samples_per_second": ', b'samples_per_second": 1'),
        ("images", "config.json", b'"batch_size": 16', b'"batch_size": 17'),
        ("images", "summary.json", b"samples_per_second", b"samples_per_secone"),
        ("text", "vocabulary.json", b'"a"', b'"A"'),
        ("text", "vocabulary.json", b'"a"', b'"\xff"'),
        ("text", "config.json", b'"data"', b'"dat\xe4"'),
    ],
)
def test_a_changed_file_is_named(copy, name, file, old, new):
    run = copy(name)
    replace(run / file, old, new)
    code, out, errors = evaluate(run)
    assert (code, out) == (2, "")
    assert f"{run / file} is damaged or was edited (its hash is not the one in hashes.json): " in errors
    assert len(errors.splitlines()) == 1


def test_weights_with_a_changed_vocabulary(copy):
    run = copy("text")
    replace(run / "vocabulary.json", b'"a"', b'"A"')
    words = ["train", *COMMON, "--model", "rev-gpt", "--width", "8", "--depth", "1", "--heads", "1", "--seq-len", "8"]
    (run.parent / "verse.txt").write_text("so long as men can breathe or eyes can see\n" * 8)
    out = run.parent / "new"
    code, _, errors = call(*words, "--data", f"text:{run.parent / 'verse.txt'}", "--init-from", run, "--out", out)
    assert code == 2
    assert "vocabulary.json is damaged or was edited" in errors
    assert not out.exists()


def test_damaged_hashes_and_runs_of_older_versions(copy):
    run = copy("images")
    before = evaluate(run)
    content = (run / "hashes.json").read_bytes()
    for old, new in ((b"sha256", b"sha257"), (b"network.json", b"network.jsom"), (b"{", b"["), (b"{", b"\xff")):
        (run / "hashes.json").write_bytes(content.replace(old, new, 1))
        code, _, errors = evaluate(run)
        assert code == 2
        assert f"{run / 'hashes.json'} is damaged (" in errors
        assert "remove it to read the files of the run unchecked" in errors
    (run / "hashes.json").unlink()
    assert evaluate(run) == before
    assert resume(run)[0] == 0
    assert (run / "hashes.json").read_bytes() == content


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"{", "config.json is damaged (Expecting"),
        ("config.json", b"[]", "config.json is damaged (it holds list, not dict)"),
        ("config.json", b"\xff", "config.json is damaged ('utf-8' codec"),
        ("vocabulary.json", b"\xff", "vocabulary.json is damaged ('utf-8' codec"),
        ("vocabulary.json", b"{}", "vocabulary.json is damaged (it holds dict, not list)"),
        ("summary.json", b"{}}", "summary.json is damaged (Extra data"),
        ("config.json", None, "config.json is missing: restore a copy"),
        ("vocabulary.json", None, "vocabulary.json is missing: restore it"),
    ],
)
def test_damage_in_a_run_without_hashes(copy, file, content, words):
    run = copy("text")
    (run / "hashes.json").unlink()
    (run / file).unlink()
    if content is not None:
        (run / file).write_bytes(content)
    code, _, errors = evaluate(run)
    assert code == 2
    assert f"{run}/{words}" in errors
    assert len(errors.splitlines()) == 1


def test_a_summary_without_a_value_that_is_printed(attack, tmp_path):
    target = attack.targets[0]
    folder = shutil.copytree(target.folder, tmp_path / "comparison")
    (folder / METHOD / "hashes.json").unlink()
    replace(folder / METHOD / "summary.json", b"samples_per_second", b"samples_per_secone")
    words = ["compare", *target.options, *COMMON, "--methods", METHOD, "--resume", "--out", folder]
    code, _, errors = call(*words)
    assert code == 2
    assert "summary.json is damaged (it has no valid samples_per_second): restore a copy, or remove it and" in errors


@pytest.mark.parametrize("damaged", [None, b"{", b"\xff"])
@pytest.mark.parametrize("name", ["unfinished images", "images"])
def test_a_lost_configuration_is_read_from_the_checkpoint(copy, name, damaged):
    run = copy(name)
    content = (run / "config.json").read_bytes()
    (run / "config.json").unlink()
    if damaged is not None:
        (run / "config.json").write_bytes(damaged)
    code, _, errors = resume(run)
    state = "missing" if damaged is None else "damaged"
    assert code == 0
    assert f"config.json was {state}: the run continues with the options in its last checkpoint" in errors
    assert (run / "config.json").read_bytes() == content
    assert evaluate(run)[0] == 0


def test_an_edited_configuration(copy):
    run = copy("unfinished images")
    content = (run / "config.json").read_bytes()
    for old, new, words in (
        (
            b'"stages": 2',
            b'"stages": 1',
            "the checkpoint was written with stages 2, not 1: restore that",
        ),
        (b'"seed": 0', b'"seed": 8', "the checkpoint was written with seed 0, not 8"),
    ):
        replace(run / "config.json", old, new)
        code, _, errors = resume(run)
        assert (code, words in errors) == (2, True), errors
        (run / "config.json").write_bytes(content)
    replace(run / "config.json", b'"checkpoint_every": 0', b'"checkpoint_every": 2')
    assert resume(run)[0] == 0
    replace(run / "config.json", b'"checkpoint_every": 2', b'"checkpoint_every": 3')
    assert "remove hashes.json" in evaluate(run)[2]


def test_an_edited_configuration_of_a_run_without_a_checkpoint(copy):
    run = copy("unfinished images")
    shutil.rmtree(run / "checkpoint")
    replace(run / "config.json", b'"seed": 0', b'"seed": 8')
    code, _, errors = resume(run)
    assert code == 2
    assert "config.json is damaged or was edited" in errors
    assert "restore a copy; if you edited it on purpose, remove hashes.json" in errors
    (run / "hashes.json").unlink()
    assert resume(run)[0] == 0


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ["digit", "truncation", "deletion"])
@pytest.mark.parametrize("name", ["unfinished images", "text"])
def test_damaged_metrics_are_restored_from_the_checkpoint(copy, name, how):
    run = copy(name)
    before = records(run)
    evaluations = [record for record in before if "test_loss" in record]
    damage(run / "metrics.jsonl", how, random.Random(0))
    damaged = None if how == "deletion" else (run / "metrics.jsonl").read_bytes()
    code, _, errors = resume(run)
    assert code == 0
    state = "was missing" if damaged is None else "was damaged or edited (it is now metrics.damaged.jsonl)"
    assert f"warning: {run / 'metrics.jsonl'} {state}: 2 evaluations restored from the checkpoint" in errors
    assert ("; other records are lost" in errors) == (before != evaluations)
    assert records(run)[: len(evaluations)] == evaluations
    if damaged is not None:
        assert (run / "metrics.damaged.jsonl").read_bytes() == damaged
    assert "metrics" not in resume(run)[2]


def test_damaged_metrics_in_reports(copy, tmp_path):
    for name in ("unfinished images", "images"):
        run = copy(name)
        damage(run / "metrics.jsonl", "digit", random.Random(0))
        said = call("report", run, "--out", tmp_path / "report.html")[1]
        assert f"{name}: metrics.jsonl is damaged or was edited" in said
        assert "metrics.jsonl is damaged or was edited" in call("plot", run, "--out", tmp_path / "plot.png")[2]


def test_damaged_best_weights(copy):
    for name, old, new in (("unfinished images", b"head.", b"heab."), ("images", b" ", b" ")):
        run = copy(name)
        file = run / "best.safetensors"
        content = file.read_bytes().replace(old, new)
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 8]) + content[-2:])
        code, _, errors = resume(run)
        assert code == 0
        assert f"warning: {file} is damaged or of another run: restore a copy" in errors
    assert "best.safetensors is not what the run wrote" in evaluate(run, "--weights", "best")[2]
    file.write_bytes(content.replace(b"head.", b"heab."))
    assert "best.safetensors has no head." in evaluate(run, "--weights", "best")[2]
    file.unlink()
    assert "best.safetensors is missing: restore a copy" in evaluate(run, "--weights", "best")[2]
    with pytest.raises(ValueError, match=r"best\.safetensors is missing"):
        petra.load(run, weights="best")
