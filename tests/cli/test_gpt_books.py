"""The recipe gpt-books from texts to a generated text, small and on a CPU."""

import json
from random import Random

import pytest

from petra.cli.main import main

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow

WORDS = ["the", "old", "captain", "saw", "a", "white", "house", "by", "river", "and", "followed", "its", "long", "road"]
WORDS += ["to", "harbour", "where", "his", "brother", "had", "lost", "one", "letter", "before", "winter", "came"]
SMALL = ["--width", "64", "--depth", "4", "--heads", "2", "--seq-len", "32", "--batch-size", "8", "--epochs", "1"]
SMALL += ["--accumulate", "2", "--warmup-epochs", "0.1", "--lr", "5e-3", "--quiet", "--device", "cpu", "--threads", "1"]


def call(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def read(run, name="summary.json"):
    return json.loads((run / name).read_text())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Sentences in which each word decides the next two or three, 150 kB of them."""
    folder, random = tmp_path_factory.mktemp("books"), Random(0)
    words, last = [], 0
    while len(words) < 30_000:
        last = (3 * last + random.randrange(2)) % len(WORDS)
        words.append(WORDS[last])
    (folder / "book.txt").write_text(" ".join(words))
    out = folder / "tokens"
    call("tokenize", "--train", folder / "book.txt", "--vocab-size", 400, "--out", out, "--quiet")
    return out


def train(tokens, out, *options):
    call("train", "--recipe", "gpt-books", "--data", f"tokens:{tokens}", *SMALL, "--out", out, *options)
    return read(out)


def test_train_evaluate_and_generate_with_the_exact_pipeline(tokens, tmp_path, capsys):
    summary = train(tokens, tmp_path / "run")
    assert (summary["method"], summary["schedule"], len(summary["stages"])) == ("petra", "1f1b", 6)
    assert summary["accumulate"] == 2
    assert summary["test_loss"] < 1.5  # without any context 3.2; with all of it 0.7
    capsys.readouterr()
    call("evaluate", tmp_path / "run", "--device", "cpu")
    assert f"{summary['bits_per_byte']:.4f} bits per byte" in capsys.readouterr().out
    call(
        "generate",
        tmp_path / "run",
        "--prompt",
        "the old",
        "--max-new-tokens",
        30,
        "--temperature",
        0.5,
        "--device",
        "cpu",
    )
    text = capsys.readouterr().out
    assert text.startswith("the old")
    words = text.split()[2:-1]  # the last may be incomplete
    assert len(words) > 10
    assert sum(word in WORDS for word in words) > 0.8 * len(words)


def test_petra_is_one_option_away(tokens, tmp_path):
    summary = train(tokens, tmp_path / "run", "--schedule", "low-staleness", "--set", "chunked_loss=false")
    assert summary["schedule"] == "low-staleness"
    assert summary["staleness"] == [5, 4, 3, 2, 1, 0]
    assert summary["test_loss"] < 3.2
    config = read(tmp_path / "run", "config.json")
    assert (config["method"], config["model_options"]["chunked_loss"]) == ("petra", False)
