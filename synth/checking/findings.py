"""What :mod:`synth.checking.check` finds, and how findings are grouped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from synth.catalog.untrusted import printable

#: Severities, worst first: the entry or file is not served; it is, at a cost; worth knowing.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Something that FlashInfer will trip over.

    Attributes
    ----------
    code : str
        Stable name of the kind of finding.
    key : str
        The entry's key as it is in the file, ``""`` for the file as a whole.
    message : str
        What is wrong, one line. It may quote the file: what isn't printable in it is escaped.
    way_out : str
        What to do about it, one line.
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


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one code: how many, and the first as an example."""

    code: str
    severity: str
    count: int
    example: Finding


def summary(findings: Iterable[Finding]) -> tuple[FindingGroup, ...]:
    """Group findings by code, worst and most frequent first.

    Examples
    --------
    >>> [(g.code, g.count) for g in summary([Finding("bucket", "k", "m", "w")] * 3)]
    [('bucket', 3)]
    """
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.severity, finding.code].append(finding)
    ordered = sorted(groups.items(), key=lambda g: (SEVERITIES.index(g[0][0]), -len(g[1]), g[0][1]))
    return tuple(FindingGroup(code, severity, len(found), found[0]) for (severity, code), found in ordered)
