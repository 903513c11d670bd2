"""Tables and messages for people."""

import pytest

from petra.formatting import memory_size, parse_bytes, render, suggestion, unknown

HEADER = ["name", "what it is", "size"]
ROWS = [["a", "one two three four", "1"], ["bb", "five", "22"]]


def test_a_table_that_fits_is_not_wrapped():
    expected = """\
name  what it is          size
----  ------------------  ----
a     one two three four     1
bb    five                  22"""
    assert render(HEADER, ROWS, left=2) == render(HEADER, ROWS, left=2, width=30, spaced=True) == expected


def test_long_cells_are_wrapped_at_words():
    expected = """\
name  what it is  size
----  ----------  ----
a     one two        1
      three four

bb    five          22"""
    assert render(HEADER, ROWS, left=2, width=22, spaced=True) == expected
    assert render(HEADER, ROWS, left=2, width=22) == expected.replace("\n\n", "\n")


def test_a_table_is_never_narrower_than_its_words():
    lines = render(HEADER, ROWS, left=2, width=1).splitlines()
    assert "three" in " ".join(lines)
    assert max(map(len, lines)) == len("name  three  size")


def test_the_closest_of_many_names():
    names = [f"net{i}" for i in range(50)]
    assert suggestion("net51", names).startswith("did you mean 'net")
    assert suggestion("xyz", names).startswith("the closest of 50 are net")
    assert suggestion("xyz", names).count(",") == 2
    assert suggestion("xyz", ["a", "b"]) == "choose from a, b"
    assert str(unknown("model", "xyz", names, "petra models")).endswith(" (`petra models` lists all)")
    assert "lists all" not in str(unknown("model", "xyz", names[:3], "petra models"))


@pytest.mark.parametrize("rows", [[], [["a", "", ""]]])
def test_tables_with_few_rows(rows):
    lines = render(HEADER, rows, width=10).splitlines()
    assert lines[:3] == ["      what", "        it", "name    is  size"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 * 2**30), ("8 gib", 8 * 2**30), ("1.5 MB", 1500000), ("800k", None), ("512 KiB", 2**19), ("77", 77)],
)
def test_amounts_of_memory(text, expected):
    if expected is None:
        with pytest.raises(ValueError, match="is not an amount of memory: give one like 8GiB, 800MB or 8589934592"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == parse_bytes(expected) == expected


@pytest.mark.parametrize("text", ["0", "-1 GiB", "0 GiB", "inf", "nan", "1e99GiB", "", "GiB", "8 8GiB", -3])
def test_amounts_of_memory_that_make_no_sense(text):
    with pytest.raises(ValueError, match="amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(("size", "text"), [(512, "0.5 KiB"), (2**20, "1.00 MiB"), (3 * 2**29, "1.50 GiB")])
def test_sizes_of_memory(size, text):
    assert memory_size(size) == text
