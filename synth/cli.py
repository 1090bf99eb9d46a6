"""The command line. Every command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from synth import __version__
from synth.catalog.shapes import ACTIVATIONS
from synth.catalog.tactics import DEFAULT_FLASHINFER, QUANTS
from synth.errors import SynthError

if TYPE_CHECKING:
    from synth.catalog.devices import Device
    from synth.catalog.shapes import Deployment, Model
    from synth.emitting import Emission, Source
    from synth.measurements import Timings
    from synth.performance.model import PerformanceModel
    from synth.performance.routing import Routing

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Prints a :class:`SynthError`, or wrong usage, as one line and exits with 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        run: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        try:
            code = run(*args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as e:
            e.show()
            sys.exit(2)
        except click.UsageError as e:
            command = e.ctx.command_path if e.ctx is not None else "synth"
            _fail(f"{e.format_message().rstrip('.')}; `{command} --help` lists what there is")
        except click.ClickException as e:
            _fail(e.format_message())
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SynthError as e:
            _fail(str(e))
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="synth")
def main() -> None:
    """Tuning configs for FlashInfer's MoE kernels, from a few real timings.

    \b
    synth fit                           fit the shipped timings (and your own) into models
    synth emit --device "NVIDIA H200"   write the config that FlashInfer loads
    """


def _folders(command: F) -> F:
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


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_flashinfer_option = click.option(
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
    from synth.catalog.shapes import find_layer, load_models, model_from_config, select

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
    from synth.catalog.shapes import Model

    return Model(name, name, hidden, inter, experts, top_k, activation, quants=QUANTS, source="given by hand")


@main.command()
@_json_option
def devices(as_json: bool) -> None:
    """List the known GPUs, under the names that torch reports."""
    from synth.catalog.devices import load_devices

    rows = [
        {"name": d.name, "arch": d.arch, "sms": d.sms, "l2_mb": d.l2_mb, "dram_gbs": d.dram_gbs, "tflops": d.tflops}
        for d in load_devices()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from synth.console import table

    columns = ["name", "arch", "SMs", "L2 MB", "GB/s", "dense TFLOPS"]
    peaks = [" ".join(f"{q} {v:g}" for q, v in d.tflops.items()) for d in load_devices()]
    table("Devices", columns, [[*list(r.values())[:5], peak] for r, peak in zip(rows, peaks, strict=True)])


@main.command()
@_json_option
def models(as_json: bool) -> None:
    """List the public MoE models of the catalogue."""
    import dataclasses

    from synth.catalog.shapes import load_models

    if as_json:
        click.echo(json.dumps([dataclasses.asdict(m) for m in load_models()], indent=1))
        return
    from synth.console import table

    table(
        "Models",
        ["name", "hidden", "inter", "experts", "top_k", "activation", "quantizations", "tp x ep"],
        [
            [
                m.name, m.hidden, m.inter, m.experts, m.top_k, m.activation, " ".join(m.quants),
                " ".join(f"{tp}x{ep}" for tp, ep in m.deployments),
            ]
            for m in load_models()
        ],
    )  # fmt: skip


@main.command()
@_flashinfer_option
@click.option("--arch", help="For example sm90.")
@click.option("--quant", type=click.Choice(QUANTS))
@_json_option
def tactics(flashinfer: str, arch: str | None, quant: str | None, as_json: bool) -> None:
    """List FlashInfer's tactics: what each id is."""
    from synth.catalog.tactics import STAGES, load_tables

    tables = [t for t in load_tables(flashinfer) if arch in (None, t.arch) and quant in (None, t.quant)]
    if not tables:
        raise SynthError(f"no tactics known for --arch {arch} --quant {quant}; leave one out to see what there is")
    rows = [
        {"arch": t.arch, "quant": t.quant, "stage": stage, "id": i, "tactic": str(tactic)}
        for t in tables
        for stage in STAGES
        for i, tactic in t.items(stage)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from synth.console import table

    table(f"Tactics of FlashInfer {flashinfer}", list(rows[0]), [list(r.values()) for r in rows])


@main.command()
@click.option("--device", help="Only this device.")
@click.option("--quant", type=click.Choice(QUANTS), help="Only this quantization.")
@_folders
def fit(device: str | None, quant: str | None, own_measurements: Path | None, own_models: Path | None) -> None:
    """Fit every device and quantization in the measurements into a model, and print its held-out regret."""
    from synth.console import progress, regrets
    from synth.fitting import fit as fit_one
    from synth.fitting import save
    from synth.learning import workers
    from synth.paths import user_folder

    folder = own_models or user_folder("models")
    tables = _load_timings(own_measurements, device, quant)
    refused: SynthError | None = None
    for timings in tables:
        origin = timings.origin
        name = f"{origin.device} {origin.quant}" + (" (simulated)" if origin.simulated else "")
        try:
            with progress(f"fitting {name}") as report, workers() as pool:
                fitted = fit_one(timings, report, pool)
        except SynthError as e:
            # One table that can't be fitted, of a device that isn't known for example, doesn't stop the others.
            if len(tables) > 1:
                click.echo(f"warning: {name} is not fitted: {e}", err=True)
            refused = e
            continue
        path = save(fitted.model, folder)
        if fitted.evaluations and fitted.calibration:
            regrets(f"{name}: regret, each model family held out", fitted.evaluations)
            click.echo(
                f"90 % intervals cover {100 * fitted.calibration.coverage:.1f} %; times are off by "
                f"{100 * fitted.calibration.error:.1f} % in the median (held out)"
            )
        else:
            click.echo(f"{name}: one model family only, so no held-out regret")
        click.echo(f"{len(fitted.model.shapes_)} shapes, {len(timings)} timings -> {path}\n")
    if refused is not None:
        raise refused
    click.echo('next: synth emit --device "NAME"')


@main.command()
@click.option("--device", default="NVIDIA H200", show_default=True)
@click.option("--quant", type=click.Choice(QUANTS), help="Only this quantization.")
@click.option("--by", type=click.Choice(["family", "shape"]), default="family", show_default=True, help="Hold out by.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="Score the fitted models on this table (csv or csv.gz) of shapes that they have never seen.",
)
@click.option(
    "--evidence",
    type=click.Path(path_type=Path),
    help="Judge the analytical models by a folder of public measurements that they have not seen.",
)
@click.option("--transfer", is_flag=True, help="What one quantization's model says of the other's kernels.")
@click.option("--quick", is_flag=True, help="Without timings only: no sweeps are replayed.")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="How often ways of choosing cells that have chance in them are tried.",
)
@click.option("--learning-curve", is_flag=True, help="Plot what timings are worth and how true probabilities are.")
@click.option(
    "--plots",
    type=click.Path(path_type=Path),
    default="synth-plots",
    show_default=True,
    help="Folder for the plots of --learning-curve.",
)
@_flashinfer_option
@_json_option
@_folders
def evaluate(
    device: str,
    quant: str | None,
    by: str,
    against: Path | None,
    evidence: Path | None,
    transfer: bool,
    quick: bool,
    seeds: int,
    learning_curve: bool,
    plots: Path,
    flashinfer: str,
    as_json: bool,
    own_measurements: Path | None,
    own_models: Path | None,
) -> None:
    """Measure on shapes held out: the regret of the choices, what timings are worth, how true the doubt is."""
    from synth.catalog.devices import get_device
    from synth.console import problems, progress, regrets, shape_regrets, study
    from synth.evaluating import against_table, held_out, plot, report
    from synth.paths import readable

    if (against is not None) + (evidence is not None) + transfer > 1:
        raise SynthError("give one of --against, --evidence and --transfer")
    if evidence is not None or transfer:
        _evaluate_analytical(evidence, device, flashinfer, as_json, own_measurements)
        return
    if learning_curve and (quick or against is not None):
        raise SynthError("--learning-curve needs the sweeps replayed; leave out --quick and --against")
    if learning_curve:
        from synth.plotting import check

        check()
    results = []
    if against is not None:
        found: list[object] = []
        results = against_table(
            against, get_device(device), quant, flashinfer, readable("models", own_models), problems=found
        )
        problems(found)
    else:
        for timings in _load_timings(own_measurements, get_device(device).name, quant, flashinfer):
            with progress(f"evaluating {timings.origin.quant}") as step:
                results.append(held_out(timings, by, step, quick=quick, seeds=seeds))
    files = plot(results, plots) if learning_curve else []
    if as_json:
        click.echo(json.dumps(report(results), indent=1))
        return
    for result in results:
        regrets(f"{result.title}: regret", result.evaluations)
        shape_regrets(f"{result.title}: the model, by shape", result.evaluations[0])
        for label in result.refused:
            click.echo(f"refused: {label} is in the model's training data, so it isn't scored as unseen")
        if result.study is not None:
            study(result.title, result.study)
        elif not quick and against is None:
            click.echo(f"{result.title}: no shape was swept, so there is nothing to replay")
    for file in files:
        click.echo(f"-> {file}")


def _evaluate_analytical(
    evidence: Path | None, device: str, flashinfer: str, as_json: bool, own_measurements: Path | None
) -> None:
    """Print how good analytical models are: by public measurements, or carried over between quantizations."""
    import dataclasses

    from synth.catalog.devices import get_device
    from synth.console import evidence_tables, progress, transfer_tables

    if evidence is not None:
        from synth.evidence import evaluate as judge

        with progress("fitting halves") as report:
            found = judge(evidence, report)
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(found), indent=1))
        else:
            evidence_tables(found)
        return
    from synth.transferring import transfers

    tables = _load_timings(own_measurements, get_device(device).name, None, flashinfer)
    if len(tables) < 2:
        raise SynthError(f"--transfer needs timings of two quantizations, and {device} has those of {len(tables)}")
    with progress("carrying over") as report:
        scores = transfers(tables, report)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(s) for s in scores], indent=1))
    else:
        transfer_tables(scores)


@main.command()
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
@_flashinfer_option
@layer_options
@_folders
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
    from synth.catalog.devices import find_devices
    from synth.emitting import output_paths, write
    from synth.performance.routing import Routing

    spread = Routing.parse(routing)
    found = find_devices(device)
    paths = output_paths(found, output, file_format)
    done: list[tuple[Emission, Path]] = []
    skipped: list[_Skipped] = []
    for one, path in zip(found, paths, strict=True):
        try:
            emission, without = _emit_one(
                one, file_format, engine, max_tokens, measured, spread, flashinfer, own_measurements, own_models, layer
            )
        except _SkippedError as e:
            skipped += e.skipped
        else:
            done.append((emission, path))
            skipped += without
    # What is measured goes where this command looks for it.
    given = click.get_current_context().get_parameter_source("own_measurements") is ParameterSource.COMMANDLINE
    collect_options = {**layer, "measurements": own_measurements if given else None}
    if not done:
        _nothing_written(skipped, measured, _collect_command(collect_options))
    write([emission for emission, _ in done], [path for _, path in done])
    for emission, path in done:
        _print_emission(emission, path)
    for reason, group in _by_reason(skipped).items():
        click.echo(f"skipped: {_named(group)}: {reason}; {sum(s.deployments for s in group)} deployments", err=True)
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


#: Why a quantization of a device has no model at all: without these a fitted one can't be made either.
_NOT_PUBLIC = "its SMs, L2, memory bandwidth or peak aren't public"


@dataclass(frozen=True)
class _Skipped:
    """Quantizations of a device that nothing is written for, with so many deployments, and why."""

    device: Device
    quants: tuple[str, ...]
    deployments: int
    reason: str
    can_be_timed: bool = False


class _SkippedError(SynthError):
    """All quantizations of a device are skipped."""

    def __init__(self, skipped: list[_Skipped]) -> None:
        super().__init__(skipped[0].reason)
        self.skipped = skipped


def _emit_one(
    device: Device,
    file_format: str,
    engine: str,
    max_tokens: tuple[int, ...],
    measured: bool,
    routing: Routing,
    flashinfer: str,
    own_measurements: Path | None,
    own_models: Path | None,
    layer: dict[str, Any],
) -> tuple[Emission, list[_Skipped]]:
    """Return a device's config, and the quantizations that are skipped in it since nothing is known to choose by.

    Raises
    ------
    _SkippedError
        When nothing is left to write.
    """
    from synth.catalog.tactics import load_tables
    from synth.console import progress
    from synth.emitting import NothingToWriteError
    from synth.emitting import emit as emit_config
    from synth.flashinfer.contract import ENGINES, SERVER_MAX_TOKENS

    quants = [t.quant for t in load_tables(flashinfer) if t.arch == device.tactics_arch]
    if not quants:
        raise _SkippedError([_Skipped(device, (), 0, f"no tactics known for {device.arch} in FlashInfer {flashinfer}")])
    deployments = wanted_layers(quants, **layer)
    sources: dict[str, Source] = {}
    skipped: list[_Skipped] = []
    for quant in dict.fromkeys(d.quant for d in deployments):
        found = _source(device, quant, flashinfer, measured, own_measurements, own_models)
        if isinstance(found, str):
            count = sum(d.quant == quant for d in deployments)
            skipped.append(_Skipped(device, (quant,), count, found, can_be_timed=found != _NOT_PUBLIC))
        else:
            sources[quant] = found
    if not sources:
        raise _SkippedError(skipped)
    try:
        with progress(f"choosing for {device.name}") as report:
            emission = emit_config(
                device,
                [d for d in deployments if d.quant in sources],
                sources,
                engines=ENGINES if engine == "both" else (engine,),
                max_tokens=max_tokens or SERVER_MAX_TOKENS,
                flashinfer=flashinfer,
                file_format=file_format,
                routing=routing,
                measured=measured,
                progress=report,
            )
    except NothingToWriteError as e:
        left_out = sum(t.left_out for t in e.tallies)
        why = "without timings, or not sure to beat the fallback" if measured else "not sure to beat the fallback"
        reason = f"all {left_out} entries are left out: {why}"
        quants = [t.quant for t in e.tallies]
        count = sum(t.deployments for t in e.tallies)
        skipped.append(_Skipped(device, tuple(quants), count, reason, can_be_timed=True))
        raise _SkippedError(skipped) from e
    return emission, skipped


def _source(
    device: Device,
    quant: str,
    flashinfer: str,
    measured: bool,
    own_measurements: Path | None,
    own_models: Path | None,
) -> Source | str:
    """Return what to choose by: the fitted model or else the analytic one, and timings; or why there is nothing."""
    from synth.console import problems
    from synth.denied import load as load_denied
    from synth.emitting import Source, analytical_source
    from synth.measurements import load
    from synth.paths import find_model, readable
    from synth.performance.model import PerformanceModel

    folders = readable("measurements", own_measurements)
    found: list[Any] = []
    tables = load(folders, device.name, quant, flashinfer, problems=found)
    problems(found)
    path = find_model(readable("models", own_models), device.name, quant, flashinfer)
    if path is not None:
        model = PerformanceModel.load(path, device=device.name, quant=quant, flashinfer=flashinfer)
        name = f"model fitted on {len(model.shapes_)} shapes"
    else:
        try:
            analytical = analytical_source(device, quant, flashinfer)
        except SynthError:
            # There are tactics, or nobody would have asked.
            return _NOT_PUBLIC
        model, name = analytical.model, analytical.name
        if measured and all(t.origin != model.origin_ for t in tables):
            return f"no timings for FlashInfer {flashinfer}"
    timings = next((t for t in tables if t.origin == model.origin_), None)
    if path is None and timings is not None:
        model, name = PerformanceModel(start=model).fit(timings), f"{name}, and {len(timings)} timings"
        click.echo(
            f"note: {device.name} {quant}: {len(timings)} timings, fitted for this config; `synth fit` keeps the model "
            "and says how good it is",
            err=True,
        )
    return Source(model, timings, name, load_denied(folders, model.origin_))


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
    reasons = "; ".join(f"{_named(group)}: {reason}" for reason, group in _by_reason(skipped).items())
    if not any(s.can_be_timed for s in skipped):
        raise SynthError(f"nothing to write: {reasons}; `synth devices` lists what is known of each device")
    hint = f"to time some, on such a GPU: {command}"
    if measured:
        click.echo(f"error: --measured: nothing is written: {reasons}; {hint}", err=True)
        sys.exit(1)
    raise SynthError(f"nothing to write: {reasons}; {hint}")


def _by_reason(skipped: Sequence[_Skipped]) -> dict[str, list[_Skipped]]:
    groups: dict[str, list[_Skipped]] = {}
    for one in skipped:
        groups.setdefault(one.reason, []).append(one)
    return groups


def _named(group: Sequence[_Skipped]) -> str:
    """Return the devices of a group with their quantizations, each once: "A (bf16, fp8), B"."""
    quants: dict[str, list[str]] = {}
    for one in group:
        quants.setdefault(one.device.name, []).extend(one.quants)
    return ", ".join(f"{name} ({', '.join(qs)})" if qs else name for name, qs in quants.items())


def _warn_of_analytical(emissions: Sequence[Emission], layer: Mapping[str, Any]) -> None:
    """Say in one line what is analytical in these configs, how sure that is, and what would measure it."""
    told = [(e.device.name, t, n) for e in emissions for t in e.tallies for n in [t.entries.get("analytical", 0)] if n]
    if not told:
        return
    entries = sum(n for _, _, n in told)
    left_out = sum(t.abstained.get("analytical", 0) for _, t, _ in told)
    regret = sum(t.regret["analytical"] * n for _, t, n in told) / entries
    within = sum(t.within["analytical"] * n for _, t, n in told) / entries
    quants: dict[str, list[str]] = {}
    for name, tally, _ in told:
        quants.setdefault(name, []).append(tally.quant)
    # Devices with the same quantizations are listed together.
    alike: dict[str, list[str]] = {}
    for name, some in quants.items():
        alike.setdefault(", ".join(some), []).append(name)
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
    from synth.console import table
    from synth.emitting import SOURCES, sidecar_path

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


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", help="GPU to stand for when the file doesn't name one.")
@click.option("--misses", "shown", type=click.IntRange(0), default=10, show_default=True, help="Misses to print.")
@_json_option
def replay(file: Path, device: str | None, shown: int, as_json: bool) -> None:
    """Load FILE into the installed FlashInfer and ask its own lookup for every key. Exit 1 on a miss."""
    from synth.catalog.devices import get_device
    from synth.flashinfer.replay import replay as run

    report = run(file, device=get_device(device).name if device else None)
    if as_json:
        import dataclasses

        click.echo(json.dumps({**dataclasses.asdict(report), "ok": report.ok}, indent=1, default=str))
    else:
        click.echo(
            f"{file}: FlashInfer {report.flashinfer} on {report.device}: {report.keys_hit} of {report.keys} keys and "
            f"{report.hits} of {report.lookups} lookups hit"
        )
        for note in report.notes:
            click.echo(f"note: {note}")
        for miss in report.misses[:shown]:
            click.echo(f"miss: {miss.key}: {miss.reason}")
        if len(report.misses) > shown:
            click.echo(f"{len(report.misses) - shown} more misses; --misses N shows more")
    sys.exit(0 if report.ok else 1)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@_flashinfer_option
@click.option("--device", help="GPU to check for when the file doesn't name one.")
@_json_option
def check(file: Path, flashinfer: str, device: str | None, as_json: bool) -> None:
    """Say what this FlashInfer will not use of FILE, and why. Exit 1 when something is found."""
    import dataclasses

    from synth.catalog.devices import get_device
    from synth.flashinfer.checking import check as run
    from synth.flashinfer.checking import summary

    findings = run(file, flashinfer, device=get_device(device).name if device else None)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(f) for f in findings], indent=1))
    elif not findings:
        click.echo(f"{file}: nothing found; FlashInfer {flashinfer} can use every entry")
    else:
        for group in summary(findings):
            more = f" ({group.count} of these)" if group.count > 1 else ""
            where = f" [{group.example.key}]" if group.example.key else ""
            click.echo(f"{group.severity}: {group.code}{more}: {group.example.message}{where}; {group.example.way_out}")
    sys.exit(1 if any(f.severity != "note" for f in findings) else 0)


@main.command()
@click.option("--device", help="GPU.  [default: the one that is here]")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds of measuring on each GPU.")
@click.option("--fraction", type=click.FloatRange(0, 1, min_open=True), help="Share of the sweep.  [default: 0.05]")
@click.option("--full", is_flag=True, help="Every tactic of every bucket.")
@click.option(
    "--device-plan",
    is_flag=True,
    help="The first minute on a GPU without timings: settle the layers that are named, then time a few that are far "
    "from them, for all other models.  [--budget: 60]",
)
@click.option(
    "--no-rounds",
    is_flag=True,
    help="Time the tactics predicted fastest in each bucket; otherwise what to time is decided round by round, from "
    "what was timed so far.",
)
@click.option("--buckets", help="Token counts, for example 1,64,1024.  [default: FlashInfer's up to --max-tokens]")
@click.option("--max-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Largest bucket.")
@click.option("--pass", "passes", type=click.IntRange(1), multiple=True, help="Pass number; may be repeated.")
@click.option("--gpus", default="0", show_default=True, help="all, or numbers such as 0,2.")
@click.option(
    "--ray", "ray_address", is_flag=False, flag_value="auto", help="Run on a Ray cluster, one actor for each GPU."
)
@click.option("--simulate", is_flag=True, help="Replay the measurements with noise instead of timing kernels.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--journal", type=click.Path(path_type=Path), help="Journal.  [default: in your measurements folder]")
@_flashinfer_option
@_json_option
@layer_options
@_folders
def collect(
    device: str | None,
    budget: float | None,
    fraction: float | None,
    full: bool,
    device_plan: bool,
    no_rounds: bool,
    buckets: str | None,
    max_tokens: int,
    passes: tuple[int, ...],
    gpus: str,
    ray_address: str | None,
    simulate: bool,
    dry_run: bool,
    journal: Path | None,
    flashinfer: str,
    as_json: bool,
    own_measurements: Path | None,
    own_models: Path | None,
    **layer: Any,
) -> None:
    """Time a planned sample of tactics on this GPU through FlashInfer's own autotuner.

    Every timing is in the journal before the next one starts; the same command continues where it stopped.
    """
    import dataclasses

    from synth.catalog.tactics import load_tables
    from synth.collecting import GPU_RUNNER, RichReporter, find_gpus, simulated_runner
    from synth.collecting import collect as run
    from synth.console import plan_summary
    from synth.measurements import load
    from synth.paths import find_model, readable, user_folder
    from synth.performance.model import PerformanceModel, predictor
    from synth.planning import Layer, make_plan, summarize
    from synth.planning.anchors import with_anchors
    from synth.planning.rounds import decide_by_rounds

    if full + (budget is not None) + (fraction is not None) > 1:
        raise SynthError("give one of --budget, --fraction and --full")
    if device_plan and (full or fraction is not None or no_rounds or len(passes) > 1):
        raise SynthError("--device-plan decides by rounds within --budget; leave out --full, --fraction, --no-rounds")
    if device_plan and not (layer["model_names"] or layer["config_file"] or layer["hidden"]):
        raise SynthError("--device-plan settles the layers that are named; name some, such as --model glm-5 --tp 8")
    found = _device_here(device, simulate or (dry_run and device is not None))
    tables = {t.quant: t for t in load_tables(flashinfer) if t.arch == found.tactics_arch}
    layers = [Layer.of(d) for d in wanted_layers(list(tables), **layer)]
    trained = {
        q: PerformanceModel.load(path)
        for q in dict.fromkeys(one.quant for one in layers)
        if (path := find_model(readable("models", own_models), found.name, q, flashinfer))
    }
    starts = _starts(found, [one.quant for one in layers if one.quant not in trained], flashinfer)
    turns: list[list[int]] = []
    if device_plan:
        budget = budget or _FIRST_MINUTE_S
        layers, turns = with_anchors(layers, list(starts), max_tokens)
    plan = make_plan(
        layers,
        found.name,
        found.tactics_arch,
        flashinfer,
        fraction=None if full or budget is not None else fraction or 0.05,
        buckets=_numbers(buckets) if buckets else None,
        max_tokens=max_tokens,
        passes=passes or (1,),
        budget_s=budget,
        predict=predictor({**starts, **trained}),
    )
    root = own_measurements or user_folder("measurements")
    if simulate:
        root = root / "simulated"
        own = own_measurements if own_measurements and own_measurements.is_dir() else None
        spec = simulated_runner(readable("measurements", own), found.name)
    else:
        spec = GPU_RUNNER
    cards = (0,) if simulate and gpus == "all" else find_gpus(gpus) if not dry_run else (0,)
    planned = summarize(plan, len(cards))
    if dry_run:
        if as_json:
            click.echo(json.dumps(planned.as_dict(), indent=1))
        else:
            plan_summary(planned)
        return
    if not as_json:
        plan_summary(planned)
    strategy = None
    # Rounds need something to begin with, and too little may be public of the device.
    guided = all(one.quant in trained or one.quant in starts for one in plan.layers)
    if guided and not full and not no_rounds and len(plan.passes) == 1:
        there = own_measurements if own_measurements and own_measurements.is_dir() else None
        # What a simulation replays must not be known to it.
        earlier = [] if simulate else load(readable("measurements", there), found.name, None, flashinfer, problems=[])
        strategy = decide_by_rounds(plan, trained, earlier, starts=starts, turns=turns, at_once=len(cards))
    with RichReporter() as reporter:
        done = run(
            plan,
            spec,
            journal or plan.journal_path(root),
            strategy=strategy,
            gpus=cards,
            ray=ray_address,
            reporter=reporter,
            measurements=root,
        )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), indent=1, default=str))
    else:
        from synth.console import collect_summary

        collect_summary(done)
    if done.outcome == "failed":
        raise SynthError(f"{done.reason}; what was timed is in {done.journal}; the same command continues")
    if done.outcome == "interrupted":
        sys.exit(130)
    if not as_json:
        click.echo(f"next: synth fit --measurements {root}" if simulate or own_measurements else "next: synth fit")


#: Seconds of measuring of a device plan.
_FIRST_MINUTE_S = 60.0


def _starts(device: Device, quants: Iterable[str], flashinfer: str) -> dict[str, PerformanceModel]:
    """Return what is believed of a device without timings, by quantization; nothing where too little is public."""
    from contextlib import suppress

    from synth.analytical import analytical_model

    found = {}
    for quant in dict.fromkeys(quants):
        with suppress(SynthError):
            found[quant] = analytical_model(device, quant, flashinfer)
    return found


@main.command()
@click.option("--device", help="GPU.  [default: the one that is here]")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds of measuring for each layer, on each GPU; those of earlier calls with this --pass count.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.001,
    show_default=True,
    help="A layer is done where its expected remaining regret is below this share.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Largest bucket.")
@click.option("--pass", "pass_", type=click.IntRange(1), default=1, show_default=True, help="Pass number.")
@click.option("--no-numbers", is_flag=True, help="Don't compare outputs with the fallback's.")
@click.option("--gpus", default="0", show_default=True, help="all, or numbers such as 0,2.")
@click.option("--simulate", is_flag=True, help="Replay the measurements with noise instead of timing kernels.")
@click.option("--wrong", type=int, multiple=True, hidden=True, help="With --simulate: a tactic with wrong numbers.")
@click.option("--dry-run", is_flag=True, help="Print where each layer stands and stop.")
@_flashinfer_option
@_json_option
@layer_options
@_folders
def verify(
    device: str | None,
    budget: float,
    threshold: float,
    max_tokens: int,
    pass_: int,
    no_numbers: bool,
    gpus: str,
    simulate: bool,
    wrong: tuple[int, ...],
    dry_run: bool,
    flashinfer: str,
    as_json: bool,
    own_measurements: Path | None,
    own_models: Path | None,
    **layer: Any,
) -> None:
    """Spot-check the choices of layers on this GPU, and compare their numbers with the fallback's.

    For each layer: time what its choices are least sure of until the expected remaining regret is below --threshold
    or --budget is spent; then run every chosen pair of tactics beside FlashInfer's fallback. A tactic whose output is
    wrong is denied on this device and FlashInfer version, and the layer is chosen anew. `synth emit` uses the timings
    and the denied tactics at once. Exit 1 when a chosen tactic's numbers were wrong.
    """
    from synth.catalog.tactics import load_tables
    from synth.collecting import GPU_RUNNER, RichReporter, SilentReporter, duration, find_gpus, simulated_runner
    from synth.console import problems, standings, verification
    from synth.flashinfer.contract import token_buckets
    from synth.numbers import ComparatorSpec
    from synth.paths import find_model, readable, shipped, user_folder
    from synth.performance.model import PerformanceModel
    from synth.planning import Layer
    from synth.verifying import gpu_comparator, outlook, report
    from synth.verifying import verify as run

    if wrong and not simulate:
        raise SynthError("--wrong goes with --simulate")
    found = _device_here(device, simulate or (dry_run and device is not None))
    tables = {t.quant: t for t in load_tables(flashinfer) if t.arch == found.tactics_arch}
    named: dict[object, Layer] = {}
    for d in wanted_layers(list(tables), **layer):
        # Several deployments may be one layer on a rank.
        named.setdefault((d.shape, d.quant), Layer.of(d))
    layers = list(named.values())
    loaded = {}
    for q in dict.fromkeys(one.quant for one in layers):
        path = find_model(readable("models", own_models), found.name, q, flashinfer)
        if path is None:
            raise SynthError(
                f"{found.name} {q}: no model for FlashInfer {flashinfer} whose choices could be verified; time some "
                "kernels with `synth collect` and run `synth fit`"
            )
        loaded[q] = PerformanceModel.load(path, device=found.name, quant=q, flashinfer=flashinfer)
    fresh = own_measurements is not None and not own_measurements.exists()
    folders = [shipped("measurements")] if fresh else readable("measurements", own_measurements)
    root = own_measurements or user_folder("measurements")
    spec = GPU_RUNNER
    if simulate:
        # Real timings must not decide what replays them.
        root, spec, folders = root / "simulated", simulated_runner(folders, found.name), []
    if dry_run:
        there = [root, *folders]
        buckets = token_buckets(max_tokens, flashinfer)
        standing = [(one, outlook(one, loaded[one.quant], there, buckets, simulated=simulate)) for one in layers]
        if as_json:
            click.echo(json.dumps([report(one, now) for one, now in standing], indent=1))
        else:
            standings(standing)
        return
    cards = (0,) if simulate and gpus == "all" else find_gpus(gpus)
    if len(layers) > 1 and not as_json:
        click.echo(f"{len(layers)} layers, at most {duration(budget * len(layers))} of measuring on each GPU")
    done = []
    bad: list[Any] = []
    for one in layers:
        comparator = ComparatorSpec("synth.numbers:SimulatedComparator", {"wrong": wrong}) if simulate else None
        result = run(
            one,
            loaded[one.quant],
            root,
            folders=folders,
            budget_s=budget,
            threshold=threshold,
            max_tokens=max_tokens,
            pass_=pass_,
            runner=spec,
            simulated=simulate,
            comparator=None if no_numbers else comparator or gpu_comparator(one),
            gpus=cards,
            reporter=SilentReporter if as_json else RichReporter,
            problems=bad,
        )
        done.append(result)
        if not as_json:
            verification(result)
        if result.collected.outcome == "failed":
            raise SynthError(
                f"{one}: {result.collected.reason}; what was timed is in {result.collected.journal}; the same command "
                "continues"
            )
        if result.collected.outcome == "interrupted":
            break
    problems(list(dict.fromkeys(map(str, bad))))
    if as_json:
        click.echo(json.dumps([report(r.layer, r) for r in done], indent=1))
    if done and done[-1].collected.outcome == "interrupted":
        sys.exit(130)
    if not as_json and not simulate:
        click.echo("next: synth emit uses these timings for their layers; synth fit learns from them for others")
    sys.exit(1 if any(r.numbers.denials for r in done) else 0)


def _device_here(device: str | None, elsewhere: bool) -> Device:
    """Return the GPU that is here, or with `elsewhere` the one that is named."""
    from synth.catalog.devices import get_device
    from synth.collecting import gpu_name

    if elsewhere:
        return get_device(device or "NVIDIA H200")
    found = get_device(gpu_name())
    if device is not None and get_device(device) != found:
        raise SynthError(f"--device {device}: the GPU here is {found.name}")
    return found


@main.group()
def measurements() -> None:
    """Add and merge files of timings."""


@measurements.command("add")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--device", default="NVIDIA H200", show_default=True, help="What a flat table doesn't say.")
@_flashinfer_option
@_folders
def measurements_add(
    files: tuple[Path, ...], device: str, flashinfer: str, own_measurements: Path | None, own_models: Path | None
) -> None:
    """Add FILES to your measurements: a collect journal, a measurements file, or a flat table (csv, csv.gz)."""
    from synth.catalog.devices import get_device
    from synth.collecting import add_file
    from synth.console import problems
    from synth.paths import user_folder

    found = get_device(device)
    root = own_measurements or user_folder("measurements")
    for file in files:
        bad: list[Any] = []
        written = add_file(file, root, device=found.name, arch=found.tactics_arch, flashinfer=flashinfer, problems=bad)
        problems(bad)
        for path in written:
            click.echo(f"{file} -> {path}")


@measurements.command("merge")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder for the merged file.")
def measurements_merge(files: tuple[Path, ...], output: Path) -> None:
    """Merge measurements FILES of one shape; refuses mixed devices, versions, quantizations and timing policies."""
    from synth.console import problems
    from synth.measurements import merge, read, write

    bad: list[Any] = []
    merged = merge([read(file, bad) for file in files])
    problems(bad)
    click.echo(f"{len(merged)} timings -> {write(merged, output)}")


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SynthError(f"--buckets {text!r}: give token counts such as 1,64,1024")
    return [int(part) for part in parts]


def _load_timings(
    own: Path | None, device: str | None, quant: str | None, flashinfer: str | None = None
) -> list[Timings]:
    from synth.catalog.devices import get_device
    from synth.console import problems
    from synth.measurements import load
    from synth.paths import readable

    found: list[Any] = []
    folders = readable("measurements", own)
    tables = load(folders, get_device(device).name if device else None, quant, flashinfer, problems=found)
    problems(found)
    if not tables:
        asked = " ".join(str(x) for x in (device, quant) if x) or "anything"
        raise SynthError(f"no timings of {asked} in {', '.join(map(str, folders))}; `synth collect` makes some")
    return tables
