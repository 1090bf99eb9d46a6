"""Reads and writes the one form that a bundled module has: a docstring and ``best_configs = {…}``, literals only.

Python's own parser reads it, and nothing is compiled or executed. Before that, what stands outside of strings is
looked through: only the marks and words of that one form, and no more of it than the parser can hold. A stranger's
file could otherwise fill the memory, or end the process, which deeply nested names do to Python 3.10.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from synth.catalog import untrusted
from synth.catalog.untrusted import MAX_DIGITS, shown
from synth.configs.model import Config, Entry
from synth.configs.v1 import Duplicates, in_order
from synth.errors import SynthError

_TITLE = "FlashInfer MoE tactics, written by synth. Keys map to (0, tactic id)."

#: The H200's module for the whole catalogue, 27,592 entries, has 6 MiB.
MAX_BYTES = 16 << 20
#: Most characters outside of strings, each string counting as one; that module has 550,000.
_MAX_CODE = 2 << 20
#: Where a module says in which encoding it is (PEP 263): in a comment on one of its first two lines.
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
#: Strings without a prefix, with at most so many escapes that matching them needs little memory; and comments.
_ESCAPES = r"(?:\\.[^{0}\\]*){{0,100000}}"
_STRINGS = re.compile(
    r'(?<!\w)(?:"{3}(?:[^"\\]|\\.|"{1,2}(?!")){0,1000000}"{3}|'
    + "|".join(f"{q}[^{q}\\\\\n]*{_ESCAPES.format(q + chr(92) + 'n')}{q}" for q in ('"', "'"))
    + r")|#[^\n]*",
    re.DOTALL,
)
_NUMBER = re.compile(rf"(?<!\w)\.?[0-9](?:[eE][+-]|[\w.]){{0,{MAX_DIGITS}}}(?![\w.])")
#: What is left then: strings as S and numbers as 0. No operator and no call: a sign or a bracket follows no value.
_CODE = re.compile(r"(?:\s|\b(?:S|0|best_configs|True|False|None)\b|[][(){},:=]|[-+](?=[ \t]*0))*")
_AFTER_VALUE = re.compile(r"[\w)\]}]\s*[-+(\[{]")
_NOT_LITERAL = "not a literal; write 'key': (0, tactic)"
_OTHER_CODE = "holds code other than 'best_configs = {…}'; synth reads only that literal"


def loads(path: Path, data: bytes) -> Config:
    """Return what a module holds; `path` is only named in errors, which are those of :func:`read_module`."""
    docstring, pairs = read_module(path, data)
    duplicates = Duplicates()
    entries = tuple(_entry(key, value) for key, value in duplicates(pairs).items())
    return Config("bundled", entries, _metadata_of(docstring), {}, tuple(duplicates.keys), tuple(duplicates.differing))


def _entry(key: str, value: object) -> Entry:
    good = isinstance(value, (tuple, list)) and len(value) >= 2 and type(value[1]) is int
    return Entry(key, value[1] if good else None, value=value)  # type: ignore[index]


def _metadata_of(docstring: str | None) -> object:
    """Return the metadata that is written into a module's docstring."""
    try:
        text = docstring.partition("\n\n")[2] if docstring else ""
        return untrusted.loads(text.encode("utf-8", "surrogatepass")) if text else None
    except ValueError:
        return None


def dumps_bundled(metadata: Mapping[str, object], entries: Iterable[Entry]) -> bytes:
    """Return a bundled module: the metadata as its docstring, one line an entry, sorted by key.

    Raises
    ------
    SynthError
        As :func:`synth.configs.v1.dumps_json`.
    """
    head = json.dumps(metadata, sort_keys=True, indent=1, allow_nan=False)
    head = head.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = [f'"""{_TITLE}\n\n{head}\n"""\n', "best_configs = {"]
    lines += [f"    {entry.text!a}: (0, {entry.tactic_id})," for entry in in_order(entries)]
    return ("\n".join([*lines, "}"]) + "\n").encode("ascii")


def read_module(path: Path, data: bytes) -> tuple[str | None, list[tuple[str, object]]]:
    """Return a module's docstring, None without one, and its entries in order, equal keys included.

    Raises
    ------
    SynthError
        When it holds anything else, or more than a tuning config does; names the line.
    """
    text = _decoded(path, data)
    _check_code(path, text)
    try:
        with warnings.catch_warnings():
            # Python warns of escapes such as \d and takes them as they are.
            warnings.simplefilter("ignore")
            statements = ast.parse(text).body
    except SyntaxError as e:
        _fail(path, e.lineno or 1, f"{_NOT_LITERAL} (Python: {e.msg})")
    except (ValueError, RecursionError, MemoryError):
        _fail(path, 1, _NOT_LITERAL)
    docstring: str | None = None
    match statements:
        case [ast.Expr(value=ast.Constant(value=str(text))), *rest]:
            docstring, statements = text, rest
    match statements:
        case [ast.Assign(targets=[ast.Name(id="best_configs")], value=value)]:
            return docstring, _entries(path, value)
    _fail(path, statements[-1].lineno if statements else 1, _OTHER_CODE)


def _decoded(path: Path, data: bytes) -> str:
    if b"\0" in data:
        raise SynthError(f"{path} is not Python: it holds a zero byte; restore the file or write it anew")
    for line in data.split(b"\n", 2)[:2]:
        coding = _CODING.match(line)
        if coding is not None and coding[1].lower().replace(b"_", b"-") not in (b"utf-8", b"utf8"):
            # Python would read other keys than those that a person sees.
            raise SynthError(f"{path} says that it is in {shown(coding[1].decode('ascii'))}; write it in UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise SynthError(f"{path} is not UTF-8 text (byte {e.start}); name a config file") from e
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_code(path: Path, text: str) -> None:
    """Raise where anything stands outside of strings that no tuning config holds."""
    # Line ends stay, so that places can be told.
    bare = _STRINGS.sub(lambda m: ("" if m[0][0] == "#" else " S ") + "\n" * m[0].count("\n"), text)
    bare = _NUMBER.sub(" 0 ", bare)
    if len(bare) > _MAX_CODE:
        _fail(path, 1, f"more than {_MAX_CODE} characters outside of strings; that is no tuning config")
    good = _CODE.match(bare)
    end = good.end() if good is not None else 0
    if end == len(bare):
        odd = _AFTER_VALUE.search(bare)
        if odd is None:
            return
        end = odd.start()
    inside = any(bare.count(mark, 0, end) > bare.count(closing, 0, end) for mark, closing in ("()", "[]", "{}"))
    _fail(path, bare.count("\n", 0, end) + 1, _NOT_LITERAL if inside else _OTHER_CODE)


def _entries(path: Path, value: ast.expr) -> list[tuple[str, object]]:
    if not isinstance(value, ast.Dict):
        _fail(path, value.lineno, "best_configs is not a dict literal; write it anew")
    found = []
    for key, tactic in zip(value.keys, value.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            _fail(path, (key or tactic).lineno, "a key is not text; write 'key': (0, tactic)")
        try:
            found.append((key.value, ast.literal_eval(tactic)))
        except (ValueError, TypeError, RecursionError, MemoryError):
            _fail(path, tactic.lineno, _NOT_LITERAL)
    return found


def _fail(path: Path, line: int, message: str) -> NoReturn:
    raise SynthError(f"{path}, line {line}: {message}")
