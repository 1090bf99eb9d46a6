"""Does a pair of tactics give the numbers that FlashInfer's fallback gives?

A layer is run with a pair and with the fallback on the same inputs. That happens in a process of its own: a tactic
that reads beyond its memory loses the CUDA context, and one that hangs never returns. Either ends that process and
counts against the pair, not against the command.
"""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from synth.choosing.choose import Choice
from synth.choosing.spots import Known
from synth.collecting.children import Child
from synth.collecting.gpus import visible_name
from synth.collecting.runner import Spec
from synth.collecting.worker import Broken, Refused, Started, describe
from synth.errors import OutOfMemory, SynthError
from synth.flashinfer.tactics import Tactic, TacticTable
from synth.timings.records import Agreement, Denial

#: Tactics of gemm1 and gemm2; -1 is FlashInfer's fallback.
Pair = tuple[int, int]
FALLBACK: Pair = (-1, -1)

#: Largest difference from the fallback's output, as a share of the largest output, that rounding explains. Tactics
#: add up in different orders, and gemm2's fused finalize adds the experts' outputs after rounding each to bf16: up to
#: 0.012 was seen of right ones in bf16. FP8 rounds to 3 bits of mantissa between the two GEMMs, where a last bit of
#: the sum before it decides.
TOLERANCE: Mapping[str, float] = {"bf16": 0.02, "fp8": 0.05}

#: A pair that serves many buckets is compared at this many of them: the ends and what lies between.
_TOKEN_COUNTS = 3
#: A process that died or hung gets this many tries at the same pair: the reason may have been another one.
_TRIES = 2


class CannotCompare(SynthError):
    """The numbers of this layer can't be compared here, whatever the tactics; the message says why."""


class Comparator(Protocol):
    """Runs one layer. Made and used in one process."""

    def deviation(self, tokens: int, pair: Pair) -> float:
        """Return the largest difference from the fallback's output over the largest output.

        Infinite where a value is not finite.

        Raises
        ------
        SynthError
            When the layer can't be run here at all.
        """


#: How to make a comparator.
ComparatorSpec = Spec[Comparator]


@dataclass(frozen=True)
class Compared:
    """What came of comparing a pair at one token count.

    Attributes
    ----------
    tokens : int
    pair : (int, int)
    deviation : float
        Infinite where there was no finite output.
    error : str
        How it ended where there was no output.
    """

    tokens: int
    pair: Pair
    deviation: float
    error: str = ""


_Answer = Started | Compared | Refused | Broken


@dataclass(frozen=True)
class Patience:
    """Seconds after which a process that says nothing counts as hanging: while it starts, and at one pair."""

    start_s: float = 1800.0
    pair_s: float = 60.0


class Comparison:
    """Compares pairs of one layer in a process of its own; a context manager.

    Parameters
    ----------
    spec : ComparatorSpec
        What runs the layer there.
    gpu : int, optional
        Index of the GPU among those that this process may see; without it the environment stays as it is.
    patience : Patience
        When it counts as hanging.
    """

    def __init__(self, spec: ComparatorSpec, gpu: int | None = None, patience: Patience | None = None) -> None:
        self._spec, self._patience = spec, patience or Patience()
        self._device = None if gpu is None else visible_name(gpu)
        self._child: Child | None = None

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def compare(self, tokens: int, pair: Pair) -> Compared:
        """Compare a pair with the fallback.

        Raises
        ------
        CannotCompare
            When the layer can't be run here, so that nothing is known of the pair.
        """
        error = ""
        for _ in range(_TRIES):
            child = self._child or self._start()
            child.send((tokens, pair))
            said = _answer(child, self._patience.pair_s)
            if isinstance(said, Compared):
                return said
            if isinstance(said, Refused):
                raise CannotCompare(said.error)
            assert isinstance(said, Broken)
            error = said.error
            self._end()
        return Compared(tokens, pair, math.inf, error)

    def _start(self) -> Child:
        self._child = Child(_Comparing, self._spec, self._device)
        said = _answer(self._child, self._patience.start_s)
        if isinstance(said, (Refused, Broken)):
            self._end()
            raise CannotCompare(f"the layer can't be run: {said.error}" if isinstance(said, Broken) else said.error)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _answer(child: Child, seconds: float) -> _Answer:
    """Return what the process says next, :class:`Broken` where it doesn't."""
    deadline = time.monotonic() + seconds
    while not child.connection.poll(min(seconds, 1.0)):
        if time.monotonic() >= deadline:
            return Broken(f"no answer for {seconds:.0f} s, so it counts as hanging")
    answers: list[_Answer] = child.said()[0]
    if answers:
        return answers[0]
    code = child.join()
    return Broken(f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")


class _Comparing:
    """What compares in its process; see :class:`synth.collecting.children.Answering`."""

    def __init__(self, spec: ComparatorSpec) -> None:
        self._spec = spec

    def start(self) -> Iterator[_Answer]:
        yield self._try(self._make)

    def run(self, item: tuple[int, Pair]) -> Iterator[_Answer]:
        yield self._try(lambda: Compared(*item, float(self._comparator.deviation(*item))))

    def finish(self) -> Iterator[_Answer]:
        yield from ()

    def _make(self) -> Started:
        self._comparator = self._spec.make()
        return Started({})

    def _try(self, what: Callable[[], _Answer]) -> _Answer:
        try:
            return what()
        except SynthError as e:
            return Refused("run", str(e))
        except Exception as e:
            return Broken(describe(e)[:300])


def guilty(comparison: Comparison, bad: Compared, tolerance: float) -> dict[int, Compared]:
    """Return which stages' tactics make a pair wrong: stage → what came of that tactic beside the other's fallback.

    Where each alone is right, both are taken as guilty: which one to keep can't be told.

    Parameters
    ----------
    comparison : Comparison
    bad : Compared
        The pair, wrong at its token count.
    tolerance : float
        See :data:`TOLERANCE`.
    """
    alone = {1: (bad.pair[0], -1), 2: (-1, bad.pair[1])}
    suspects = {stage: pair for stage, pair in alone.items() if pair != FALLBACK}
    found = {stage: comparison.compare(bad.tokens, pair) for stage, pair in suspects.items()}
    wrong = {stage: c for stage, c in found.items() if not c.deviation <= tolerance}
    return wrong or dict.fromkeys(suspects, bad)


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


def check_numbers(
    known: Known, spec: ComparatorSpec, gpu: int, before: Numbers, patience: Patience | None = None
) -> Numbers:
    """Compare every chosen pair that was not compared yet, and find the guilty tactics of those that are wrong.

    The pairs of servers that don't fuse the finalize step are compared too.

    Parameters
    ----------
    known : Known
        The layer.
    spec, gpu, patience
        See :class:`Comparison`.
    before : Numbers
        What came of earlier choices.
    """
    layer, table = known.layer, known.model.table
    tolerance = TOLERANCE.get(layer.quant)
    if tolerance is None:
        return replace(before, unchecked=f"a whole layer can be run in {' and '.join(TOLERANCE)} only")
    wanted = _pairs(known.choices((True, False)), table)
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
                        denials += [
                            Denial(stage, table.tactic(pair[stage - 1]), layer.shape, count, c.deviation, c.error, day)
                            for stage, c in wrong.items()
                        ]
        except CannotCompare as e:
            unchecked = str(e)
    right = {p for p, tokens in wanted.items() if _agrees(p, tokens, compared, tolerance)}
    agreeing = [c for c in compared.values() if c.pair in right]
    worst = max((c.deviation for c in agreeing), default=math.nan)
    agreements = tuple(Agreement(layer.shape, *_tactics(table, c.pair), c.tokens, c.deviation, day) for c in agreeing)
    return Numbers(len(right), worst, tuple(compared.values()), agreements, tuple(denials), unchecked)


def _agrees(pair: Pair, tokens: Sequence[int], compared: Mapping[tuple[Pair, int], Compared], tolerance: float) -> bool:
    found = [compared.get((pair, count)) for count in _some(tokens)]
    return all(c is not None and c.deviation <= tolerance for c in found)


def _tactics(table: TacticTable, pair: Pair) -> tuple[Tactic | None, Tactic | None]:
    gemm1, gemm2 = (None if i == -1 else table.tactic(i) for i in pair)
    return gemm1, gemm2


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


class SimulatedComparator:
    """Stands for a layer on a GPU: every tactic is right but those that it is told of.

    Parameters
    ----------
    wrong : sequence of int
        Ids of tactics whose output is off by half.
    broken : mapping of int to str
        Id → what happens to the process: ``raise``, ``exit`` or ``hang``.
    unable : str
        Why the layer can't be run at all.
    """

    def __init__(self, wrong: Sequence[int] = (), broken: Mapping[int, str] | None = None, unable: str = "") -> None:
        if unable:
            raise OutOfMemory(unable)
        self._wrong, self._broken = frozenset(wrong), dict(broken or {})

    def deviation(self, tokens: int, pair: Pair) -> float:
        """See :class:`Comparator`."""
        for tactic in pair:
            if tactic in self._broken:
                _break(self._broken[tactic])
        return 0.5 if self._wrong & set(pair) else 0.0 if pair == FALLBACK else 0.004


def _break(how: str) -> None:
    if how == "exit":
        os._exit(3)
    while how == "hang":
        time.sleep(3600)
    raise RuntimeError("CUDA error: an illegal memory access was encountered (simulated)")
