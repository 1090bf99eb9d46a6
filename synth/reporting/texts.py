"""Texts of the page: those of strangers made harmless, and numbers as they are read."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping

#: Longest text of a stranger that is shown whole.
_LONGEST = 120
#: Unicode categories that show nothing or change how other text shows: controls, marks of direction, surrogates,
#: private use, line and paragraph separators.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
#: What makes a spreadsheet take a cell for a formula, in ASCII and in full width.
_FORMULA = frozenset("=+-@＝＋－＠")
#: Between a number and its unit: no line ends there.
NBSP = "\u00a0"


def foreign(text: object, longest: int = _LONGEST) -> str:
    """Return text of a stranger as it may be shown: one line of visible characters, not too long, and no formula.

    Escaping is the templates'. Here goes what escaping leaves: marks that turn the direction of what follows,
    characters that HTML can't hold, and a first character that a spreadsheet into which a table is pasted takes for a
    formula's; such a text gets an apostrophe before it.
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


def times(ratio: float | None) -> str:
    """Return a ratio, as ``4.67×``; a dash for None and for no number."""
    return f"{ratio:.2f}×" if ratio is not None and math.isfinite(ratio) else "–"


def milliseconds(ms: float | None) -> str:
    """Return a time of four digits without its unit, which is ms; a dash for None."""
    return f"{ms:.4g}" if ms is not None and math.isfinite(ms) else "–"


def regret(ratio: float) -> str:
    """Return a regret, as ``1.0084``."""
    return f"{ratio:.4f}" if math.isfinite(ratio) else "–"


def summary(found: Mapping[str, float]) -> list[str]:
    """Return a row's part on regrets: choices, geometric mean, quantiles, maximum."""
    return [count(int(found["count"])), *(regret(found[name]) for name in ("geomean", "p95", "p99", "max"))]


def loud(kind: str) -> str:
    """Return a kind or source as it is written: what nobody has measured isn't said in passing."""
    return kind.upper() if kind == "analytical" else kind


def span(values: tuple[float, ...], unit: str) -> str:
    """Return the least and the most of something with its unit; a dash for nothing."""
    return f"{' to '.join(f'{v:g}' for v in values)}{NBSP}{unit}" if values else "–"


def letters(number: int) -> str:
    """Return A to Z, then AA to AZ and so on, from 0."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("A") + digit) + text
    return text
