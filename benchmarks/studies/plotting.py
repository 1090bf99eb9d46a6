"""Plots of what the studies found, as SVG and PNG. Needs matplotlib, which is imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from synth.errors import MissingDependencyError, SynthError
from synth.performance.calibration import Reliability

if TYPE_CHECKING:
    from studies.replaying import Point

#: Regrets below this can't be told from none; a logarithmic axis has no zero.
_FLOOR = 1e-5
#: Where nothing was timed, on a logarithmic axis of shares.
_LEFT = 0.0025
_COLORS = {"active": "#0b6e4f", "stratified": "#c46a1b", "random": "#6b6b6b"}
_FORMATS = ("svg", "png")


def learning_curves(curves: Mapping[str, Sequence[Point]], path: Path, *, seconds: bool = False) -> list[Path]:
    """Draw regret against the share of the sweep that was timed, a panel for each title.

    Parameters
    ----------
    curves : mapping of str to sequence of Point
        By title.
    path : Path
        Without suffix.
    seconds : bool
        Count the share in GPU seconds rather than in timings.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    MissingDependencyError
        Without matplotlib.
    SynthError
        When a file can't be written.
    """
    figure, axes = _panels(len(curves))
    for axis, (title, points) in zip(axes, curves.items(), strict=True):
        for way in dict.fromkeys(p.way for p in points):
            x, low, mean, high = np.array(_band([p for p in points if p.way == way], seconds)).T
            axis.plot(x, mean, "o-", color=_COLORS[way], label=way, markersize=4)
            axis.fill_between(x, low, high, color=_COLORS[way], alpha=0.2, linewidth=0)
        axis.set(xscale="log", yscale="log", title=title, ylabel="regret - 1 (geometric mean)")
        axis.set_xlabel(f"share of the sweep's {'GPU seconds' if seconds else 'timings'} (leftmost: none)")
        axis.grid(alpha=0.3, which="both", linewidth=0.4)
        axis.legend(frameon=False)
    return _write(figure, path)


def _band(points: Sequence[Point], seconds: bool) -> list[tuple[float, float, float, float]]:
    """Return share, least, mean and greatest regret over seeds, by the share that was to be timed."""
    rows = []
    for mark in sorted({p.mark for p in points}):
        mine = [p for p in points if p.mark == mark]
        share = float(np.mean([p.seconds / p.sweep_seconds if seconds else p.timings / p.sweep for p in mine]))
        lost = [max(p.evaluation.all.geomean - 1.0, _FLOOR) for p in mine]
        rows.append((max(share, _LEFT), min(lost), float(np.mean(lost)), max(lost)))
    return rows


def reliability(curves: Mapping[str, Mapping[str, Reliability]], path: Path) -> list[Path]:
    """Draw how often what was stated happened, a panel for each title and a line for each name.

    Parameters
    ----------
    curves : mapping of str to mapping of str to Reliability
        By title and name.
    path : Path
        Without suffix.

    Returns, raises
    ---------------
    As :func:`learning_curves`.
    """
    figure, axes = _panels(len(curves))
    for axis, (title, lines) in zip(axes, curves.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.7, linestyle=":")
        for name, one in lines.items():
            axis.plot(one.stated, one.happened, "-", linewidth=1, label=f"{name} (error {one.error:.3f})")
            axis.scatter(one.stated, one.happened, s=4 + np.sqrt(one.count))
        axis.set(title=title, xlabel="stated probability", ylabel="share that happened", xlim=(0, 1), ylim=(0, 1))
        axis.grid(alpha=0.3, linewidth=0.4)
        axis.legend(frameon=False, loc="upper left")
    return _write(figure, path)


def check() -> None:
    """Raise a MissingDependencyError where matplotlib is missing: better before the work than after it."""
    _figure_type()


def _figure_type() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "plots need matplotlib, which is not installed; run `pip install 'flashinfer-synth[studies]'`"
        ) from None
    return Figure


def _panels(count: int) -> tuple[Any, Any]:
    figure = _figure_type()(figsize=(5.2 * count, 4.4), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _write(figure: Any, path: Path) -> list[Path]:
    files = [path.with_name(f"{path.name}.{kind}") for kind in _FORMATS]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            # Without a date the same plot is the same file.
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as e:
        raise SynthError(f"{path.parent}: {e.strerror or e}; name a folder to write plots to with --plots") from None
    return files
