"""MoE layers: the shape on one rank, public models, and their deployments."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from synth.catalog.data import read_toml
from synth.catalog.padding import ENGINE_NAMES, PADDINGS, engines_that_pad, find_padding, round_up
from synth.catalog.schemes import QUANTS
from synth.errors import SynthError, UnsupportedShapeError


@dataclass(frozen=True, order=True)
class MoEShape:
    """An MoE layer on one rank.

    Attributes
    ----------
    hidden : int
        Hidden size: gemm1's K and gemm2's N.
    inter : int
        Intermediate size on this rank, after the tensor-parallel split: gemm2's K.
    experts : int
        Experts on this rank, after the expert-parallel split.
    top_k : int
        Experts that each token is routed to, over all ranks.
    ep_size : int
        Expert-parallel ranks; the layer has ``experts * ep_size`` experts in all.
    gated : bool
        The activation has a gate, so gemm1's N is ``2 * inter``.
    """

    hidden: int
    inter: int
    experts: int
    top_k: int
    ep_size: int = 1
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "inter", "experts", "top_k", "ep_size"):
            if getattr(self, name) < 1:
                raise SynthError(f"a shape's {name} must be at least 1, not {getattr(self, name)}")
        if self.top_k > self.experts * self.ep_size:
            raise SynthError(f"top_k {self.top_k} is more than the layer's {self.experts * self.ep_size} experts")

    def __str__(self) -> str:
        text = f"h{self.hidden}-i{self.inter}-e{self.experts}-k{self.top_k}"
        if self.ep_size > 1:
            text += f"-ep{self.ep_size}"
        return text if self.gated else text + "-ungated"

    @classmethod
    def parse(cls, text: str) -> MoEShape:
        """Read the text form that ``str`` writes, for example ``h2048-i1024-e64-k8``.

        Raises
        ------
        SynthError
            When `text` is not a shape's text form.
        """
        m = re.fullmatch(r"h(\d+)-i(\d+)-e(\d+)-k(\d+)(?:-ep(\d+))?(-ungated)?", text)
        if m is None:
            raise SynthError(f"{text!r} is not a shape; expected, for example, h2048-i1024-e64-k8 or …-ep8-ungated")
        h, i, e, k, ep = (int(x) if x else 1 for x in m.groups()[:5])
        return cls(h, i, e, k, ep, m[6] is None)

    def gemm_nk(self, stage: int) -> tuple[int, int]:
        """Return N (weight columns) and K of one stage's GEMM."""
        if stage == 1:
            return (2 if self.gated else 1) * self.inter, self.hidden
        return self.hidden, self.inter

    @property
    def expert_probability(self) -> float:
        """Probability that a token goes to one given expert, under uniform random routing."""
        return self.top_k / (self.experts * self.ep_size)


#: Tensor-parallel sizes up to this one are named as a way out.
_MOST_TP = 16

#: Activations between the two GEMMs, and whether they have a gate.
ACTIVATIONS = {"swiglu": True, "geglu": True, "geglu_tanh": True, "situ": True, "relu2": False}


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
            _check_quant(quant)
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
        _check_quant(quant)
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
        _check_quant(quant)
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


@dataclass(frozen=True)
class Deployment:
    """A model's MoE layer on one rank, in one quantization.

    Attributes
    ----------
    model : str
        The model's name.
    tp, ep : int
        Tensor-parallel and expert-parallel size.
    quant : str
        Quantization of both GEMMs.
    activation : str
        A key of :data:`ACTIVATIONS`.
    bias : bool
        The experts have biases.
    shape : MoEShape
        The layer on one rank, after the split, and after padding that the kernels need.
    """

    model: str
    tp: int
    ep: int
    quant: str
    activation: str
    bias: bool
    shape: MoEShape

    @property
    def label(self) -> str:
        """Short name, for example ``glm-5-tp8`` or ``deepseek-v3-ep8``."""
        return self.model + (f"-tp{self.tp}" if self.tp > 1 else "") + (f"-ep{self.ep}" if self.ep > 1 else "")

    def shape_for(self, engine: str) -> MoEShape:
        """Return the layer as `engine` passes it to FlashInfer: some pad more than the kernels need."""
        return engine_shape(self.shape, self.quant, engine)


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
    raise SynthError(f"unknown model {name!r}; {hint} Or give its config.json with --config, or {_BY_HAND}")


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


# What FlashInfer 0.7.4 asks of hidden and inter, read in data/csrc/fused_moe/cutlass_backend of the package:
# - binding = flashinfer_cutlass_fused_moe_binding.cu, runMoe (424-438): 128 for MXFP4 weights, else 16 bytes of
#   the narrower operand; kernels = cutlass_fused_moe_kernels.cuh, runMoe (4201-4245): 128 bits of the weights, and
#   expandInputRows (1833) and doActivation (2679): rows of 16 bytes.
# - NVFP4's block scales of gemm1 lie in tiles of 128 rows per expert (kernels, getOffsetWeightSF, 1020), but the
#   binding wants them for inter rounded up to 64, times 2 with a gate (getQuantParams, 1494-1528). Without a gate
#   only a multiple of 128 satisfies both. With one, vLLM refuses what isn't a multiple of 64 when it loads the
#   weights: padding would come between gate and up.
_FP4_SCALES = "the block scales of gemm1 come in tiles of 128 rows"
_MULTIPLES = {
    "bf16": (8, 8, 8, "rows must be multiples of 16 bytes"),
    "fp8": (16, 16, 16, "rows must be multiples of 16 bytes"),
    "nvfp4": (32, 64, 128, _FP4_SCALES + " and rows must be multiples of 16 bytes"),
    "mxfp8_mxfp4": (128, 128, 128, "MXFP4 weights are aligned to 128"),
}


def padded_shape(shape: MoEShape, quant: str) -> MoEShape:
    """Return `shape` with hidden and inter rounded up to what FlashInfer's CUTLASS MoE asks for."""
    _check_quant(quant)
    hidden, gated, ungated, _ = _MULTIPLES[quant]
    return replace(
        shape,
        hidden=round_up(shape.hidden, hidden),
        inter=round_up(shape.inter, gated if shape.gated else ungated),
    )


def engine_shape(shape: MoEShape, quant: str, engine: str) -> MoEShape:
    """Return `shape` as `engine` passes it to FlashInfer, see :mod:`synth.catalog.padding`."""
    padding = find_padding(engine, quant, shape.gated)
    if padding is None:
        return shape
    hidden, inter = padding.apply(shape.hidden, shape.inter)
    return replace(shape, hidden=hidden, inter=inter)


@functools.lru_cache(maxsize=4096)
def why_unsupported(shape: MoEShape, quant: str) -> str | None:
    """Return why FlashInfer's CUTLASS MoE has no kernel for a shape, and the padded size; None where it has one."""
    padded = padded_shape(shape, quant)
    hidden, gated, ungated, reason = _MULTIPLES[quant]
    wrong = [
        f"{what} {size} is not a multiple of {multiple} (pad it to {target})"
        for what, size, multiple, target in (
            ("hidden", shape.hidden, hidden, padded.hidden),
            ("inter on a rank", shape.inter, gated if shape.gated else ungated, padded.inter),
        )
        if size != target
    ]
    if not wrong:
        return None
    size, target = (shape.hidden, shape.inter), (padded.hidden, padded.inter)
    engines = [ENGINE_NAMES[e] for e in engines_that_pad(quant, shape.gated, size, target)]
    if len(engines) > 1:
        who = f"{' and '.join(engines)} pad it by themselves"
    else:
        who = f"{engines[0]} pads it by itself" if engines else "no engine is known to pad it by itself"
    return f"{' and '.join(wrong)}; {reason}; {who}"


def check_supported(shape: MoEShape, quant: str) -> None:
    """Refuse a shape that FlashInfer's CUTLASS MoE has no kernel for.

    Raises
    ------
    UnsupportedShapeError
        When hidden or inter isn't a multiple of what the quantization needs; names the reason, the padded size, and
        the engines that pad to it by themselves.
    """
    why = why_unsupported(shape, quant)
    if why is not None:
        raise UnsupportedShapeError(f"{shape}: FlashInfer has no {quant} MoE kernel: {why}")


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


_BY_HAND = "--hidden --inter --experts --top-k"
#: Where multimodal models keep their language model.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
#: Where DBRX and Mistral's own format keep the experts.
_EXPERT_SECTIONS = ("ffn_config", "moe")
#: Key names of public configs; the first that is there and isn't null counts.
_KEYS = {
    # Latent MoE: the experts see a projection of the hidden state.
    "hidden size": ("moe_latent_size", "routed_expert_hidden_size", "hidden_size", "d_model", "n_embd", "dim"),
    "intermediate size": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
        "expert_intermediate_size",
        "expert_hidden_dim",
        "intermediate_size",
        "ffn_hidden_size",
    ),
    "number of experts": (
        "n_routed_experts",
        "num_routed_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_experts",
    ),
    "experts per token": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "num_selected_experts",
    ),
    "activation": ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function", "ffn_act_fn"),
}
_ACTIVATION_NAMES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "swiglu": "swiglu",
    "swigluoai": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_tanh": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "situ": "situ",
    "relu2": "relu2",
}


def model_from_config(path: Path) -> Model:
    """Read a model from its Hugging Face ``config.json``.

    The model is named after the folder that holds the file. ModelOpt's ``hf_quant_config.json`` beside it is read
    when the config doesn't say how it is quantized.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    Model
        Undivided, with the one quantization that the config names, bf16 when it names none.

    Raises
    ------
    SynthError
        When the file can't be read, isn't a MoE model's config, lacks a key or has a quantization without tactics.
    """
    config = _read_json(path)
    language = _language_model(config)
    if language is None:
        raise SynthError(
            f"{path}: no experts in it (looked for {', '.join(_KEYS['number of experts'])}), so this is a dense model "
            f"or a format not known here; give {_BY_HAND}"
        )
    oss = language.get("model_type") == "gpt_oss"
    name = _name_from_path(path)
    try:
        return Model(
            name=name,
            family=family_of(name),
            hidden=_integer(path, language, "hidden size"),
            inter=_integer(path, language, "intermediate size"),
            experts=_integer(path, language, "number of experts"),
            top_k=_integer(path, language, "experts per token"),
            activation=_activation(path, language),
            bias=oss or language.get("mlp_bias") is True,
            quants=(_quant_hint(path, config, language),),
            source=path.name,
            pad_inter=64 if oss else 1,
        )
    except SynthError as e:
        message = str(e)
        raise SynthError(message if str(path) in message else f"{path}: {message}; give {_BY_HAND}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise SynthError(f"{path} is a folder; name the config.json in it, or give {_BY_HAND}")
    try:
        data = json.loads(path.read_bytes())
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}; name another file, or give {_BY_HAND}") from None
    except (ValueError, RecursionError) as e:
        raise SynthError(f"{path} is not JSON ({e}); download it again, or give {_BY_HAND}") from None
    if not isinstance(data, dict):
        raise SynthError(f"{path} is not a model's config.json: expected an object; name that file, or give {_BY_HAND}")
    return data


def _language_model(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of `config` that has experts, with nested expert sections merged in."""
    merged = dict(config)
    for section in _EXPERT_SECTIONS:
        if isinstance(config.get(section), dict):
            merged |= config[section]
            # The section's own type says nothing about the model.
            merged["model_type"] = config.get("model_type")
    experts = _lookup(merged, "number of experts")[1]
    if experts is not None and experts not in (0, 1):
        return merged
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, dict) and (found := _language_model(nested)) is not None:
            return found
    return None


def _lookup(config: dict[str, Any], what: str) -> tuple[str, Any]:
    """Return the key that `config` uses for `what` and its value, ``("", None)`` when it has none."""
    return next(((key, config[key]) for key in _KEYS[what] if config.get(key) is not None), ("", None))


def _integer(path: Path, config: dict[str, Any], what: str) -> int:
    key, value = _lookup(config, what)
    if value is None:
        raise SynthError(f"{path}: no {what} (looked for {', '.join(_KEYS[what])}); give {_BY_HAND}")
    if isinstance(value, list) and value:
        # One value a layer (Hunyuan), or one each for text and images (ERNIE VL), of which text is served here.
        modalities = "ernie" in str(config.get("model_type", "")) and len(value) == 2
        if not modalities and any(v != value[0] for v in value):
            raise SynthError(f"{path}: {key} differs between layers; give {_BY_HAND} for one of them")
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SynthError(f"{path}: {key} is {json.dumps(value)}, not a positive integer; give {_BY_HAND}")
    return value


def _activation(path: Path, config: dict[str, Any]) -> str:
    key, value = _lookup(config, "activation")
    if isinstance(value, dict):
        value = value.get("name")
    if value is None:
        return "swiglu"
    if not isinstance(value, str) or value not in _ACTIVATION_NAMES:
        raise SynthError(
            f"{path}: {key} {json.dumps(value)} is not an activation of FlashInfer's MoE; "
            f"give {_BY_HAND} and --activation"
        )
    return _ACTIVATION_NAMES[value]


def _quant_hint(path: Path, config: dict[str, Any], language: dict[str, Any]) -> str:
    section = config.get("quantization_config") or language.get("quantization_config")
    beside = path.with_name("hf_quant_config.json")
    if not section and beside.is_file():
        section = _read_json(beside).get("quantization")
    if not section:
        return "bf16"
    words = _expert_quant_words(section, language) if isinstance(section, dict) else []
    for word in words:
        if quant := _quant_of_word(word.lower()):
            return quant
    raise SynthError(
        f"{path}: quantization_config {' '.join(words)!r} is none of {', '.join(QUANTS)}; give {_BY_HAND} and --quant"
    )


def _expert_quant_words(section: dict[str, Any], language: dict[str, Any]) -> list[str]:
    """Return what `section` says of the experts' quantization, the most specific first."""
    layers = section.get("quantized_layers")
    experts = [
        layer.get("quant_algo")
        for name, layer in (layers.items() if isinstance(layers, dict) else ())
        if "expert" in name and "shared" not in name and isinstance(layer, dict)
    ]
    words = (
        section.get("moe_quant_algo"),
        *experts[:1],
        "mxfp4" if language.get("expert_dtype") == "fp4" else None,
        section.get("quant_algo"),
        section.get("format"),
        section.get("quant_method"),
    )
    return [word for word in words if isinstance(word, str)]


def _quant_of_word(word: str) -> str | None:
    """Return the quantization that a config's word means, ``None`` for one without tactics."""
    if "a16" in word:  # weights only: the activations stay in bf16
        return None
    if "nvfp4" in word:
        return "nvfp4"
    if "mxfp4" in word:
        return "mxfp8_mxfp4"
    return "fp8" if word in ("fp8", "float-quantized") or word.startswith("fp8_") else None


def _name_from_path(path: Path) -> str:
    """Return a slug from the folder that holds a config, seeing through the Hugging Face cache's layout."""
    parents = path.absolute().parents
    cached = next((p.name for p in parents if p.name.startswith("models--")), None)
    text = cached.rsplit("--", 1)[-1] if cached else parents[0].name
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def _check_quant(quant: str) -> None:
    if quant not in QUANTS:
        raise SynthError(f"unknown quantization {quant!r}; known: {', '.join(QUANTS)}")


@functools.cache
def _models_by_name() -> dict[str, Model]:
    return {name: model for model in load_models() for name in (model.name, *model.aliases)}
