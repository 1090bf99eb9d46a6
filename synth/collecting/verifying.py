"""Spot checks on the GPU: time the cells that the choices of a layer are least sure of, and check their numbers.

One layer is served at a time (:mod:`synth.choosing.spots`). Then every chosen pair is compared with the fallback
(:mod:`synth.collecting.numbers`); a tactic whose numbers are wrong is denied (:mod:`synth.timings.denied`), and the
layer is chosen, timed and compared again without it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from synth.choosing.choose import Choice
from synth.choosing.plan import DEFAULT_MAX_TOKENS, Layer, make_plan
from synth.choosing.spots import THRESHOLD, Change, Known, Spots, Standing
from synth.collecting.numbers import ComparatorSpec, Numbers, Patience, check_numbers
from synth.collecting.reporters import CollectSummary, Reporter
from synth.collecting.results import journal_to_measurements
from synth.collecting.runner import GPU_RUNNER, RunnerSpec
from synth.collecting.running import collect
from synth.collecting.slots import Limits
from synth.errors import SynthError
from synth.performance.model import PerformanceModel, predictor
from synth.timings.records import AGREED, DENIED
from synth.timings.rows import Problem

#: Seconds of measuring for each layer.
BUDGET_S = 60.0


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
    known = Known(layer, model, [root, *folders], counts, simulated, [] if problems is None else problems)
    spots = Spots(known, threshold)
    first = known.choices()
    before = spots.standing(first)
    numbers = Numbers(unchecked="" if comparator is not None else "it was not asked for")
    timed = failed = 0
    seconds = 0.0
    while True:
        with contextlib.ExitStack() as stack:
            ears = reporter()
            if isinstance(ears, contextlib.AbstractContextManager):
                stack.enter_context(ears)
            done = collect(
                plan, runner, journal, strategy=spots, gpus=gpus, reporter=ears, measurements=root, limits=limits
            )
        timed, failed, seconds = timed + done.timed, failed + done.failed, seconds + done.measuring_s
        spots.finish()
        if done.timed:
            known.read([])
        if done.outcome in ("failed", "interrupted") or comparator is None:
            break
        denied = len(numbers.denials)
        numbers = check_numbers(known, comparator, gpus[0], numbers, patience)
        if numbers.agreements:
            AGREED.add(numbers.agreements, known.origin, root)
        if len(numbers.denials) == denied:
            break
        DENIED.add(numbers.denials[denied:], known.origin, root)
        known.read([])
        spots = Spots(known, threshold)
    last = known.choices()
    after = spots.standing(last)
    enough = spots.regret() < threshold
    return Verification(
        layer=layer,
        before=before,
        after=after,
        chosen_before=_ids(first),
        chosen=_ids(last),
        changes=spots.changes(first, last),
        timings=timed,
        failed=failed,
        measuring_s=seconds,
        stop=_stop(done, after.regret, threshold, enough, spots.exhausted),
        done=enough,
        numbers=numbers,
        collected=done,
    )


def comparator_of(layer: Layer, simulate: bool = False, wrong: Sequence[int] = ()) -> ComparatorSpec:
    """Return how to compare numbers of a layer: on the GPU in front of it, or simulated, with some tactics wrong."""
    if simulate:
        return ComparatorSpec("synth.collecting.numbers:SimulatedComparator", {"wrong": wrong})
    options = {"shape": layer.shape, "quant": layer.quant, "activation": layer.activation}
    return ComparatorSpec("synth.gpu.layer:LayerComparator", options)


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


def _ids(choices: Sequence[Choice]) -> dict[tuple[int, int], int]:
    return {(c.stage, c.bucket): c.tactic_id for c in choices}


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
