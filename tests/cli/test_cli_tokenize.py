"""`petra tokenize`, and what follows it: train, resume, evaluate, generate and compare on its tokens."""

import gzip
import json
import math
import shutil

import pytest
import torch

import petra
from petra.cli.main import main
from petra.cli.tokenize import unescape
from petra.data import HuggingFaceTokenizer, TextData, load_data
from petra.data.tokenizer import CharacterTokenizer
from petra.runs.config import RunConfig
from petra.runs.generation import generate
from petra.runs.run import Run

pytest.importorskip("tokenizers")

GPT = ["--model", "rev-gpt", "--width", "8", "--depth", "1", "--heads", "1", "--seq-len", "12", "--optimizer", "adamw"]
COMMON = ["--quiet", "--threads", "1", "--device", "cpu", "--epochs", "1", "--warmup-epochs", "0", "--stages", "2"]
VERSE = "So long as men can breathe or eyes can see,\nso long lives this, and this gives life to thee – Zoë.\n"


def call(*arguments):
    return main([str(argument) for argument in arguments])


def train(folder, data, *arguments):
    assert call("train", *COMMON, *GPT, "--data", data, "--out", folder, *arguments) == 0
    return folder


def read(folder, name="summary.json"):
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(4):
        (folder / f"{number}.txt.gz").write_bytes(gzip.compress((f"{number} " + VERSE * 9).encode()))
    return folder


@pytest.fixture(scope="module")
def tokens(texts):
    out = texts.parent / f"{texts.name}-tokens"
    assert call("tokenize", "--train", texts, "--vocab-size", 280, "--test-share", 0.25, "--out", out, "--quiet") == 0
    return out


@pytest.fixture(scope="module")
def run(tokens):
    return train(tokens.parent / "run", f"tokens:{tokens}")


def test_the_summary_of_the_tokens(texts, tokens, tmp_path, capsys):
    capsys.readouterr()
    assert call("tokenize", "--train", texts, "--test", texts / "0.txt.gz", "--out", tmp_path, "--vocab-size", 280) == 0
    found, info = capsys.readouterr(), read(tmp_path, "tokens.json")
    assert found.err == ""  # without a terminal there is no progress bar
    assert info["train"]["documents"] == 4
    assert f"{info['train']['bytes'] / info['train']['tokens']:.3f}" in found.out
    assert f"{info['test']['tokens']:,}" in found.out
    command = found.out.partition("train with: ")[2].strip()
    assert command.startswith("petra train --model rev-gpt --schedule 1f1b ")  # a GPT learns little from late gradients
    assert command.endswith(f" --optimizer muon --lr 2e-3 --data tokens:{tmp_path}")
    assert call("tokenize", "--check", tokens) == 0
    assert f"{tokens} is as it was written" in capsys.readouterr().out
    shutil.copytree(tokens, tmp_path / "copy")
    (tmp_path / "copy" / "test.bin").write_bytes((tokens / "test.bin").read_bytes()[::-1])
    assert call("tokenize", "--check", tmp_path / "copy") == 2
    assert "test.bin has changed since it was written" in capsys.readouterr().err


def test_documents_within_a_file(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("# one\n1\n\n\n# two\n2\n\n\n# three\n3\n")
    for option, text in (("--document-separator", r"\n\n\n"), ("--document-start", "# ")):
        out = tmp_path / option.strip("-")
        assert call("tokenize", "--train", tmp_path / "a.txt", option, text, "--out", out) == 0
        assert [read(out, "tokens.json")[split]["documents"] for split in ("train", "test")] == [2, 1]
    assert unescape(r"\n\t\\n\x") == "\n\t\\n\\x"
    capsys.readouterr()


def test_a_run_on_tokens(run, tokens, capsys):
    assert (run / "tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()
    assert not (run / "vocabulary.json").exists()
    assert read(run, "network.json")["arguments"]["vocab_size"] == 280
    info, summary = read(tokens, "tokens.json")["test"], read(run)
    bits = summary["test_loss"] * info["tokens"] / (math.log(2) * info["bytes"])
    assert summary["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert json.loads((run / "metrics.jsonl").read_text())["bits_per_byte"] == summary["bits_per_byte"]
    capsys.readouterr()
    assert call("evaluate", run, "--device", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert call("evaluate", run, "--device", "cpu") == 0
    assert f"{bits:.4f} bits per byte" in capsys.readouterr().out
    assert call("train", "--resume", "--out", run, "--device", "cpu", "--quiet") == 0
    assert f"({bits:.4f} bits per byte)" in capsys.readouterr().out


def test_bits_per_byte_of_characters_and_bytes(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(VERSE * 9)
    for kind, bytes_per_token in (("bytes", 1.0), ("text", None)):
        data = load_data(f"{kind}:{tmp_path / 'a.txt'}", seq_len=12)
        assert isinstance(data, TextData)
        if bytes_per_token is None:
            text = "".join(data.vocabulary[token] for token in data.test_tokens)
            bytes_per_token = len(text.encode()) / len(text)
            assert bytes_per_token > 1
        summary = read(train(tmp_path / kind, f"{kind}:{tmp_path / 'a.txt'}"))
        bits = summary["test_loss"] / math.log(2) / bytes_per_token
        assert summary["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_the_comparison_has_bits_per_byte(tokens, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # the header is one line
    options = [*COMMON, *GPT, "--data", f"tokens:{tokens}", "--out", tmp_path / "both"]
    assert call("compare", *options, "--methods", "reversible", "petra") == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "bits per byte" in header
    for name, row in zip(("reversible", "petra"), rows, strict=True):
        assert f"{read(tmp_path / 'both' / name)['bits_per_byte']:.4f}" in row


@pytest.mark.parametrize("tick", [2, 5])
def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(tokens, tmp_path, tick):
    class Killed(Exception):
        pass

    def kill(now, action, stage):
        if now == tick:
            raise Killed

    options = {"model": "rev-gpt", "model_options": {"width": 8, "depth": 1, "heads": 1}, "data": f"tokens:{tokens}"}
    options |= {"seq_len": 12, "stages": 3, "batch_size": 16, "epochs": 2, "optimizer": "adamw", "checkpoint_every": 1}
    config = RunConfig.from_options(None, options)
    straight = Run(config, tmp_path / "straight", quiet=True)()
    stopped = Run(config, tmp_path / "stopped", quiet=True)
    stopped.trainer.executor.observers.append(kill)
    with pytest.raises(Killed):
        stopped()
    moved = shutil.copytree(tokens, tmp_path / "moved")
    config = RunConfig.from_options(None, {**options, "data": f"tokens:{moved}"})
    resumed = Run(config, tmp_path / "stopped", resume=True, quiet=True)
    assert 0 < resumed.trainer.executor.microbatches <= tick
    summary = resumed()
    assert summary["weights_sha256"] == straight["weights_sha256"]
    assert summary["bits_per_byte"] == straight["bits_per_byte"]


def test_other_data(run, tokens, texts, tmp_path, capsys):
    def tokenized(name, *options):
        assert call("tokenize", "--out", tmp_path / name, "--quiet", *options) == 0
        return f"tokens:{tmp_path / name}"

    file = texts / "1.txt.gz"
    alone = tokenized("alone", "--test", file, "--tokenizer", run / "tokenizer.json")
    other = tokenized("other", "--train", texts, "--vocab-size", 270)
    (tmp_path / "a.txt").write_text(VERSE * 9)
    characters = train(tmp_path / "characters", f"text:{tmp_path / 'a.txt'}")
    capsys.readouterr()
    assert call("evaluate", run, "--device", "cpu", "--data", alone, "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"] == alone
    for folder, data, words in (
        (run, other, "was not encoded with the tokenizer of the run: give tokens of `petra tokenize --tokenizer"),
        (run, f"text:{tmp_path / 'a.txt'}", "was not encoded with the tokenizer of the run"),
        (characters, alone, "the network does not read tokens of a tokenizer.json"),
    ):
        assert call("evaluate", folder, "--device", "cpu", "--data", data) == 2
        assert words in capsys.readouterr().err
    options = [*COMMON[1:], *GPT, "--init-from", run, "--overwrite", "--out", tmp_path / "new"]
    for data, differs in ((other, True), (f"tokens:{tokens}", False)):
        assert call("train", *options, "--data", data) == 0
        assert ("its vocabulary differs" in capsys.readouterr().err) == differs
    assert call("train", "--resume", "--out", run, "--data", other, "--device", "cpu") == 2
    assert "is not the data that the run started with" in capsys.readouterr().err


def write(capsys, folder, *arguments):
    capsys.readouterr()
    assert call("generate", folder, "--threads", 1, "--device", "cpu", *arguments) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_text_is_encoded_and_decoded(run, capsys):
    network, tokenizer = petra.load(run), HuggingFaceTokenizer.read(run / "tokenizer.json")
    for prompt in ("So long – Zoë", ""):
        tokens = tokenizer.encode(prompt) or [tokenizer.end]
        for _ in range(9):
            tokens.append(int(network(torch.tensor([tokens[-12:]]))[0, -1].argmax()))
        expected = tokenizer.decode(tokens if prompt else tokens[1:]).partition("<|endoftext|>")[0]
        assert write(capsys, run, "--prompt", prompt, "--max-new-tokens", 9, "--temperature", 0) == expected


def test_a_prompt_that_is_not_utf_8(run, capsys):
    assert call("generate", run, "--device", "cpu", "--prompt", "\udcff") == 2
    error = capsys.readouterr().err
    assert r"the text is not UTF-8 at character 0 ('\udcff')" in error
    assert len(error.splitlines()) == 1
    with pytest.raises(ValueError, match=r"--prompt contains '\\udcff', which is not among the 2 characters"):
        CharacterTokenizer("ab", "--prompt").encode("a\udcff")


def test_text_ends_at_the_end_of_a_document(run):
    network = petra.load(run)
    whole = generate(network, [5], 40, context=12, entries=280, seed=1)
    stop = next(token for token in whole[5:] if token not in whole[:5])
    first = whole.index(stop)
    assert generate(network, [5], 40, context=12, entries=280, seed=1, stop=stop) == whole[:first]
    assert generate(network, [5], 40, context=12, entries=280, seed=1, stop=280) == whole


def test_a_lost_tokenizer(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "copy")
    (folder / "tokenizer.json").write_text("{")
    for says in (
        "tokenizer.json is damaged or was edited",
        "tokenizer.json is damaged or not a Hugging Face tokenizer",
    ):
        assert call("generate", folder, "--device", "cpu") == 2
        assert says in capsys.readouterr().err
        (folder / "hashes.json").unlink(missing_ok=True)  # an older version of Petra wrote none
    (folder / "tokenizer.json").unlink()
    for command in ("generate", "evaluate"):
        assert call(command, folder, "--device", "cpu") == 2
        assert "tokenizer.json is missing: restore it" in capsys.readouterr().err


def test_mistakes(texts, tokens, tmp_path, capsys):
    file, out = texts / "0.txt.gz", tmp_path / "out"
    for options, words in (
        (["--train", file], "--out is missing: give the folder to write"),
        (["--out", out], "--train is missing"),
        (["--train", file, "--out", tokens], "contains tokens already: give --overwrite"),
        (["--train", file, "--test", file, "--test-share", 0.1, "--out", out], "--test-share is 0.1, but --test is"),
        (["--train", file, "--test-share", 1, "--out", out], "--test-share is 1.0: give more than 0 and less than 1"),
        (["--train", file, "--vocab-size", 256, "--out", out], "--vocab-size is 256: give 257 or more\n"),
        (["--train", file, "--end-of-text", "", "--out", out], "--end-of-text is '', which cannot be a token: give"),
        (["--train", file, "--tokenizer", texts, "--out", out], f"{texts} is a folder: give the tokenizer.json"),
        (["--train", file, "--vocab-size", 300, "--tokenizer", tokens / "tokenizer.json", "--out", out], "leave one"),
        (["--check", tmp_path], "contains no tokens.json"),
        (["--check", tokens, "--out", out], "--check reads an existing folder: leave --train, --test and --out out"),
    ):
        assert call("tokenize", *options) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1
        assert not out.exists()
