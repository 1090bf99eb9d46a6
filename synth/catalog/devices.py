"""GPUs: what is public about each, under the exact name that torch reports."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from synth.catalog.data import read_toml
from synth.errors import SynthError

# Words of names: the maker's, which every name has; the series that shares its numbers with older cards; and what
# torch adds to a card's name where it sees only a slice of it.
_MAKER, _PRO, _MIG = "nvidia", "pro", "mig"


@dataclass(frozen=True)
class Device:
    """A GPU model. ``None``, or a missing peak, means not public.

    Attributes
    ----------
    name : str
        What ``torch.cuda.get_device_name`` reports.
    arch : str
        Architecture, for example ``"sm90"``.
    sms : int or None
        Streaming multiprocessors.
    l2_mb : float or None
        L2 cache in MB.
    dram_gbs : float or None
        Specified memory bandwidth in GB/s.
    tflops : dict of str to float
        Specified dense peak in TFLOPS of each quantization.
    smem_block_bytes : int
        Shared memory in bytes that one block can have.
    source : str
        Where the numbers are from.
    """

    name: str
    arch: str
    sms: int | None
    l2_mb: float | None
    dram_gbs: float | None
    tflops: dict[str, float] = field(hash=False)
    smem_block_bytes: int
    source: str

    @property
    def slug(self) -> str:
        """Name for files, for example ``nvidia-h200``."""
        return slug(self.name)

    @property
    def tactics_arch(self) -> str:
        """Architecture whose tactics run here: FlashInfer enumerates SM121's with SM120's."""
        return "sm120" if self.arch == "sm121" else self.arch


def slug(name: str) -> str:
    """Return a device's name as file names spell it, whether the device is known or not."""
    return "-".join(_words(name))


@functools.cache
def load_devices() -> tuple[Device, ...]:
    """Return the known devices, in the order of ``devices.toml``."""
    return tuple(
        Device(
            name=row["name"],
            arch=row["arch"],
            sms=row.get("sms"),
            l2_mb=row.get("l2_mb"),
            dram_gbs=row.get("dram_gbs"),
            tflops=row.get("tflops", {}),
            smem_block_bytes=row["smem_block_bytes"],
            source=row["source"],
        )
        for row in read_toml("synth.catalog", "devices.toml")["device"]
    )


def find_devices(query: str) -> tuple[Device, ...]:
    """Return the device with this name or slug, else every device whose name has all words of `query`.

    Parameters
    ----------
    query : str
        Whole words in any order; case and "NVIDIA" are ignored. ``"RTX PRO 6000"`` means each of its editions,
        ``"h200"`` the H200 and not the GB200. ``"RTX 6000"`` means none: there are cards of that name, and an RTX PRO
        6000 is another one.

    Raises
    ------
    SynthError
        When no device matches; the message has the nearest names. A MIG slice is refused as such.
    """
    words = _words(query)
    if _MIG in words:
        raise SynthError(_slice_refusal(query, words[: words.index(_MIG)]))
    found = _matches(words)
    if not found:
        raise SynthError(f"unknown device {query!r}; {_near(words)}")
    return found


def get_device(name: str) -> Device:
    """Return the one device that `name` means.

    Raises
    ------
    SynthError
        When no device matches, or more than one.
    """
    found = find_devices(name)
    if len(found) > 1:
        raise SynthError(f"{name!r} means {len(found)} devices; give one of {', '.join(d.name for d in found)}")
    return found[0]


def _matches(words: list[str]) -> tuple[Device, ...]:
    """Return the devices that `words` mean, none if they mean none."""
    said = _telling(words)
    exact = tuple(d for d in load_devices() if _telling(_words(d.name)) == said)
    return exact or tuple(d for d in load_devices() if said and _has_all(_words(d.name), set(said)))


def _has_all(name: list[str], said: set[str]) -> bool:
    """Tell whether a name has all words that are said, and those that are said go without a word they need."""
    # The RTX 6000 and the RTX 5000 are older cards: what is called PRO is meant only by a query that says so.
    bare = any(word in said and before == _PRO for before, word in itertools.pairwise(name)) and _PRO not in said
    return said <= set(name) and not bare


def _slice_refusal(query: str, card: list[str]) -> str:
    """Say why a MIG slice has no config; `card` are the words before "MIG"."""
    whole = " or ".join(d.name for d in _matches(card)) or "one of `synth devices`"
    return (
        f"{query!r} is a MIG slice: torch reports another name than the whole card's, so FlashInfer ignores the card's "
        "config there, and with its share of the SMs a slice would need timings of its own, which synth doesn't take; "
        f"name the whole card, without MIG: {whole}"
    )


#: At most so many near matches are named.
_MOST_NEAR = 3
#: A word of a query is taken for a misspelt one of a name from this likeness on, see difflib.
_LIKE = 0.7
#: A word with a number in it, such as 6000 or h200, says as much as three others.
_NUMBER_WEIGHT = 3.0
#: What a name's own words that the query lacks cost.
_LACK = 0.1
#: A near match is as likely as the best one, or this much less.
_ALSO_NEAR = 0.85


def _near(words: list[str]) -> str:
    """Say which devices a query without a match may have meant, the likeliest first."""
    known = [(d.name, _telling(_words(d.name))) for d in load_devices()]
    vocabulary = {word for _, name in known for word in name}
    asked = [part for word in _telling(words) for part in _parts(word, vocabulary)]
    held = [(len(name), text) for text, name in known if set(name) <= set(asked)]
    if held:
        # More than a known name: a card's other build, or what nvidia-smi prints around the name.
        whole = [text for count, text in held if count == max(held)[0]]
        return f"did you mean {_or(whole)}? A config is used only where torch reports exactly its device's name"
    scored = sorted(((_likeness(asked, name), text) for text, name in known), key=lambda pair: -pair[0])
    near = [text for score, text in scored if score > 0 and score >= _ALSO_NEAR * scored[0][0]][:_MOST_NEAR]
    return f"did you mean {_or(near)}?" if near else f"known: {', '.join(text for text, _ in known)}"


def _likeness(asked: list[str], name: list[str]) -> float:
    """Return how near a query is to a name by the words they share; 0 where what tells cards apart has nothing near."""
    score = 0.0
    numbered: list[float] = []
    telling: list[float] = []
    for word in asked:
        number = _has_digit(word)
        like = max(
            (SequenceMatcher(None, word, other).ratio() for other in name if _has_digit(other) == number), default=0.0
        )
        like = like if like >= _LIKE else 0.0
        score += like * (_NUMBER_WEIGHT if number else 1.0)
        (numbered if number else telling).append(like)
    if not any(numbered or telling):
        return 0.0
    return max(score - _LACK * len(set(name) - set(asked)), 0.0)


def _parts(word: str, vocabulary: set[str]) -> list[str]:
    """Return the known words and the number that a word of a query is made of: rtx, pro, 6000 of rtxpro6000."""
    if word in vocabulary:
        return [word]
    for piece in sorted(vocabulary, key=len, reverse=True):
        rest = word[len(piece) :]
        if word.startswith(piece) and rest and (rest in vocabulary or rest.isdecimal() or not _has_digit(piece)):
            tail = _parts(rest, vocabulary)
            if all(part in vocabulary or part.isdecimal() for part in tail):
                return [piece, *tail]
    return [word]


def _has_digit(word: str) -> bool:
    return any(c.isdigit() for c in word)


def _or(names: list[str]) -> str:
    return " or ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])


def _telling(words: list[str]) -> list[str]:
    """Return the words that say which GPU is meant."""
    return [word for word in words if word != _MAKER]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
