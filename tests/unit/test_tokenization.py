"""`tokenize`: tokens that give the text back, equal for every size of pieces; splits; files."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from helpers.data_files import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from petra.data import HuggingFaceTokenizer, TokenInfo, documents, load_data, tokenization, tokenize
from petra.data.token_files import check_tokens

tokenizers = pytest.importorskip("tokenizers")

WORDS = "The network's layers don't store what they can compute again; 12 of 345 élèves agree.\n\n\tYes, \r\n  no.\n"
ANYTHING = st.text(max_size=80) | st.text(st.sampled_from("the net's wé1. \n\t\r\u00a0\u2028\x1c'"), max_size=120)


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.train([WORDS * 3], 300)


@pytest.fixture(scope="module")
def tokenizer_file(tokenizer, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(tokenizer.to_json())
    return file


def written(folder: Path, *texts: str) -> list[Path]:
    """Files with these texts."""
    files = [folder / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text.encode())
    return files


def tokens_of(folder: Path, split: str) -> list[int]:
    return np.fromfile(folder / f"{split}.bin", TokenInfo.read(folder).dtype).tolist()


@given(ANYTHING)
def test_tokens_give_the_text_back(tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode_batch([text, ""]) == [tokens, []]
    assert all(0 < token < tokenizer.vocab_size for token in tokens)


def test_a_text_that_is_not_utf_8(tokenizer) -> None:
    with refused(
        r"the text is not UTF-8 at character 1 ('\udcff'), but the tokenizer reads only UTF-8: correct the text"
    ):
        tokenizer.encode("é\udcff")


def test_a_text_may_spell_a_special_token(tokenizer) -> None:
    tokens = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end not in tokens
    assert tokenizer.decode(tokens) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.end]) == "<|endoftext|>"


@settings(max_examples=40)
@given(st.lists(ANYTHING, min_size=1, max_size=3), st.integers(1, 40))
def test_tokens_do_not_depend_on_the_size_of_pieces(tokenizer, tokenizer_file, texts: list[str], size: int) -> None:
    texts = [text + "." for text in texts]
    with TemporaryDirectory() as folder:
        files, out = written(Path(folder), *texts), Path(folder, "out")
        info = tokenize([], files, out, tokenizer=tokenizer_file, piece_characters=size)
        assert tokens_of(out, "test") == [token for text in texts for token in (*tokenizer.encode(text), tokenizer.end)]
    assert info.train is None
    assert info.test.documents == len(texts)
    assert info.test.bytes == sum(len(text.encode()) for text in texts)
    assert info.end_of_text == tokenizer.end == 0


@settings(max_examples=10)
@given(st.integers(1, 200))
def test_a_trained_tokenizer_does_not_depend_on_the_size_of_pieces(size: int) -> None:
    with TemporaryDirectory() as folder:
        files = written(Path(folder), WORDS * 3, WORDS[::-1] * 2)
        out = [Path(folder, name) for name in ("a", "b")]
        whole = tokenize(files, [], out[0], vocab_size=290, test_share=0.5)
        assert tokenize(files, [], out[1], vocab_size=290, test_share=0.5, piece_characters=size) == whole
        made = HuggingFaceTokenizer.train([WORDS * 3], 290)
        assert (out[0] / "tokenizer.json").read_text() == made.to_json()  # of the training text alone
        assert tokens_of(out[0], "test") == [*made.encode(WORDS[::-1] * 2), 0]


def test_the_vocabulary_has_the_size_that_was_asked_for(tmp_path) -> None:
    files = written(tmp_path, WORDS * 2, WORDS)
    assert tokenize(files, [], tmp_path / "small", vocab_size=280).vocab_size == 280
    large = tokenize(files, [], tmp_path / "large", vocab_size=10_000)
    assert 280 < large.vocab_size < 1000  # the text has no more
    values = json.loads((tmp_path / "large" / "tokens.json").read_text())
    assert values["dtype"] == "uint16"
    assert check_tokens(tmp_path / "large") == large


@pytest.mark.parametrize(("count", "share", "held_out"), [(2, 0.9, 1), (2, 0.01, 1), (10, 0.3, 3), (10, 0.99, 9)])
def test_the_last_documents_are_held_out(tmp_path, tokenizer, tokenizer_file, count, share, held_out) -> None:
    texts = [f"{number} {WORDS}" for number in range(count)]
    files = written(tmp_path, "\n--\n".join(texts))
    info = tokenize(files, [], tmp_path / "out", tokenizer=tokenizer_file, test_share=share, separator="\n--\n")
    assert info.train is not None
    assert (info.train.documents, info.test.documents) == (count - held_out, held_out)
    for split, part in (("train", texts[:-held_out]), ("test", texts[-held_out:])):
        expected = [token for text in part for token in (*tokenizer.encode(text), 0)]
        assert tokens_of(tmp_path / "out", split) == expected


@given(st.integers(1, 99), st.integers(1, 60))
@settings(max_examples=30)
def test_the_end_of_one_document_is_held_out(tokenizer, tokenizer_file, percent: int, size: int) -> None:
    with TemporaryDirectory() as folder:
        files, out = written(Path(folder), WORDS), Path(folder, "out")
        tokenize(files, [], out, tokenizer=tokenizer_file, test_share=percent / 100, piece_characters=size)
        cut = len(WORDS) - max(1, int(len(WORDS) * (percent / 100)))
        for split, part in (("train", WORDS[:cut]), ("test", WORDS[cut:])):
            assert tokens_of(out, split) == [*tokenizer.encode(part), 0]


@pytest.mark.parametrize("separator", ["", "\n\n"])
def test_files_are_read_once_to_count_documents_and_once_to_encode(tmp_path, tokenizer_file, separator) -> None:
    files, read = written(tmp_path, WORDS), []
    with patch.object(documents, "read_text_parts", lambda file, _: read.append(file) or iter([file.read_text()])):
        tokenize(files, [], tmp_path / "out", tokenizer=tokenizer_file, separator=separator)
    assert read == files * 2


def test_any_hugging_face_tokenizer(tmp_path) -> None:
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 2, "</s>": 5, "?": 0, "a": 70_000}, unk_token="?"))
    other.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    other.add_special_tokens(["<s>", "</s>"])
    other.enable_truncation(1)
    other.enable_padding(length=9)
    other.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 2), ("</s>", 5)])
    other.save(str(tmp_path / "tokenizer.json"))
    files = written(tmp_path, "a b a", "a")
    with refused("has no token '<|endoftext|>' to separate documents with: give --end-of-text with one of <s>, </s>"):
        tokenize(files, [], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert not (tmp_path / "out").exists()
    info = tokenize(files, [], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", end_of_text="</s>")
    assert (info.vocab_size, info.end_of_text, info.dtype.name) == (70_001, 5, "uint32")
    assert tokens_of(tmp_path / "out", "train") == [70_000, 0, 70_000, 5]
    assert load_data(f"tokens:{tmp_path / 'out'}", seq_len=1).arguments == {"vocab_size": 70_001, "seq_len": 1}


def test_tokens_stay_if_their_replacement_fails(tmp_path, monkeypatch) -> None:
    files, out = written(tmp_path, WORDS, WORDS), tmp_path / "out"
    info = tokenize(files, [], out, vocab_size=280)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert sorted(before) == ["test.bin", "tokenizer.json", "tokens.json", "train.bin"]
    with refused("contains tokens already: give --overwrite to replace them, or another --out"):
        tokenize(files, [], out)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tokenization, "TokenCounts", interrupted)
        for folder in (out, tmp_path / "new"):
            with pytest.raises(KeyboardInterrupt):
                tokenize(files, [], folder, vocab_size=270, overwrite=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert not (tmp_path / "new").exists()
    other = tokenize([], files[:1], out, tokenizer=out / "tokenizer.json", overwrite=True)
    assert other.tokenizer_sha256 == info.tokenizer_sha256
    assert sorted(file.name for file in out.iterdir()) == ["test.bin", "tokenizer.json", "tokens.json"]


def test_errors(tmp_path, monkeypatch) -> None:
    good, empty = written(tmp_path, WORDS, "")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "no-json.json").write_text("words")
    (tmp_path / "no-text.json").write_bytes(b"{\xff}")
    out = tmp_path / "out"
    for arguments, options, words in (
        (([], []), {}, "--train is missing: give text files, or --test and --tokenizer to encode a test text only"),
        (([], [good]), {}, "--train is missing"),
        (([empty], [good]), {}, "the train split has no text: give files with text in them"),
        (([good], [empty]), {}, "the test split has no text"),
        (([empty], []), {}, "the training text has 0 characters, too few to hold some out: give a longer text"),
        (([good], []), {"vocab_size": 256}, "--vocab-size is 256: give 257 or more, for all bytes and <|endoftext|>"),
        (([good], []), {"separator": "a", "start": "b"}, "--document-separator and --document-start are given: leave"),
        (([good], []), {"tokenizer": tmp_path / "bad.json"}, "bad.json is damaged or not a Hugging Face tokenizer ("),
        (([good], []), {"tokenizer": tmp_path / "no.json"}, "no.json does not exist: give the tokenizer.json of a"),
        (
            ([good], []),
            {"tokenizer": tmp_path / "no-json.json"},
            "no-json.json is damaged or not a Hugging Face tokeni",
        ),
        (([good], []), {"tokenizer": tmp_path}, f"{tmp_path} is a folder: give the tokenizer.json of a Hugging Face"),
        (([good], []), {"tokenizer": tmp_path / "no-text.json"}, "no-text.json is not a Hugging Face tokenizer (it is"),
        (([good], []), {"end_of_text": ""}, "--end-of-text is '', which cannot be a token: give a text in UTF-8, such"),
        (([good], []), {"end_of_text": "\udcff"}, r"--end-of-text is '\udcff', which cannot be a token"),
        (
            ([good], []),
            {"vocab_size": 10**20},
            f"--vocab-size is {10**20}, too large for a tokenizer: give 16777216 or",
        ),
        (([tmp_path / "none"], []), {}, "none, which does not exist: give text files"),
    ):
        with refused(words):
            tokenize(*arguments, out, **options)
        assert not out.exists()
    with refused("0.txt, which is a file: give a folder"):
        tokenize([good], [], good)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused("needs a package that is not installed: pip install 'petra[text]'"):
        tokenize([good], [good], out)
