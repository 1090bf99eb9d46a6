"""Checkpoints: what a model's config.json, or ModelOpt's file beside it, says of its MoE layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from synth.catalog.data import read_toml
from synth.catalog.models import BY_HAND, Model, family_of, find_layer, find_model, select
from synth.catalog.schemes import QUANTS
from synth.catalog.shapes import Deployment
from synth.errors import SynthError

_NAMES = read_toml("synth.catalog", "checkpoints.toml")
#: Key names of public configs, by what they say.
_KEYS: dict[str, list[str]] = _NAMES["keys"]


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
            f"or a format not known here; give {BY_HAND}"
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
        raise SynthError(message if str(path) in message else f"{path}: {message}; give {BY_HAND}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise SynthError(f"{path} is a folder; name the config.json in it, or give {BY_HAND}")
    try:
        data = json.loads(path.read_bytes())
    except OSError as e:
        raise SynthError(f"can't read {path}: {e.strerror or e}; name another file, or give {BY_HAND}") from None
    except (ValueError, RecursionError) as e:
        raise SynthError(f"{path} is not JSON ({e}); download it again, or give {BY_HAND}") from None
    if not isinstance(data, dict):
        raise SynthError(f"{path} is not a model's config.json: expected an object; name that file, or give {BY_HAND}")
    return data


def _language_model(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of `config` that has experts, with nested expert sections merged in."""
    merged = dict(config)
    for section in _NAMES["expert_sections"]:
        if isinstance(config.get(section), dict):
            merged |= config[section]
            # The section's own type says nothing about the model.
            merged["model_type"] = config.get("model_type")
    experts = _lookup(merged, "number of experts")[1]
    if experts is not None and experts not in (0, 1):
        return merged
    for key in _NAMES["nested"]:
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
        raise SynthError(f"{path}: no {what} (looked for {', '.join(_KEYS[what])}); give {BY_HAND}")
    if isinstance(value, list) and value:
        # One value a layer (Hunyuan), or one each for text and images (ERNIE VL), of which text is served here.
        modalities = "ernie" in str(config.get("model_type", "")) and len(value) == 2
        if not modalities and any(v != value[0] for v in value):
            raise SynthError(f"{path}: {key} differs between layers; give {BY_HAND} for one of them")
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SynthError(f"{path}: {key} is {json.dumps(value)}, not a positive integer; give {BY_HAND}")
    return value


def _activation(path: Path, config: dict[str, Any]) -> str:
    key, value = _lookup(config, "activation")
    if isinstance(value, dict):
        value = value.get("name")
    if value is None:
        return "swiglu"
    if not isinstance(value, str) or value not in _NAMES["activations"]:
        raise SynthError(
            f"{path}: {key} {json.dumps(value)} is not an activation of FlashInfer's MoE; "
            f"give {BY_HAND} and --activation"
        )
    return str(_NAMES["activations"][value])


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
        f"{path}: quantization_config {' '.join(words)!r} is none of {', '.join(QUANTS)}; give {BY_HAND} and --quant"
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


def layer(model: str | Path, *, tp: int = 1, ep: int = 1, quant: str | None = None) -> Deployment:
    """Return one MoE layer as it is on one rank.

    Parameters
    ----------
    model : str or Path
        A model of the catalogue, its label such as ``"glm-5-tp8"`` (then `tp` and `ep` stay 1), or the path of a
        checkpoint's ``config.json``.
    tp, ep : int
        Tensor- and expert-parallel size of the experts.
    quant : str, optional
        One of :data:`synth.catalog.schemes.QUANTS`; by default what the checkpoint says, or the model's first.

    Raises
    ------
    SynthError
        When there is no such model, or FlashInfer has no kernel for the layer.

    Examples
    --------
    >>> import synth
    >>> synth.layer("glm-5", tp=8, quant="bf16").shape
    MoEShape(hidden=6144, inter=256, experts=256, top_k=8, ep_size=1, gated=True)
    """
    found = model_from_config(model) if isinstance(model, Path) else find_layer(model)
    labelled = not isinstance(model, Path) and found != find_model(found.name)
    tp, ep = found.deployments[0] if labelled and (tp, ep) == (1, 1) else (tp, ep)
    (deployment,) = select([found], (quant or found.quants[0],), quant=quant, tp=tp, ep=ep, named=True)
    return deployment
