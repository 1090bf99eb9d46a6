"""Public MoE models: one layer before any split, how people run it, and the deployments that are asked for."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from synth.catalog.data import read_toml
from synth.catalog.padding import PADDINGS, round_up
from synth.catalog.shapes import (
    ACTIVATIONS,
    Deployment,
    MoEShape,
    check_quant,
    engine_shape,
    padded_shape,
    why_unsupported,
)
from synth.errors import SynthError, UnsupportedShapeError

#: Tensor-parallel sizes up to this one are named as a way out.
_MOST_TP = 16
BY_HAND = "--hidden --inter --experts --top-k"


@dataclass(frozen=True)
class Model:
    """A public MoE model: one layer's shape before any split, and how people run it.

    Attributes
    ----------
    name : str
        Slug, for example ``glm-4.5-air``.
    family : str
        Models that are held out together, for example ``glm``.
    hidden, inter : int
        Hidden size that the experts see, and one expert's intermediate size.
    experts, top_k : int
        Routed experts, and how many of them a token goes to.
    activation : str
        A key of :data:`ACTIVATIONS`.
    bias : bool
        The experts have biases, which are passed to the kernel.
    quants : tuple of str
        Quantizations in which the model is published or commonly served.
    deployments : tuple of (int, int)
        Usual tensor-parallel and expert-parallel sizes.
    source : str
        Where the numbers are from; says so when they weren't checked against it.
    aliases : tuple of str
        Models of the same family with the same layer.
    pad_inter : int
        Engines pad the intermediate size on a rank up to a multiple of this.

    Raises
    ------
    SynthError
        When the values contradict each other.
    """

    name: str
    family: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    activation: str = "swiglu"
    bias: bool = False
    quants: tuple[str, ...] = ("bf16",)
    deployments: tuple[tuple[int, int], ...] = ((1, 1),)
    source: str = ""
    aliases: tuple[str, ...] = ()
    pad_inter: int = 1

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise SynthError(f"{self.name}: unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")
        for quant in self.quants:
            check_quant(quant)
            for tp, ep in self.deployments:
                self._shape(tp, ep, quant)

    def deploy(self, tp: int, ep: int, quant: str) -> Deployment:
        """Return this model's layer on one rank, padded as the engines pad it.

        Parameters
        ----------
        tp, ep : int
            Tensor-parallel and expert-parallel size.
        quant : str
            Any quantization, whether the model is published in it or not.

        Returns
        -------
        Deployment
            Where the kernels don't take the layer as it is and an engine pads it by itself to a size that they take,
            of that size; :meth:`Deployment.shape_for` says what one given engine passes. Where no engine does, of the
            size that :func:`check_supported` refuses.

        Raises
        ------
        SynthError
            When `tp` doesn't divide the intermediate size or `ep` the experts.
        """
        check_quant(quant)
        return Deployment(self.name, tp, ep, quant, self.activation, self.bias, self._shape(tp, ep, quant))

    def tp_sizes(self, ep: int, quant: str) -> tuple[int, ...]:
        """Return the tensor-parallel sizes, up to 16, at which FlashInfer has kernels for this layer.

        Parameters
        ----------
        ep : int
            Expert-parallel size.
        quant : str
            Quantization.
        """
        check_quant(quant)
        shapes = {tp: self._shape(tp, ep, quant) for tp in range(1, _MOST_TP + 1) if self.inter % tp == 0}
        return tuple(tp for tp, shape in shapes.items() if padded_shape(shape, quant) == shape)

    def _shape(self, tp: int, ep: int, quant: str) -> MoEShape:
        if ep < 1 or self.experts % ep:
            raise SynthError(f"{self.name}: --ep {ep} doesn't divide the {self.experts} experts")
        if tp < 1 or self.inter % tp:
            raise SynthError(
                f"{self.name}: --tp {tp} doesn't divide the intermediate size {self.inter}; "
                f"{_tp_hint(self.tp_sizes(ep, quant), quant)}"
            )
        inter = round_up(self.inter // tp, self.pad_inter)
        shape = MoEShape(self.hidden, inter, self.experts // ep, self.top_k, ep, ACTIVATIONS[self.activation])
        if padded_shape(shape, quant) == shape:
            return shape
        padded = [engine_shape(shape, quant, p.engine) for p in PADDINGS if p.quant == quant]
        return min((s for s in padded if padded_shape(s, quant) == s), default=shape)


@functools.cache
def load_models() -> tuple[Model, ...]:
    """Return the public models of the catalogue, in the order of ``models.toml``."""
    return tuple(map(_model, read_toml("synth.catalog", "models.toml")["model"]))


def _model(row: dict[str, Any]) -> Model:
    try:
        return Model(
            name=row["name"],
            family=row["family"],
            **row["layer"],
            quants=tuple(row["quants"]),
            deployments=tuple((tp, ep) for tp, ep in row["deployments"]),
            source=row["source"],
            aliases=tuple(row.get("aliases", ())),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise SynthError(
            f"models.toml, {row.get('name', 'a model without a name')}: a field is missing, misspelt or of another "
            f"kind ({e}); the head of the file lists them"
        ) from e


def find_model(name: str) -> Model:
    """Return the model with this name or alias; case and a Hugging Face owner are ignored.

    Raises
    ------
    SynthError
        When there is none; the message lists near matches.
    """
    names = _models_by_name()
    key = name.lower().rsplit("/", 1)[-1]
    if key in names:
        return names[key]
    near = difflib.get_close_matches(key, names, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "`synth models` lists them"
    raise SynthError(f"unknown model {name!r}; {hint} Or give its config.json with --config, or {BY_HAND}")


def find_layer(label: str) -> Model:
    """Return the model of this name or of this deployment's label; a label's sizes are then its only deployment.

    Raises
    ------
    SynthError
        When there is none, or it can't be split like this.
    """
    m = re.fullmatch(r"(.+?)(?:-tp(\d+))?(?:-ep(\d+))?", label.lower())
    if label.lower() in _models_by_name() or m is None or not (m[2] or m[3]):
        return find_model(label)
    return replace(find_model(m[1]), deployments=((int(m[2] or 1), int(m[3] or 1)),))


def family_of(label: str) -> str:
    """Return the family of a model's name or a deployment's label.

    A label that no model of the catalogue has belongs to the family before its first ``-``.
    """
    name = re.sub(r"(-tp\d+)?(-ep\d+)?$", "", label.lower())
    model = _models_by_name().get(name)
    return model.family if model else name.split("-", 1)[0]


@functools.cache
def _models_by_name() -> dict[str, Model]:
    return {name: model for model in load_models() for name in (model.name, *model.aliases)}


def deployments(
    models: Iterable[Model], *, quants: Collection[str] | None = None, supported: bool = False
) -> Iterator[Deployment]:
    """Yield every usual deployment of `models`, in every quantization they are published in.

    Parameters
    ----------
    models : iterable of Model
        Models, in the order wanted.
    quants : collection of str, optional
        Only these quantizations.
    supported : bool
        Leave out what :func:`check_supported` refuses.
    """
    for model in models:
        for quant in model.quants:
            if quants is not None and quant not in quants:
                continue
            for tp, ep in model.deployments:
                deployment = model.deploy(tp, ep, quant)
                if not supported or padded_shape(deployment.shape, quant) == deployment.shape:
                    yield deployment


def select(
    models: Iterable[Model],
    quants: Collection[str],
    *,
    quant: str | None = None,
    tp: int | None = None,
    ep: int | None = None,
    named: bool = False,
) -> list[Deployment]:
    """Return the deployments of `models` that are asked for.

    Parameters
    ----------
    models : iterable of Model
    quants : collection of str
        Quantizations that the device has tactics for.
    quant : str, optional
        Only this one; of a named model also when it isn't published in it.
    tp, ep : int, optional
        Only these sizes; of a named model also when they aren't usual. One given alone means 1 for the other.
    named : bool
        The models were named, so a shape that FlashInfer has no kernel for is an error and not just left out.

    Raises
    ------
    SynthError
        When nothing fits, or a named model can't be split or served like this.
    """
    if quant is not None and quant not in quants:
        raise SynthError(f"--quant {quant}: no tactics known for this device; known: {', '.join(quants)}")
    narrowed = []
    for model in models:
        wanted = (quant,) if quant and (named or quant in model.quants) else () if quant else model.quants
        sizes = ((tp or 1, ep or 1),) if named and (tp or ep) else _sizes(model, tp, ep)
        narrowed.append(replace(model, quants=wanted, deployments=sizes))
    every = list(deployments(narrowed, quants=quants))
    found = [d for d in every if padded_shape(d.shape, d.quant) == d.shape]
    if not found:
        by_name = {m.name: m for m in narrowed}
        for d in every:
            _check_deployment(by_name[d.model], d)
        raise SynthError(f"no deployment fits --tp {tp} --ep {ep} --quant {quant or ' or '.join(quants)}")
    return found


def _sizes(model: Model, tp: int | None, ep: int | None) -> tuple[tuple[int, int], ...]:
    return tuple(size for size in model.deployments if tp in (None, size[0]) and ep in (None, size[1]))


def _check_deployment(model: Model, deployment: Deployment) -> None:
    """Refuse a deployment that FlashInfer's CUTLASS MoE has no kernel for; also names the sizes that would do."""
    why = why_unsupported(deployment.shape, deployment.quant)
    if why is not None:
        hint = _tp_hint(model.tp_sizes(deployment.ep, deployment.quant), deployment.quant)
        raise UnsupportedShapeError(f"{deployment.label} {deployment.quant}: {why}; {hint}")


def _tp_hint(sizes: Sequence[int], quant: str) -> str:
    if not sizes:
        return f"no --tp fits {quant}"
    return f"--tp {', '.join(map(str, sizes))} fit{'s' if len(sizes) == 1 else ''} {quant}"
