"""Spot checks of one layer: what is known of it, where its choices stand, which cells to time next, and when to stop.

Each timing narrows what is believed of all cells of the layer, so that after the last one the belief *is* the refit of
this layer (:mod:`synth.performance.posterior`). The checks end where the expected remaining regret, the mean over
stages and buckets, is below a threshold, or where the seconds are spent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from synth.catalog.schemes import STAGES
from synth.choosing.choose import Choice, choose
from synth.choosing.picks import Pick, Seen
from synth.choosing.plan import Layer
from synth.choosing.rounds import KnownDevice
from synth.flashinfer.tactics import Tactic
from synth.performance.model import PerformanceModel
from synth.performance.posterior import Posterior, Timed, believe, timed_of
from synth.timings.folders import load
from synth.timings.records import DENIED
from synth.timings.rows import Problem

#: A layer is done where its expected remaining regret, as a share, is below this.
THRESHOLD = 0.001


@dataclass(frozen=True)
class Standing:
    """How good the choices of a layer are believed to be.

    Attributes
    ----------
    regret : float
        Expected regret as a share, geometric mean over stages and buckets.
    near : float
        Mean probability that a choice is within 1 % of the best.
    entries : dict of str to int
        Choices by source: measured, verified, predicted.
    """

    regret: float
    near: float
    entries: dict[str, int]


@dataclass(frozen=True)
class Change:
    """A choice that another tactic has replaced.

    `gain` is the old tactic's time over the new one's, less 1, as believed in the end; NaN where the old one failed,
    was denied, or fell so far behind that nothing precise is believed of it.
    """

    stage: int
    bucket: int
    old: Tactic
    new: Tactic
    gain: float


class Known:
    """What files say of one layer: its timings and the denied tactics.

    Parameters
    ----------
    layer : Layer
    model : PerformanceModel
        Of the device, FlashInfer version and quantization in question.
    folders : sequence of Path
        Measurements; those that don't exist are passed over.
    buckets : sequence of int
        Token counts. Timings of others don't count.
    simulated : bool
        Only simulated timings count, or only real ones.
    problems : list
        Gets the rows of measurements that can't be read.

    Attributes
    ----------
    origin : Origin
        What the timings are of.
    times : dict of Pick to (float, int)
        Cells that were timed and never failed: ms, and how many timings are behind it.
    failed : set of Pick
        Cells that failed when they were timed, were it only once.
    """

    def __init__(
        self,
        layer: Layer,
        model: PerformanceModel,
        folders: Sequence[Path],
        buckets: Sequence[int],
        simulated: bool,
        problems: list[Problem],
    ) -> None:
        self.layer, self.model, self.buckets = layer, model, buckets
        self.origin = replace(model.origin_, simulated=simulated)
        self._folders = list(dict.fromkeys(folder.resolve() for folder in folders))
        self.read(problems)

    def read(self, problems: list[Problem]) -> None:
        """Read the files (again)."""
        o = self.origin
        there = [folder for folder in self._folders if folder.is_dir()]
        found = load(there, o.device, o.quant, o.flashinfer, problems=problems) if there else []
        self._timings = next((t for t in found if t.origin == o), None)
        self._denied = frozenset((d.stage, d.tactic) for d in DENIED.load(there, o))
        self.times: dict[Pick, tuple[float, int]] = {}
        self.failed: set[Pick] = set()
        if self._timings is None:
            return
        t = self._timings
        shapes = [i for i, shape in enumerate(t.shapes) if shape == self.layer.shape]
        t = t.select(np.isin(t.shape, shapes) & np.isin(t.tokens, self.buckets))
        bad = t.select(np.isnan(t.ms))
        cells = zip(bad.stage.tolist(), bad.tokens.tolist(), bad.tactic.tolist(), strict=True)
        self.failed = {Pick(0, *cell) for cell in cells}
        for stage, timed in timed_of(t, self.layer.shape).items():
            columns = (timed.tokens, timed.tactic, timed.ms, timed.repeats)
            for tokens, tactic, ms, repeats in zip(*(column.tolist() for column in columns), strict=True):
                self.times[Pick(0, stage, tokens, tactic)] = ms, repeats
        for pick in self.failed:
            self.times.pop(pick, None)

    @property
    def cells(self) -> set[Pick]:
        """The cells that were timed."""
        return self.failed | self.times.keys()

    def choices(self, fused_finalize: Sequence[bool] = (True,)) -> list[Choice]:
        """Choose; see :func:`synth.choosing.choose.choose`."""
        return choose(
            self.model, [self.layer.shape], self.buckets, timings=self._timings, fused_finalize=fused_finalize,
            denied=self._denied,
        )  # fmt: skip

    def belief(self, stage: int, seen: Sequence[Seen] = ()) -> Posterior:
        """Return what is believed of a stage after the timings in the files and those `seen` beside them."""
        cells = self.cells
        new = {s.pick: s.ms for s in seen if s.pick not in cells}
        failed = self.failed | {pick for pick, ms in new.items() if math.isnan(ms)}
        times = {**self.times, **{pick: (ms, 1) for pick, ms in new.items() if pick not in failed}}
        good = sorted((p.tokens, p.tactic, *time) for p, time in times.items() if p.stage == stage)
        timed = None
        if good:
            tokens, tactic, ms, repeats = (np.array(column) for column in zip(*good, strict=True))
            timed = Timed(tokens, tactic, ms, repeats)
        without = {(p.tokens, p.tactic) for p in failed if p.stage == stage}
        denied = [i for i, tactic in self.model.table.items(stage) if (stage, tactic) in self._denied]
        without |= {(bucket, i) for bucket in self.buckets for i in denied}
        return believe(self.model, self.layer.shape, stage, self.buckets, timed, without=without)


class Spots:
    """:class:`KnownDevice` for one layer of which some cells are timed already.

    What is believed depends a little on the order of the timings. So where a run of rounds ends, the belief is made
    anew of all timings together, as :func:`synth.choosing.choose.choose` and a later call will see them, and that one
    decides whether it was enough.

    Parameters
    ----------
    known : Known
    threshold : float
        Expected remaining regret (logarithm) below which nothing more is timed.

    Attributes
    ----------
    exhausted : bool
        Nothing was left to time though there were seconds.
    """

    def __init__(self, known: Known, threshold: float = THRESHOLD) -> None:
        self._known, self._threshold = known, threshold
        self._seen: Sequence[Seen] = ()
        # What the belief has taken in already, and is not to hear of again.
        self._believed = known.cells
        self._inner = self._device([])
        self.exhausted = False

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        """See :class:`synth.choosing.picks.Strategy`."""
        self._seen = seen
        picks = self._inner.next([s for s in seen if s.pick not in self._believed], most, seconds)
        if not picks and most > 0 and seconds > 0:
            self._inner = self._device(seen)
            picks = self._inner.next([], most, seconds)
            # The next call hands over all timings again.
            self._believed |= {s.pick for s in seen}
            self.exhausted = not picks
        return picks

    def finish(self) -> None:
        """Take in the timings that came after the last round was asked for."""
        self._inner = self._device(self._seen)

    def regret(self) -> float:
        """Return the mean expected regret (logarithm)."""
        return float(self._inner.belief(0).expected_regret())

    def standing(self, choices: Sequence[Choice]) -> Standing:
        """Return how good some choices of the layer are."""
        near = np.concatenate([p.outlook().within[:, 0] for p in self._inner.belief(0).stages.values()])
        entries = Counter(c.source for c in choices)
        return Standing(math.expm1(self.regret()), float(near.mean()), dict(sorted(entries.items())))

    def changes(self, first: Sequence[Choice], last: Sequence[Choice]) -> tuple[Change, ...]:
        """Return which choices of the layer are others now."""
        pairs = zip(first, last, strict=True)
        return tuple(
            Change(new.stage, new.bucket, old.tactic, new.tactic, self._gain(old, new))
            for old, new in pairs
            if old.tactic_id != new.tactic_id
        )

    def _gain(self, old: Choice, new: Choice) -> float:
        posterior = self._inner.belief(0).stages[new.stage]
        rows = posterior.rows(np.full(2, new.bucket), np.array([old.tactic_id, new.tactic_id]))
        if (rows < 0).any():
            return math.nan
        behind = float(posterior.mean[rows[0]] - posterior.mean[rows[1]])
        # A failed tactic's mean is beyond every time.
        return math.expm1(behind) if behind < 10 else math.nan

    def _device(self, seen: Sequence[Seen]) -> KnownDevice:
        """Return a strategy that believes what the files and the timings `seen` say together."""
        known = self._known
        models = {known.layer.quant: known.model}
        device = KnownDevice(models, [known.layer], known.buckets, enough=self._threshold)
        for stage in STAGES:
            device.belief(0).stages[stage] = known.belief(stage, seen)
        return device


def outlook(
    layer: Layer, model: PerformanceModel, folders: Sequence[Path], buckets: Sequence[int], *, simulated: bool = False
) -> Standing:
    """Return how a layer stands before any spot check, from the timings in some folders."""
    known = Known(layer, model, folders, buckets, simulated, [])
    return Spots(known).standing(known.choices())
