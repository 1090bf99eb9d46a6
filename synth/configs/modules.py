"""Reads the one form that a bundled module has, a docstring and ``best_configs = {…}``, and nothing else of Python.

Python's own parser isn't used on a stranger's file. It can be made to crash, in Python 3.10 by a long sum, and in any
version to fill the memory, by the tree that it makes of a few megabytes. What this reader accepts, Python takes for
the same; whatever it does not know, another prefix of a string for example, it refuses.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from synth.catalog.untrusted import MAX_DIGITS, shown
from synth.errors import SynthError

#: Most words, marks, values and gaps of a module; the H200's config for the whole catalogue has 330,000.
_MAX_LEXEMES = 2_000_000
#: Longest string; a key has 300 characters, and the docstring, which holds the metadata, some thousands.
_MAX_STRING = 1 << 20
#: Deepest nesting in an entry, which is ``(0, tactic)``.
_MAX_DEPTH = 16

#: Where a module says in which encoding it is (PEP 263): in a comment on one of its first two lines.
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_LEXEME = re.compile(
    r"""(?P<space>[ \t]+|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<string>"{3}|'{3}|"|')
    |(?P<number>\.?[0-9](?:[eE][+-]|[\w.]){0,1100})
    |(?P<name>\w+)
    |(?P<mark>[][(){},:=+-])""",
    re.VERBOSE,
)
_ENDS = {quote: re.compile(rf"\\|{quote}" + (r"|\n" if len(quote) == 1 else "")) for quote in ('"', "'", '"""', "'''")}
_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NOT_LITERAL = "not a literal; write 'key': (0, tactic)"
_OTHER_CODE = "holds code other than 'best_configs = {…}'; synth reads only that literal"


def read_module(path: Path, data: bytes) -> tuple[str | None, list[tuple[str, object]]]:
    """Return a module's docstring, None without one, and its entries in order, equal keys included.

    Parameters
    ----------
    path : Path
        The file, for messages.
    data : bytes
        Its content.

    Raises
    ------
    SynthError
        When it holds anything but a docstring and ``best_configs = {…}``, or its keys are not all text; the message
        names the line.
    """
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
    return _Reader(path, text.replace("\r\n", "\n").replace("\r", "\n")).module()


class _Lexeme(NamedTuple):
    """A word, mark, number, string or line end; `value` is what a literal stands for."""

    kind: str
    text: str
    value: object
    start: int

    def is_mark(self, marks: str) -> bool:
        """Tell whether it is one of some marks."""
        return self.kind == "mark" and self.text in marks


class _Reader:
    """Reads one module by recursive descent; `_next` is the lexeme that comes next."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text
        self._depth = 0
        self._lexemes = self._lex()
        self._next = _Lexeme("newline", "", None, 0)
        self._take()

    def module(self) -> tuple[str | None, list[tuple[str, object]]]:
        docstring = None
        self._skip_lines()
        if self._next.kind == "string":
            docstring = self._string()
            self._end_of_statement()
        for word in ("best_configs", "="):
            if self._next.text != word or self._next.kind == "string":
                self._fail_code()
            self._take()
        if not self._next.is_mark("{"):
            self._fail("best_configs is not a dict literal; write it anew")
        entries = self._entries()
        self._end_of_statement()
        if self._next.kind != "end":
            self._fail_code()
        return docstring, entries

    def _entries(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = []
        self._take_inside()
        while not self._next.is_mark("}"):
            key = self._value(1)
            if not isinstance(key, str):
                self._fail("a key is not text; write 'key': (0, tactic)")
            self._expect(":")
            found.append((key, self._value(1)))
            if not self._next.is_mark("}"):
                self._expect(",")
        self._take()
        return found

    def _value(self, depth: int) -> object:
        """Read a literal inside of brackets."""
        here = self._next
        if here.kind == "string":
            return self._string(inside=True)
        if here.kind == "number" or (here.kind == "name" and here.text in _WORDS):
            self._take_inside()
            return here.value
        if here.is_mark("+-"):
            self._take_inside()
            number = self._next.value
            if self._next.kind != "number" or not isinstance(number, (int, float)):
                self._fail_literal()
            self._take_inside()
            return -number if here.text == "-" else number
        if here.is_mark("([{") and depth <= _MAX_DEPTH:
            return self._sequence(here.text, depth)
        self._fail_literal()

    def _sequence(self, opening: str, depth: int) -> object:
        """Read a tuple, a list, a dict, or a value in parentheses."""
        closing = _CLOSING[opening]
        items: list[object] = []
        comma = False
        self._take_inside()
        while not self._next.is_mark(closing):
            item = self._value(depth + 1)
            if opening == "{":
                self._expect(":")
                try:
                    hash(item)
                except TypeError:
                    self._fail_literal()
                item = item, self._value(depth + 1)
            items.append(item)
            comma = self._next.is_mark(",")
            if comma:
                self._take_inside()
            elif not self._next.is_mark(closing):
                self._fail_literal()
        self._take_inside()
        if opening == "[":
            return items
        if opening == "{":
            return dict(items)  # type: ignore[arg-type]
        return items[0] if len(items) == 1 and not comma else tuple(items)

    def _string(self, inside: bool = False) -> str:
        """Read strings that stand side by side: to Python they are one."""
        parts = []
        while self._next.kind == "string":
            parts.append(str(self._next.value))
            if inside:
                self._take_inside()
            else:
                self._take()
        return "".join(parts)

    def _end_of_statement(self) -> None:
        if self._next.kind not in ("newline", "end"):
            self._fail_code()
        self._skip_lines()

    def _take(self) -> None:
        if self._next.kind != "end":
            self._next = next(self._lexemes)

    def _take_inside(self) -> None:
        """Go on inside of brackets, where line ends don't count."""
        self._take()
        self._skip_lines()

    def _skip_lines(self) -> None:
        while self._next.kind == "newline":
            self._take()

    def _expect(self, mark: str) -> None:
        if not self._next.is_mark(mark):
            self._fail_literal()
        self._take_inside()

    def _lex(self) -> Iterator[_Lexeme]:
        text, at, at_margin, count = self._text, 0, True, 0
        while at < len(text):
            count += 1
            if count > _MAX_LEXEMES:
                self._fail(f"more than {_MAX_LEXEMES} words and values up to here; that is no tuning config", at)
            m = _LEXEME.match(text, at)
            if m is None or m.lastgroup is None:
                self._fail(_NOT_LITERAL if self._depth else _OTHER_CODE, at)
            start, at, kind = at, m.end(), m.lastgroup
            if kind == "space":
                # Outside of brackets, what follows blanks at the start of a line is a block of something.
                if at_margin and m[0][0] != "#" and text[at : at + 1] not in ("\n", "#", ""):
                    self._fail_code(start)
                continue
            at_margin = kind == "newline" and self._depth == 0
            value: object = None
            if kind == "string":
                at = self._end_of_string(start, m[0])
                inner = text[start + 1 : at - 1]
                value = inner if len(m[0]) == 1 and "\\" not in inner else self._evaluated(start, at)
            elif kind == "number":
                plain = m[0] == "0" or (m[0][0] in "123456789" and len(m[0]) < 19 and m[0].isdigit() and m[0].isascii())
                value = int(m[0]) if plain else self._evaluated(start, at)
            elif kind == "name":
                value = _WORDS.get(m[0])
            elif kind == "mark":
                self._depth += (m[0] in "([{") - (m[0] in ")]}")
            yield _Lexeme(kind, m[0], value, start)
        yield _Lexeme("end", "", None, len(text))

    def _end_of_string(self, start: int, quote: str) -> int:
        at = start + len(quote)
        while (m := _ENDS[quote].search(self._text, at)) is not None and m[0] != "\n":
            if m[0] == quote:
                return m.end()
            at = m.end() + 1
            if at - start > _MAX_STRING:
                self._fail(f"a string of more than {_MAX_STRING} characters; that is no tuning config", start)
        self._fail("a string doesn't end; restore the file or write it anew", start)

    def _evaluated(self, start: int, end: int) -> object:
        """Return the value of one string or number, as Python reads it."""
        literal = self._text[start:end]
        if literal[0] not in "\"'" and len(literal) > MAX_DIGITS:
            self._fail(f"a number of more than {MAX_DIGITS} digits; write it anew", start)
        try:
            with warnings.catch_warnings():
                # Python warns of escapes such as \d and takes them as they are.
                warnings.simplefilter("ignore")
                return ast.literal_eval(literal)
        except (ValueError, SyntaxError, MemoryError):
            self._fail(_NOT_LITERAL, start)

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        line = self._text.count("\n", 0, self._next.start if at is None else at) + 1
        raise SynthError(f"{self._path}, line {line}: {message}")

    def _fail_literal(self) -> NoReturn:
        if self._next.kind == "end":
            self._fail("best_configs doesn't end; restore the file or write it anew")
        self._fail(_NOT_LITERAL)

    def _fail_code(self, at: int | None = None) -> NoReturn:
        self._fail(_OTHER_CODE, at)
