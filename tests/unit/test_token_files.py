"""Token files: the batches of the same tokens in memory, nothing read that is not needed, errors."""

import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from helpers.data_files import equal, refused
from helpers.token_folders import write_tokens
from hypothesis import given
from hypothesis import strategies as st

from petra.data import Batches, TextData, TokenData, bits_per_byte, fingerprint, load_data
from petra.data.text import MappedWindowSplit, WindowSplit
from petra.data.token_files import TokenInfo, check_tokens, token_dtype


def both(folder: Path, train, test, vocab_size: int, seq_len: int):
    """The same tokens in files and in memory."""
    data = load_data(f"tokens:{write_tokens(folder, train, test, vocab_size)}", seq_len=seq_len)
    rows = [torch.tensor(row, dtype=torch.int32) for row in (train, test)]
    return data, TextData("reference", *rows, vocab_size=vocab_size, seq_len=seq_len)


@given(st.data())
def test_batches_are_those_of_the_tokens_in_memory(data) -> None:
    vocab_size = data.draw(st.sampled_from([7, 300, 2**16, 2**16 + 1, 2**31]))
    seq_len = data.draw(st.integers(1, 12))
    tokens = st.integers(0, vocab_size - 1) | st.just(vocab_size - 1)
    rows = [data.draw(st.lists(tokens, min_size=seq_len + 1, max_size=70)) for _ in range(2)]
    shards, seed, epoch = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    size = data.draw(st.integers(shards, 6))
    with TemporaryDirectory() as folder:
        in_files, in_memory = both(Path(folder), *rows, vocab_size, seq_len)
        assert in_files.arguments == in_memory.arguments
        for split in ("train", "test"):
            for shard in range(shards):
                found, expected = (
                    Batches(one, split, size, seed=seed, shard=(shard, shards)) for one in (in_files, in_memory)
                )
                assert found.samples == expected.samples
                start = data.draw(st.integers(0, len(found)))
                assert equal(list(found.epoch(epoch, start)), list(expected.epoch(epoch, start)))


@pytest.mark.parametrize("vocab_size", [2**16, 2**31])
def test_a_file_on_the_device_gives_the_windows_of_a_mapped_one(tmp_path, vocab_size) -> None:
    row = [0, 1, vocab_size - 1, 2**15, 2**15 - 1, 5, 6, vocab_size - 2, 8]
    folder = write_tokens(tmp_path, row, row, vocab_size)
    mapped = np.memmap(folder / "train.bin", token_dtype(vocab_size), "r")
    signed = torch.from_numpy(np.array(mapped).view(np.int16 if vocab_size == 2**16 else np.int32))
    cpu = torch.device("cpu")
    splits = WindowSplit(signed, 3, True, cpu), MappedWindowSplit(mapped, 3, True, cpu)
    for epoch in range(3):
        index, drawn = torch.tensor([1, 0]), splits[0].draw(2, 0, epoch, 0)
        assert equal([splits[0].take(index, drawn)], [splits[1].take(index, drawn)])
    assert splits[0].take(torch.tensor([0]), None)[0].tolist() == [row[:3]]


def test_a_vocabulary_that_fits_takes_two_bytes() -> None:
    assert [token_dtype(size).str for size in (1, 2**16, 2**16 + 1)] == ["<u2", "<u2", "<u4"]


def test_a_file_larger_than_memory_is_not_read(tmp_path) -> None:
    folder, seq_len, tokens = write_tokens(tmp_path, [1] * 9, [1] * 9, 70000), 2**20, 2**38
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(4 * tokens)  # 1 TiB of zeros, which take no space
        file.seek(4 * tokens - 4)
        file.write(b"\x09\x00\x00\x00")
    values = json.loads((folder / "tokens.json").read_text())
    values["train"]["tokens"] = tokens
    (folder / "tokens.json").write_text(json.dumps(values))
    data = replace(load_data(f"tokens:{folder}", seq_len=2), seq_len=8)
    assert len(fingerprint(data)) == 64
    split = MappedWindowSplit(np.memmap(folder / "train.bin", "<u4", "r"), seq_len, False, torch.device("cpu"))
    assert len(split) == tokens // seq_len - 1
    x, y = split.take(torch.tensor([0, len(split) - 1]), None)
    assert x.shape == y.shape == (2, seq_len)
    assert [int(count) for count in x.count_nonzero(1)] == [9, 0]
    assert int(split.take(torch.tensor([len(split) - 1]), torch.tensor([[seq_len - 1]]))[1][0, -1]) == 9
    assert len(data.split("train", augment=True, device=torch.device("cpu"), dtype=torch.float32)) == tokens // 8 - 1


def test_the_fingerprint_depends_on_the_contents_and_not_on_the_folder(tmp_path) -> None:
    def of(name, train, test, vocab_size=9):
        return fingerprint(load_data(f"tokens:{write_tokens(tmp_path / name, train, test, vocab_size)}", seq_len=2))

    row, other = [1, 2, 3, 4], [1, 2, 3, 5]
    assert of("a", row, row) == of("b", row, row)
    assert len({of("a", row, row), of("b", other, row), of("c", row, other), of("d", row, row, 10)}) == 4


def test_files_are_compared_with_their_hashes(tmp_path) -> None:
    folder = write_tokens(tmp_path, [1, 2, 3], [4, 5, 6], 9)
    assert check_tokens(folder) == TokenInfo.read(folder)
    (folder / "test.bin").write_bytes(np.array([4, 5, 7], "<u2").tobytes())
    with pytest.raises(ValueError, match=r"test.bin has changed since it was written: restore it"):
        check_tokens(folder)


def test_a_test_split_alone(tmp_path) -> None:
    folder = write_tokens(tmp_path, None, [1, 2, 3, 4, 5], 9)
    with pytest.raises(ValueError, match="has only a test split: give --train to `petra tokenize` as well"):
        load_data(f"tokens:{folder}", seq_len=2)
    data = load_data(f"tokens:{folder}", seq_len=2, test_only=True)
    assert [x.tolist() for x, _ in Batches(data, "test", 4).epoch(0)] == [[[1, 2], [3, 4]]]
    assert Batches(data, "train", 1).samples == 1


def test_bits_per_byte(tmp_path) -> None:
    data = load_data(f"tokens:{write_tokens(tmp_path, [1] * 9, [2] * 10, 9, test_bytes=35)}", seq_len=3)
    assert isinstance(data, TokenData)
    assert bits_per_byte(data, 1.4) == pytest.approx(1.4 * 10 / (math.log(2) * 35))
    (tmp_path / "a.txt").write_text("a" * 90 + "aaaπ€aaaaa")  # the last tenth has 8 characters of 1, 2 and 3 bytes
    assert bits_per_byte(load_data(f"text:{tmp_path / 'a.txt'}", seq_len=3), 1.4) == pytest.approx(
        1.4 / math.log(2) * 10 / 13
    )
    assert bits_per_byte(load_data(f"bytes:{tmp_path / 'a.txt'}", seq_len=3), 1.4) == pytest.approx(1.4 / math.log(2))
    assert bits_per_byte(load_data("synthetic:1x2x2:2:8"), 1.4) is None


def test_errors_name_file_and_remedy(tmp_path) -> None:
    def spoiled(name, spoil):
        folder = write_tokens(tmp_path / name, [1] * 20, [2] * 10, 9)
        spoil(folder)
        return f"tokens:{folder}"

    def change(**values):
        def spoil(folder):
            before = json.loads((folder / "tokens.json").read_text())
            (folder / "tokens.json").write_text(json.dumps({**before, **values}))

        return spoil

    with refused("there is no folder 'nowhere': give tokens:FOLDER", kind=FileNotFoundError):
        load_data("tokens:nowhere")
    (tmp_path / "empty").mkdir()
    with refused("contains no tokens.json: give a folder that `petra tokenize` has written"):
        load_data(f"tokens:{tmp_path / 'empty'}")
    for name, spoil, words in (
        ("json", lambda f: (f / "tokens.json").write_text("{"), "tokens.json is damaged ("),
        ("keys", change(strange=1), "tokens.json is damaged ("),
        ("list", lambda f: (f / "tokens.json").write_text("[]"), "tokens.json is damaged ("),
        ("later", change(version=2), "damaged (its version is 2, not 1): tokenize the text again"),
        ("bin", lambda f: (f / "test.bin").unlink(), "test.bin is missing: restore it, or tokenize the text again"),
        ("short", lambda f: (f / "train.bin").write_bytes(b"12"), "train.bin has 2 bytes, not 40 as tokens.json says"),
        ("wide", change(vocab_size=2**17), "train.bin has 40 bytes, not 80 as tokens.json says"),
        ("lost", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing: restore it, because it"),
        ("other", lambda f: (f / "tokenizer.json").write_text("[]"), "is not the tokenizer that the tokens were made"),
    ):
        data = spoiled(name, spoil)
        with refused(words):
            load_data(data, seq_len=4)
    good = spoiled("good", lambda folder: None)
    for options, words in (
        ({"seq_len": 10}, "the test split has 10 tokens, too few for a sample of 10 and the next token"),
        ({"seq_len": 0}, "seq_len is 0: give 1 or more"),
        ({"vocab_size": 9}, "--vocab-size is 9, but tokens:FOLDER has a fixed vocabulary: leave it out"),
    ):
        with refused(words):
            load_data(good, **options)
