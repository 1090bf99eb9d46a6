"""How a model's router spreads tokens over its experts.

A **routing** gives every expert of a layer, over all ranks, its share of the tokens. Timings are taken under *uniform*
routing; servers see some experts more often than others. What a kernel does depends on the shares alone, not on which
expert has which, so a routing is kept as the shares from the most to the least popular expert.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.errors import SynthError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Most experts of a layer.
MAX_EXPERTS = 16384
#: Largest Zipf exponent: beyond it all tokens go to the same ``top_k`` experts.
MAX_EXPONENT = 10.0
#: Inclusion probabilities are sampled as multiples of 2^-40.
_ONE = 1 << 40


@dataclass(frozen=True)
class Routing:
    """How tokens spread over the experts of a layer. Make one with its class methods.

    Equal routings are equal whatever they are called.

    Attributes
    ----------
    text : str
        What it is called: as ``--routing`` has it, a file without its folder.
    exponent : float
        Zipf exponent of the experts' popularity.
    hot : int
        Experts that every token goes to; the rest of its picks is uniform over the others.
    weights : tuple of float
        Shares of counted tokens, descending, summing to 1; empty without counts.
    padded : bool
        The counts name their experts and leave out those without tokens, so that a model may have more.
    layers : int
        Layers that were counted.
    is_balanced : bool
        Nothing is left to chance: tokens are dealt to the experts in turn.
    """

    text: str = field(default="uniform", compare=False)
    exponent: float = 0.0
    hot: int = 0
    weights: tuple[float, ...] = ()
    padded: bool = False
    layers: int = field(default=0, compare=False)
    is_balanced: bool = False

    @property
    def is_uniform(self) -> bool:
        """Every expert is equally likely, as in every timing."""
        return self.exponent == 0.0 and self.hot == 0 and not self.weights and not self.is_balanced

    def __str__(self) -> str:
        return self.text

    @classmethod
    def uniform(cls) -> Routing:
        """Return the routing of the timings: every expert is equally likely."""
        return cls()

    @classmethod
    def balanced(cls) -> Routing:
        """Return the routing of many public benchmarks: tokens are dealt to the experts in turn.

        No two experts differ by more than one row, so few tokens reach more experts than uniform routing lets them.
        """
        return cls("balanced", is_balanced=True)

    @classmethod
    def zipf(cls, exponent: float) -> Routing:
        """Return a routing in which the r-th most popular expert has weight ``r ** -exponent``.

        It fits any number of experts. The weight is popularity before the cap: no expert can get more than every
        token, see :meth:`inclusion`.

        Raises
        ------
        SynthError
            When the exponent is not from 0 to ``MAX_EXPONENT``.
        """
        if not 0.0 <= exponent <= MAX_EXPONENT:
            raise SynthError(f"zipf:{exponent:g}: the exponent must be from 0 to {MAX_EXPONENT:g}")
        return cls(f"zipf:{exponent:g}" if exponent else "uniform", exponent=float(exponent))

    @classmethod
    def always(cls, experts: int) -> Routing:
        """Return a routing in which every token goes to the same few experts, and uniformly to others for the rest.

        An engine that runs a model's shared expert as one of the routed ones has such a routing.

        Raises
        ------
        SynthError
            When the number is not from 1 to ``MAX_EXPERTS``.
        """
        if not 1 <= experts <= MAX_EXPERTS:
            raise SynthError(f"hot:{experts}: the number of experts must be from 1 to {MAX_EXPERTS}")
        return cls(f"hot:{experts}", hot=experts)

    @classmethod
    def counts(cls, layers: Sequence[Sequence[float]], text: str = "counts", *, padded: bool = False) -> Routing:
        """Return the routing of tokens counted per expert, layer by layer.

        One config serves all layers of a model, and each layer has popular experts of its own: summed over layers,
        the counts would look more even than any layer is. So each layer's shares are sorted first, and the average
        is taken over their most popular experts, the second, and so on. Layers without tokens (a model's dense ones)
        are passed over.

        Parameters
        ----------
        layers : sequence of sequences of float
            Tokens per expert of each layer; all of one length, unless `padded`.
        text : str
            What to call it.
        padded : bool
            Experts without tokens are left out at the end.

        Raises
        ------
        SynthError
            When a count is not a number from 0 on, or there is nothing to go by.
        """
        profiles: list[list[float]] = []
        longest = max((len(layer) for layer in layers), default=0)
        if not 1 <= longest <= MAX_EXPERTS:
            raise SynthError(f"{text}: counts of {longest} experts; a layer has 1 to {MAX_EXPERTS}")
        for i, layer in enumerate(layers):
            if len(layer) != longest and not padded:
                raise SynthError(f"{text}: layer {i} has counts of {len(layer)} experts, another one {longest}")
            values = [number_of(x, f"{text}: layer {i}, expert {e}") for e, x in enumerate(layer)]
            largest = max(values, default=0.0)
            if largest > 0.0:
                # Scaled first, so that the sum of huge counts is finite.
                scaled = [x / largest for x in values]
                total = math.fsum(scaled)
                profile = sorted((x / total for x in scaled), reverse=True)
                profiles.append(profile + [0.0] * (longest - len(profile)))
        if not profiles:
            raise SynthError(f"{text}: no expert has a token; count while the server is busy")
        mean = [math.fsum(column) / len(profiles) for column in zip(*profiles, strict=True)]
        return cls(text, weights=tuple(mean), padded=padded, layers=len(profiles))

    @classmethod
    def parse(cls, text: str) -> Routing:
        """Read what ``--routing`` takes.

        - ``uniform``, ``balanced``, ``zipf:1.2`` or ``hot:1``;
        - a text file with tokens per expert, one number a line;
        - a CSV with a header: ``expert,count``, with or without ``layer``, in any order (SGLang's ``layer_id`` and
          ``expert_id`` too). Rows of the same expert add up, experts that are missing have no tokens;
        - a JSON file: a list of counts; a list of lists, a layer each; a list of such lists, a step each, which add
          up; a mapping of expert to count; or ``{"logical_count": …}`` with any of these lists.

        Raises
        ------
        SynthError
            When it is none of these.
        """
        if text == "uniform":
            return cls.uniform()
        if text == "balanced":
            return cls.balanced()
        name, colon, value = text.partition(":")
        if colon and name in ("zipf", "hot"):
            kind = {"zipf": "zipf:1.2", "hot": "hot:1"}[name]
            try:
                return cls.zipf(float(value)) if name == "zipf" else cls.always(int(value))
            except ValueError:
                raise SynthError(f"--routing {text}: not a number after the colon; give, for example, {kind}") from None
        # Not with the module: reading counts needs what is here.
        from synth.performance.routing_file import read_counts

        return read_counts(Path(text))

    def inclusion(self, experts: int, top_k: int) -> Floats:
        """Return the probability that a token goes to each expert, in descending order.

        A token goes to `top_k` distinct experts, so the probabilities sum to `top_k` and none exceeds 1. They are
        proportional to the weights as far as that allows: ``p_i = min(1, c * w_i)`` with the one c that gives the
        sum. Counts of a server are proportional to the probabilities already, and stay so.

        Parameters
        ----------
        experts : int
            Experts of the layer, over all ranks.
        top_k : int
            Experts that each token goes to.

        Returns
        -------
        ndarray of float64, shape (experts,)
            Read-only.

        Raises
        ------
        SynthError
            When the routing doesn't fit such a layer.
        """
        return _inclusion(self, experts, top_k)

    def sample(self, experts: int, top_k: int, tokens: int, rng: np.random.Generator) -> Ints:
        """Draw the experts of some tokens.

        Each token is drawn alone, by systematic sampling over the experts in a random order: `top_k` distinct
        experts, each with exactly the probability of :meth:`inclusion` (to 2^-40). So one expert's rows are binomial.
        Which expert is popular is drawn too, once for all tokens: a rank of several holds any of them.

        Parameters
        ----------
        experts, top_k : int
            As for :meth:`inclusion`.
        tokens : int
        rng : numpy.random.Generator

        Returns
        -------
        ndarray of int64, shape (tokens, top_k)
            Expert ids, from 0 on.
        """
        if self.is_balanced:
            dealt = np.arange(tokens * top_k, dtype=np.int64).reshape(tokens, top_k) % experts
            return np.asarray(rng.permutation(experts)[dealt])
        share = _in_whole_numbers(self.inclusion(experts, top_k), top_k)[rng.permutation(experts)]
        picked = np.empty((tokens, top_k), dtype=np.int64)
        # In whole numbers no rounding can repeat an expert or lose one. In parts, for the memory of large batches.
        step = max(1, 4_000_000 // experts)
        for start in range(0, tokens, step):
            rows = min(step, tokens - start)
            order = rng.random((rows, experts)).argsort(axis=1)
            end = share[order].cumsum(axis=1)
            # An expert is picked where the next of the points u, u + 1, … lies within its stretch.
            passed = (end - rng.integers(1, _ONE + 1, (rows, 1)) + _ONE) // _ONE
            on = np.diff(passed, axis=1, prepend=0) > 0
            picked[start : start + rows] = order[on].reshape(rows, top_k)
        return picked

    def record(self) -> dict[str, Any]:
        """Return what a config's sidecar says of the routing: its name, a digest, and a summary of counts."""
        weights = list(self.weights)
        parts = [self.exponent, self.hot, self.padded, [f"{w:.12g}" for w in weights]]
        content = json.dumps([*parts, "balanced"] if self.is_balanced else parts)
        found: dict[str, Any] = {"text": self.text, "digest": hashlib.sha256(content.encode()).hexdigest()[:16]}
        if weights:
            found["counted"] = {
                "experts": len(weights),
                "layers": self.layers,
                "without_tokens": weights.count(0.0),
                "share_of_first": _short(weights[0]),
                "share_of_first_tenth": _short(math.fsum(weights[: -(-len(weights) // 10)])),
                "share_of_last": _short(weights[-1]),
            }
        return found


#: The routing of every timing.
UNIFORM = Routing()


@functools.lru_cache(maxsize=1024)
def _inclusion(routing: Routing, experts: int, top_k: int) -> Floats:
    if not 1 <= top_k <= experts:
        raise SynthError(f"a token can't go to {top_k} of {experts} experts")
    if routing.hot:
        if routing.hot > top_k:
            raise SynthError(f"{routing}: a token of a model to be covered goes to {top_k} experts only")
        rest = (top_k - routing.hot) / max(experts - routing.hot, 1)
        p = np.array([1.0] * routing.hot + [rest] * (experts - routing.hot))
    else:
        p = _proportional(_weights(routing, experts), top_k, routing)
    p.flags.writeable = False
    return p


def _weights(routing: Routing, experts: int) -> Floats:
    """Return the weight of each expert of a layer, descending."""
    if not routing.weights:
        return np.asarray(np.arange(1.0, experts + 1.0) ** -routing.exponent)
    counted = len(routing.weights)
    if counted > experts or (counted < experts and not routing.padded):
        raise SynthError(
            f"{routing}: counts of {counted} experts, but a layer has {experts} over all ranks; name the model that "
            "was counted with --model"
        )
    return np.array(routing.weights + (0.0,) * (experts - counted))


def _proportional(weights: Floats, top_k: int, routing: Routing) -> Floats:
    """Return ``min(1, c * weights)`` that sums to `top_k`; `weights` descend."""
    positive = int(np.count_nonzero(weights))
    if positive < top_k:
        raise SynthError(
            f"{routing}: {positive} experts have tokens, fewer than the {top_k} that each token goes to; count more "
            "tokens, or name the model that was counted with --model"
        )
    # With the first m experts at 1, c is what is left over the weights that are left; m is the least that keeps the
    # next expert at or below 1. Summed from the smallest on, so that tiny weights aren't lost.
    left = np.cumsum(weights[::-1])[::-1]
    m = np.arange(top_k)
    capped = int(np.argmax((top_k - m) * weights[:top_k] <= left[:top_k] * (1.0 + 1e-12)))
    p = np.ones_like(weights)
    p[capped:] = weights[capped:] * ((top_k - capped) / left[capped])
    return np.minimum(p, 1.0)


def _in_whole_numbers(p: Floats, top_k: int) -> Ints:
    """Return probabilities as multiples of 2^-40 that sum to `top_k` exactly."""
    whole = np.rint(p * _ONE).astype(np.int64)
    short = top_k * _ONE - int(whole.sum())
    room = np.where(whole > 0, _ONE - whole, 0) if short > 0 else whole
    taken = np.clip(abs(short) - (np.cumsum(room) - room), 0, room)
    return np.asarray(whole + taken if short > 0 else whole - taken)


def number_of(value: object, place: str) -> float:
    """Return a count as a number.

    Raises
    ------
    SynthError
        When it is not a finite number from 0 on.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise SynthError(f"{place}: {str(value)[:40]!r} is not a count; counts are numbers from 0 on")
    return number


def _short(value: float) -> float:
    return float(f"{value:.6g}")
