"""Files of tokens per expert, as a server counted them.

- **SGLang**'s expert distribution recorder. Early versions write a CSV ``layer_id,expert_id,count``, with only the
  experts that got tokens. Later ones write a ``.pt`` file of torch, with ``logical_count`` of [steps, layers, experts]
  in mode ``stat``. It has to be converted, since synth opens no pickles. The JSON ``{"logical_count": …}`` that
  ``--init-expert-location`` takes is read as it is.
- **vLLM**'s load balancer (EPLB) logs only how balanced the ranks are and writes no counts. Its state
  ``expert_load_window`` is [steps, layers, physical experts]: summed onto logical experts and written with
  ``json.dump(….tolist(), file)``, it is read here. Expert ids that its API returns with
  ``--enable-return-routed-experts`` have to be counted first.

Sources: ``python/sglang/srt/eplb/expert_distribution.py`` and ``expert_location.py``, sgl-project/sglang#5275;
``vllm/distributed/eplb/eplb_state.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from synth.catalog import untrusted
from synth.errors import SynthError
from synth.performance.routing import MAX_EXPERTS, Routing, number_of

#: Largest file of counts that is read, in bytes.
MAX_BYTES = 64 * 1024 * 1024
_EXPERT_COLUMNS = ("expert", "expert_id")
_LAYER_COLUMNS = ("layer", "layer_id")
_COUNT_COLUMNS = ("count", "tokens")
_FORMS = "give uniform, balanced, zipf:1.2, hot:1, or a file of tokens per expert (text, CSV or JSON)"


def read_counts(path: Path) -> Routing:
    """Read a file of tokens per expert; :meth:`synth.performance.routing.Routing.parse` says which there are.

    Raises
    ------
    SynthError
        When the file is missing, too large, or not such a file.
    """
    name = path.name
    if path.suffix.lower() in (".pt", ".pth"):
        raise _torch_file(name)
    try:
        with path.open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise SynthError(f"--routing {path}: can't be read ({reason}); {_FORMS}") from None
    if len(data) > MAX_BYTES:
        raise SynthError(f"{name}: larger than {MAX_BYTES >> 20} MiB; sum the counts over steps first")
    if data.startswith((b"PK\x03\x04", b"\x80", b"\x93NUMPY")):
        raise _torch_file(name)
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SynthError(f"{name}: not a text file; {_FORMS}") from None
    if content.lstrip().startswith(("[", "{")):
        return _from_json(content, name)
    return _from_lines(content, name)


def _torch_file(name: str) -> SynthError:
    return SynthError(
        f"{name}: a file of torch or numpy, which synth doesn't open; convert it: python -c \"import json, torch; d = "
        f"torch.load('{name}', map_location='cpu'); json.dump({{'logical_count': d['logical_count'].tolist()}}, "
        "open('counts.json', 'w'))\""
    )


def _from_json(content: str, name: str) -> Routing:
    try:
        found = untrusted.loads(content.encode(), values=MAX_BYTES)
    except ValueError as e:
        raise SynthError(f"{name}: not JSON ({e})") from None
    if isinstance(found, dict) and "logical_count" in found:
        found = found["logical_count"]
    if isinstance(found, dict):
        return _from_cells(((0, key, value, f"{name}: expert {key}") for key, value in found.items()), name)
    depth, part = 0, found
    while isinstance(part, list) and depth < 4:
        depth, part = depth + 1, part[0] if part else None
    if not 1 <= depth <= 3:
        raise SynthError(f"{name}: not a list of counts, of layers of counts, or of steps of layers of counts")
    steps = [[found]] if depth == 1 else [found] if depth == 2 else found
    for i, step in enumerate(steps):
        if not isinstance(step, list) or not all(isinstance(layer, list) for layer in step):
            raise SynthError(f"{name}: step {i} is not a list of layers like the first one")
    return Routing.counts(_added(steps, name), name)


def _added(steps: list[list[list[Any]]], name: str) -> list[list[float]]:
    """Return the sum over steps, by layer and expert."""
    if len(steps) == 1:
        return steps[0]
    total = [[0.0] * len(layer) for layer in steps[0]]
    for i, step in enumerate(steps):
        if len(step) != len(steps[0]) or any(len(a) != len(b) for a, b in zip(step, steps[0], strict=True)):
            raise SynthError(f"{name}: step {i} has other layers or experts than the first one")
        values = [[number_of(x, f"{name}: step {i}, layer {j}") for x in layer] for j, layer in enumerate(step)]
        total = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(total, values, strict=True)]
    return total


def _from_lines(content: str, name: str) -> Routing:
    rows = [
        (i, [cell.strip() for cell in (line.split(",") if "," in line else line.split())])
        for i, line in enumerate(content.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not rows:
        raise SynthError(f"{name}: an empty file; {_FORMS}")
    names = [cell.lower() for cell in rows[0][1]]
    if _is_number(names[0]):
        if wide := next((i for i, cells in rows if len(cells) != 1), None):
            raise SynthError(f"{name}, line {wide}: several columns need a header, such as expert,count")
        return Routing.counts([[number_of(cells[0], f"{name}, line {i}") for i, cells in rows]], name)

    def column(known: Sequence[str]) -> int | None:
        return next((i for i, cell in enumerate(names) if cell in known), None)

    expert, layer, count = column(_EXPERT_COLUMNS), column(_LAYER_COLUMNS), column(_COUNT_COLUMNS)
    if count is None or (expert is None and len(names) > 1):
        raise SynthError(f"{name}: the header {','.join(names)!r} must be count, expert,count or layer,expert,count")
    if uneven := next((i for i, cells in rows if len(cells) != len(names)), None):
        raise SynthError(f"{name}, line {uneven}: not {len(names)} columns like the header")
    if expert is None:
        return Routing.counts([[number_of(cells[count], f"{name}, line {i}") for i, cells in rows[1:]]], name)
    return _from_cells(
        (
            (cells[layer] if layer is not None else 0, cells[expert], cells[count], f"{name}, line {i}")
            for i, cells in rows[1:]
        ),
        name,
    )


def _from_cells(cells: Iterable[tuple[object, object, object, str]], name: str) -> Routing:
    """Return the routing of counts that name their layer and expert; those of the same one add up."""
    found: dict[object, dict[int, float]] = {}
    for layer, expert, count, place in cells:
        if not re.fullmatch(r"[0-9]{1,9}", str(expert)) or int(str(expert)) >= MAX_EXPERTS:
            raise SynthError(f"{place}: {str(expert)[:40]!r} is not an expert's number, from 0 to {MAX_EXPERTS - 1}")
        counted = found.setdefault(layer, {})
        number = int(str(expert))
        counted[number] = counted.get(number, 0.0) + number_of(count, place)
    return Routing.counts([_dense(layer) for layer in found.values()], name, padded=True)


def _dense(counts: Mapping[int, float]) -> list[float]:
    return [counts.get(i, 0.0) for i in range(max(counts) + 1)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
