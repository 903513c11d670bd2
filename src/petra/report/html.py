"""HTML and SVG elements. Text is escaped unless it is an element, so that no name of a run can become markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

_INVALID = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # not allowed in XML


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


NOTHING = Html()


def text(value: object) -> Html:
    """Return a value as escaped text; markup stays as it is."""
    return value if isinstance(value, Html) else Html(escape(_INVALID.sub("\ufffd", str(value))))


def join(parts: Sequence[object], separator: str = "") -> Html:
    """Return parts in sequence, each of them escaped."""
    return Html(separator.join(map(text, parts)))


def tag(element: str, /, *children: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        element: The name of the element.
        *children: Its contents: elements, and text to be escaped.
        **attributes: Its attributes. An underscore in a name stands for a hyphen, one at its end for nothing. True
            writes the name as value, None and False leave the attribute out.

    Returns:
        The element, in a form that is valid in HTML and in XML.
    """
    written = [
        f' {key.rstrip("_").replace("_", "-")}="{text(key if value is True else value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    start = f"<{element}{''.join(written)}"
    return Html(f"{start}>{join(children)}</{element}>" if children or element not in _VOID else f"{start}/>")


_VOID = {"meta", "path", "line", "rect", "circle", "br", "link"}


def table(header: Sequence[object], rows: Sequence[Sequence[object]], left: int = 1) -> Html:
    """Return a table that scrolls if it is wider than the page.

    Args:
        header: The title of each column.
        rows: The cells of each row.
        left: The number of columns that are aligned to the left; the others are aligned to the right.

    Returns:
        The element.
    """

    def row(cells: Sequence[object], name: str) -> Html:
        return tag("tr", *(tag(name, c, class_="number" if i >= left else None) for i, c in enumerate(cells)))

    head = tag("thead", row(header, "th"))
    body = tag("tbody", *(row(cells, "td") for cells in rows))
    return tag("div", tag("table", head, body), class_="scroll")


def definitions(rows: Sequence[tuple[object, object]]) -> Html:
    """Return a table of names and values without a header."""
    return tag("div", tag("table", *(tag("tr", tag("th", a), tag("td", b)) for a, b in rows)), class_="scroll names")


def missing(what: object, remedy: object = "") -> Html:
    """Return a note that says what a report lacks, and how to add it."""
    return tag("p", what, *([" ", remedy] if remedy else []), class_="missing")


def code(words: object) -> Html:
    """Return a command as a block that wraps."""
    return tag("pre", tag("code", words))
