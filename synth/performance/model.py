"""The performance model: the analytic model, and a forest that corrects it.

The analytic model (:mod:`synth.performance.roofline`) carries what extrapolates (bytes, waves, main loop steps); a
forest of extremely randomised trees on dimensionless features (:mod:`synth.performance.features`) learns what it
misses, as the logarithm of measured over analytic time. :mod:`synth.performance.training` fits both, and
:mod:`synth.performance.model_file` keeps them as a file.

Since the features have no units, what a forest learned on one device says something of another. A device without
timings, or with few, borrows the *structure* of a fitted one: its forests, over constants of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog.devices import get_device
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import Tactic, TacticTable, load_table
from synth.performance import model_file
from synth.performance.cells import SWEPT, Cells, Prediction, swept_buckets
from synth.performance.features import FEATURES, expected, features
from synth.performance.forest import Forest
from synth.performance.geometry import Floats, Ints, Sites, least_by
from synth.performance.roofline import DEFAULTS, Hardware, Roofline, TacticColumns, Work, tactic_columns, work
from synth.timings.origin import Origin
from synth.timings.table import Timings

__all__ = (
    "FEATURES",
    "FORMAT",
    "SWEPT",
    "Analysis",
    "Cells",
    "PerformanceModel",
    "Prediction",
    "predictor",
    "swept_buckets",
)

#: Version of the model file and of the features; a file of another one has to be fitted again.
FORMAT = 3
#: Tactics predicted within this logarithm of the best are told apart by the choice forest alone.
_CLOSE = 0.3
#: Standard deviation of the analytic model's logarithm where nothing was timed: its error on the H200, widened.
_ANALYTIC_SD = 0.25
#: Deviation of the logarithm of close tactics' relative times where a structure is borrowed: what of it doesn't hold.
_BORROWED_SD = 0.03
#: Least standard deviation of a fitted prediction's logarithm before calibration: repeats differ by as much.
_LEAST_SD = 0.004
_PARAMETERS = ("choice_trees", "time_trees", "leaf", "features", "near", "far", "seed")


@dataclass(frozen=True)
class Analysis:
    """What the analytic model says of cells, good enough to rule tactics out.

    Attributes
    ----------
    cells : Cells
    sites : Sites
        Geometry of each distinct (shape, stage, tokens), sorted.
    row : ndarray of int64, shape (cells,)
        Each cell's row in `sites`.
    work : Work
    ms : ndarray of float64, shape (cells,)
        Analytic time.
    """

    cells: Cells
    sites: Sites
    row: Ints
    work: Work
    ms: Floats

    def select(self, rows: NDArray[Any]) -> Analysis:
        """Return what is said of some of the cells."""
        return Analysis(self.cells.select(rows), self.sites, self.row[rows], self.work.select(rows), self.ms[rows])

    def relative(self) -> Floats:
        """Return each cell's time over the best of its site's cells."""
        return np.asarray(self.ms / least_by(self.row, self.ms, len(self.sites))[self.row])


class PerformanceModel:
    """Predicts how long a cell takes on one device under one quantization.

    Two forests correct the analytic model. The *choice* forest predicts log(ms / best ms of the bucket), less half of
    what the analytic model says of it: what tells close tactics apart. The *time* forest predicts
    log(ms / analytic ms): absolute times, for margins and durations. Of a device with hardly any swept buckets, a
    *residual* forest takes the place of both, or corrects those of another device.

    Parameters
    ----------
    choice_trees, time_trees : int
        Trees of the two forests.
    leaf : int
        Least rows in a leaf.
    features : float
        Share of the features tried at each split.
    near : float
        Timings within this logarithm of their bucket's best are fitted; of the others, `far` of them.
    far : float
        Share of the slower timings that are fitted too. The fallback's always are.
    seed : int
        Seed of the forests and of the sample.
    jobs : int
        Threads that grow trees; the result doesn't depend on it.
    start : PerformanceModel, optional
        What is believed of the device without timings; a few of them correct it.

    Attributes
    ----------
    origin_ : Origin
        What the timings have in common.
    shapes_ : tuple of (str, str)
        Label and text form of each shape fitted.
    digest_ : str
        Digest of the timings.
    roofline_ : Roofline
    choice_, time_ : Forest or None
        Both None without a structure. Of another device, if `borrowed_` says so.
    residual_ : Forest or None
        What a sample of timings says beyond those.
    borrowed_ : str
        Where the structure is from, such as ``"NVIDIA H200 fp8"``; empty for a device's own forests, or for none.
    spread_ : float
        Factor from the trees' disagreement to the standard deviation of a prediction's logarithm.
    held_out_ : dict
        Regret and coverage measured on shapes held out, when it was.
    calibration_ : dict of float
        What turns the probabilities of a posterior into calibrated ones, when it was measured.
    """

    def __init__(
        self,
        *,
        choice_trees: int = 64,
        time_trees: int = 16,
        leaf: int = 3,
        features: float = 0.3,
        near: float = 0.12,
        far: float = 0.03,
        seed: int = 0,
        jobs: int = 2,
        start: PerformanceModel | None = None,
    ) -> None:
        self.choice_trees = choice_trees
        self.time_trees = time_trees
        self.leaf = leaf
        self.features = features
        self.near = near
        self.far = far
        self.seed = seed
        self.jobs = jobs
        self.start = start

    origin_: Origin
    shapes_: tuple[tuple[str, str], ...]
    digest_: str
    roofline_: Roofline
    choice_: Forest | None
    time_: Forest | None
    residual_: Forest | None
    borrowed_: str
    spread_: float
    held_out_: dict[str, Any]
    calibration_: dict[str, float]
    #: The tactics that this model predicts, and the same as arrays.
    table: TacticTable
    columns: TacticColumns
    hardware: Hardware

    def bind(self, origin: Origin, table: TacticTable) -> None:
        """Forget everything, and be the analytic model of an origin with its default constants."""
        self.origin_, self.table = origin, table
        self.hardware = Hardware.of(get_device(origin.device), origin.quant)
        self.columns = tactic_columns(table, self.hardware)
        self.roofline_ = Roofline()
        self.shapes_, self.digest_, self.borrowed_ = (), "", ""
        self.choice_ = self.time_ = self.residual_ = None
        self.spread_ = 1.0
        self.held_out_, self.calibration_ = {}, {}

    def fit(self, timings: Timings) -> PerformanceModel:
        """Fit all rows of `timings`, repeats averaged first.

        Raises
        ------
        SynthError
            When there are no timings or the device is unknown.
        """
        # Not with the module: who only predicts doesn't wait for scikit-learn.
        from synth.performance import training

        training.fit(self, timings)
        return self

    @classmethod
    def of_sample(cls, start: PerformanceModel, cells: Cells, ms: Floats, *, seed: int = 0) -> PerformanceModel:
        """Return a model of some timings spread over a device's cells.

        Parameters
        ----------
        start : PerformanceModel
            What is believed of the device without them.
        cells, ms
            What was timed, each cell once, and its times in ms.
        """
        from synth.performance import training

        model = cls(seed=seed)
        model.bind(start.origin_, start.table)
        training.fit_sample(model, cells, ms, start)
        return model

    @classmethod
    def analytic(
        cls,
        origin: Origin,
        table: TacticTable,
        roofline: Roofline | None = None,
        structure: PerformanceModel | None = None,
    ) -> PerformanceModel:
        """Return the model of a device without timings.

        Parameters
        ----------
        roofline : Roofline, optional
            Its constants; the defaults if not given.
        structure : PerformanceModel, optional
            The model of another device or quantization whose forests correct the analytic model; otherwise nothing
            does.
        """
        model = cls()
        model.bind(origin, table)
        model.roofline_ = roofline or Roofline()
        if structure is not None:
            model.choice_, model.time_, model.spread_ = structure.choice_, structure.time_, structure.spread_
            model.borrowed_ = f"{structure.origin_.device} {structure.origin_.quant}"
        return model

    @property
    def analytical(self) -> bool:
        """Whether no timing of its device went into the model."""
        return not self.digest_ and self.residual_ is None

    def knows(self, shape: MoEShape) -> bool:
        """Return whether timings of `shape` were fitted."""
        return str(shape) in {text for _, text in self.shapes_}

    def analyse(self, cells: Cells) -> Analysis:
        """Return what the analytic model says of cells: ten times faster than :meth:`predict`."""
        site, row = cells.sites()
        w = work(site, row, cells.tactic, self.columns, self.hardware)
        ms = self.roofline_.predict(w, cells.tactic, self.columns, self.hardware)
        return Analysis(cells, site, row, w, ms)

    def analytic_ms(self, at: Analysis) -> Floats:
        """Return the times of cells that were analysed, by the constants as they are now."""
        return self.roofline_.predict(at.work, at.cells.tactic, self.columns, self.hardware)

    def predict_analytic(self, cells: Cells) -> Floats:
        """Return the analytic part alone, in ms."""
        return self.analyse(cells).ms

    def predict(self, cells: Cells) -> Prediction:
        """Predict cells.

        Parameters
        ----------
        cells : Cells
            All tactics that a bucket is chosen from should be predicted in one call: close ones are told apart by
            their times relative to the best.
        """
        if not len(cells):
            return Prediction(np.zeros(0), np.zeros(0), np.zeros(0))
        return self.correct(self.analyse(cells))

    def correct(self, at: Analysis) -> Prediction:
        """Predict cells that were analysed; see :meth:`predict`."""
        if self.residual_ is None:
            return self.before_timings(at)
        x = self._inputs(at)
        before = self.before_timings(at, x)
        correction, sd = self.residual_.predict(x)
        return Prediction(before.ms * np.exp(correction), self.spread_ * np.hypot(sd, _LEAST_SD), sd)

    def before_timings(self, at: Analysis, x: NDArray[np.float32] | None = None) -> Prediction:
        """Predict cells without what a sample of timings says of them.

        Parameters
        ----------
        x : ndarray of float32, shape (cells, features), optional
            The forests' input, where it is known already.
        """
        if self.time_ is None or self.choice_ is None:
            sd = np.full(len(at.ms), _ANALYTIC_SD)
            return Prediction(at.ms, sd, sd / 2.0)
        x = self._inputs(at) if x is None else x
        log_ms, sd = self.time_.predict(x)
        log_ms += np.log(at.ms)
        log_sd = self.spread_ * np.hypot(sd, _LEAST_SD)
        correction, choice_sd = self.choice_.predict(x)
        relative = expected(at.relative()) + correction
        # Anchor: the chosen tactic has its absolute time; close ones follow the choice forest, far ones their own.
        row, count = at.row, len(at.sites)
        least = least_by(row, relative, count)
        anchor = least_by(row, np.where(relative == least[row], log_ms, np.inf), count)
        behind = relative - least[row]
        log_ms = anchor[row] + np.where(behind < _CLOSE, behind, np.maximum(log_ms - anchor[row], _CLOSE))
        if self.borrowed_:
            log_sd, choice_sd = np.hypot(log_sd, _ANALYTIC_SD), np.hypot(choice_sd, _BORROWED_SD)
        return Prediction(np.exp(log_ms), log_sd, choice_sd)

    def draws(self, cells: Cells) -> Floats:
        """Return what each tree of the residual forest says of log ms, shape (trees, cells); as :meth:`predict`."""
        assert self.residual_ is not None
        at = self.analyse(cells)
        x = self._inputs(at)
        return self.residual_.each(x) + np.log(self.before_timings(at, x).ms)

    def _inputs(self, at: Analysis) -> NDArray[np.float32]:
        return features(at.sites, at.row, at.cells.tactic, at.work, at.relative(), self.columns, self.hardware)

    def save(self, path: Path) -> None:
        """Write the model to `path`: a zip of plain arrays and a JSON text, the same bytes for the same model."""
        description = {
            "format": FORMAT,
            "origin": dataclasses.asdict(self.origin_),
            "table": {str(i): str(self.table.tactic(i)) for i in range(len(self.table))},
            "gemm1": len(self.table.gemm1),
            "shapes": [list(s) for s in self.shapes_],
            "digest": self.digest_,
            "roofline": dict(zip(DEFAULTS, self.roofline_.constants, strict=True)),
            "spread": self.spread_,
            "borrowed": self.borrowed_,
            "held_out": self.held_out_,
            "calibration": self.calibration_,
            "features": list(FEATURES),
            "parameters": {name: getattr(self, name) for name in _PARAMETERS},
        }
        model_file.write(path, description, self._arrays())

    @classmethod
    def load(
        cls, path: Path, *, device: str | None = None, quant: str | None = None, flashinfer: str | None = None
    ) -> PerformanceModel:
        """Read a model that :meth:`save` wrote. Nothing in the file is executed.

        Parameters
        ----------
        device, quant, flashinfer : str, optional
            What the model must be of.

        Raises
        ------
        SynthError
            When the file is missing, damaged, or of another version.
        """
        way_out = "fit it again with `synth fit`"
        try:
            described, arrays = model_file.read(path)
            if described["format"] != FORMAT or tuple(described["features"]) != FEATURES:
                raise SynthError(f"{path}: a model of another version of synth; {way_out}")
            origin = Origin(**described["origin"])
            for field, asked in (("device", device), ("quant", quant), ("flashinfer", flashinfer)):
                if asked not in (None, getattr(origin, field)):
                    raise SynthError(f"a model of {field} {getattr(origin, field)}, not {asked}")
            return cls._described(origin, described, arrays)
        except FileNotFoundError:
            raise SynthError(f"{path}: no such model; {way_out}") from None
        except SynthError as e:
            text = str(e) if str(path) in str(e) else f"{path}: {e}"
            raise SynthError(text if way_out in text else f"{text}; {way_out}") from None
        except Exception as e:  # zipfile, zlib, json and numpy raise a dozen kinds for damaged input
            raise SynthError(f"{path}: not a model of synth ({type(e).__name__}); {way_out}") from None

    @classmethod
    def _described(
        cls, origin: Origin, described: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
    ) -> PerformanceModel:
        """Return the model of a file's content, of which everything is checked."""
        parameters = described["parameters"]
        if parameters.keys() - set(_PARAMETERS) or not all(type(v) in (int, float) for v in parameters.values()):
            raise SynthError("its parameters are not those of a model")
        model = cls(**parameters)
        model.bind(origin, _table_of(origin, described))
        model.shapes_ = tuple(
            (model_file.name_of(label), str(MoEShape.parse(shape))) for label, shape in described["shapes"]
        )
        model.digest_ = model_file.name_of(described["digest"])
        model.roofline_ = Roofline(tuple(float(described["roofline"][name]) for name in DEFAULTS))
        if not all(-20.0 <= x <= 6.0 for x in model.roofline_.constants):
            raise SynthError("its constants are out of range")
        forests = (model_file.forest_of(arrays, prefix) for prefix in model_file.FORESTS)
        model.choice_, model.time_, model.residual_ = forests
        if (model.choice_ is None) != (model.time_ is None):
            raise SynthError("it has one of two forests that go together")
        model.borrowed_ = model_file.name_of(described["borrowed"])
        model.spread_ = float(described["spread"])
        if not 0.0 < model.spread_ < math.inf:
            raise SynthError("its spread is no positive number")
        model.held_out_ = dict(described["held_out"])
        model.calibration_ = {str(k): float(v) for k, v in described["calibration"].items()}
        if not all(map(math.isfinite, model.calibration_.values())):
            raise SynthError("its calibration is not made of numbers")
        return model

    def fingerprint(self) -> str:
        """Return a digest of what the model predicts with."""
        text = json.dumps([FORMAT, self.digest_, self.roofline_.constants, self.spread_])
        h = hashlib.sha256(text.encode())
        for array in self._arrays().values():
            h.update(array.tobytes())
        return h.hexdigest()

    def _arrays(self) -> dict[str, NDArray[Any]]:
        forests = zip(model_file.FORESTS, (self.choice_, self.time_, self.residual_), strict=True)
        return {prefix + k: v for prefix, forest in forests if forest for k, v in forest.arrays().items()}


def _table_of(origin: Origin, described: Mapping[str, Any]) -> TacticTable:
    """Return the tactics that a model's file names: those of its FlashInfer version, where that is known."""
    tactics = tuple(Tactic.parse(described["table"][str(i)]) for i in range(len(described["table"])))
    split = int(described["gemm1"])
    if not 0 < split < len(tactics):
        raise SynthError("its tactics are not those of two stages")
    table = TacticTable(origin.flashinfer, origin.arch, origin.quant, tactics[:split], tactics[split:])
    try:
        same = load_table(origin.arch, origin.quant, origin.flashinfer) == table
    except SynthError:
        same = True
    if not same or any(0 in (*t.tile, *t.cluster) for t in tactics):
        raise SynthError("its tactics are not those of its FlashInfer version")
    return table


def predictor(models: Mapping[str, PerformanceModel]) -> Callable[[MoEShape, str, int, int, Sequence[int]], Any]:
    """Return a function that predicts the times in ms of some tactics of one (shape, stage, tokens).

    Parameters
    ----------
    models : mapping of str to PerformanceModel
        By quantization; the function returns None for one that is not in it.
    """

    def predict(shape: MoEShape, quant: str, stage: int, tokens: int, ids: Sequence[int]) -> Any:
        if quant not in models:
            return None
        ones = np.ones(len(ids), dtype=np.int64)
        cells = Cells((shape,), ones * 0, ones * stage, ones * tokens, np.array(ids, dtype=np.int64))
        return models[quant].predict(cells).ms.tolist()

    return predict
