"""Tables and messages for people."""

import pytest

from petra.formatting import render, suggestion, unknown

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
