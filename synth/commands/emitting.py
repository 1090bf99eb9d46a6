"""Choose and write a config."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from synth.commands.options import flashinfer_option, folders, layer_options, wanted_layers
from synth.errors import SynthError

if TYPE_CHECKING:
    from synth.catalog.devices import Device
    from synth.choosing.emission import Emission
    from synth.choosing.sources import Source

_K = TypeVar("_K")
_V = TypeVar("_V")


@click.command(short_help="choose tactics and write the config that FlashInfer loads")
@click.option("--device", required=True, help='GPU: "NVIDIA H200"; "RTX PRO 6000" means every edition.')
@click.option(
    "-o",
    "--output",
    # Text and not a path, which would lose a slash at the end.
    type=click.Path(),
    help="Config file; for several devices a folder, where each gets its own.  [default: synth-DEVICE.json]",
)
@click.option("--format", "file_format", type=click.Choice(["json", "bundled"]), default="json", show_default=True)
@click.option(
    "--engine", type=click.Choice(["vllm", "sglang", "both"]), default="both", show_default=True, help="Whose keys."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    multiple=True,
    help="Maximum token count of a server; may be repeated.  [default: 512, 1024 … 32768]",
)
@click.option("--measured", is_flag=True, help="Only entries with timings behind them; exit 1 where there are none.")
@click.option(
    "--routing",
    default="uniform",
    show_default=True,
    help="How tokens spread over the experts: balanced, zipf:1.2, hot:1 (one expert gets every token), or a file of "
    "tokens per expert.",
)
@flashinfer_option
@layer_options
@folders
def emit(
    device: str,
    output: str | None,
    file_format: str,
    engine: str,
    max_tokens: tuple[int, ...],
    measured: bool,
    routing: str,
    flashinfer: str,
    own_measurements: Path | None,
    own_models: Path | None,
    **layer: Any,
) -> None:
    """Choose a tactic for every shape, stage and bucket, and write the config that FlashInfer loads."""
    # Before numpy is there: its matrices are small here, and threads that wait for work burn more than they save.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from synth.catalog.devices import find_devices
    from synth.choosing.emission import output_paths, write
    from synth.flashinfer.calls import ENGINES, SERVER_MAX_TOKENS
    from synth.performance.routing import Routing

    spread = Routing.parse(routing)
    found = find_devices(device)
    paths = output_paths(found, output, file_format)
    folders = {"measurements": own_measurements, "models": own_models}
    settings: dict[str, Any] = {
        "engines": ENGINES if engine == "both" else (engine,),
        "max_tokens": max_tokens or SERVER_MAX_TOKENS,
        "flashinfer": flashinfer,
        "file_format": file_format,
        "routing": spread,
        "measured": measured,
    }
    done: list[tuple[Emission, Path]] = []
    skipped: list[_Skipped] = []
    for one, path in zip(found, paths, strict=True):
        emission, without = _emit_one(one, settings, folders, layer)
        skipped += without
        if emission is not None:
            done.append((emission, path))
    # What is measured goes where this command looks for it.
    given = click.get_current_context().get_parameter_source("own_measurements") is ParameterSource.COMMANDLINE
    collect_options = {**layer, "measurements": own_measurements if given else None}
    if not done:
        _nothing_written(skipped, measured, _collect_command(collect_options))
    write([emission for emission, _ in done], [path for _, path in done])
    for emission, path in done:
        _print_emission(emission, path)
    for reason, deployments in _reasons(skipped).items():
        click.echo(f"skipped: {reason}; {deployments} deployments", err=True)
    _warn_of_analytical([emission for emission, _ in done], collect_options)
    if not spread.is_uniform:
        click.echo(
            f"WARNING: --routing {spread}: no entry is measured, since all timings were taken under uniform routing; "
            "each is an estimate for this routing, and a server that routes otherwise should not use the file.",
            err=True,
        )
    if len(done) > 1:
        entries, left_out = (sum(getattr(e, what) for e, _ in done) for what in ("entries", "left_out"))
        click.echo(f"{len(done)} configs: {entries} entries in all, {left_out} left out")
    if file_format == "bundled":
        click.echo("copy it into flashinfer/tuning_configs/ and set FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1")
    click.echo(f"next: synth replay {done[0][1]}")


@dataclass(frozen=True)
class _Skipped:
    """Quantizations of a device that nothing is written for, with so many deployments, and why."""

    device: Device
    quants: tuple[str, ...]
    deployments: int
    reason: str
    can_be_timed: bool = False


def _emit_one(
    device: Device, settings: dict[str, Any], folders: dict[str, Path | None], layer: dict[str, Any]
) -> tuple[Emission | None, list[_Skipped]]:
    """Return a device's config, None without entries, and the quantizations that are skipped in it."""
    from synth.choosing.emission import NothingToWriteError
    from synth.choosing.emission import emit as emit_config
    from synth.choosing.sources import NoSourceError
    from synth.flashinfer.tactics import load_tables
    from synth.reporting.console import progress

    flashinfer, measured = settings["flashinfer"], settings["measured"]
    quants = [t.quant for t in load_tables(flashinfer) if t.arch == device.tactics_arch]
    if not quants:
        return None, [_Skipped(device, (), 0, f"no tactics known for {device.arch} in FlashInfer {flashinfer}")]
    deployments = _grouped((d.quant, d) for d in wanted_layers(quants, **layer))
    sources: dict[str, Source] = {}
    skipped: list[_Skipped] = []
    for quant, some in deployments.items():
        try:
            sources[quant] = _source(device, quant, flashinfer, measured, folders)
        except NoSourceError as e:
            skipped.append(_Skipped(device, (quant,), len(some), str(e), e.can_be_timed))
    if not sources:
        return None, skipped
    try:
        with progress(f"choosing for {device.name}") as report:
            chosen = [one for quant in sources for one in deployments[quant]]
            return emit_config(device, chosen, sources, progress=report, **settings), skipped
    except NothingToWriteError as e:
        why = "without timings, or not sure to beat the fallback" if measured else "not sure to beat the fallback"
        reason = f"all {sum(t.left_out for t in e.tallies)} entries are left out: {why}"
        count = sum(t.deployments for t in e.tallies)
        return None, [*skipped, _Skipped(device, tuple(t.quant for t in e.tallies), count, reason, can_be_timed=True)]


def _source(device: Device, quant: str, flashinfer: str, measured: bool, folders: dict[str, Path | None]) -> Source:
    """Return what to choose by, having said what is wrong with it or not kept."""
    from synth.choosing.sources import source_for
    from synth.reporting.console import problems

    found: list[Any] = []
    try:
        source = source_for(device, quant, flashinfer, measured=measured, problems=found, **folders)
    finally:
        problems(found)
    if source.fitted_here and source.timings is not None:
        click.echo(
            f"note: {device.name} {quant}: {len(source.timings)} timings, fitted for this config; `synth fit` keeps "
            "the model and says how good it is",
            err=True,
        )
    return source


#: Options that the command to collect takes over from the one to emit, in the order in which they are printed.
_COLLECT_OPTIONS = (
    *("model", "config", "name", "hidden", "inter", "experts", "top-k", "activation"),
    *("tp", "ep", "quant", "measurements"),
)


def _collect_command(layer: Mapping[str, Any], quants: Iterable[str] = ()) -> str:
    """Return the command that times the layers that were asked for, on such a GPU.

    Parameters
    ----------
    layer : mapping
        The layer options, by parameter.
    quants : iterable of str
        What to time where no quantization was asked for, if it is a single one; else all of the layers'.
    """
    only = tuple(quants)
    if layer.get("quant") is None and len(only) == 1:
        layer = {**layer, "quant": only[0]}
    words = ["synth", "collect"]
    if any(layer.get(name) for name in ("model_names", "config_file", "hidden")):
        words.append("--device-plan")
    for option in _COLLECT_OPTIONS:
        value = layer.get({"model": "model_names", "config": "config_file"}.get(option, option.replace("-", "_")))
        for one in value if isinstance(value, tuple) else () if value is None else (value,):
            words += [f"--{option}", str(one)]
    return shlex.join(words)


def _nothing_written(skipped: Sequence[_Skipped], measured: bool, command: str) -> NoReturn:
    """End the command: 1 where what was asked for isn't measured, 2 where nothing can be said of it."""
    reasons = "; ".join(_reasons(skipped))
    if not any(s.can_be_timed for s in skipped):
        raise SynthError(f"nothing to write: {reasons}; `synth devices` lists what is known of each device")
    hint = f"to time some, on such a GPU: {command}"
    if measured:
        click.echo(f"error: --measured: nothing is written: {reasons}; {hint}", err=True)
        sys.exit(1)
    raise SynthError(f"nothing to write: {reasons}; {hint}")


def _reasons(skipped: Sequence[_Skipped]) -> dict[str, int]:
    """Return who is skipped and why, each reason once, with the deployments: "A (bf16, fp8), B: because"."""
    told = {}
    for reason, group in _grouped((s.reason, s) for s in skipped).items():
        quants = _grouped((s.device.name, s.quants) for s in group)
        names = [name + (f" ({', '.join(some)})" if (some := sum(qs, ())) else "") for name, qs in quants.items()]
        told[f"{', '.join(names)}: {reason}"] = sum(s.deployments for s in group)
    return told


def _grouped(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    found: dict[_K, list[_V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _warn_of_analytical(emissions: Sequence[Emission], layer: Mapping[str, Any]) -> None:
    """Say in one line what is analytical in these configs, how sure that is, and what would measure it."""
    told = [(e.device.name, t, n) for e in emissions for t in e.tallies for n in [t.entries.get("analytical", 0)] if n]
    if not told:
        return
    entries = sum(n for _, _, n in told)
    left_out = sum(t.abstained.get("analytical", 0) for _, t, _ in told)
    regret = sum(t.regret["analytical"] * n for _, t, n in told) / entries
    within = sum(t.within["analytical"] * n for _, t, n in told) / entries
    quants = _grouped((name, t.quant) for name, t, _ in told)
    # Devices with the same quantizations are listed together.
    alike = _grouped((", ".join(some), name) for name, some in quants.items())
    devices = "; ".join(f"{', '.join(names)} ({some})" for some, names in alike.items())
    command = _collect_command(layer, dict.fromkeys(t.quant for _, t, _ in told))
    click.echo(
        f"WARNING: {entries} entries are ANALYTICAL: computed from public numbers of the GPU, never measured on one. "
        f"Devices: {devices}. How sure: {left_out / (left_out + entries):.0%} of all entries are left out, as not sure "
        f"to beat the fallback; those that are written are expected to be {regret:.1%} slower than the best, and to be "
        f"within 2 % of it with a probability of {within:.0%}, as the model states it; docs/sm120.md says how far that "
        f"could be checked. To measure, on such a GPU: {command}",
        err=True,
    )


def _print_emission(emission: Emission, path: Path) -> None:
    from synth.configs.sidecar import SOURCES, sidecar_path
    from synth.reporting.console import table

    table(
        f"{emission.device.name}: {path}",
        ["quant", "deployments", "shapes", *SOURCES, "left out", "faster than fallback"],
        [
            [
                t.quant,
                t.deployments,
                t.shapes,
                *(t.entries.get(s, 0) for s in SOURCES),
                t.left_out,
                f"{t.gain:.2f}x" if t.entries else "",
            ]
            for t in emission.tallies
        ],
    )
    click.echo(f"{emission.entries} entries, {emission.left_out} left out; where each comes from: {sidecar_path(path)}")
