"""How long the commands take on this machine: run it from a checkout with nothing else running.

    python benchmarks/speed.py [--device "NVIDIA H200"]

Prints one line a figure: the median of several runs of whole processes, and of calls inside this one.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from synth.catalog.paths import model_file, shipped
from synth.performance.model import Cells, PerformanceModel
from synth.timings.folders import load

ROOT = Path(__file__).resolve().parent.parent


def seconds(call: Callable[[], object], runs: int) -> float:
    """Return the median duration of `call`."""
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def command(*arguments: str) -> Callable[[], object]:
    """Return a call that runs ``synth`` with `arguments` in a process of its own."""
    line = [sys.executable, str(ROOT / "cli.py"), *arguments]
    return lambda: subprocess.run(line, cwd=ROOT, capture_output=True, check=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="NVIDIA H200")
    device = parser.parse_args().device
    (timings,) = load(shipped("measurements"), device, "bf16", problems=[])
    model = PerformanceModel.load(shipped("models") / model_file(device, "bf16", timings.origin.flashinfer))
    cells = Cells.of(timings.averaged())
    print(f"load every timing       {seconds(lambda: load(shipped('measurements'), problems=[]), 5):8.2f} s")
    print(f"predict                 {len(cells) / seconds(lambda: model.predict(cells), 5):8.0f} cells/s")
    print(f"synth --help            {seconds(command('--help'), 5):8.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        own = ("--models", f"{folder}/models")
        print(f"synth fit               {seconds(command('fit', *own), 3):8.1f} s")
        emit = ("emit", "--device", device, *own, "-o", f"{folder}/config.json")
        one = (*emit, "--hidden", "3072", "--inter", "1024", "--experts", "96", "--top-k", "6", "--quant", "bf16")
        print(f"synth emit, catalogue   {seconds(command(*emit), 3):8.1f} s")
        print(f"synth emit, one shape   {seconds(command(*one), 3):8.1f} s, of which start-up")
        start = [sys.executable, "-c", "import synth.choosing.emission"]
        print(f"  importing takes       {seconds(lambda: subprocess.run(start, cwd=ROOT, check=True), 3):8.1f} s")


if __name__ == "__main__":
    main()
