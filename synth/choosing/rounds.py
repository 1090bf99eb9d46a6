"""What to time next, round by round, from what was timed so far.

Each round is short: a sixth of what was timed before. :class:`KnownDevice` serves a device with a fitted model and
takes the timings that lower the expected time of the choices most for each second of the GPU. :class:`NewDevice`
serves one without: it fits what there is after each round, and times where its trees disagree on the best tactic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synth.catalog.schemes import STAGES
from synth.choosing.picks import Pick, Seen, Strategy
from synth.choosing.plan import Layer, Plan, timing_seconds
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.flashinfer.tactics import load_table
from synth.performance.geometry import Floats, Ints, first_of_each, least_by
from synth.performance.model import Cells, PerformanceModel
from synth.performance.posterior import Posterior, Timed, believe, timed_of
from synth.timings.origin import Origin
from synth.timings.table import Timings

#: A round takes this share of the timings before it …
_GROWTH = 0.15
#: … and at least this many.
_LEAST = 4
#: On a new device: the first round, and the least of the later ones.
_FIRST = 60
_LEAST_NEW = 20
#: Layers that aren't settled for their own sake get at most this many timings, in rounds of at least so many.
_LATER = 160
_LEAST_LATER = 50
#: On a new device, tactics within this factor of the best analytic time come into question.
_PLAUSIBLE = 2.0
#: The timings of a layer end where the mean expected regret of its choices is below this (logarithm).
ENOUGH = 0.0002
#: In a batch every pick is thought through; this many are the most.
_MOST = 64


class KnownDevice:
    """Rounds for layers of a device that has a model: one layer after the other, each with an equal share.

    Parameters
    ----------
    models : mapping of str to PerformanceModel
        By quantization; layers of others are passed over.
    layers : sequence of Layer
    buckets : sequence of int
        Token counts.
    timings : mapping of str to Timings, optional
        By quantization: what was timed before, of these layers or others.
    enough : float
        A layer is done where the mean over its buckets of the expected regret (logarithm) is below this.
    at_once : int
        Layers that are timed at the same time.
    """

    def __init__(
        self,
        models: Mapping[str, PerformanceModel],
        layers: Sequence[Layer],
        buckets: Sequence[int],
        *,
        timings: Mapping[str, Timings] | None = None,
        enough: float = ENOUGH,
        at_once: int = 1,
    ) -> None:
        self._models, self._layers, self._buckets = models, layers, tuple(sorted(set(buckets)))
        self._timings, self._enough, self._at_once = timings or {}, enough, at_once
        self._open = [i for i, layer in enumerate(layers) if layer.quant in models]
        self._beliefs: dict[int, _LayerBelief] = {}
        # Timings and seconds that each layer begun may still have.
        self._left: dict[int, tuple[int, float]] = {}
        self._taken = 0

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        """See :class:`synth.choosing.picks.Strategy`."""
        new = seen[self._taken :]
        self._taken = len(seen)
        for layer in sorted({s.pick.layer for s in new}):
            if self._layers[layer].quant in self._models:
                self.belief(layer).observe([s for s in new if s.pick.layer == layer])
        picks: list[Pick] = []
        while self._open and not picks and most > 0 and seconds > 0:
            begin = [i for i in self._open if i not in self._left or min(self._left[i]) > 0]
            if not begin:
                # All have had their share: what others left over is shared again.
                self._left.clear()
                begin = list(self._open)
            for layer in begin[: self._at_once]:
                if layer not in self._left:
                    self._left[layer] = self._share(most - len(picks), seconds)
                count, budget = self._left[layer]
                count = min(count, most - len(picks))
                if count <= 0:
                    continue
                belief = self.belief(layer)
                some, cost = ([], 0.0) if belief.done(self._enough) else belief.batch(count, budget)
                self._left[layer] = (self._left[layer][0] - len(some), budget - cost)
                if not some:
                    self._open.remove(layer)
                picks += some
        return picks

    def _share(self, most: int, seconds: float) -> tuple[int, float]:
        """Return what a layer that begins may have: an equal part of what those begun don't hold."""
        begun = [self._left[i] for i in self._open if i in self._left]
        others = len(self._open) - len(begun)
        count = most - sum(n for n, _ in begun)
        if math.isinf(seconds):
            return math.ceil(count / others), seconds
        return math.ceil(count / others), (seconds - sum(s for _, s in begun)) / others

    def belief(self, layer: int) -> _LayerBelief:
        """Return what is believed of one layer."""
        if layer not in self._beliefs:
            one = self._layers[layer]
            known = timed_of(self._timings[one.quant], one.shape) if one.quant in self._timings else {}
            self._beliefs[layer] = _LayerBelief(layer, self._models[one.quant], one, self._buckets, known)
        return self._beliefs[layer]


class _LayerBelief:
    """The posteriors of a layer's two stages."""

    def __init__(
        self,
        index: int,
        model: PerformanceModel,
        layer: Layer,
        buckets: Sequence[int],
        known: Mapping[int, Timed],
    ) -> None:
        self._index = index
        self.stages: dict[int, Posterior] = {
            stage: believe(model, layer.shape, stage, buckets, known.get(stage)) for stage in STAGES
        }
        self._timed = 0

    def observe(self, new: Sequence[Seen]) -> None:
        self._timed += len(new)
        for stage, posterior in self.stages.items():
            mine = [s for s in new if s.pick.stage == stage]
            tokens, tactic = (np.array([s.pick[i] for s in mine], dtype=np.int64) for i in (2, 3))
            ms = np.array([s.ms for s in mine])
            failed = np.isnan(ms)
            for row in posterior.rows(tokens[failed], tactic[failed]).tolist():
                if row >= 0:
                    posterior.rule_out(row)
            good = ~failed
            if good.any():
                ones = np.ones(int(good.sum()), dtype=np.int64)
                posterior.condition(Timed(tokens[good], tactic[good], ms[good], ones))

    def expected_regret(self) -> float:
        """Return the mean over stages and buckets of the expected regret of the choice (logarithm)."""
        return float(np.mean(np.concatenate([p.outlook().regret for p in self.stages.values()])))

    def done(self, enough: float) -> bool:
        if not any(len(p.open()) for p in self.stages.values()):
            return True
        return self.expected_regret() < enough

    def batch(self, most: int, seconds: float) -> tuple[list[Pick], float]:
        """Return the picks of one round and their seconds, each chosen as if those before had given the expected."""
        size = min(most, max(_LEAST, round(_GROWTH * self._timed)), _MOST)
        offers = {stage: _Offers(posterior.copy()) for stage, posterior in self.stages.items()}
        picks: list[Pick] = []
        spent = 0.0
        while len(picks) < size and spent < seconds:
            stage = max(offers, key=lambda s: offers[s].rate)
            if offers[stage].rate <= 0.0:
                break
            tokens, tactic, cost = offers[stage].take()
            picks.append(Pick(self._index, stage, tokens, tactic))
            spent += cost
        return picks, spent


class _Offers:
    """The cells of one stage that may be timed next, and the best of them."""

    def __init__(self, posterior: Posterior) -> None:
        self._posterior = posterior
        self._look()

    def _look(self) -> None:
        p = self._posterior
        rows = p.open()
        #: What the best offer lowers the sum of log times by, for each second.
        self.rate = 0.0
        if not len(rows):
            return
        rates = p.worth(rows) / timing_seconds(np.exp(p.mean[rows]))
        best = int(np.argmax(rates))
        self._row, self.rate = int(rows[best]), float(rates[best])

    def take(self) -> tuple[int, int, float]:
        """Return tokens, tactic and seconds of the best offer, and look for the next one."""
        p, row = self._posterior, self._row
        tokens = int(p.tokens[row])
        p.assume(row)
        self._look()
        return tokens, int(p.tactic[row]), float(timing_seconds(math.exp(p.mean[row])))


class Together:
    """Several strategies for the same layers, each of which looks after some; one after the other."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._strategies = strategies

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        """See :class:`synth.choosing.picks.Strategy`."""
        for n, strategy in enumerate(self._strategies):
            share = len(self._strategies) - n
            if picks := strategy.next(seen, math.ceil(most / share), seconds / share):
                return picks
        return []


class NewDevice:
    """Rounds for layers of a device that has no model: what was timed of all layers is fitted after each round.

    The first round spreads over layers, stages and buckets. Each later one takes, in each (layer, stage, bucket), the
    tactic that its trees expect to improve most on the one that is best on average, and keeps the most promising.

    Parameters
    ----------
    starts : mapping of str to PerformanceModel
        By quantization: what is believed of the device without timings, see :meth:`PerformanceModel.analytic`. Layers
        of other quantizations are passed over.
    layers : sequence of Layer
    buckets : sequence of int
        Token counts.
    turns : sequence of collections of int
        Groups of layers that are timed one after the other. The first is settled, in at most half of the time. Each
        later one is there for what it teaches of other layers: it gets an equal part of the rest and at most
        ``_LATER`` timings, in few rounds. What a group doesn't need is left to the next. All at once if not given.
    seed : int
        Seed of the first round and of the trees.
    """

    def __init__(
        self,
        starts: Mapping[str, PerformanceModel],
        layers: Sequence[Layer],
        buckets: Sequence[int],
        *,
        turns: Sequence[Collection[int]] = (),
        seed: int = 0,
    ) -> None:
        counts = tuple(sorted(set(buckets)))
        self._samples = [
            _Sample(start, [i for i, layer in enumerate(layers) if layer.quant == quant], layers, counts, turns, seed)
            for quant, start in starts.items()
            if any(layer.quant == quant for layer in layers)
        ]
        self._open = list(range(len(self._samples)))

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        """See :class:`synth.choosing.picks.Strategy`."""
        picks: list[Pick] = []
        while self._open and not picks and most > 0 and seconds > 0:
            every = sum(len(self._samples[i]) for i in self._open)
            for i in list(self._open):
                share = len(self._samples[i]) / every
                some = self._samples[i].next(seen, math.ceil(most * share), seconds * share)
                if not some:
                    # What one quantization doesn't need is left to the others.
                    self._open.remove(i)
                picks += some
        return picks

    def chosen(self, seen: Sequence[Seen]) -> list[Pick]:
        """Return the tactic that looks best in each (layer, stage, bucket) after the timings `seen`."""
        return [pick for sample in self._samples for pick in sample.chosen(seen)]


class _Sample:
    """The cells of one quantization, and the model of those timed."""

    def __init__(
        self,
        start: PerformanceModel,
        members: Sequence[int],
        layers: Sequence[Layer],
        counts: Sequence[int],
        turns: Sequence[Collection[int]],
        seed: int,
    ) -> None:
        self._start, self._seed, self._table = start, seed, start.table
        self._members = np.array(members, dtype=np.int64)
        smem = smem_block_bytes(start.origin_.device, self._table.arch)
        runnable = {
            (i, stage): runnable_ids(self._table, stage, layers[m].shape, smem, layers[m].activation)
            for i, m in enumerate(members)
            for stage in STAGES
        }
        grid = [
            (i, stage, tokens, tactic)
            for i in range(len(members))
            for stage in STAGES
            for tokens in counts
            for tactic in runnable[i, stage]
        ]
        shape, stage, tokens, tactic = np.array(grid, dtype=np.int64).T
        self._cells = Cells([layers[i].shape for i in members], shape, stage, tokens, tactic)
        # The grid is sorted by place: (layer, stage, bucket).
        change = (np.diff(shape) != 0) | (np.diff(stage) != 0) | (np.diff(tokens) != 0)
        self._place = np.concatenate([[0], np.cumsum(change)]).astype(np.int64)
        self._places = int(self._place[-1]) + 1
        self._row = {Pick(members[i], *rest): row for row, (i, *rest) in enumerate(grid)}
        # What is settled in turn: places, and the share of the whole budget at which their turn ends.
        member = shape[np.searchsorted(self._place, np.arange(self._places))]
        groups = [np.isin(self._members, list(turn))[member] for turn in turns]
        groups = [group for group in groups if group.any()] or [np.ones(self._places, dtype=bool)]
        after = 0.5 / max(len(groups) - 1, 1)
        self._turns = [(group, 1.0 - (len(groups) - 1 - n) * after) for n, group in enumerate(groups)]
        self._budget: tuple[int, float] | None = None
        self._later = False
        self._fitted: tuple[tuple[int, bytes], _Look] | None = None

    def __len__(self) -> int:
        return len(self._cells)

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        mine = [s for s in seen if s.pick in self._row]
        self._budget = self._budget or (most, seconds)
        while self._turns and most > 0 and seconds > 0:
            places, end = self._turns[0]
            # Of what is without a limit, any share is left.
            count = most - math.floor((1.0 - end) * self._budget[0])
            time = seconds if math.isinf(seconds) else seconds - (1.0 - end) * self._budget[1]
            if self._later:
                begun = sum(bool(places[self._place[self._row[s.pick]]]) for s in mine)
                count = min(count, _LATER - begun)
            if count > 0 and time > 0 and (picks := self._round(mine, places, count, time)):
                return picks
            self._turns.pop(0)
            self._later = True
        return []

    def _round(self, mine: Sequence[Seen], places: NDArray[np.bool_], most: int, seconds: float) -> list[Pick]:
        """Return the picks of one round among some places."""
        timed = np.array([self._row[s.pick] for s in mine], dtype=np.int64)
        begun = int(places[self._place[timed]].sum())
        at_first = min(_FIRST, int(places.sum()))
        if begun < at_first or all(math.isnan(s.ms) for s in mine):
            return self._spread(timed, places, min(most, at_first), seconds)
        look = self._look(mine, places)
        gain = look.gain.copy()
        gain[np.isin(look.rows, timed)] = 0.0
        # At most one a place: the next round knows more.
        best = first_of_each(self._place[look.rows], -gain)
        best = best[gain[best] > ENOUGH]
        ranked = best[np.argsort(-gain[best], kind="stable")]
        if not len(ranked) and begun < _FIRST:
            # So few that all trees say the same.
            return self._spread(timed, places, min(most, _LEAST_NEW), seconds)
        size = min(most, max(_LEAST_LATER if self._later else _LEAST_NEW, round(_GROWTH * begun)))
        cost = np.cumsum(timing_seconds(np.exp(look.mean[ranked])))
        return [self._pick(int(row)) for row in look.rows[ranked[: min(size, int((cost <= seconds).sum()) + 1)]]]

    def chosen(self, seen: Sequence[Seen]) -> list[Pick]:
        look = self._look([s for s in seen if s.pick in self._row], np.ones(self._places, dtype=bool))
        return [self._pick(int(look.rows[i])) for i in look.best]

    def _pick(self, row: int) -> Pick:
        c = self._cells
        return Pick(int(self._members[c.shape[row]]), int(c.stage[row]), int(c.tokens[row]), int(c.tactic[row]))

    def _plausible(self, analytic: Floats) -> NDArray[np.bool_]:
        return analytic <= _PLAUSIBLE * least_by(self._place, analytic, self._places)[self._place]

    def _spread(self, timed: Ints, places: NDArray[np.bool_], size: int, seconds: float) -> list[Pick]:
        """Spread over some places at random, those timed least first, each with a plausible tactic."""
        rng = np.random.default_rng([self._seed, len(timed)])
        analytic = self._start.predict_analytic(self._cells)
        open_ = self._plausible(analytic)
        open_[timed] = False
        before = np.bincount(self._place[timed], minlength=self._places)
        picks: list[Pick] = []
        order = np.lexsort((rng.random(self._places), before))
        for place in order[places[order]][:size].tolist():
            rows = np.flatnonzero(open_ & (self._place == place))
            if not len(rows) or seconds <= 0:
                continue
            row = int(rng.choice(rows))
            picks.append(self._pick(row))
            seconds -= timing_seconds(float(analytic[row]))
        return picks

    def _look(self, mine: Sequence[Seen], places: NDArray[np.bool_]) -> _Look:
        """Fit the timings and return what the trees say of the plausible cells in some places."""
        key = len(mine), places.tobytes()
        if self._fitted is not None and self._fitted[0] == key:
            return self._fitted[1]
        rows = np.array([self._row[s.pick] for s in mine], dtype=np.int64)
        ms = np.array([s.ms for s in mine])
        good = ~np.isnan(ms)
        model = PerformanceModel.of_sample(
            self._start, self._cells.select(rows[good]), ms[good], seed=self._seed + len(mine)
        )
        may = self._plausible(model.predict_analytic(self._cells))
        may[rows[good]] = True
        may[rows[~good]] = False
        found = np.flatnonzero(may & places[self._place])
        draws = model.draws(self._cells.select(found))
        mean = draws.mean(axis=0)
        place = self._place[found]
        best = first_of_each(place, mean)
        at = np.full(self._places, -1)
        at[place[best]] = best
        gain = np.maximum(draws[:, at[place]] - draws, 0.0).mean(axis=0)
        rivals = gain.copy()
        rivals[best] = 0.0
        # The best itself is worth as much as its strongest rival: timing either tells them apart.
        gain[best] = -least_by(place, -rivals, self._places)[place[best]]
        look = _Look(found, mean, best, gain)
        self._fitted = (key, look)
        return look


@dataclass(frozen=True)
class _Look:
    """What the trees say.

    Attributes
    ----------
    rows : ndarray of int64, shape (n,)
        Plausible cells.
    mean : ndarray of float64, shape (n,)
        Mean log ms over the trees.
    best : ndarray of int64, shape (places,)
        Index into `rows` of the least mean of each place.
    gain : ndarray of float64, shape (n,)
        Expected improvement on the best of its place.
    """

    rows: Ints
    mean: Floats
    best: Ints
    gain: Floats


def decide_by_rounds(
    plan: Plan,
    models: Mapping[str, PerformanceModel],
    timings: Sequence[Timings] = (),
    *,
    starts: Mapping[str, PerformanceModel] | None = None,
    turns: Sequence[Collection[int]] = (),
    at_once: int = 1,
) -> Strategy:
    """Return the strategy for a plan: by the models where there are some, from nothing elsewhere.

    Parameters
    ----------
    models : mapping of str to PerformanceModel
        By quantization.
    timings : sequence of Timings
        What was timed before on this device.
    starts : mapping of str to PerformanceModel, optional
        By quantization: what is believed where there is no model; the analytic model with its default constants if
        not given.
    turns : sequence of collections of int
        See :class:`NewDevice`.
    at_once : int
        GPUs that share the work.
    """
    buckets = sorted({batch.tokens for batch in plan.batches})
    quants = dict.fromkeys(layer.quant for layer in plan.layers)
    known = [q for q in quants if q in models]
    strategies: list[Strategy] = []
    if known:
        before = {t.origin.quant: t for t in timings if t.origin.quant in known}
        strategies.append(KnownDevice(models, plan.layers, buckets, timings=before, at_once=at_once))
    if len(known) < len(quants):
        begin = {q: (starts or {}).get(q) or _default(plan, q) for q in quants if q not in known}
        strategies.append(NewDevice(begin, plan.layers, buckets, turns=turns, seed=plan.seed))
    return strategies[0] if len(strategies) == 1 else Together(strategies)


def _default(plan: Plan, quant: str) -> PerformanceModel:
    origin = Origin.make(plan.device, plan.arch, quant, plan.flashinfer)
    return PerformanceModel.analytic(origin, load_table(plan.arch, quant, plan.flashinfer))
