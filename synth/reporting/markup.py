"""HTML as values: whatever isn't :class:`Markup` is escaped, so that no text of a file becomes an element."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterable, Sequence

#: Longest text of a stranger that is shown whole.
_LONGEST = 120
#: Unicode categories that show nothing or change how other text shows: controls, marks of direction, surrogates,
#: private use, line and paragraph separators.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
#: What makes a spreadsheet take a cell for a formula, in ASCII and in full width.
_FORMULA = frozenset("=+-@＝＋－＠")
_VOID = frozenset(("meta", "br"))
#: Between a number and its unit: no line ends there.
NBSP = "\u00a0"

Child = object
Attribute = object


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def el(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element.

    Parameters
    ----------
    tag : str
    *children : object
        :class:`Markup` stays; an iterable that isn't text is taken apart; None is nothing; anything else is escaped.
    **attributes : object
        By name, ``_`` for ``-`` and a last ``_`` dropped, as in ``class_``. None leaves one out.
    """
    head = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{head}>")
    return Markup(f"<{tag}{head}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Return children one after the other, see :func:`el`."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(str(child))
        elif isinstance(child, str) or not isinstance(child, Iterable):
            parts.append(html.escape(str(child)))
        else:
            parts.append(str(join(child)))
    return Markup("".join(parts))


def foreign(text: object, longest: int = _LONGEST) -> str:
    """Return text of a stranger as it may be shown: one line of visible characters, not too long, and no formula.

    Escaping is :func:`el`'s. Here goes what escaping leaves: marks that turn the direction of what follows, characters
    that HTML can't hold, and a first character that a spreadsheet into which a table is pasted takes for a formula's;
    such a text gets an apostrophe before it.
    """
    whole = str(text)
    seen = "".join(" " if c in "\t\n\r" else "\ufffd" if unicodedata.category(c) in _UNSEEN else c for c in whole)
    line = " ".join(seen.split())
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return f"'{line}" if line[:1] in _FORMULA else line


def count(value: int) -> str:
    """Return a number of things, thousands apart."""
    return f"{value:,}"


def counted(value: int, one: str, many: str | None = None) -> str:
    """Return a number of things with its noun."""
    return f"{value:,}{NBSP}{one if value == 1 else many or one + 's'}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent; a dash for None and for no number."""
    if share is None or not math.isfinite(share):
        return "–"
    # Adding zero makes a rounded minus zero plain.
    return f"{round(100 * share, digits) + 0.0:.{digits}f}{NBSP}%"


def times(ratio: float | None, digits: int = 2) -> str:
    """Return a ratio, as ``4.67×``; a dash for None and for no number."""
    if ratio is None or not math.isfinite(ratio):
        return "–"
    return f"{ratio:.{digits}f}×"


def milliseconds(ms: float | None) -> str:
    """Return a time of four digits without its unit, which is ms; a dash for None."""
    return "–" if ms is None or not math.isfinite(ms) else f"{ms:.4g}"


def regret(ratio: float) -> str:
    """Return a regret, as ``1.0084``."""
    return f"{ratio:.4f}" if math.isfinite(ratio) else "–"


def prose(text: str) -> Markup:
    """Return text in which what stands between backticks is code."""
    return join(el("code", part) if i % 2 else part for i, part in enumerate(text.split("`")))


def p(*parts: Child, class_: str | None = None) -> Markup:
    """Return a paragraph; its texts are :func:`prose`."""
    return el("p", [part if isinstance(part, Markup) else prose(str(part)) for part in parts], class_=class_)


def whole(text: str) -> Markup:
    """Return text that no line's end divides."""
    return el("span", text, class_="w")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Child]], *, caption: str, texts: Iterable[int] = (0,)
) -> Markup:
    """Return a table in a box of its own that scrolls sideways where it is wider than the page.

    Parameters
    ----------
    columns : sequence of str
    rows : iterable of sequence of object
    caption : str
        What the numbers are, and from how many entries, as :func:`prose`.
    texts : iterable of int
        Columns that are left-aligned; the others hold numbers.
    """
    left = set(texts)
    kinds = [None if i in left else "n" for i in range(len(columns))]
    head = el("tr", [el("th", name, scope="col", class_=kind) for name, kind in zip(columns, kinds, strict=True)])
    body = [el("tr", [el("td", v, class_=kind) for v, kind in zip(row, kinds, strict=True)]) for row in rows]
    return boxed(el("table", el("thead", head), el("tbody", body)), caption)


def boxed(inner: Markup, caption: str) -> Markup:
    """Return a box that scrolls sideways under its caption; the keyboard reaches it, and it has a name."""
    box = el("div", inner, class_="wide", tabindex="0", role="region", aria_label=caption.replace("`", ""))
    return el("figure", el("figcaption", prose(caption)), box, class_="table")


def pairs(items: Iterable[tuple[str, Child]], class_: str = "facts") -> Markup:
    """Return names and values as a list of descriptions."""
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in items], class_=class_)
