"""Text: windows of a file as a pure function of seed, epoch and index; labelled texts; errors."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.data_files import equal, refused
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from petra.data import Batches, SentenceData, TextData, Vocabulary, load_data
from petra.data.vocabulary import PAD, START, UNKNOWN, split_words

# --- a file as one row of tokens ---


def counted(train: int, seq_len: int, test: int = 0) -> TextData:
    """Tokens that are equal to their position."""
    rows = [torch.arange(n, dtype=torch.int32) for n in (train, test or seq_len + 1)]
    return TextData("counted", *rows, vocab_size=max(map(len, rows)), seq_len=seq_len)


@given(tokens=st.integers(2, 60), seq_len=st.integers(1, 20), size=st.integers(1, 9), epoch=st.integers(0, 4))
def test_windows_do_not_overlap_and_leave_out_the_edges_alone(tokens: int, seq_len: int, size: int, epoch: int) -> None:
    assume(tokens > seq_len)
    batches = Batches(counted(tokens, seq_len), "train", size, seed=epoch)
    seen = list(batches.epoch(epoch))
    x, y = torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])
    assert x.shape == y.shape == (batches.samples, seq_len)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)  # each target is the token one place on
    row = x[x[:, 0].argsort()].flatten()
    assert torch.equal(row, row[0] + torch.arange(len(row)))  # in a row: nothing twice, nothing left out
    assert int(row[0]) < seq_len
    assert int(y.max()) <= tokens - 1
    assert len(row) > tokens - 2 * seq_len - 1
    assert batches.samples == max(1, tokens // seq_len - 1)  # whatever the epoch


def test_windows_begin_elsewhere_each_epoch_and_reach_every_place() -> None:
    batches = Batches(counted(40, 4), "train", 3)
    firsts = [min(int(x.min()) for x, _ in batches.epoch(epoch)) for epoch in range(40)]
    assert set(firsts) == {0, 1, 2, 3}
    unmoved = Batches(counted(40, 4), "train", 3, augment=False)
    assert {min(int(x.min()) for x, _ in unmoved.epoch(epoch)) for epoch in range(5)} == {0}


def test_windows_of_the_test_split_come_in_order_from_its_start() -> None:
    seen = list(Batches(counted(9, 4, test=14), "test", 2).epoch(7))
    assert [x.tolist() for x, _ in seen] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert seen[1][1].tolist() == [[9, 10, 11, 12]]


def test_windows_depend_on_seed_epoch_and_index_alone() -> None:
    def run(seed: int, epoch: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        return list(Batches(counted(90, 5), "train", 4, seed=seed).epoch(epoch, start))

    assert equal(run(1, 2), run(1, 2))
    assert equal(run(1, 2)[3:], run(1, 2, 3))
    assert not equal(run(1, 2), run(1, 3))
    assert not equal(run(1, 2), run(2, 2))


@given(st.integers(1, 4), st.integers(4, 9))
def test_shards_of_windows_together_are_the_whole_batch(replicas: int, batch_size: int) -> None:
    data = counted(93, 4)
    whole = Batches(data, "train", batch_size, seed=3)
    parts = [Batches(data, "train", batch_size, seed=3, shard=(r, replicas)) for r in range(replicas)]
    for i, (x, y) in enumerate(whole.epoch(2)):
        shards = [next(iter(p.epoch(2, i))) for p in parts if p.weight(i) > 0]
        assert torch.equal(torch.cat([x for x, _ in shards]), x)
        assert torch.equal(torch.cat([y for _, y in shards]), y)


def test_windows_share_no_memory_with_the_data_or_each_other() -> None:
    data = counted(30, 4)
    for x, y in Batches(data, "train", 4).epoch(0):
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
        x.zero_()
    assert torch.equal(data.train_tokens, torch.arange(30, dtype=torch.int32))


def test_characters_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "verse.txt"
    text = "ab\r\nπa" * 10
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # with the mark that some editors write
    data = load_data(f"text:{path}", seq_len=3)
    assert isinstance(data, TextData)
    assert data.vocabulary == ("\n", "\r", "a", "b", "π")
    assert data.arguments == {"vocab_size": 5, "seq_len": 3}
    assert (len(data.train_tokens), len(data.test_tokens)) == (54, 6)
    tokens = torch.cat((data.train_tokens, data.test_tokens))
    assert "".join(data.vocabulary[i] for i in tokens) == text
    assert tokens.dtype == torch.uint8


def test_more_than_256_characters(tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    text = "".join(map(chr, range(1000, 1400)))
    path.write_text(text, encoding="utf-8")
    data = load_data(f"text:{path}", seq_len=8)
    assert isinstance(data, TextData)
    assert data.vocab_size == 400
    assert "".join(data.vocabulary[i] for i in data.train_tokens) == text[:360]


def test_bytes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "any.bin"
    path.write_bytes(bytes(range(256)) * 20)
    data = load_data(f"bytes:{path}")
    assert isinstance(data, TextData)
    assert data.arguments == {"vocab_size": 256, "seq_len": 256}
    assert data.vocabulary == ()
    assert data.train_tokens[:256].tolist() == list(range(256))
    assert len(data.train_tokens) == 4608


def test_texts_that_make_no_data_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with refused("no file", "nowhere.txt", "text:FILE", kind=FileNotFoundError):
        load_data("text:nowhere.txt")
    path.write_bytes(b"")
    for kind in ("text", "bytes"):
        with refused(path, "empty"):
            load_data(f"{kind}:{path}")
    path.write_bytes(b"\xef\xbb\xbf")
    with refused(path, "empty"):
        load_data(f"text:{path}")
    path.write_bytes(b"abc\xff" * 100)
    with refused(path, "not UTF-8 at byte 3", "bytes:FILE"):
        load_data(f"text:{path}")
    path.write_text("x" * 100)
    with refused("text.txt", "test split has 10 tokens", "sample of 10", "--seq-len"):
        load_data(f"text:{path}", seq_len=10)
    assert load_data(f"text:{path}", seq_len=9).arguments["seq_len"] == 9
    with refused("--vocab-size is 5", "leave it out"):
        load_data(f"text:{path}", seq_len=5, vocab_size=5)
    with refused("is a file", f"text:{path}"):
        load_data(str(path))
    good = counted(30, 4)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"vocab_size": 29}, "token 29 is outside 0..28"),
        ({"train_tokens": good.train_tokens - 1}, "token -1"),
        ({"test_tokens": good.test_tokens.view(1, -1)}, "(1, 5)"),
        ({"test_tokens": good.test_tokens.float()}, "torch.float32"),
    ]
    for change, words in cases:
        with refused("counted", words):
            dataclasses.replace(good, **change)


# --- the vocabulary of sentences ---


def test_words_are_numbered_by_frequency_and_others_spelled() -> None:
    vocabulary = Vocabulary.from_texts(["the cat, the cat", "The dog", "an ant"], 100)
    assert vocabulary.entries[:3] == ("<s>", "<pad>", "<unk>")
    letters = vocabulary.entries[3 : 3 + (len(vocabulary) - 5) // 2]
    assert letters == ("t", "a", "e", "h", "c", "n", ",", "d", "g", "o")  # by frequency, then by code point
    assert vocabulary.entries[-2:] == ("the", "cat")  # those that come twice

    def text(tokens: list[int]) -> list[str]:
        return [vocabulary.entries[token] for token in tokens]

    assert text(vocabulary.encode("The CAT dozes.", 12)) == [
        *("<s>", "the", "cat", "d", "##o", "<unk>", "##e", "<unk>", "<unk>", "<pad>", "<pad>", "<pad>")
    ]
    assert vocabulary.encode("the the the", 2) == [START, vocabulary.entries.index("the")]
    assert vocabulary.encode("dog", 3) == [START, *(vocabulary.entries.index(piece) for piece in ("d", "##o"))]
    assert vocabulary.encode("", 3) == [START, PAD, PAD]
    assert vocabulary.encode("ж", 2) == [START, UNKNOWN]
    assert (START, PAD) == (0, 1)


@pytest.mark.parametrize("size", [16, 27, 50])
def test_characters_take_at_most_half_of_a_vocabulary(size: int) -> None:
    texts = ["abcdefghijklmnopqrstuvwxyz", *(f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")] * 2
    vocabulary = Vocabulary.from_texts(texts, size)
    spelled = [entry for entry in vocabulary.entries[3:] if len(entry.removeprefix("##")) == 1]
    assert len(vocabulary) == size
    assert size / 2 - 4 < len(spelled) <= size / 2


@given(
    st.lists(st.text("abcdefgß Жİ,.\t\n", max_size=30), min_size=1, max_size=8), st.integers(16, 60), st.integers(2, 20)
)
def test_any_text_has_tokens_of_a_vocabulary_of_any_size(texts: list[str], size: int, seq_len: int) -> None:
    assume(any(split_words(text) for text in texts))
    vocabulary = Vocabulary.from_texts(texts, size)
    assert len(vocabulary) <= size
    assert len(set(vocabulary.entries)) == len(vocabulary)
    assert vocabulary.entries == Vocabulary.from_texts(reversed(texts), size).entries
    for text in texts:
        tokens = vocabulary.encode(text, seq_len)
        assert len(tokens) == seq_len
        assert tokens[0] == START
        assert tokens == Vocabulary(vocabulary.entries).encode(text, seq_len)
        assert size < 60 or UNKNOWN not in tokens  # room for all characters that there are


def test_invalid_vocabularies_raise() -> None:
    with refused("--vocab-size is 15", "16 or more"):
        Vocabulary.from_texts(["a"], 15)
    with refused("no words"):
        Vocabulary.from_texts(["  ", ""], 50)
    with refused("['a', 'b']", "<pad>"):
        Vocabulary(["a", "b"])


# --- sentences with labels ---

ROWS = [("a fine film", 1), ("dull , dull", 0), ("fine", 1), ("not a film", 0)]


def write_tsv(path: Path, rows: list[Any], header: str = "sentence\tlabel") -> None:
    lines = ([header] if header else []) + ["\t".join(map(str, row)) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def check(data: Any, folder: Path, classes: int = 2, test: int = 2) -> None:
    assert isinstance(data, SentenceData)
    assert data.name == folder.name
    assert data.train_labels.tolist() == [1, 0, 1, 0]
    assert data.train_tokens.shape == (4, 64)
    assert len(data.test_labels) == test
    assert data.arguments == {"vocab_size": len(data.vocabulary), "seq_len": 64, "num_classes": classes, "pad": 1}
    words = [data.vocabulary[i] for i in data.train_tokens[1, :7]]
    assert words == ["<s>", "dull", ",", "dull", "<pad>", "<pad>", "<pad>"]
    x, y = next(Batches(data, "test", 5).epoch(0))
    assert torch.equal(x, data.test_tokens)
    assert torch.equal(y, data.test_labels)


@pytest.mark.parametrize("header", ["sentence\tlabel", "", "text\tlabels", "Sentence\tLabel"])
@pytest.mark.parametrize("name", ["test", "dev", "valid"])
def test_sentences_of_tab_separated_files(tmp_path: Path, header: str, name: str) -> None:
    write_tsv(tmp_path / "train.tsv", ROWS, header)
    write_tsv(tmp_path / f"{name}.tsv", ROWS[:2], header)
    check(load_data(str(tmp_path)), tmp_path)


def test_columns_are_found_by_name_and_an_unlabelled_test_split_gives_way(tmp_path: Path) -> None:
    rows = [(i, label, text) for i, (text, label) in enumerate(ROWS)]
    write_tsv(tmp_path / "train.tsv", rows, "index\tlabel\tsentence\r")
    write_tsv(tmp_path / "test.tsv", [(0, "fine"), (1, "dull"), (2, "x")], "index\tsentence")
    write_tsv(tmp_path / "dev.tsv", rows[:2], "index\tlabel\tsentence\r")
    check(load_data(str(tmp_path)), tmp_path)
    write_tsv(tmp_path / "test.tsv", [("fine", -1)] * 3)
    check(load_data(str(tmp_path)), tmp_path)
    write_tsv(tmp_path / "test.tsv", [("fine", 1)] * 3)
    check(load_data(str(tmp_path)), tmp_path, test=3)


def write_parquet(path: Path, rows: list[tuple[str | None, Any]], columns: str = "sentence label") -> None:
    text, label = columns.split()
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"idx": list(range(len(rows))), text: [t for t, _ in rows], label: [v for _, v in rows]}), path
    )


@pytest.mark.parametrize("columns", ["sentence label", "text label"])
@pytest.mark.parametrize("place", [".", "data"])
def test_sentences_of_parquet(tmp_path: Path, columns: str, place: str) -> None:
    write_parquet(tmp_path / place / "train-00000-of-00002.parquet", ROWS[:1], columns)
    write_parquet(tmp_path / place / "train-00001-of-00002.parquet", ROWS[1:], columns)
    write_parquet(tmp_path / place / "test-00000-of-00001.parquet", [("hidden", -1)] * 5, columns)
    write_parquet(tmp_path / place / "validation-00000-of-00001.parquet", ROWS[:2], columns)
    check(load_data(str(tmp_path)), tmp_path)


def test_seq_len_and_size_of_the_vocabulary(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", ROWS)
    write_tsv(tmp_path / "test.tsv", ROWS)
    data = load_data(str(tmp_path), seq_len=3, vocab_size=20)
    assert isinstance(data, SentenceData)
    assert data.train_tokens.shape == (4, 3)
    assert len(data.vocabulary) <= 20
    with refused("--seq-len is 1", "2 or more"):
        load_data(str(tmp_path), seq_len=1)


def test_sentence_files_that_make_no_sense_are_named(tmp_path: Path) -> None:
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv"
    write_tsv(train, ROWS)
    with refused(tmp_path, "test.tsv, dev.tsv", "labels"):
        load_data(str(tmp_path))
    bad: list[tuple[bytes, tuple[str, ...]]] = [
        (b"", ("empty",)),
        (b"\n\n", ("empty",)),
        (b"sentence\tlabel\n", ("no lines after the first",)),
        (b"fine\xff\t1\n", ("not UTF-8 at byte 4",)),
        (b"one\ttwo\tthree\n", ("no text column", "sentence or text")),
        (b"label\nfine\n", ("no text column", "['label']")),
        (b"just a sentence\n", ("no text column", "['just a sentence']")),
        (b"sentence\tlabel\nfine\t1\nfine\n", ("line 3 has 1 columns, not 2",)),
        (b"fine\t1\na\tb\t0\n", ("line 2 has 3 columns", "tabs")),
        (b"fine\tgood\n", ("line 1", "label 'good'", "from 0")),
        (b"sentence\tlabel\nfine\t0.5\n", ("line 2", "label '0.5'")),
        (b"fine\t1\nbad\t-2\n", ("label -2 in row 2", "negative")),
    ]
    for content, words in bad:
        test.write_bytes(content)
        with refused(test, *words):
            load_data(str(tmp_path))
    test.write_bytes(b"fine\t9\n")
    with refused("label 9 with 4 training sentences", "from 0"):
        load_data(str(tmp_path))
    write_tsv(test, ROWS)
    write_tsv(train, [("fine",)], "sentence")
    with refused(train, "no labels"):
        load_data(str(tmp_path))
    write_tsv(train, [("", 0), ("  ", 1)])
    with refused("no words"):
        load_data(str(tmp_path))


def test_parquet_whose_texts_are_categories(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a fine film", "dull"]).dictionary_encode(), "label": [1, 0]})
    for name in ("train", "test"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    assert load_data(str(tmp_path)).train_labels.tolist() == [1, 0]


def test_parquet_mistakes_are_named(tmp_path: Path) -> None:
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    write_parquet(train, ROWS)
    write_parquet(test, [("fine", 1), (None, 0)])
    with refused(test, "row 1", "no text"):
        load_data(str(tmp_path))
    write_parquet(test, [("fine", 1), ("dull", None)])
    with refused(test, "row 1", "label None"):
        load_data(str(tmp_path))
    write_parquet(test, [("fine", 0.5)])
    with refused(test, "label 0.5"):
        load_data(str(tmp_path))
    write_parquet(test, [("fine", 1)], "words label")
    with refused(test, "no text column", "words"):
        load_data(str(tmp_path))
    pq.write_table(pa.table({"sentence": pa.array([], pa.string()), "label": pa.array([], pa.int64())}), test)
    with refused(test, "empty"):
        load_data(str(tmp_path))
    test.write_bytes(b"PAR1")
    with refused(test, "not a readable parquet file"):
        load_data(str(tmp_path))


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "train.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused("pip install 'petra[images]'"):
        load_data(str(tmp_path))


def test_images_with_captions_are_images(tmp_path: Path) -> None:
    table = pa.table({"text": ["a cat"], "image": pa.array([b"broken"], pa.binary()), "label": [0]})
    for name in ("train", "test"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with refused("not a readable image"):
        load_data(str(tmp_path))


def test_sentence_data_checks_its_fields() -> None:
    tokens, labels = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([0, 1, 1])
    good = SentenceData("small", tokens, labels, tokens, labels, 2, ("<s>", "<pad>"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"train_tokens": tokens.float()}, "torch.float32"),
        ({"train_tokens": tokens[0]}, "(4,)"),
        ({"test_tokens": tokens[:0], "test_labels": labels[:0]}, "(0, 4)"),
        ({"test_labels": labels[:2]}, "for 3 sentences"),
        ({"test_tokens": tokens + 2}, "token 2 is outside 0..1"),
        ({"num_classes": 1}, "label 1 is outside 0..0"),
        ({"test_tokens": tokens[:, :3]}, "4 tokens, but test sentences 3"),
    ]
    for change, words in cases:
        with refused("small", words):
            dataclasses.replace(good, **change)


def test_text_options_for_images_raise(tmp_path: Path) -> None:
    with refused("--seq-len is 5", "digits"):
        load_data("digits", seq_len=5)
    with refused("--vocab-size is 99", "synthetic"):
        load_data("synthetic:1x2x2:2:4", vocab_size=99)
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(bytes(3074))  # CIFAR-100
    assert load_data(str(tmp_path)).unit == "images"
    with refused("--seq-len is 5", tmp_path):
        load_data(str(tmp_path), seq_len=5)
