"""Spot checks on the GPU: time the cells that the choices of a layer are least sure of, and check their numbers.

One layer is served at a time. Each timing narrows what is believed of all its cells, so that after the last one the
belief *is* the refit of this layer (:mod:`synth.performance.posterior`). The checks end by one rule: where the expected
remaining regret, the mean over stages and buckets, is below a threshold, or where the seconds are spent. Then every
chosen pair is compared with the fallback (:mod:`synth.collecting.numbers`); a tactic whose numbers are wrong is denied
(:mod:`synth.timings.denied`), and the layer is chosen, timed and compared again without it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.choosing.choose import Choice, choose
from synth.choosing.picks import Pick, Seen
from synth.choosing.plan import DEFAULT_MAX_TOKENS, Layer, make_plan
from synth.choosing.rounds import KnownDevice
from synth.collecting.numbers import (
    FALLBACK,
    TOLERANCE,
    CannotCompare,
    ComparatorSpec,
    Compared,
    Comparison,
    Pair,
    Patience,
    guilty,
)
from synth.collecting.reporters import CollectSummary, Reporter
from synth.collecting.results import journal_to_measurements
from synth.collecting.runner import GPU_RUNNER, RunnerSpec
from synth.collecting.running import collect
from synth.collecting.slots import Limits
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, TacticTable
from synth.performance.model import PerformanceModel, predictor
from synth.performance.posterior import Posterior, Timed, believe
from synth.timings.agreed import AGREED, Agreement
from synth.timings.denied import DENIED, Denial
from synth.timings.measurements import Origin, Problem, Timings, load

#: Seconds of measuring for each layer.
BUDGET_S = 60.0
#: A layer is done where its expected remaining regret, as a share, is below this.
THRESHOLD = 0.001
#: A pair that serves many buckets is compared at this many of them: the ends and what lies between.
_TOKEN_COUNTS = 3


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


@dataclass(frozen=True)
class Numbers:
    """What came of comparing the chosen pairs with the fallback.

    Attributes
    ----------
    pairs : int
        Distinct pairs whose numbers agree.
    worst : float
        Their largest deviation; NaN without any.
    compared : tuple of Compared
        Every comparison, wrong ones included.
    agreements : tuple of Agreement
        Those of the pairs whose numbers agree.
    denials : tuple of Denial
        What was denied.
    unchecked : str
        Why some or all pairs were not compared; empty where all were.
    """

    pairs: int = 0
    worst: float = math.nan
    compared: tuple[Compared, ...] = ()
    agreements: tuple[Agreement, ...] = ()
    denials: tuple[Denial, ...] = ()
    unchecked: str = ""


@dataclass(frozen=True)
class Verification:
    """What verifying one layer came to.

    Attributes
    ----------
    layer : Layer
    before, after : Standing
        Of the choices before the first and after the last timing of this call.
    chosen_before, chosen : dict
        (stage, bucket) → tactic id.
    changes : tuple of Change
    timings, failed : int
        Timings of this call, and how many of them failed.
    measuring_s : float
        Seconds of measuring of this call.
    stop : str
        Why it ended.
    done : bool
        The expected remaining regret is below the threshold.
    numbers : Numbers
    collected : CollectSummary
        Of the last round of timings; says whether it was interrupted or failed.
    """

    layer: Layer
    before: Standing
    after: Standing
    chosen_before: dict[tuple[int, int], int]
    chosen: dict[tuple[int, int], int]
    changes: tuple[Change, ...]
    timings: int
    failed: int
    measuring_s: float
    stop: str
    done: bool
    numbers: Numbers
    collected: CollectSummary


def outlook(
    layer: Layer, model: PerformanceModel, folders: Sequence[Path], buckets: Sequence[int], *, simulated: bool = False
) -> Standing:
    """Return how a layer stands before any spot check, from the timings in some folders."""
    state = _State(layer, model, folders, buckets, simulated, [])
    return _standing(_Spots(state, THRESHOLD), state.choices())


def verify(
    layer: Layer,
    model: PerformanceModel,
    root: Path,
    *,
    folders: Sequence[Path] = (),
    budget_s: float = BUDGET_S,
    threshold: float = THRESHOLD,
    buckets: Sequence[int] | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    pass_: int = 1,
    runner: RunnerSpec = GPU_RUNNER,
    simulated: bool = False,
    comparator: ComparatorSpec | None = None,
    gpus: Sequence[int] = (0,),
    reporter: Callable[[], Reporter] = Reporter,
    limits: Limits | None = None,
    patience: Patience | None = None,
    problems: list[Problem] | None = None,
) -> Verification:
    """Spot-check the choices of a layer.

    Timings go to a journal under `root` and into its measurements files, and nothing that was timed there is timed
    again. The same call continues where an earlier one stopped; the seconds of earlier calls count.

    Parameters
    ----------
    layer : Layer
    model : PerformanceModel
        Of the device that is here and the layer's quantization.
    root : Path
        Measurements folder that is written to.
    folders : sequence of Path
        More folders to read timings and denied tactics from.
    budget_s : float
        Seconds of measuring on each GPU.
    threshold : float
        The checks end where the expected remaining regret, as a share, is below this.
    buckets : sequence of int, optional
        Token counts; FlashInfer's own up to `max_tokens` if not given.
    pass_ : int
        Number of the pass. Another one has its own journal and seconds, as another driver needs; what is known is not
        timed again there either.
    runner : RunnerSpec
        What times.
    simulated : bool
        The runner is a simulated one: only simulated timings count.
    comparator : ComparatorSpec, optional
        What compares numbers; without it they are not checked.
    gpus : sequence of int
        GPUs that time; the first one compares.
    reporter : callable
        Returns what hears of the timings, for each round of them.
    limits, patience
        When a worker counts as hanging, while timing and while comparing.
    problems : list, optional
        Gets the rows of measurements that can't be read.

    Raises
    ------
    SynthError
        When the run can't begin, or a file can't be read or written.
    """
    if not 0 < threshold < 1:
        raise SynthError(f"--threshold {threshold:g} is not a share between 0 and 1, such as {THRESHOLD}")
    if model.origin_.simulated and not simulated:
        raise SynthError(
            f"the {layer.quant} model was fitted on simulated timings; fit one on real ones with `synth fit`"
        )
    origin = model.origin_
    plan = make_plan(
        [layer], origin.device, origin.arch, origin.flashinfer, budget_s=budget_s, buckets=buckets,
        max_tokens=max_tokens, passes=(pass_,), predict=predictor({layer.quant: model}),
    )  # fmt: skip
    counts = sorted({b.tokens for b in plan.batches})
    journal = plan.journal_path(root)
    # A sweep of the same layer has a journal, and seconds, of its own.
    journal = journal.with_name(f"verify-{journal.name}")
    if journal.exists():
        # What a run that was cut off has not put into the measurements yet.
        journal_to_measurements(journal, root)
    state = _State(layer, model, [root, *folders], counts, simulated, [] if problems is None else problems)
    strategy = _Spots(state, threshold)
    first = state.choices()
    before = _standing(strategy, first)
    numbers = Numbers()
    timed = failed = 0
    seconds = 0.0
    while True:
        with contextlib.ExitStack() as stack:
            ears = reporter()
            if isinstance(ears, contextlib.AbstractContextManager):
                stack.enter_context(ears)
            done = collect(
                plan, runner, journal, strategy=strategy, gpus=gpus, reporter=ears, measurements=root, limits=limits
            )
        timed, failed, seconds = timed + done.timed, failed + done.failed, seconds + done.measuring_s
        strategy.finish()
        if done.timed:
            state.read()
        if done.outcome in ("failed", "interrupted") or comparator is None:
            break
        found = _compare(state, comparator, gpus[0], numbers, patience)
        if found.agreements:
            AGREED.add(found.agreements, state.origin, root)
        new = found.denials[len(numbers.denials) :]
        numbers = found
        if not new:
            break
        DENIED.add(new, state.origin, root)
        state.read()
        strategy = _Spots(state, threshold)
    last = state.choices()
    after = _standing(strategy, last)
    enough = strategy.regret() < threshold
    if comparator is None:
        numbers = replace(numbers, unchecked="it was not asked for")
    return Verification(
        layer=layer,
        before=before,
        after=after,
        chosen_before=_ids(first),
        chosen=_ids(last),
        changes=tuple(_changes(first, last, strategy)),
        timings=timed,
        failed=failed,
        measuring_s=seconds,
        stop=_stop(done, after.regret, threshold, enough, strategy.exhausted),
        done=enough,
        numbers=numbers,
        collected=done,
    )


def gpu_comparator(layer: Layer) -> ComparatorSpec:
    """Return how to compare numbers of a layer on the GPU in front of it."""
    options = {"shape": layer.shape, "quant": layer.quant, "activation": layer.activation}
    return ComparatorSpec("synth.gpu.runtime:LayerComparator", options)


def report(layer: Layer, found: Verification | Standing) -> dict[str, Any]:
    """Return a verification, or where a layer stands, as plain values for JSON."""
    head = {"layer": layer.label, "quant": layer.quant, "shape": str(layer.shape)}
    if isinstance(found, Standing):
        return {**head, **asdict(found)}
    return {
        **head,
        "before": asdict(found.before),
        "after": asdict(found.after),
        "changes": [
            {"stage": c.stage, "bucket": c.bucket, "old": str(c.old), "new": str(c.new), "gain": _plain(c.gain)}
            for c in found.changes
        ],
        "timings": found.timings,
        "failed": found.failed,
        "measuring_s": round(found.measuring_s, 3),
        "stop": found.stop,
        "done": found.done,
        "numbers": {
            "pairs": found.numbers.pairs,
            "worst": _plain(found.numbers.worst),
            "comparisons": len(found.numbers.compared),
            "denied": [d.record() for d in found.numbers.denials],
            "unchecked": found.numbers.unchecked,
        },
        "skipped": list(found.collected.skipped),
        "journal": str(found.collected.journal),
        "files": [str(path) for path in found.collected.files],
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Spots:
    """:class:`KnownDevice` for one layer of which some cells are timed already.

    What is believed depends a little on the order of the timings. So where a run of rounds ends, the belief is made
    anew of all timings together, as :func:`synth.choosing.choose.choose` and a later call will see them, and that one
    decides whether it was enough.
    """

    def __init__(self, state: _State, enough: float) -> None:
        self._state, self._enough = state, enough
        self._seen: Sequence[Seen] = ()
        self._known = state.known()
        self._inner = self._device([])
        # Whether nothing was left to time though there were seconds.
        self.exhausted = False

    def next(self, seen: Sequence[Seen], most: int, seconds: float) -> list[Pick]:
        """See :class:`synth.choosing.picks.Strategy`."""
        self._seen = seen
        picks = self._inner.next(self._new(), most, seconds)
        if not picks and most > 0 and seconds > 0:
            self._inner = self._device(seen)
            picks = self._inner.next([], most, seconds)
            # The next call hands over all timings again, those in this belief included.
            self._known |= {s.pick for s in seen}
            self.exhausted = not picks
        return picks

    def finish(self) -> None:
        """Take in the timings that came after the last round was asked for."""
        self._inner = self._device(self._seen)

    def regret(self) -> float:
        """Return the mean expected regret (logarithm)."""
        return float(self._inner.belief(0).expected_regret())

    @property
    def posteriors(self) -> dict[int, Posterior]:
        """What is believed, by stage."""
        return self._inner.belief(0).stages

    def _new(self) -> list[Seen]:
        return [s for s in self._seen if s.pick not in self._known]

    def _device(self, seen: Sequence[Seen]) -> KnownDevice:
        """Return a strategy that believes what the files and the timings `seen` say together."""
        state = self._state
        device = KnownDevice({state.layer.quant: state.model}, [state.layer], state.buckets, enough=self._enough)
        for stage in STAGES:
            device.belief(0).stages[stage] = state.belief(stage, seen)
        return device


class _State:
    """What is known of one layer: its timings and the denied tactics, from files."""

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
        self.origin: Origin = replace(model.origin_, simulated=simulated)
        self._folders = list(dict.fromkeys(folder.resolve() for folder in folders))
        self.timings: Timings | None = None
        self.denials: tuple[Denial, ...] = ()
        self.read(problems)

    @property
    def table(self) -> TacticTable:
        return self.model.table

    @property
    def denied(self) -> frozenset[tuple[int, Tactic]]:
        return frozenset((d.stage, d.tactic) for d in self.denials)

    def read(self, problems: list[Problem] | None = None) -> None:
        """Read the files (again)."""
        o = self.origin
        there = [folder for folder in self._folders if folder.is_dir()]
        bad: list[Problem] = [] if problems is None else problems
        found = load(there, o.device, o.quant, o.flashinfer, problems=bad) if there else []
        self.timings = next((t for t in found if t.origin == o), None)
        self.denials = DENIED.load(there, o)

    def choices(self, fused_finalize: Sequence[bool] = (True,)) -> list[Choice]:
        return choose(
            self.model, [self.layer.shape], self.buckets, timings=self.timings, fused_finalize=fused_finalize,
            denied=self.denied,
        )  # fmt: skip

    def known(self) -> set[Pick]:
        """Return the cells that were timed."""
        cells = [(stage, *cell) for stage in STAGES for cell in (*_cells(self._of(stage)[0]), *self._of(stage)[1])]
        return {Pick(0, *cell) for cell in cells}

    def belief(self, stage: int, seen: Sequence[Seen] = ()) -> Posterior:
        """Return what is believed of a stage after the timings in the files and those `seen` beside them."""
        timed, failed = self._of(stage)
        there = set(_cells(timed)) | failed
        new = [(s.pick.tokens, s.pick.tactic, s.ms) for s in seen if s.pick.stage == stage]
        new = sorted(one for one in new if one[:2] not in there)
        failed |= {(b, i) for b, i, ms in new if math.isnan(ms)}
        failed |= {(b, i) for b in self.buckets for i, t in self.table.items(stage) if (stage, t) in self.denied}
        good = [one for one in new if not math.isnan(one[2])]
        if good:
            tokens, tactic, ms = (np.array(column) for column in zip(*good, strict=True))
            order = np.lexsort((np.append(timed.tactic, tactic), np.append(timed.tokens, tokens)))
            timed = Timed(
                np.append(timed.tokens, tokens)[order],
                np.append(timed.tactic, tactic)[order],
                np.append(timed.ms, ms)[order],
                np.append(timed.repeats, np.ones(len(good), dtype=np.int64))[order],
            )
        some = timed if len(timed.ms) else None
        return believe(self.model, self.layer.shape, stage, self.buckets, some, without=failed)

    def _of(self, stage: int) -> tuple[Timed, set[tuple[int, int]]]:
        """Return the good timings of a stage of the layer in the buckets, and the cells that ever failed."""
        empty = np.empty(0, dtype=np.int64)
        if self.timings is None or self.layer.shape not in self.timings.shapes:
            return Timed(empty, empty, np.empty(0), empty), set()
        t = self.timings
        mine = t.select(
            (t.shape == t.shapes.index(self.layer.shape)) & (t.stage == stage) & np.isin(t.tokens, self.buckets)
        )
        bad = mine.select(np.isnan(mine.ms))
        failed = set(zip(bad.tokens.tolist(), bad.tactic.tolist(), strict=True))
        rows, repeats = mine.merged()
        cells = zip(rows.tokens.tolist(), rows.tactic.tolist(), strict=True)
        good = np.array([cell not in failed for cell in cells], dtype=bool)
        return Timed(rows.tokens[good], rows.tactic[good], rows.ms[good], repeats[good]), failed


def _cells(timed: Timed) -> Iterator[tuple[int, int]]:
    return zip(timed.tokens.tolist(), timed.tactic.tolist(), strict=True)


def _standing(strategy: _Spots, choices: Sequence[Choice]) -> Standing:
    near = np.concatenate([p.outlook().within[:, 0] for p in strategy.posteriors.values()])
    return Standing(
        regret=math.expm1(strategy.regret()),
        near=float(near.mean()),
        entries=dict(sorted(Counter(c.source for c in choices).items())),
    )


def _ids(choices: Sequence[Choice]) -> dict[tuple[int, int], int]:
    return {(c.stage, c.bucket): c.tactic_id for c in choices}


def _changes(first: Sequence[Choice], last: Sequence[Choice], strategy: _Spots) -> list[Change]:
    changes = []
    for old, new in zip(first, last, strict=True):
        if old.tactic_id == new.tactic_id:
            continue
        posterior = strategy.posteriors[new.stage]
        tactics = np.array([old.tactic_id, new.tactic_id])
        rows = posterior.rows(np.full(2, new.bucket), tactics)
        gain = math.nan
        if (rows >= 0).all():
            behind = float(posterior.mean[rows[0]] - posterior.mean[rows[1]])
            # A failed tactic's mean is beyond every time.
            gain = math.expm1(behind) if behind < 10 else math.nan
        changes.append(Change(new.stage, new.bucket, old.tactic, new.tactic, gain))
    return changes


def _stop(done: CollectSummary, regret: float, threshold: float, enough: bool, exhausted: bool) -> str:
    rest = f"expected remaining regret {regret:.2%}"
    if done.outcome == "failed":
        return f"it failed: {done.reason}"
    if done.outcome == "interrupted":
        return f"interrupted, {rest}"
    if enough:
        return f"{rest} is below {threshold:.2%}"
    if exhausted:
        return f"no timing is left that could change a choice, {rest}"
    if done.skipped and not done.timed:
        return f"{done.skipped[-1]}, {rest}"
    return f"budget spent, {rest}"


# --- numbers ---------------------------------------------------------------------------------------------------------


def _compare(state: _State, spec: ComparatorSpec, gpu: int, before: Numbers, patience: Patience | None) -> Numbers:
    """Compare every chosen pair that was not compared yet, and find the guilty tactics of those that are wrong.

    The pairs of servers that don't fuse the finalize step are compared too.
    """
    tolerance = TOLERANCE.get(state.layer.quant)
    if tolerance is None:
        return replace(before, unchecked=f"a whole layer can be run in {' and '.join(TOLERANCE)} only")
    wanted = _pairs(state.choices((True, False)), state.table)
    compared = {(c.pair, c.tokens): c for c in before.compared}
    denials = list(before.denials)
    bad: set[tuple[int, int]] = set()
    unchecked = ""
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    with Comparison(spec, gpu, patience) as comparison:
        try:
            for pair, tokens in wanted.items():
                for count in _some(tokens):
                    if (pair, count) in compared or not bad.isdisjoint(enumerate(pair, 1)):
                        # Another pair gave its tactic away.
                        continue
                    if (FALLBACK, count) not in compared:
                        sane = compared[FALLBACK, count] = comparison.compare(count, FALLBACK)
                        if not sane.deviation <= tolerance:
                            raise CannotCompare(f"the fallback's own output at {count} tokens isn't to be trusted")
                    result = compared[pair, count] = comparison.compare(count, pair)
                    if not result.deviation <= tolerance:
                        wrong = guilty(comparison, result, tolerance)
                        bad |= {(stage, pair[stage - 1]) for stage in wrong}
                        denials += _denials(state, wrong, day)
        except CannotCompare as e:
            unchecked = str(e)
    right = {p for p, tokens in wanted.items() if _agrees(p, tokens, compared, tolerance)}
    agreeing = [c for c in compared.values() if c.pair in right]
    worst = max((c.deviation for c in agreeing), default=math.nan)
    agreements = tuple(_agreement(state, c, day) for c in agreeing)
    return Numbers(len(right), worst, tuple(compared.values()), agreements, tuple(denials), unchecked)


def _agrees(pair: Pair, tokens: Sequence[int], compared: Mapping[tuple[Pair, int], Compared], tolerance: float) -> bool:
    found = [compared.get((pair, count)) for count in _some(tokens)]
    return all(c is not None and c.deviation <= tolerance for c in found)


def _agreement(state: _State, compared: Compared, day: str) -> Agreement:
    gemm1, gemm2 = (None if i == -1 else state.table.tactic(i) for i in compared.pair)
    return Agreement(state.layer.shape, (gemm1, gemm2), compared.tokens, compared.deviation, day)


def _denials(state: _State, wrong: dict[int, Compared], day: str) -> list[Denial]:
    shape: MoEShape = state.layer.shape
    return [
        Denial(stage, state.table.tactic(c.pair[stage - 1]), shape, c.tokens, c.deviation, c.error, day)
        for stage, c in wrong.items()
    ]


def _pairs(choices: Sequence[Choice], table: TacticTable) -> dict[Pair, list[int]]:
    """Return every distinct pair of gemm1's and gemm2's choices, with the buckets where it is chosen.

    A stage whose choice isn't sure to beat the fallback has no entry, so that the fallback runs there.
    """
    ids: dict[tuple[bool, int], dict[int, int]] = {}
    for c in choices:
        runs = c.beats_fallback and c.tactic_id != table.fallback_id(c.stage)
        ids.setdefault((c.fused_finalize, c.bucket), {})[c.stage] = c.tactic_id if runs else -1
    pairs: dict[Pair, list[int]] = {}
    for (_, bucket), stages in ids.items():
        pair = stages[1], stages[2]
        if pair != FALLBACK and bucket not in pairs.setdefault(pair, []):
            pairs[pair].append(bucket)
    return pairs


def _some(tokens: Sequence[int]) -> list[int]:
    """Return a handful of token counts: the least, the largest, and some between."""
    ordered = sorted(tokens)
    if len(ordered) <= _TOKEN_COUNTS:
        return ordered
    step = (len(ordered) - 1) / (_TOKEN_COUNTS - 1)
    return [ordered[round(i * step)] for i in range(_TOKEN_COUNTS)]
