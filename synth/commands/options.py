"""What several commands share: options, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from synth.catalog.schemes import QUANTS
from synth.catalog.shapes import ACTIVATIONS
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER

if TYPE_CHECKING:
    from synth.catalog.devices import Device
    from synth.catalog.models import Model
    from synth.catalog.shapes import Deployment
    from synth.timings.table import Timings


F = TypeVar("F", bound=Callable[..., Any])


def folders(command: F) -> F:
    command = click.option(
        "--measurements",
        "own_measurements",
        type=click.Path(path_type=Path),
        envvar="SYNTH_MEASUREMENTS",
        help="Folder of your own timings, read beside the shipped ones.",
    )(command)
    return click.option(
        "--models",
        "own_models",
        type=click.Path(path_type=Path),
        envvar="SYNTH_MODELS",
        help="Folder of your own fitted models.",
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
flashinfer_option = click.option(
    "--flashinfer", default=DEFAULT_FLASHINFER, show_default=True, help="FlashInfer version."
)


def layer_options(command: F) -> F:
    """Add the options that narrow the catalogue, or give a layer by hand or by its config.json."""
    options = [
        click.option("--model", "model_names", multiple=True, help="A model or a label such as glm-5-tp8; repeatable."),
        click.option("--tp", type=click.IntRange(1), help="Tensor-parallel size of the experts."),
        click.option("--ep", type=click.IntRange(1), help="Expert-parallel size."),
        click.option("--quant", type=click.Choice(QUANTS), help="Quantization."),
        click.option("--config", "config_file", type=click.Path(path_type=Path), help="A model's config.json."),
        click.option("--hidden", type=click.IntRange(1), help="By hand: hidden size."),
        click.option("--inter", type=click.IntRange(1), help="By hand: intermediate size of one expert, undivided."),
        click.option("--experts", type=click.IntRange(1), help="By hand: routed experts, undivided."),
        click.option("--top-k", type=click.IntRange(1), help="By hand: experts per token."),
        click.option(
            "--activation", type=click.Choice(list(ACTIVATIONS)), help="By hand: activation.  [default: swiglu]"
        ),
        click.option("--name", help="By hand: what to call the model."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def wanted_layers(
    quants: Sequence[str],
    *,
    model_names: Sequence[str],
    tp: int | None,
    ep: int | None,
    quant: str | None,
    config_file: Path | None,
    hidden: int | None,
    inter: int | None,
    experts: int | None,
    top_k: int | None,
    activation: str | None,
    name: str | None,
) -> list[Deployment]:
    """Return the deployments that the layer options ask for, each in a quantization of `quants`."""
    from synth.catalog.checkpoints import model_from_config
    from synth.catalog.models import find_layer, load_models, select

    by_hand = {"--hidden": hidden, "--inter": inter, "--experts": experts, "--top-k": top_k}
    given = [option for option, value in by_hand.items() if value is not None]
    ways = [bool(model_names), config_file is not None, bool(given)]
    if sum(ways) > 1:
        raise SynthError("give a layer in one way: --model, --config, or --hidden --inter --experts --top-k")
    if not given and (activation or name):
        raise SynthError("--activation and --name go with --hidden --inter --experts --top-k")
    models: Sequence[Model]
    if given:
        missing = [option for option in by_hand if option not in given]
        if missing or hidden is None or inter is None or experts is None or top_k is None:
            raise SynthError(f"a layer by hand needs {' '.join(missing)} too")
        models = [_by_hand(name or "by-hand", hidden, inter, experts, top_k, activation or "swiglu")]
    elif config_file is not None:
        models = [model_from_config(config_file)]
    else:
        models = [find_layer(n) for n in model_names] or load_models()
    return select(models, quants, quant=quant, tp=tp, ep=ep, named=any(ways))


def _by_hand(name: str, hidden: int, inter: int, experts: int, top_k: int, activation: str) -> Model:
    from synth.catalog.models import Model

    return Model(name, name, hidden, inter, experts, top_k, activation, quants=QUANTS, source="given by hand")


def device_here(device: str | None, elsewhere: bool) -> Device:
    """Return the GPU that is here, or with `elsewhere` the one that is named."""
    from synth.catalog.devices import get_device
    from synth.collecting.gpus import gpu_name

    if elsewhere:
        return get_device(device or "NVIDIA H200")
    found = get_device(gpu_name())
    if device is not None and get_device(device) != found:
        raise SynthError(f"--device {device}: the GPU here is {found.name}")
    return found


def load_timings(
    own: Path | None, device: str | None, quant: str | None, flashinfer: str | None = None
) -> list[Timings]:
    from synth.catalog.devices import get_device
    from synth.catalog.paths import readable
    from synth.reporting.console import problems
    from synth.timings.folders import load

    found: list[Any] = []
    folders = readable("measurements", own)
    tables = load(folders, get_device(device).name if device else None, quant, flashinfer, problems=found)
    problems(found)
    if not tables:
        asked = " ".join(str(x) for x in (device, quant) if x) or "anything"
        raise SynthError(f"no timings of {asked} in {', '.join(map(str, folders))}; `synth collect` makes some")
    return tables
