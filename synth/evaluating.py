"""What ``synth evaluate`` does: held-out regret of the shipped timings, or of a table that the models never saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from synth.catalog.devices import Device
from synth.errors import SynthError
from synth.measurements import Timings, read_table
from synth.paths import find_model
from synth.performance.evaluation import Evaluation, Judge, baselines, cross_validate
from synth.performance.model import Cells, PerformanceModel

#: The quantization whose figures stand at the top of the JSON when there are several.
_REFERENCE = "bf16"


@dataclass(frozen=True)
class Result:
    """Regrets for one device and quantization.

    Attributes
    ----------
    title, quant : str
    evaluations : tuple of Evaluation
        The model's first, then the baselines'.
    refused : tuple of str
        Labels of shapes that are in the training data and so aren't scored as unseen.
    """

    title: str
    quant: str
    evaluations: tuple[Evaluation, ...]
    refused: tuple[str, ...] = ()


def held_out(timings: Timings, by: str, progress: Callable[[int, int], None] | None = None) -> Result:
    """Evaluate the model and the baselines on each family, or each shape, held out."""
    judge, ms, _ = cross_validate(timings, by, progress=progress)
    title = f"{timings.origin.device} {timings.origin.quant}, held out by {by}"
    return Result(title, timings.origin.quant, (judge.evaluate("model", ms), *baselines(judge, by)))


def against_table(
    path: Path,
    device: Device,
    quant: str | None,
    flashinfer: str,
    models: list[Path],
    *,
    problems: list[Any],
) -> list[Result]:
    """Score fitted models on a table of shapes that they have never seen.

    Raises
    ------
    SynthError
        When the table can't be read, there is no model for it, or every shape is in the training data.
    """
    results = []
    refused_all: list[str] = []
    for timings in read_table(path, device.name, device.tactics_arch, flashinfer, problems=problems):
        origin = timings.origin
        if quant not in (None, origin.quant):
            continue
        file = find_model(models, origin.device, origin.quant, flashinfer)
        if file is None:
            raise SynthError(f"no {origin.quant} model for {origin.device}, FlashInfer {flashinfer}; run `synth fit`")
        model = PerformanceModel.load(file, device=origin.device, quant=origin.quant, flashinfer=flashinfer)
        known = np.array([model.knows(s) for s in timings.shapes], dtype=bool)
        present = np.unique(timings.shape).tolist()
        refused = tuple(timings.labels[i] for i in present if known[i])
        unseen = timings.select(~known[timings.shape])
        if not len(unseen):
            refused_all.extend(refused)
            continue
        judge = Judge(unseen)
        own = judge.evaluate("model", model.predict(Cells.of(judge.timings)).ms)
        fallback = next(iter(baselines(judge)))
        title = f"{origin.device} {origin.quant}, unseen shapes of {path.name}"
        results.append(Result(title, origin.quant, (own, fallback), refused))
    if not results:
        what = (
            f"every shape ({', '.join(refused_all)}) is in the models' training data"
            if refused_all
            else (f"no {quant} rows" if quant else "no rows")
        )
        raise SynthError(f"{path}: {what}; nothing to score as unseen")
    # Shapes of a quantization that was refused whole are named with the first result.
    return [replace(results[0], refused=(*results[0].refused, *refused_all)), *results[1:]]


def report(results: list[Result]) -> dict[str, Any]:
    """Return results as plain values: bf16's on top (or the only quantization's), all of them under ``quants``."""
    quants: dict[str, Any] = {}
    for r in results:
        quants[r.quant if r.quant not in quants else r.title] = _plain(r)
    top = quants.get(_REFERENCE) or next(iter(quants.values()))
    return {**top, "quants": quants}


def _plain(result: Result) -> dict[str, Any]:
    own, *others = result.evaluations
    return {
        **own.as_dict(),
        "refused": list(result.refused),
        "baselines": {e.name: {k: v for k, v in e.as_dict().items() if k != "shapes"} for e in others},
    }
