"""The performance model: the analytic model, and a forest that corrects it.

The analytic model carries what extrapolates (bytes, waves, main loop steps); a forest of extremely randomised trees
on dimensionless features learns what it misses, as the logarithm of measured over analytic time.

Since the features have no units, what a forest learned on one device says something of another. A device without
timings, or with few, borrows the *structure* of a fitted one: its forests, over constants of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog import untrusted
from synth.catalog.devices import Device, get_device
from synth.catalog.files import write_atomically
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.flashinfer.tactics import Tactic, TacticTable, load_table
from synth.performance.forest import LEAF, Forest
from synth.performance.geometry import EXTENTS, Floats, Ints, Sites, least_by, sites
from synth.performance.roofline import DEFAULTS, Hardware, Roofline, TacticColumns, Work, tactic_columns, work
from synth.performance.routing import UNIFORM, Routing
from synth.timings.origin import Origin
from synth.timings.table import Timings, digest

#: Version of the model file and of the features; a file of another one has to be fitted again.
FORMAT = 3
#: Largest model file that is read, in bytes: the shipped ones have 2.3 MB and are kept below 8 MiB.
_MAX_PACKED = 32 << 20
#: … and unpacked. A node of a tree takes 4 bytes there, and 100 as scikit-learn has it.
_MAX_UNPACKED = 64 << 20
#: Largest description in a model file, in bytes: those of the shipped ones have 11 kB.
_MAX_DESCRIPTION = 4 << 20
#: Most trees of a forest and levels of a tree; the shipped models have 64 and 43.
_MAX_TREES, _MAX_LEVELS = 1024, 500
#: Largest leaf: the logarithm of a ratio of times, which is 3 at most in the shipped models.
_MAX_LEAF = 20.0
#: The arrays of a model file.
_FORESTS = ("choice_", "time_", "residual_")
_ARRAYS = tuple(f"{forest}{array}.npy" for forest in _FORESTS for array in ("sizes", "feature", "threshold", "value"))
#: A file's modification time inside the archive, so that equal models are equal bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)
#: Relative times are clipped at this logarithm, and slower timings don't shape the analytic constants.
_REACH = 0.5
#: Tactics predicted within this logarithm of the best are told apart by the choice forest alone.
_CLOSE = 0.3
#: A bucket was swept when this share of its tactics was timed.
SWEPT = 0.95
#: Fewer swept buckets than this don't make a choice forest.
_LEAST_SWEPT = 24
#: … and neither do fewer shapes than this, where there is a structure to borrow: it knows more of other shapes.
_LEAST_SHAPES = 8
#: The residual forest of a device of which only a sample was timed: its trees reproduce every timing.
_SPARSE_TREES = 60
_SPARSE_FEATURES = 0.9
_PARAMETERS = ("choice_trees", "time_trees", "leaf", "features", "near", "far", "seed")


@dataclass(frozen=True)
class Cells:
    """Cells to predict.

    Attributes
    ----------
    shapes : sequence of MoEShape
    shape : ndarray of int64, shape (cells,)
        Index into `shapes`.
    stage, tokens, tactic : ndarray of int64, shape (cells,)
        Stage 1 or 2, tokens in the batch, tactic id.
    routing : Routing
        How tokens spread over the experts, for all cells; that of every timing unless given.
    """

    shapes: Sequence[MoEShape]
    shape: Ints
    stage: Ints
    tokens: Ints
    tactic: Ints
    routing: Routing = UNIFORM

    def __len__(self) -> int:
        return len(self.shape)

    @classmethod
    def of(cls, timings: Timings) -> Cells:
        """Return the cells of a table of timings, row by row."""
        columns = (timings.shape, timings.stage, timings.tokens, timings.tactic)
        shape, stage, tokens, tactic = (c.astype(np.int64) for c in columns)
        return cls(timings.shapes, shape, stage, tokens, tactic)

    def select(self, rows: NDArray[Any]) -> Cells:
        """Return some of the cells."""
        part = (self.shape[rows], self.stage[rows], self.tokens[rows], self.tactic[rows])
        return Cells(self.shapes, *part, self.routing)

    def sites(self) -> tuple[Sites, Ints]:
        """Return the geometry of each distinct (shape, stage, tokens), and each cell's row in it."""
        key = (self.shape * 2 + (self.stage - 1)) * (int(self.tokens.max(initial=0)) + 1) + self.tokens
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        found = sites(self.shapes, self.shape[first], self.stage[first], self.tokens[first], self.routing)
        return found, inverse.astype(np.int64)


@dataclass(frozen=True)
class Prediction:
    """How long cells take.

    Attributes
    ----------
    ms : ndarray of float64, shape (cells,)
        Predicted time. Within a site the order of close tactics is the choice forest's.
    log_sd : ndarray of float64, shape (cells,)
        Standard deviation of the logarithm of `ms`.
    choice_sd : ndarray of float64, shape (cells,)
        How far the trees disagree on the logarithm of a cell's time beside the others of its bucket; not calibrated.
    """

    ms: Floats
    log_sd: Floats
    choice_sd: Floats


class PerformanceModel:
    """Predicts how long a cell takes on one device under one quantization.

    Two forests correct the analytic model. The *choice* forest predicts log(ms / best ms of the bucket), less half of
    what the analytic model says of it: what tells close tactics apart. The *time* forest predicts
    log(ms / analytic ms): absolute times, for margins and durations.

    The best of a bucket is only known where it was swept, so that the choice forest is fitted on swept buckets. Where
    there are hardly any, a *residual* forest takes the place of both: it is fitted on all timings and reproduces them.
    It corrects what is believed without timings: the analytic model, or one with the structure of another device.

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

    def fit(self, timings: Timings) -> PerformanceModel:
        """Fit all rows of `timings`, repeats averaged first.

        Raises
        ------
        SynthError
            When there are no timings or the device is unknown.
        """
        table = timings.averaged()
        if not len(table):
            raise SynthError(f"no timings to fit for {timings.origin.device} {timings.origin.quant}")
        self._bind(timings.origin, timings.table)
        fitted = np.unique(table.shape).tolist()
        self.shapes_ = tuple((timings.labels[i], str(timings.shapes[i])) for i in fitted)
        self.digest_ = digest(timings)
        keys, bucket = table.buckets()
        swept = swept_buckets(table, keys, bucket)
        few_shapes = self.start is not None and len(np.unique(keys[swept, 0])) < _LEAST_SHAPES
        if swept.sum() < _LEAST_SWEPT or few_shapes:
            start = self.start or PerformanceModel.analytic(self.origin_, self._table)
            return self._fit_sample(Cells.of(table), table.ms, start)
        swept_row = swept[bucket]
        lost = np.where(swept_row, np.minimum(_relative(table), _REACH), 0.0)
        rng = np.random.default_rng(self.seed)
        fallback = np.isin(table.tactic, [self._table.fallback_id(stage) for stage in STAGES])
        keep = np.flatnonzero((lost < self.near) | fallback | (rng.random(len(table)) < self.far))
        cells = Cells.of(table)
        site, row = cells.sites()
        w = self._work(site, row, cells)
        reach = np.flatnonzero(lost < _REACH)
        self.roofline_ = Roofline.fit(
            w.select(reach), cells.tactic[reach], self._columns, self._hardware, table.ms[reach], seed=self.seed
        )
        analytic = self._analytic(w, cells)
        best = least_by(row, analytic, len(site)) if swept.all() else self._least_on_grid(cells)
        relative = analytic / best[row]
        x = _features(
            site, row[keep], cells.tactic[keep], w.select(keep), relative[keep], self._columns, self._hardware
        )
        lost, analytic, ms, known = lost[keep], analytic[keep], table.ms[keep], swept_row[keep]
        weight = np.exp(-5.0 * lost[known])
        target = lost[known] - _expected(relative[keep][known])
        self.choice_ = self._grow(x[known], target, weight, self.choice_trees, self.seed)
        self.time_ = self._grow(x, np.log(ms / analytic), None, self.time_trees, self.seed + 1)
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
        model = cls(seed=seed)
        model._bind(start.origin_, start.table)
        return model._fit_sample(cells, ms, start)

    def _fit_sample(self, cells: Cells, ms: Floats, start: PerformanceModel) -> PerformanceModel:
        from sklearn.ensemble import ExtraTreesRegressor

        site, row = cells.sites()
        w = self._work(site, row, cells)
        self.roofline_, self.borrowed_ = start.roofline_, start.borrowed_
        self.choice_, self.time_ = start.choice_, start.time_
        if self.time_ is None:
            self.roofline_ = Roofline.fit(
                w, cells.tactic, self._columns, self._hardware, ms, seed=self.seed, start=start.roofline_
            )
        analytic = self._analytic(w, cells)
        relative = analytic / self._least_on_grid(cells)[row]
        x = _features(site, row, cells.tactic, w, relative, self._columns, self._hardware)
        forest = ExtraTreesRegressor(
            _SPARSE_TREES, max_features=_SPARSE_FEATURES, n_jobs=self.jobs, random_state=self.seed
        )
        before = analytic if self.time_ is None else self._structural_ms(cells)
        self.residual_ = Forest.of(forest.fit(x, np.log(ms / before)).estimators_)
        return self

    def _structural_ms(self, cells: Cells) -> Floats:
        """Return what the structure says of cells, asked beside all the other tactics of their sites."""
        _, row = cells.sites()
        found = np.empty(len(cells))
        for stage, at, full in self._grids(cells):
            ids = np.array(self._table.ids(stage), dtype=np.int64)
            ms = self._before_timings(*self._inputs(full)).ms.reshape(len(at), len(ids))
            position = np.full(int(row.max()) + 1, -1)
            position[row[at]] = np.arange(len(at))
            mine = np.flatnonzero(cells.stage == stage)
            found[mine] = ms[position[row[mine]], np.searchsorted(ids, cells.tactic[mine])]
        return found

    def _least_on_grid(self, cells: Cells) -> Floats:
        """Return the least analytic time of all tactics at each of the cells' sites, shape (sites,)."""
        _, row = cells.sites()
        least = np.full(int(row.max(initial=-1)) + 1, np.inf)
        for _, at, full in self._grids(cells):
            least[row[at]] = self.predict_analytic(full).reshape(len(at), -1).min(axis=1)
        return least

    def _grids(self, cells: Cells) -> Iterator[tuple[int, Ints, Cells]]:
        """Yield each stage, one of the cells of each of its sites, and all tactics at those sites."""
        _, row = cells.sites()
        _, first = np.unique(row, return_index=True)
        for stage in STAGES:
            ids = np.array(self._table.ids(stage), dtype=np.int64)
            at = first[cells.stage[first] == stage]
            if len(at):
                shape, stages, tokens = (np.repeat(c[at], len(ids)) for c in (cells.shape, cells.stage, cells.tokens))
                yield stage, at, Cells(cells.shapes, shape, stages, tokens, np.tile(ids, len(at)), cells.routing)

    def _grow(self, x: NDArray[np.float32], y: Floats, weight: Floats | None, trees: int, seed: int) -> Forest:
        from sklearn.ensemble import ExtraTreesRegressor

        forest = ExtraTreesRegressor(
            trees, min_samples_leaf=self.leaf, max_features=self.features, n_jobs=self.jobs, random_state=seed
        )
        return Forest.of(forest.fit(x, y, sample_weight=weight).estimators_)

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
        model._bind(origin, table)
        model.roofline_ = roofline or Roofline()
        if structure is not None:
            model.choice_, model.time_, model.spread_ = structure.choice_, structure.time_, structure.spread_
            model.borrowed_ = f"{structure.origin_.device} {structure.origin_.quant}"
        return model

    @property
    def analytical(self) -> bool:
        """Whether no timing of its device went into the model."""
        return not self.digest_ and self.residual_ is None

    @property
    def table(self) -> TacticTable:
        """The tactics that this model predicts."""
        return self._table

    @property
    def columns(self) -> TacticColumns:
        """The same tactics as arrays."""
        return self._columns

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
        if self.time_ is None and self.residual_ is None:
            return _uncorrected(self.predict_analytic(cells))
        inputs = self._inputs(cells)
        before = self._before_timings(*inputs)
        if self.residual_ is None:
            return before
        correction, sd = self.residual_.predict(inputs[-1])
        return Prediction(before.ms * np.exp(correction), self.spread_ * np.hypot(sd, _LEAST_SD), sd)

    def _before_timings(self, row: Ints, analytic: Floats, relative: Floats, x: NDArray[np.float32]) -> Prediction:
        """Predict cells of which these are the inputs, without what a sample of timings says."""
        if self.time_ is None or self.choice_ is None:
            return _uncorrected(analytic)
        log_ms, sd = self.time_.predict(x)
        log_ms += np.log(analytic)
        log_sd = self.spread_ * np.hypot(sd, _LEAST_SD)
        correction, choice_sd = self.choice_.predict(x)
        relative = _expected(relative) + correction
        # Anchor: the chosen tactic has its absolute time; close ones follow the choice forest, far ones their own.
        count = int(row.max()) + 1
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
        inputs = self._inputs(cells)
        return self.residual_.each(inputs[-1]) + np.log(self._before_timings(*inputs).ms)

    def _inputs(self, cells: Cells) -> tuple[Ints, Floats, Floats, NDArray[np.float32]]:
        """Return each cell's site, its analytic time, that over the best of its site's cells, and the features."""
        site, row = cells.sites()
        w = self._work(site, row, cells)
        analytic = self._analytic(w, cells)
        relative = analytic / least_by(row, analytic, len(site))[row]
        return row, analytic, relative, _features(site, row, cells.tactic, w, relative, self._columns, self._hardware)

    def knows(self, shape: MoEShape) -> bool:
        """Return whether timings of `shape` were fitted."""
        return str(shape) in {text for _, text in self.shapes_}

    def predict_analytic(self, cells: Cells) -> Floats:
        """Return the analytic part alone, in ms: ten times faster, good enough to rule tactics out."""
        site, row = cells.sites()
        return self._analytic(self._work(site, row, cells), cells)

    def _work(self, site: Sites, row: Ints, cells: Cells) -> Work:
        return work(site, row, cells.tactic, self._columns, self._hardware)

    def _analytic(self, w: Work, cells: Cells) -> Floats:
        return self.roofline_.predict(w, cells.tactic, self._columns, self._hardware)

    def save(self, path: Path) -> None:
        """Write the model to `path`: a zip of plain arrays and a JSON text, the same bytes for the same model."""
        meta = {
            "format": FORMAT,
            "origin": dataclasses.asdict(self.origin_),
            "table": {str(i): str(self._table.tactic(i)) for i in range(len(self._table))},
            "gemm1": len(self._table.gemm1),
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
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            _add(archive, "model.json", json.dumps(meta, indent=1, sort_keys=True).encode())
            for name, array in self._arrays().items():
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, array, allow_pickle=False)
                _add(archive, f"{name}.npy", buffer.getvalue())
        write_atomically(path, out.getvalue())

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
            files = _unpack(path)
            meta = untrusted.loads(files["model.json"])
            if meta["format"] != FORMAT or tuple(meta["features"]) != FEATURES:
                raise SynthError(f"{path}: a model of another version of synth; {way_out}")
            arrays = {name.removesuffix(".npy"): _array(data) for name, data in files.items() if name.endswith(".npy")}
            origin = Origin(**meta["origin"])
            for field, asked in (("device", device), ("quant", quant), ("flashinfer", flashinfer)):
                if asked not in (None, getattr(origin, field)):
                    raise SynthError(f"a model of {field} {getattr(origin, field)}, not {asked}")
            tactics = [Tactic.parse(meta["table"][str(i)]) for i in range(len(meta["table"]))]
            split = int(meta["gemm1"])
            if not 0 < split < len(tactics):
                raise SynthError("its tactics are not those of two stages")
            known = _known_table(origin)
            model = cls(**_parameters(meta["parameters"]))
            table = TacticTable(
                origin.flashinfer, origin.arch, origin.quant, tuple(tactics[:split]), tuple(tactics[split:])
            )
            if known not in (None, table) or any(0 in (*t.tile, *t.cluster) for t in tactics):
                raise SynthError("its tactics are not those of its FlashInfer version")
            model._bind(origin, table)
            model.shapes_ = tuple((_name(label), str(MoEShape.parse(shape))) for label, shape in meta["shapes"])
            model.digest_ = _name(meta["digest"])
            model.roofline_ = Roofline(tuple(float(meta["roofline"][name]) for name in DEFAULTS))
            if not all(-20.0 <= x <= 6.0 for x in model.roofline_.constants):
                raise SynthError("its constants are out of range")
            model.choice_, model.time_, model.residual_ = (
                _forest({k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})
                for prefix in _FORESTS
            )
            if (model.choice_ is None) != (model.time_ is None):
                raise SynthError("it has one of two forests that go together")
            model.borrowed_ = _name(meta["borrowed"])
            model.spread_ = float(meta["spread"])
            if not 0.0 < model.spread_ < math.inf:
                raise SynthError("its spread is no positive number")
            model.held_out_ = dict(meta["held_out"])
            model.calibration_ = {str(k): float(v) for k, v in meta["calibration"].items()}
            if not all(map(math.isfinite, model.calibration_.values())):
                raise SynthError("its calibration is not made of numbers")
        except FileNotFoundError:
            raise SynthError(f"{path}: no such model; {way_out}") from None
        except SynthError as e:
            text = str(e) if str(path) in str(e) else f"{path}: {e}"
            raise SynthError(text if way_out in text else f"{text}; {way_out}") from None
        except Exception as e:  # zipfile, zlib, json and numpy raise a dozen kinds for damaged input
            raise SynthError(f"{path}: not a model of synth ({type(e).__name__}); {way_out}") from None
        return model

    def fingerprint(self) -> str:
        """Return a digest of what the model predicts with."""
        text = json.dumps([FORMAT, self.digest_, self.roofline_.constants, self.spread_])
        h = hashlib.sha256(text.encode())
        for array in self._arrays().values():
            h.update(array.tobytes())
        return h.hexdigest()

    def _arrays(self) -> dict[str, NDArray[Any]]:
        forests = {"choice_": self.choice_, "time_": self.time_, "residual_": self.residual_}
        return {p + k: v for p, forest in forests.items() if forest for k, v in forest.arrays().items()}

    def _bind(self, origin: Origin, table: TacticTable) -> None:
        self.origin_ = origin
        self._table = table
        device: Device = get_device(origin.device)
        self._hardware = Hardware.of(device, origin.quant)
        self._columns: TacticColumns = tactic_columns(table, self._hardware)
        self.shapes_, self.digest_, self.borrowed_ = (), "", ""
        self.choice_ = self.time_ = self.residual_ = None
        self.spread_ = 1.0
        self.held_out_, self.calibration_ = {}, {}


def _uncorrected(analytic: Floats) -> Prediction:
    """Return the analytic times in ms as a prediction."""
    sd = np.full(len(analytic), _ANALYTIC_SD)
    return Prediction(analytic, sd, sd / 2.0)


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


#: Standard deviation of the analytic model's logarithm where nothing was timed: its error on the H200, widened.
_ANALYTIC_SD = 0.25
#: Deviation of the logarithm of close tactics' relative times where a structure is borrowed: what of it doesn't hold.
_BORROWED_SD = 0.03
#: Least standard deviation of a fitted prediction's logarithm before calibration: repeats differ by as much.
_LEAST_SD = 0.004

#: The forest's inputs, in order; all but the tactic's own are ratios or logarithms.
FEATURES = (
    "tokens", "rows", "k_steps", "tiles_n", "active", "waves", "dram_time", "flops_time", "tiles_m_per_expert",
    "activation_size", "n", "k", "experts", "rows_per_expert", "waves_ceil", "waves_ceil_ratio", "panels", "sweeps",
    "swept_size", "expert_size", "inner_size", "flops_over_dram", "output_share", "activation_share", "finalize_share",
    "n_padding", "m_padding", "fill", "large",
    *(f"tiles_{e}" for e in EXTENTS[:-1]), *(f"fill_{e}" for e in EXTENTS[:-1]),
    "m_tile", "n_tile", "cluster_m", "cluster_n", "sm80", "finalize", "swap", "stages", "top_k", "gated", "stage",
    "analytic_relative",
)  # fmt: skip


def _features(
    s: Sites, site: Ints, tactic: Ints, w: Work, relative: Floats, columns: TacticColumns, hardware: Hardware
) -> NDArray[np.float32]:
    """Return the forests' input, shape (cells, len(FEATURES)).

    `relative` is a cell's analytic time over the best of its bucket. What depends on the site alone is computed once
    a site.
    """
    log = np.log
    l2 = hardware.l2_bytes
    rows_per_expert = s.rows / s.active
    per_site = {
        "tokens": log(s.tokens),
        "rows": log(s.rows),
        "active": log(s.active),
        "activation_size": log(s.rows * s.k * hardware.activation_bytes / l2),
        "n": log(s.n),
        "k": log(s.k),
        "experts": log(s.experts),
        "rows_per_expert": log(rows_per_expert),
        "expert_size": log(s.n * s.k * hardware.weight_bytes / l2),
        "large": s.large,
        "top_k": s.top_k,
        "gated": s.gated,
        "stage": s.stage,
        **{f"tiles_{e}": s.tiles[:, i] / s.active for i, e in enumerate(EXTENTS[:-1])},
        **{f"fill_{e}": s.rows / (s.tiles[:, i] * e) for i, e in enumerate(EXTENTS[:-1])},
    }
    per_tactic = {
        "m_tile": columns.m,
        "n_tile": columns.n,
        "cluster_m": columns.cluster_m,
        "cluster_n": columns.cluster_n,
        "sm80": columns.sm80,
        "finalize": columns.finalize,
        "swap": columns.swap,
        "stages": columns.stages,
    }
    dram = w.dram_bytes
    per_cell = {
        "k_steps": log(w.k_steps),
        "tiles_n": log(w.tiles_n),
        "waves": log(w.waves),
        "dram_time": log(dram / hardware.dram),
        "flops_time": log(w.padded_flops / hardware.flops),
        "tiles_m_per_expert": log(w.tiles_m / s.active[site]),
        "waves_ceil": log(w.waves_ceil),
        "waves_ceil_ratio": np.clip(log(w.waves_ceil / np.maximum(w.waves, 1e-3)), -1.0, 8.0),
        "panels": np.log1p(w.panel_bytes / dram),
        "sweeps": np.log1p(w.sweep_bytes / (1.0 + (l2 / w.inner_bytes) ** 4) / dram),
        "swept_size": np.log1p(w.sweep_bytes / dram),
        "inner_size": log(w.inner_bytes / l2),
        "flops_over_dram": log(w.padded_flops / hardware.flops / (dram / hardware.dram)),
        "output_share": w.output_bytes / dram,
        "activation_share": w.activation_bytes / dram,
        "finalize_share": np.log1p(w.finalize_bytes / dram),
        "n_padding": w.tiles_n * columns.n[tactic] / s.n[site],
        "m_padding": w.tiles_m * columns.m[tactic] / s.rows[site],
        "fill": log(w.flops / w.padded_flops),
        "analytic_relative": np.minimum(log(relative), 1.5),
    }
    x = np.empty((len(site), len(FEATURES)), dtype=np.float32)
    for i, name in enumerate(FEATURES):
        if name in per_cell:
            x[:, i] = per_cell[name]
        elif name in per_site:
            x[:, i] = per_site[name].astype(np.float32)[site]
        else:
            x[:, i] = per_tactic[name].astype(np.float32)[tactic]
    return x


def swept_buckets(timings: Timings, keys: Ints, bucket: Ints) -> NDArray[np.bool_]:
    """Return which of the buckets of :meth:`synth.timings.table.Timings.buckets` were swept, shape (buckets,).

    A bucket is swept where nearly all tactics that can run on its shape were timed.
    """
    table = timings.table
    smem = smem_block_bytes(timings.origin.device, table.arch)
    kinds = {(i, stage) for i, stage, _ in keys.tolist()}
    runnable = {(i, stage): len(runnable_ids(table, stage, timings.shapes[i], smem)) for i, stage in kinds}
    tactics = np.array([runnable[i, stage] for i, stage, _ in keys.tolist()])
    return np.asarray(np.bincount(bucket, minlength=len(keys)) >= SWEPT * tactics)


def _relative(table: Timings) -> Floats:
    """Return log(ms / best ms of the bucket) of every row."""
    keys, bucket = table.buckets()
    return np.log(table.ms / least_by(bucket, table.ms, len(keys))[bucket])


def _expected(relative: Floats) -> Floats:
    """Return what the choice forest corrects: half of the clipped logarithm of the analytic relative time.

    All of it would pass on the analytic model's errors, none of it would leave what it knows of shapes far from any
    fitted one to the forest, which can't extrapolate.
    """
    return np.asarray(0.5 * np.minimum(np.log(relative), _REACH))


def _known_table(origin: Origin) -> TacticTable | None:
    """Return the table of the origin's FlashInfer version, None where there is none."""
    try:
        return load_table(origin.arch, origin.quant, origin.flashinfer)
    except SynthError:
        return None


def _unpack(path: Path) -> dict[str, bytes]:
    """Return a model archive's files: those of a model only, each once, never more bytes than declared.

    They are read into memory and nothing is written, so that a name such as ``../x`` would lead nowhere; it is refused
    all the same.
    """
    try:
        data = untrusted.read_bytes(path, _MAX_PACKED, "model")
    except SynthError:
        if not path.exists():
            raise FileNotFoundError from None
        raise
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        names = {i.filename for i in infos}
        if sum(i.file_size for i in infos) > _MAX_UNPACKED or len(names) != len(infos):
            raise SynthError("larger than any model")
        if strange := sorted(names - {"model.json", *_ARRAYS}):
            raise SynthError(f"it holds {untrusted.shown(strange[0])}, which no model has")
        files = {}
        for info in infos:
            # Other methods have windows of gigabytes.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise SynthError("it is packed in another way than models are")
            # A plain read() would unpack everything first and cut it to the declared size afterwards.
            with archive.open(info) as f:
                files[info.filename] = f.read(info.file_size + 1)
    if len(files.get("model.json", b"")) > _MAX_DESCRIPTION:
        raise SynthError("its description is larger than any model's")
    return files


def _name(value: object) -> str:
    """Return a text that may be printed."""
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise SynthError(f"{untrusted.shown(value)} is no name")
    return value


def _parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.keys() - set(_PARAMETERS) or not all(type(v) in (int, float) for v in values.values()):
        raise SynthError("its parameters are not those of a model")
    return dict(values)


def _forest(arrays: Mapping[str, NDArray[Any]]) -> Forest | None:
    """Return the forest of some arrays, None of none; what would take long to walk through or overflow is refused."""
    if not arrays:
        return None
    sizes, feature, value = (arrays.get(name, np.zeros(0)) for name in ("sizes", "feature", "value"))
    if len(sizes) > _MAX_TREES:
        raise SynthError(f"its forest has more than {_MAX_TREES} trees")
    if len(value) and not np.abs(value.astype(np.float64)).max() <= _MAX_LEAF:
        raise SynthError(f"its forest predicts logarithms beyond {_MAX_LEAF:g}")
    forest = Forest.from_arrays(arrays, len(FEATURES))
    inner = np.concatenate([[0], np.cumsum(feature != LEAF)])
    start = 0
    for size in sizes.tolist():
        # Nodes lie level by level: those of the next one are the children of this one's.
        levels, first, last = 0, start, start + 1
        while first < last:
            first, last, levels = last, last + 2 * int(inner[last] - inner[first]), levels + 1
            if levels > _MAX_LEVELS:
                raise SynthError(f"its forest has a tree of more than {_MAX_LEVELS} levels")
        start += size
    return forest


def _array(data: bytes) -> NDArray[Any]:
    """Read a one-dimensional array of numbers, whose size must be that of the data."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError("another version of the array format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    rest = data[stream.tell() :]
    if dtype.hasobject or len(shape) != 1 or shape[0] < 0 or shape[0] * dtype.itemsize != len(rest):
        raise ValueError("not an array of numbers")
    return np.frombuffer(rest, dtype=dtype)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)
