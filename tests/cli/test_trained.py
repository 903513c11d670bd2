"""What can be done with a finished run: its network loaded, evaluated, and made to write."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.data_files import refused
from PIL import Image
from safetensors.torch import load_file, save_file

import petra
from petra.cli.main import main
from petra.data import Batches, load_data
from petra.reversible import AdditiveCoupling, FixedPointCoupling, ReversibleResidual
from petra.trainer.loss import cross_entropy
from petra.trainer.trainer import weights_hash

pytestmark = pytest.mark.slow

COMMON = ["--quiet", "--threads", "1", "--device", "cpu", "--epochs", "1", "--warmup-epochs", "0", "--stages", "3"]
DIGITS = ["--model", "revnet18", "--width", "4", "--depths", "1,1", "--data", "digits"]
GPT = ["--model", "rev-gpt", "--width", "8", "--depth", "1", "--heads", "1", "--seq-len", "12", "--optimizer", "adamw"]
VERSE = "so long as men can breathe or eyes can see\n" * 12


def train(folder, *arguments):
    assert main(["train", *COMMON, *map(str, arguments), "--out", str(folder)]) == 0
    return folder


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "verse.txt").write_text(VERSE)
    (folder / "films").mkdir()
    lines = [f"{word} {other} film\t{label}" for word, label in (("good", 1), ("bad", 0)) for other in "abcdefghij"]
    (folder / "films" / "train.tsv").write_text("\n".join(lines))
    (folder / "films" / "dev.tsv").write_text("a good film\t1\nbad film\t0\na film\t1\n")
    return folder


@pytest.fixture(scope="module")
def digits(place):
    return train(place / "digits", *DIGITS, "--coupling", "fixed-point")


@pytest.fixture(scope="module")
def verse(place):
    return train(place / "verse", *GPT, "--data", f"text:{place / 'verse.txt'}")


@pytest.fixture(scope="module")
def encoded(place):
    return train(place / "bytes", *GPT, "--data", f"bytes:{place / 'verse.txt'}", "--comm-dtype", "bf16")


@pytest.fixture(scope="module")
def films(place):
    small = ["--width", "8", "--depth", "1", "--heads", "1", "--seq-len", "6", "--vocab-size", "40"]
    return train(place / "sentiment", "--model", "rev-roberta-small", *small, "--data", place / "films")


@pytest.fixture(scope="module")
def rounded(place):
    return train(place / "rounded", *DIGITS, "--autocast", "bf16", "--comm-dtype", "bf16", "--channels-last")


@pytest.fixture
def copy(digits, tmp_path):
    return shutil.copytree(digits, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoint"))


# --- load ---


def test_the_network_is_that_of_the_run(digits, rounded, films, monkeypatch):
    for folder in (digits, rounded, films):
        monkeypatch.setenv("HOME", str(folder.parent))
        drawn = torch.random.get_rng_state()
        network = petra.load(f"~/{folder.name}")
        assert torch.equal(torch.random.get_rng_state(), drawn)
        assert not any(module.training for module in network.modules())
        assert weights_hash(network.state_dict()) == read(folder, "summary.json")["weights_sha256"]


def test_the_coupling_is_that_of_the_run(digits, rounded):
    for folder, coupling in ((digits, FixedPointCoupling), (rounded, AdditiveCoupling)):
        blocks = [layer for layer in petra.load(folder).modules() if isinstance(layer, ReversibleResidual)]
        assert {block.coupling for block in blocks} == {coupling}


def test_all_arguments_are_kept(films):
    arguments = read(films, "network.json")["arguments"]
    assert (arguments["vocab_size"], arguments["num_classes"], arguments["pad"]) == (28, 2, 1)
    assert (arguments["width"], arguments["mlp_ratio"], arguments["reversible"]) == (8, 4, True)


@pytest.mark.parametrize("name", ["summary.json", "weights.safetensors"])
def test_a_run_that_has_not_finished(copy, name):
    (copy / name).unlink()
    with refused("has not finished", f"petra train --resume --out {copy}"):
        petra.load(copy)


def test_folders_without_a_run(tmp_path, digits):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with refused(folder, "holds no run: give the folder of one"):
            petra.load(folder)
    with refused("is a file: give the folder"):
        petra.load(digits / "weights.safetensors")
    (tmp_path / "metrics.jsonl").write_text("")  # as fit writes it
    with refused("was written by Trainer.fit", "create the network, and continue it with fit"):
        petra.load(tmp_path)
    (tmp_path / "best.safetensors").write_text("")
    with refused("was written by Trainer.fit", f"load_file('{tmp_path / 'best.safetensors'}')"):
        petra.load(tmp_path)
    for name in ("summary.json", "weights.safetensors"):
        (tmp_path / name).write_bytes((digits / name).read_bytes())
    with refused("was written by Trainer.fit", f"load_file('{tmp_path / 'weights.safetensors'}')"):
        petra.load(tmp_path)


def test_a_gpu_that_is_not_there(digits):
    with pytest.raises(ValueError, match="device is cuda:99, but this machine has no such GPU"):
        petra.load(digits, device="cuda:99")


def test_a_lost_network_file_is_written_again_by_resuming(digits):
    (digits / "network.json").rename(digits / "kept.json")
    with refused("network.json is missing", f"`petra train --resume --out {digits}` writes it again"):
        petra.load(digits)
    assert main(["train", "--resume", "--quiet", "--device", "cpu", "--out", str(digits)]) == 0
    assert (digits / "network.json").read_bytes() == (digits / "kept.json").read_bytes()
    (digits / "kept.json").unlink()
    petra.load(digits)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '{"model": "revnet18"}',
        '{"model": "revnet18", "arguments": {"width": "x"}}',
        '{"model": 3, "x": 1}',
    ],
)
def test_a_damaged_description(copy, text):
    (copy / "network.json").write_text(text)
    with refused("network.json is damaged", "writes it again"):
        petra.load(copy)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 64])
def test_damaged_weights(copy, damage):
    (copy / "weights.safetensors").write_bytes(damage)
    with refused("weights.safetensors is damaged or not a safetensors file"):
        petra.load(copy)


def test_a_truncated_file_and_a_flipped_bit(copy):
    whole = (copy / "weights.safetensors").read_bytes()
    (copy / "weights.safetensors").write_bytes(whole[:-10])
    with refused("weights.safetensors is damaged"):
        petra.load(copy)
    (copy / "weights.safetensors").write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
    with refused("is not what the run wrote (its hash is not the one in summary.json"):
        petra.load(copy)
    (copy / "weights.safetensors").write_bytes(whole)
    petra.load(copy)
    (copy / "summary.json").write_text("3")
    with refused("summary.json is damaged"):
        petra.load(copy)


def test_files_that_do_not_fit(copy):
    file = copy / "weights.safetensors"
    weights = load_file(file)
    save_file({name: value for name, value in weights.items() if name != "head.fc.bias"}, file)
    with refused(file, "has no head.fc.bias: give weights of the same network"):
        petra.load(copy)
    save_file({**weights, "more": torch.zeros(1), "most": torch.zeros(1)}, file)
    with refused(file, "has more and 1 more, which this network does not have"):
        petra.load(copy)
    save_file({**weights, "head.fc.bias": torch.zeros(3)}, file)
    with refused("head.fc.bias has shape [3]", "not [10]: restore the files of one run"):
        petra.load(copy)


# --- evaluate ---


def score(capsys, folder, *arguments):
    assert main(["evaluate", str(folder), "--json", "--threads", "1", "--device", "cpu", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["digits", "rounded", "verse", "encoded", "films"])
def test_evaluation_finds_what_the_run_found(name, request, capsys):
    folder = request.getfixturevalue(name)
    capsys.readouterr()
    found, summary = score(capsys, folder), read(folder, "summary.json")
    assert found["test_accuracy"] == summary["test_accuracy"]
    assert found["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-12)


def test_evaluation_in_a_line(digits, capsys):
    summary = read(digits, "summary.json")
    assert main(["evaluate", str(digits), "--device", "cpu", "--batch-size", "7"]) == 0
    assert capsys.readouterr().out == (
        f"revnet18 on digits: test accuracy {summary['test_accuracy']:.2%}, "
        f"test loss {summary['test_loss']:.4f} (360 images)\n"
    )


def test_precision_is_that_of_the_run_unless_it_is_given(rounded, digits, capsys):
    loss = read(rounded, "summary.json")["test_loss"]
    assert score(capsys, rounded, "--autocast", "bf16")["test_loss"] == pytest.approx(loss, rel=1e-12)
    assert abs(score(capsys, rounded, "--autocast", "float32")["test_loss"] - loss) > 1e-7
    loss = read(digits, "summary.json")["test_loss"]
    assert abs(score(capsys, digits, "--autocast", "bf16")["test_loss"] - loss) > 1e-7


def loss_on(folder, data):
    [(x, y)] = Batches(data, "test", 10**6).epoch(0)
    with torch.no_grad():
        return float(cross_entropy(petra.load(folder)(x), y))


def test_other_images_are_normalised_as_in_training(digits, capsys):
    found = score(capsys, digits, "--data", "synthetic:1x8x8:10:40")
    data, own = load_data("synthetic:1x8x8:10:40"), load_data("digits")
    assert found["samples"] == 10
    assert found["test_loss"] == pytest.approx(loss_on(digits, replace(data, mean=own.mean, std=own.std)), rel=1e-6)
    assert found["test_loss"] != pytest.approx(loss_on(digits, data), rel=1e-4)


def test_other_texts_are_spelled_as_in_training(verse, films, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("men can see eyes\n" * 20)
    vocabulary = read(verse, "vocabulary.json")
    found = score(capsys, verse, "--data", f"text:{other}")
    data = load_data(f"text:{other}", seq_len=12, vocabulary=vocabulary)
    assert [vocabulary[token] for token in data.test_tokens[-17:]] == list("men can see eyes\n")
    assert found["test_loss"] == pytest.approx(loss_on(verse, data), rel=1e-6)
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / name).write_text("film good\t1\nfilm\t0\nfilm bad\t0\n")
    data = load_data(str(tmp_path), seq_len=6, vocabulary=read(films, "vocabulary.json"))
    assert score(capsys, films, "--data", tmp_path)["test_loss"] == pytest.approx(loss_on(films, data), rel=1e-6)


def test_data_of_another_kind(digits, verse, encoded, place, tmp_path, capsys):
    (tmp_path / "strange.txt").write_text("so long, Zoë\n" * 20)
    text = f"text:{place / 'verse.txt'}"
    for folder, data, words in (
        (digits, f"text:{__file__}", "revnet18 is for classes of images, but test_trained.py asks for the next token"),
        (digits, "synthetic:3x8x8:10:8", "the network has in_channels 1, but synthetic has 3: give data of the same"),
        (digits, "synthetic:1x8x8:11:8", "the network has num_classes 10, but synthetic has 11"),
        (verse, place / "films", "rev-gpt is for the next token of text, but films asks for classes of text"),
        (verse, f"text:{tmp_path / 'strange.txt'}", "strange.txt contains ',', which is not among the 16 characters"),
        (verse, f"bytes:{place / 'verse.txt'}", "the network reads characters, but bytes:"),
        (encoded, text, "the network reads bytes, but text:"),
        (digits, "nowhere", "no data set or folder 'nowhere'"),
    ):
        assert main(["evaluate", str(folder), "--device", "cpu", "--data", str(data)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1
    assert main(["evaluate", str(digits), "--batch-size", "0"]) == 2
    assert "--batch-size is 0: give 1 or more" in capsys.readouterr().err


def test_classes_with_other_names(tmp_path, capsys):
    for folder, names in (("pets", "cat dog"), ("birds", "cat owl")):
        for part in ("train", "test"):
            for name in names.split():
                (tmp_path / folder / part / name).mkdir(parents=True)
                Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / folder / part / name / "0.png")
    run = train(tmp_path / "run", *DIGITS, "--data", tmp_path / "pets")
    capsys.readouterr()
    assert score(capsys, run, "--data", tmp_path / "pets")["samples"] == 2
    assert main(["evaluate", str(run), "--device", "cpu", "--data", str(tmp_path / "birds")]) == 2
    assert "the classes of birds are not those of the run (see 'dog')" in capsys.readouterr().err


def test_data_without_a_train_part(digits, films, place, tmp_path, capsys):
    for number in range(10):
        (tmp_path / "images" / "val" / str(number)).mkdir(parents=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp_path / f"images/val/{number}/0.png")
    assert score(capsys, digits, "--data", tmp_path / "images")["samples"] == 10
    (tmp_path / "films").mkdir()
    shutil.copy(place / "films" / "dev.tsv", tmp_path / "films" / "dev.tsv")
    found, summary = score(capsys, films, "--data", tmp_path / "films"), read(films, "summary.json")
    assert found["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-12)


# --- generate ---


def write(capsys, folder, *arguments):
    capsys.readouterr()
    assert main(["generate", str(folder), "--threads", "1", "--device", "cpu", *map(str, arguments)]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_the_likeliest_text_is_what_the_network_says(verse, capsys):
    text, vocabulary, network = "men can breathe", read(verse, "vocabulary.json"), petra.load(verse)
    found = write(capsys, verse, "--prompt", text, "--max-new-tokens", 20, "--temperature", 0)
    for _ in range(20):
        tokens = torch.tensor([[vocabulary.index(character) for character in text[-12:]]])
        text += vocabulary[int(network(tokens)[0, -1].argmax())]
    assert found == text


def test_drawn_text_depends_on_seed_and_temperature(verse, capsys):
    texts = [write(capsys, verse, "--max-new-tokens", 30, "--seed", seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert [len(text) for text in texts] == [30] * 3
    assert set("".join(texts)) <= set(VERSE)
    cold = write(capsys, verse, "--max-new-tokens", 30, "--temperature", 1e-6)
    assert cold == write(capsys, verse, "--max-new-tokens", 30, "--temperature", 0) != texts[0]
    assert cold == write(capsys, verse, "--max-new-tokens", 30, "--top-k", 1)
    assert cold == write(capsys, verse, "--max-new-tokens", 30, "--top-p", 1e-9)
    network, vocabulary = petra.load(verse), read(verse, "vocabulary.json")
    assert vocabulary[int(network(torch.tensor([[vocabulary.index("\n")]]))[0, -1].argmax())] == cold[0]


def test_bytes(encoded, capsys):
    assert write(capsys, encoded, "--prompt", "Zoë", "--max-new-tokens", 5, "--temperature", 0).startswith("Zoë")


def test_what_cannot_be_written(verse, digits, films, copy, capsys):
    (copy / "summary.json").unlink()
    for folder, arguments, words in (
        (verse, ["--prompt", "Zoë"], "--prompt contains 'Z', which is not among the 16 characters that the network"),
        (digits, [], "is for classes of images, not for writing text: give the folder of a language model"),
        (films, [], "is for classes of text, not for writing text"),
        (copy, [], "has not finished"),
        (verse, ["--max-new-tokens", "0"], "--max-new-tokens is 0: give 1 or more"),
        (verse, ["--temperature", "-1"], "--temperature is -1.0: give 0 or more"),
        (verse, ["--temperature", "nan"], "--temperature is nan: give 0 or more"),
        (verse, ["--top-k", "-1"], "--top-k is -1: give 0 or more"),
        (verse, ["--top-p", "0"], "--top-p is 0.0: give more than 0 and at most 1"),
        (verse, ["--seed", "-1"], "--seed is -1: give 0 or more"),
    ):
        assert main(["generate", str(folder), "--device", "cpu", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1


def test_a_vocabulary_that_is_lost(verse, tmp_path, capsys):
    folder = shutil.copytree(verse, tmp_path / "copy")
    for text in ("{", "[1, 2]"):
        (folder / "vocabulary.json").write_text(text)
        assert main(["generate", str(folder), "--device", "cpu"]) == 2
        assert "vocabulary.json is damaged" in capsys.readouterr().err
    (folder / "vocabulary.json").unlink()
    for command in ("generate", "evaluate"):
        assert main([command, str(folder), "--device", "cpu"]) == 2
        assert "vocabulary.json is missing: restore it" in capsys.readouterr().err
