"""Which cells to time, in which order, and what that will cost.

A plan is a list of :class:`Batch`: the candidates of one (layer, pass, stage, bucket), the most promising first. How
far down each list a run goes is either fixed (all of it, or a fraction) or left to a budget of seconds, which
:func:`depth_for` turns into a depth again and again while the run learns how long timings really take.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from synth.catalog.devices import find_devices, slug
from synth.catalog.schemes import STAGES
from synth.catalog.shapes import ACTIVATIONS, Deployment, MoEShape, check_supported
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.legality import runnable_ids, smem_block_bytes
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, TacticTable, load_table
from synth.timings.origin import DEFAULT_POLICY

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: ``predict(shape, quant, stage, tokens, ids)`` returns one time in ms for each id, or None where it can't say.
Predict = Callable[[MoEShape, str, int, int, Sequence[int]], "Sequence[float] | None"]

#: Launches of one timing: warm-ups, and one for each of FlashInfer's routing samples.
LAUNCHES = 3 + 16
#: What a timing costs beside its launches, in seconds; most of it is the 5 ms delay kernel.
OVERHEAD_S = 0.005
#: Without a reason to time them all, candidates predicted to be this many times slower than the best come last.
SLOW = 6.0
#: The largest bucket unless another is asked for: FlashInfer's own default.
DEFAULT_MAX_TOKENS = 8192

# Starting a worker (imports, loading the module), filling the weights, and one bucket's inputs.
_START_S = 20.0
_FILL_BYTES_PER_S = 30e9
_BUCKET_S = 0.05

# Bits of one activation and one weight, block scales included.
_BITS = {"bf16": (16.0, 16.0), "fp8": (8.0, 8.0), "nvfp4": (4.5, 4.5), "mxfp8_mxfp4": (8.25, 4.25)}


@dataclass(frozen=True, order=True)
class Layer:
    """An MoE layer to time.

    Attributes
    ----------
    shape : MoEShape
        The layer on one rank.
    quant : str
        One of :data:`synth.flashinfer.tactics.QUANTS`.
    label : str
        What a person calls it, for example ``"glm-5-tp8"``.
    activation : str
        A key of :data:`synth.catalog.shapes.ACTIVATIONS`.
    """

    shape: MoEShape
    quant: str
    label: str
    activation: str = "swiglu"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise SynthError(f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")
        if ACTIVATIONS[self.activation] != self.shape.gated:
            what = "has a gate" if ACTIVATIONS[self.activation] else "has no gate"
            raise SynthError(f"{self.shape}: activation {self.activation} {what} and the shape says otherwise")

    def __str__(self) -> str:
        return f"{self.label} {self.quant}"

    @classmethod
    def of(cls, deployment: Deployment) -> Layer:
        """Return the layer of a model's deployment."""
        return cls(deployment.shape, deployment.quant, deployment.label, deployment.activation)

    @classmethod
    def by_hand(cls, shape: MoEShape, quant: str, label: str | None = None, activation: str | None = None) -> Layer:
        """Return a layer that no model of the catalogue has; it is called by its shape unless `label` is given."""
        return cls(shape, quant, label or str(shape), activation or ("swiglu" if shape.gated else "relu2"))


class Cell(NamedTuple):
    """One timing to be taken."""

    layer: Layer
    pass_: int
    stage: int
    tokens: int
    tactic: int

    def __str__(self) -> str:
        return f"{self.layer} gemm{self.stage} {self.tokens} tokens tactic {self.tactic}"


@dataclass(frozen=True)
class Batch:
    """The candidates of one (layer, pass, stage, bucket).

    Attributes
    ----------
    layer : int
        Index into the plan's layers.
    pass_, stage, tokens : int
        The rest of the cell.
    tactics : tuple of int
        Ids, the most promising first.
    ms : tuple of float
        Predicted time of each.
    limit : int
        How many of them to time; a budget may time fewer.
    """

    layer: int
    pass_: int
    stage: int
    tokens: int
    tactics: tuple[int, ...]
    ms: tuple[float, ...]
    limit: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What a plan holds only once."""
        return self.layer, self.pass_, self.stage, self.tokens


@dataclass(frozen=True)
class Plan:
    """What to time, on which kind of device.

    Attributes
    ----------
    device, arch, flashinfer : str
        As in :class:`synth.timings.origin.Origin`.
    layers : tuple of Layer
        Each (shape, quant) once.
    batches : tuple of Batch
        In the order of timing.
    passes : tuple of int
        Pass numbers.
    budget_s : float or None
        Seconds of measuring on each GPU.
    seed : int
        Seed of every shuffle.
    policy : mapping
        Timing policy.
    """

    device: str
    arch: str
    flashinfer: str
    layers: tuple[Layer, ...]
    batches: tuple[Batch, ...]
    passes: tuple[int, ...]
    budget_s: float | None
    seed: int
    policy: Mapping[str, Any]

    def __len__(self) -> int:
        return sum(batch.limit for batch in self.batches)

    @functools.cached_property
    def identity(self) -> str:
        """Equal for plans that share a journal: same device, layers, buckets and passes, however much of them."""
        request = {
            "device": self.device,
            "arch": self.arch,
            "flashinfer": self.flashinfer,
            "policy": dict(self.policy),
            "layers": [[str(x.shape), x.quant, x.label, x.activation] for x in self.layers],
            "buckets": sorted({(b.layer, b.stage, b.tokens) for b in self.batches}),
            "passes": self.passes,
        }
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]

    def journal_path(self, root: Path) -> Path:
        """Return the journal of this plan under a measurements folder; the same plan always has the same."""
        first = f"{self.layers[0].label}-{self.layers[0].quant}"
        more = f"-and-{len(self.layers) - 1}-more" if len(self.layers) > 1 else ""
        return root / "journals" / f"{slug(self.device)}-{slug(first)}{more}-{self.identity[:10]}.jsonl"

    def table(self, layer: Layer) -> TacticTable:
        """Return the tactics of a layer."""
        return load_table(self.arch, layer.quant, self.flashinfer)

    def cell(self, batch: Batch, tactic: int) -> Cell:
        """Return one cell of a batch."""
        return Cell(self.layers[batch.layer], batch.pass_, batch.stage, batch.tokens, tactic)

    def cells(self) -> Iterator[Cell]:
        """Yield every cell that may be timed, the most promising of each batch first."""
        return (self.cell(batch, t) for batch in self.batches for t in batch.tactics[: batch.limit])

    def order(self, batch: Batch, tactics: Sequence[int]) -> list[int]:
        """Return `tactics` in the order of timing: shuffled, so that drift favours none, and always the same way."""
        shuffled = sorted(tactics)
        random.Random(f"{self.seed}/{self.layers[batch.layer]}/{batch.key}").shuffle(shuffled)
        return shuffled

    def reference(self, layer: int) -> tuple[int, int, int] | None:
        """Return (stage, tokens, tactic) of the cell of a layer that is timed again and again to see drift."""
        batches = [b for b in self.batches if b.layer == layer and b.limit]
        if not batches:
            return None
        stage = min(b.stage for b in batches)
        tokens = sorted({b.tokens for b in batches if b.stage == stage})
        middle = tokens[len(tokens) // 2]
        batch = next(b for b in batches if (b.stage, b.tokens) == (stage, middle))
        return stage, middle, batch.tactics[0]


def make_plan(
    layers: Sequence[Layer],
    device: str,
    arch: str,
    flashinfer: str = DEFAULT_FLASHINFER,
    *,
    fraction: float | None = None,
    buckets: Sequence[int] | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    passes: Sequence[int] = (1,),
    budget_s: float | None = None,
    predict: Predict | None = None,
    seed: int = 0,
    policy: Mapping[str, Any] = DEFAULT_POLICY,
) -> Plan:
    """Plan the timings of some layers.

    Without `fraction` and `budget_s` every tactic is timed. A layer whose (shape, quant) was already named is
    left out.

    Parameters
    ----------
    layers : sequence of Layer
        In the order wanted.
    device, arch, flashinfer : str
        As in :class:`synth.timings.origin.Origin`; `arch` is the one whose tactics run there.
    fraction : float, optional
        Share of every bucket's tactics to time, at least one: those predicted fastest, or, without `predict`, a
        spread that gives each tactic its turn.
    buckets : sequence of int, optional
        Token counts; FlashInfer's own up to `max_tokens` if not given.
    passes : sequence of int
        Pass numbers; each times everything once.
    budget_s : float, optional
        Seconds of measuring on each GPU, set-up not included.
    predict : callable, optional
        See :data:`Predict`.
    seed : int
        Seed of the spread and of the order of timing.
    policy : mapping
        Timing policy, as the measurements files will say it.

    Raises
    ------
    SynthError
        When a number is out of range, no layer is given, or FlashInfer has no kernel for one.
    """
    if not layers:
        raise SynthError("nothing to time; name a --model, a --config or a shape by hand")
    if fraction is not None and not 0 < fraction <= 1:
        raise SynthError(f"--fraction {fraction:g} is not above 0 and at most 1")
    if budget_s is not None and not 0 < budget_s < math.inf:
        raise SynthError(f"--budget {budget_s:g} is not a positive number of seconds")
    if not passes or min(passes) < 1 or len(set(passes)) < len(passes):
        raise SynthError(f"passes {', '.join(map(str, passes)) or '(none)'} are not different numbers from 1")
    counts = tuple(sorted(set(buckets))) if buckets is not None else token_buckets(max_tokens, flashinfer)
    if not counts or counts[0] < 1:
        raise SynthError("--buckets needs token counts from 1")
    named: dict[tuple[MoEShape, str], Layer] = {}
    for layer in layers:
        named.setdefault((layer.shape, layer.quant), layer)
    unique = tuple(named.values())
    batches: list[Batch] = []
    for index, layer in enumerate(unique):
        check_supported(layer.shape, layer.quant)
        table = load_table(arch, layer.quant, flashinfer)
        lists = {
            (stage, tokens): _candidates(layer, device, table, stage, tokens, turn, fraction, predict, seed)
            for stage in STAGES
            for turn, tokens in enumerate(counts)
        }
        sites = list(itertools.product(STAGES, counts))
        if budget_s is not None:
            # What the first buckets teach about durations must hold for the rest.
            random.Random(f"{seed}/{layer}").shuffle(sites)
        for pass_, (stage, tokens) in itertools.product(passes, sites):
            tactics, ms = lists[stage, tokens]
            limit = len(tactics) if fraction is None else max(1, math.ceil(fraction * len(tactics) - 1e-9))
            batches.append(Batch(index, pass_, stage, tokens, tactics, ms, limit))
    return Plan(device, arch, flashinfer, unique, tuple(batches), tuple(passes), budget_s, seed, dict(policy))


def _candidates(
    layer: Layer,
    device: str,
    table: TacticTable,
    stage: int,
    tokens: int,
    turn: int,
    fraction: float | None,
    predict: Predict | None,
    seed: int,
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ids of a stage that can run, the most promising first, and their predicted times."""
    ids = list(runnable_ids(table, stage, layer.shape, smem_block_bytes(device, table.arch), layer.activation))
    predicted = predict(layer.shape, layer.quant, stage, tokens, ids) if predict is not None else None
    if predicted is not None:
        ms = dict(zip(ids, map(float, predicted), strict=True))
        order = sorted(ids, key=lambda i: (ms[i], i))
        return tuple(order), tuple(ms[i] for i in order)
    random.Random(f"{seed}/{layer.shape}/{layer.quant}/{stage}").shuffle(ids)
    # The next bucket goes on where this one stops, so that a small fraction still visits every tactic.
    share = max(1, math.ceil((fraction or 0.1) * len(ids) - 1e-9))
    start = turn * share % len(ids)
    order = ids[start:] + ids[:start]
    return tuple(order), (rough_ms(layer.shape, layer.quant, stage, tokens, device),) * len(order)


# --- what it costs ---------------------------------------------------------------------------------------------------


_Ms = TypeVar("_Ms", float, "NDArray[np.float64]")


def timing_seconds(ms: _Ms) -> _Ms:
    """Return how long it takes to time a tactic that runs `ms`, or each of some."""
    return LAUNCHES * ms / 1000 + OVERHEAD_S


def rough_ms(shape: MoEShape, quant: str, stage: int, tokens: int, device: str) -> float:
    """Return roughly what the average tactic takes, in ms, for predicting durations where there is no model.

    Weights of the active experts from memory or padded rows through the tensor cores, whichever is longer. The
    constants are such that each of the 30 full sweeps of an H200 comes out within 25 %.
    """
    bandwidth, peak = _peaks(device, quant)
    n, k = shape.gemm_nk(stage)
    activation, weight = (bits / 8 for bits in _BITS[quant])
    active = shape.experts * -math.expm1(tokens * math.log1p(-min(shape.expert_probability, 1 - 1e-12)))
    rows = tokens * shape.expert_probability * shape.experts
    moved = active * n * k * weight + rows * (k * activation + n * 2)
    padded = active * 128 * math.ceil(rows / active / 128)
    return 0.02 + 1000 * max(moved / (0.4 * bandwidth), 2 * padded * n * k / (0.35 * peak))


def _peaks(device: str, quant: str) -> tuple[float, float]:
    """Return bytes and operations a second; those of a middling card where they aren't public."""
    bandwidth, peak = 1.5e12, 0.4e15 if quant == "bf16" else 0.8e15
    try:
        known = find_devices(device)[0]
    except SynthError:
        return bandwidth, peak
    return (known.dram_gbs or bandwidth / 1e9) * 1e9, known.tflops.get(quant, peak / 1e12) * 1e12


def estimate_memory(shape: MoEShape, quant: str, max_tokens: int) -> int:
    """Return roughly how many bytes of GPU memory timing a layer needs, the CUDA context not included.

    Weights and scales; the layer's input; and twice FlashInfer's profiler workspace for the larger stage, since a
    bucket's is allocated before the last one's is freed (``GemmProfilerBackend::getProfilerWorkspaces``): gathered
    input, GEMM output before the activation, output, and routing maps of 16 samples.
    """
    activation, weight = (bits / 8 for bits in _BITS[quant])
    weights = sum(math.prod(shape.gemm_nk(stage)) for stage in STAGES) * shape.experts * weight
    rows = max_tokens * shape.top_k
    workspace = max(
        rows * (shape.hidden * activation + shape.gemm_nk(1)[0] * 2 + shape.inter * activation),
        rows * (shape.inter * activation + shape.hidden * 2) + max_tokens * shape.hidden * 2,
    )
    routing = 16 * rows * 12
    return int(weights + max_tokens * shape.hidden * activation + 2 * (workspace + routing))


def depth_for(seconds: float, ranks: Sequence[float]) -> float:
    """Return how far down every batch's list `seconds` reach.

    Parameters
    ----------
    seconds : float
        What may be spent.
    ranks : sequence of float
        For each place in the lists, the seconds that all candidates there take together.

    Returns
    -------
    float
        Whole part: every list's first candidates. Fraction: the share of lists that get one more. Infinite when
        everything fits.
    """
    left = max(seconds, 0.0)
    for depth, cost in enumerate(ranks):
        if cost > left:
            return depth + left / cost
        left -= cost
    return math.inf


def rank_costs(costs: Iterable[Sequence[float]]) -> list[float]:
    """Return, for each place in some lists, the sum over the lists."""
    return [sum(column) for column in itertools.zip_longest(*costs, fillvalue=0.0)]


def take(batch: Batch, depth: float) -> int:
    """Return how many candidates of `batch` a depth of :func:`depth_for` gives it, always the same."""
    if depth >= len(batch.tactics):
        return len(batch.tactics)
    whole = int(depth)
    return whole + (_draw(batch.key) < depth - whole)


def worth(batch: Batch, budget: bool) -> int:
    """Return how many candidates come into question: under a budget, none that is predicted to be hopelessly slow."""
    if not budget:
        return batch.limit
    best = min(batch.ms)
    return sum(ms <= SLOW * best for ms in batch.ms[: batch.limit])


@functools.lru_cache(maxsize=65536)
def _draw(key: tuple[int, int, int, int]) -> float:
    """Return a number from 0 to 1 that is fixed for a batch."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big") / 2**32


@dataclass(frozen=True)
class LayerSummary:
    """What a plan does with one layer: cells, predicted seconds of measuring, bytes of GPU memory."""

    label: str
    shape: str
    quant: str
    cells: int
    measuring_s: float
    memory_bytes: int


@dataclass(frozen=True)
class PlanSummary:
    """What a plan will cost, before the first timing.

    Attributes
    ----------
    device, flashinfer : str
        What it is for.
    passes : tuple of int
        Pass numbers.
    layers : tuple of LayerSummary
        In order.
    cells : int
        Timings to take.
    of_cells : int
        Timings that a full sweep would take.
    measuring_s : float
        Predicted seconds of measuring, over all GPUs.
    setup_s : float
        Predicted seconds of set-up (starting, weights, inputs), over all GPUs.
    gpus : int
        GPUs that share the work.
    memory_bytes : int
        The most that a layer needs on one GPU.
    budget_s : float or None
        Seconds of measuring on each GPU.
    """

    device: str
    flashinfer: str
    passes: tuple[int, ...]
    layers: tuple[LayerSummary, ...]
    cells: int
    of_cells: int
    measuring_s: float
    setup_s: float
    gpus: int
    memory_bytes: int
    budget_s: float | None

    @property
    def wall_s(self) -> float:
        """Predicted duration, set-up included."""
        return (self.measuring_s + self.setup_s) / self.gpus

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def summarize(plan: Plan, gpus: int = 1) -> PlanSummary:
    """Predict what `plan` will cost on `gpus` equal GPUs."""
    budget = plan.budget_s is not None
    costs = [[timing_seconds(ms) for ms in b.ms[: worth(b, budget)]] for b in plan.batches]
    depth = math.inf if plan.budget_s is None else depth_for(plan.budget_s * gpus, rank_costs(costs))
    taken = [min(take(b, depth), len(cost)) for b, cost in zip(plan.batches, costs, strict=True)]
    layers = []
    for index, layer in enumerate(plan.layers):
        mine = [i for i, b in enumerate(plan.batches) if b.layer == index]
        layers.append(
            LayerSummary(
                label=layer.label,
                shape=str(layer.shape),
                quant=layer.quant,
                cells=sum(taken[i] for i in mine),
                measuring_s=sum(sum(costs[i][: taken[i]]) for i in mine),
                memory_bytes=estimate_memory(layer.shape, layer.quant, max(plan.batches[i].tokens for i in mine)),
            )
        )
    memory = [x.memory_bytes for x in layers]
    used = sum(1 for n in taken if n)
    return PlanSummary(
        device=plan.device,
        flashinfer=plan.flashinfer,
        passes=plan.passes,
        layers=tuple(layers),
        cells=sum(taken),
        of_cells=sum(len(b.tactics) for b in plan.batches),
        measuring_s=sum(x.measuring_s for x in layers),
        setup_s=gpus * _START_S + sum(memory) / _FILL_BYTES_PER_S + used * _BUCKET_S,
        gpus=gpus,
        memory_bytes=max(memory),
        budget_s=plan.budget_s,
    )
