"""Fit the analytic model's constants to public whole-layer measurements: ``python benchmarks/constants.py DIR``.

Writes ``synth/performance/analytical.toml``. DIR holds the measurements that ``benchmarks/evidence.py`` reads; they are
not part of the project. Repeat after the shipped NVIDIA H200 models change: the fit begins at their constants.
"""

from __future__ import annotations

import sys
from pathlib import Path

from studies.public import fit_constants, grouped, read_folder

from synth.catalog.devices import get_device
from synth.catalog.paths import find_model, shipped
from synth.flashinfer.tactics import DEFAULT_FLASHINFER
from synth.performance.analytical import STRUCTURE
from synth.performance.model import PerformanceModel
from synth.performance.roofline import DEFAULTS

#: Kernels of the same kind on the H200: TMA ones alone, or SM80-style ones among them.
KINDS = {"nvfp4": "fp8", "fp8": "bf16", "bf16": "bf16"}
HEAD = """# Constants of the analytic model, by architecture and quantization. Made by benchmarks/constants.py.
#
# structure  quantization of the NVIDIA H200 whose forests correct them: that of the same kind of kernel.
# roofline   as in synth/performance/roofline.py.
# source     what they were fitted to; none of it is shipped.
"""


def main() -> None:
    layers, _ = read_folder(Path(sys.argv[1]))
    blocks = [HEAD]
    for (name, quant), times in sorted(grouped(layers).items()):
        if name == STRUCTURE:
            continue
        path = find_model([shipped("models")], STRUCTURE, KINDS[quant], DEFAULT_FLASHINFER)
        assert path is not None
        model = fit_constants(times, PerformanceModel.load(path).roofline_)
        rows = sum(map(len, times))
        source = f"{rows:,} whole layers of ai-dynamo/aiconfigurator (Apache-2.0): {', '.join(t.engine for t in times)}"
        # No layers of MXFP8 x MXFP4 are public: its kernels are those of NVFP4.
        for each in (quant, "mxfp8_mxfp4") if quant == "nvfp4" else (quant,):
            constants = ", ".join(f"{n} = {c!r}" for n, c in zip(DEFAULTS, model.roofline.constants, strict=True))
            blocks.append(
                f'[[constants]]\narch = "{get_device(name).tactics_arch}"\nquant = "{each}"\n'
                f'structure = "{KINDS[quant]}"\ndevice = "{name}"\n'
                f'source = "{source if each == quant else "those of nvfp4, whose kernels are alike"}"\n'
                f"roofline = {{ {constants} }}\n"
            )
        print(name, quant, {e: [round(x, 2) for x in o] for e, o in model.overheads.items()}, model.resident)
    target = Path(__file__).parents[1] / "synth" / "performance" / "analytical.toml"
    target.write_text("\n".join(blocks), encoding="utf-8")
    print(f"-> {target.name}")


if __name__ == "__main__":
    main()
