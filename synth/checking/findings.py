"""What a check finds: the texts of ``findings.toml``, filled in, and how findings are grouped."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from synth.catalog.data import read_toml
from synth.catalog.untrusted import printable

#: Severities, worst first: the entry or file is not served; it is, at a cost; worth knowing.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Something that FlashInfer will trip over.

    Attributes
    ----------
    code : str
        What kind it is, the same for every entry.
    key : str
        The entry's key, as it stands in the file; ``""`` for the whole file.
    message, way_out : str
        Printable: a file's texts are escaped.
    severity : str
        One of :data:`SEVERITIES`.
    """

    code: str
    key: str
    message: str
    way_out: str
    severity: str = "error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "way_out", printable(self.way_out))


@functools.cache
def _texts() -> Mapping[str, Mapping[str, str]]:
    return read_toml("synth.checking", "findings.toml")


def finding(name: str, key: str = "", /, *, severity: str | None = None, **facts: object) -> Finding:
    """Return the finding that ``findings.toml`` has under `name`, with the `facts` in its texts.

    Parameters
    ----------
    severity : str, optional
        Another one than the usual.
    """
    texts = _texts()[name]
    code = name.partition("/")[0]
    message, way_out = (texts[part].format_map(facts) for part in ("says", "way_out"))
    return Finding(code, key, message, way_out, severity or texts["severity"])


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one code: how many, and the first as an example."""

    code: str
    severity: str
    count: int
    example: Finding


def summary(findings: Iterable[Finding]) -> tuple[FindingGroup, ...]:
    """Group findings by code, worst and most frequent first."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for one in findings:
        groups[one.severity, one.code].append(one)
    ordered = sorted(groups.items(), key=lambda g: (SEVERITIES.index(g[0][0]), -len(g[1]), g[0][1]))
    return tuple(FindingGroup(code, severity, len(found), found[0]) for (severity, code), found in ordered)
