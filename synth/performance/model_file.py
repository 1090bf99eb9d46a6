"""A model as a file: a zip of plain arrays and a JSON text. Nothing in it is executed, and little of it is believed."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.catalog import untrusted
from synth.catalog.files import write_atomically
from synth.errors import SynthError
from synth.performance.features import FEATURES
from synth.performance.forest import LEAF, Forest

#: The forests of a model: what each one's arrays begin with.
FORESTS = ("choice_", "time_", "residual_")
_ARRAYS = tuple(f"{forest}{array}.npy" for forest in FORESTS for array in ("sizes", "feature", "threshold", "value"))
_DESCRIPTION = "model.json"
#: Largest model file that is read, in bytes: the shipped ones have 2.3 MB and are kept below 8 MiB.
_MAX_PACKED = 32 << 20
#: … and unpacked. A node of a tree takes 4 bytes there.
_MAX_UNPACKED = 64 << 20
#: Largest description in a model file, in bytes: those of the shipped ones have 11 kB.
_MAX_DESCRIPTION = 4 << 20
#: Most trees of a forest and levels of a tree; the shipped models have 64 and 43.
_MAX_TREES, _MAX_LEVELS = 1024, 500
#: Largest leaf: the logarithm of a ratio of times, which is 3 at most in the shipped models.
_MAX_LEAF = 20.0
#: A file's modification time inside the archive, so that equal models are equal bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write(path: Path, description: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a model: the same bytes for the same content."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        _add(archive, _DESCRIPTION, json.dumps(description, indent=1, sort_keys=True).encode())
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            _add(archive, f"{name}.npy", buffer.getvalue())
    write_atomically(path, out.getvalue())


def read(path: Path) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Return a model's description and its arrays: those of a model only, each once, never more bytes than declared.

    They are read into memory and nothing is written, so that a name such as ``../x`` would lead nowhere; it is refused
    all the same. Beside :class:`SynthError`, damaged input raises a dozen kinds of exception.
    """
    try:
        data = untrusted.read_bytes(path, _MAX_PACKED, "model")
    except SynthError:
        if not path.exists():
            raise FileNotFoundError from None
        raise
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        names = {i.filename for i in infos}
        if sum(i.file_size for i in infos) > _MAX_UNPACKED or len(names) != len(infos):
            raise SynthError("larger than any model")
        if strange := sorted(names - {_DESCRIPTION, *_ARRAYS}):
            raise SynthError(f"it holds {untrusted.shown(strange[0])}, which no model has")
        files = {}
        for info in infos:
            # Other methods have windows of gigabytes.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise SynthError("it is packed in another way than models are")
            # A plain read() would unpack everything first and cut it to the declared size afterwards.
            with archive.open(info) as f:
                files[info.filename] = f.read(info.file_size + 1)
    text = files.pop(_DESCRIPTION)
    if len(text) > _MAX_DESCRIPTION:
        raise SynthError("its description is larger than any model's")
    return untrusted.loads(text), {name.removesuffix(".npy"): _array(data) for name, data in files.items()}


def forest_of(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Forest | None:
    """Return one forest of a model's arrays, None without one; what would take long to walk or overflow is refused."""
    mine = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if not mine:
        return None
    sizes, feature, value = (mine.get(name, np.zeros(0)) for name in ("sizes", "feature", "value"))
    if len(sizes) > _MAX_TREES:
        raise SynthError(f"its forest has more than {_MAX_TREES} trees")
    if len(value) and not np.abs(value.astype(np.float64)).max() <= _MAX_LEAF:
        raise SynthError(f"its forest predicts logarithms beyond {_MAX_LEAF:g}")
    forest = Forest.from_arrays(mine, len(FEATURES))
    inner = np.concatenate([[0], np.cumsum(feature != LEAF)])
    start = 0
    for size in sizes.tolist():
        # Nodes lie level by level: those of the next one are the children of this one's.
        levels, first, last = 0, start, start + 1
        while first < last:
            first, last, levels = last, last + 2 * int(inner[last] - inner[first]), levels + 1
            if levels > _MAX_LEVELS:
                raise SynthError(f"its forest has a tree of more than {_MAX_LEVELS} levels")
        start += size
    return forest


def name_of(value: object) -> str:
    """Return a text that may be printed."""
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise SynthError(f"{untrusted.shown(value)} is no name")
    return value


def _array(data: bytes) -> NDArray[Any]:
    """Read a one-dimensional array of numbers, whose size must be that of the data."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError("another version of the array format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    rest = data[stream.tell() :]
    if dtype.hasobject or len(shape) != 1 or shape[0] < 0 or shape[0] * dtype.itemsize != len(rest):
        raise ValueError("not an array of numbers")
    return np.frombuffer(rest, dtype=dtype)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)
