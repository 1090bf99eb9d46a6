from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from synth.catalog.devices import find_devices, get_device, load_devices, slug
from synth.catalog.schemes import QUANTS
from synth.errors import SynthError
from synth.flashinfer.tactics import load_tables

# What torch.cuda.get_device_name reports.
NAMES = [
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA RTX PRO 5000 Blackwell",
    "NVIDIA RTX PRO 4500 Blackwell",
    "NVIDIA GB10",
    "NVIDIA H200",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA B200",
    "NVIDIA GB200",
    "NVIDIA GB300",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_exact_name_is_one_device(name: str) -> None:
    assert get_device(name).name == name
    assert get_device(name.lower()).name == name
    assert get_device(slug(name)).name == name


def test_names_and_slugs_are_unique() -> None:
    assert sorted(d.name for d in load_devices()) == sorted(NAMES)
    assert len({d.slug for d in load_devices()}) == len(NAMES)
    assert get_device("H200").slug == "nvidia-h200"


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("RTX PRO 6000", NAMES[:3]),
        ("pro 6000 rtx", NAMES[:3]),
        ("h200", ["NVIDIA H200"]),
        ("B200", ["NVIDIA B200"]),
        ("max-q", [NAMES[2]]),
        ("5090", ["NVIDIA GeForce RTX 5090"]),
        ("RTX Blackwell", [NAMES[0], NAMES[1], NAMES[2], NAMES[4], NAMES[5]]),
        ("RTX PRO 5000", [NAMES[4]]),
        # All words of another name, too, but one name's own.
        ("RTX PRO 6000 Blackwell Workstation Edition", [NAMES[1]]),
    ],
)
def test_whole_words_find_every_variant(query: str, names: list[str]) -> None:
    assert sorted(d.name for d in find_devices(query)) == sorted(names)


@pytest.mark.parametrize(
    ("query", "near"),
    [
        ("H20", ["NVIDIA H200"]),
        ("RTX 5091", ["NVIDIA GeForce RTX 5090"]),
        ("GB20", ["NVIDIA GB200"]),
        ("RTX PRO 600", NAMES[:3]),
        ("RXT PRO 6000", NAMES[:3]),
        ("rtxpro6000", NAMES[:3]),
        ("RTX6000 PRO", NAMES[:3]),
        ("geforce5090", [NAMES[3]]),
        ("RTX PRO 500", [NAMES[4], NAMES[5]]),
        ("server editon", [NAMES[0]]),
        # Cards of these names are older ones.
        ("RTX 6000", NAMES[:3]),
        ("6000", NAMES[:3]),
        ("RTX 6000 Ada", NAMES[:3]),
        ("RTX 5000", [NAMES[4]]),
        # More than a known name: another build of the card, and what nvidia-smi prints around a name.
        ("NVIDIA H200 NVL", ["NVIDIA H200"]),
        ("NVIDIA H100 PCIe", ["NVIDIA H100 80GB HBM3"]),
        ("NVIDIA RTX PRO 5000 72GB Blackwell", [NAMES[4]]),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", [NAMES[3]]),
        (f"{NAMES[0]} (UUID: GPU-5a9090b2-1c2d-77aa)", [NAMES[0]]),
        (f"GPU 0: {NAMES[2]}", [NAMES[2]]),
    ],
)
def test_a_wrong_name_lists_only_the_nearest_matches_best_first(query: str, near: list[str]) -> None:
    with pytest.raises(SynthError, match=f"^unknown device {re.escape(repr(query))}; did you mean ") as e:
        find_devices(query)
    named = re.findall("|".join(sorted(map(re.escape, NAMES), key=len, reverse=True)), str(e.value).partition("; ")[2])
    assert named == near


@pytest.mark.parametrize(
    ("query", "whole"),
    [
        (f"{NAMES[0]} MIG 2g.48gb", NAMES[0]),
        (f"{NAMES[2]} MIG 4g.96gb", NAMES[2]),
        ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "one of `synth devices`"),
        ("MIG", "one of `synth devices`"),
    ],
)
def test_a_mig_slice_is_refused_as_one(query: str, whole: str) -> None:
    for find in (find_devices, get_device):
        with pytest.raises(
            SynthError, match=f"MIG slice: .* timings of its own.*without MIG: {re.escape(whole)}$"
        ) as e:
            find(query)
        assert "\n" not in str(e.value)


def words(text: str) -> list[str]:
    return [word for word in re.findall("[a-z0-9]+", text.lower()) if word != "nvidia"]


def edits(name: str, letters: str) -> Iterator[str]:
    """Yield every text that is one insertion, deletion, replacement or exchange of neighbours away from `name`."""
    for i in range(len(name) + 1):
        yield from (name[:i] + c + name[i:] for c in letters)
        if i < len(name):
            yield name[:i] + name[i + 1 :]
            yield from (name[:i] + c + name[i + 1 :] for c in letters)
        if i + 1 < len(name):
            yield name[:i] + name[i + 1] + name[i] + name[i + 2 :]


def names_another(text: str, name: str) -> bool:
    """Tell whether `text` is what others are called, or a part of it that `name` lacks: "H100" for "H200"."""
    said = set(words(text))
    others = [set(words(other)) for other in NAMES if other != name]
    return any(words(text) == words(other) for other in NAMES if other != name) or (
        not said <= set(words(name)) and any(said <= other for other in others)
    )


def means_itself_or_nothing(edited: str, name: str) -> None:
    assume(not names_another(edited, name))
    try:
        found = find_devices(edited)
    except SynthError as e:
        assert "\n" not in str(e) and len(str(e)) < 1000
        return
    assert [d.name for d in found] == [name]


@pytest.mark.parametrize(
    ("text", "name", "another"),
    [
        ("H100", "NVIDIA H200", True),
        ("NVIDIA RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 5000 Blackwell", True),
        ("NVIDIA H300", "NVIDIA H200", False),
        ("RTX PRO 50 00 Blackwell", "NVIDIA RTX PRO 5000 Blackwell", False),
    ],
)
def test_the_property_below_leaves_out_only_what_names_another_device(text: str, name: str, another: bool) -> None:
    assert names_another(text, name) is another


@given(st.data())
@settings(max_examples=300)
def test_a_name_with_any_one_edit_is_refused_or_means_its_own_device(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    written = data.draw(st.sampled_from([name, slug(name), name.removeprefix("NVIDIA ")]))
    means_itself_or_nothing(data.draw(st.sampled_from(list(edits(written, "0123456789aqx -")))), name)


@given(st.sampled_from(NAMES), st.text(max_size=3), st.integers(0, 60))
@example("NVIDIA RTX PRO 5000 Blackwell", "", 0)
def test_a_name_with_any_text_in_it_is_refused_or_means_its_own_device(name: str, text: str, at: int) -> None:
    means_itself_or_nothing(name[:at] + text + name[at:], name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_lacks_a_word_never_means_other_devices_only(name: str) -> None:
    parts = name.split()
    for i in range(len(parts)):
        shorter = " ".join(parts[:i] + parts[i + 1 :])
        if any(words(shorter) == words(other) for other in NAMES if other != name):
            continue
        try:
            found = find_devices(shorter)
        except SynthError:
            continue
        assert name in [d.name for d in found]


@pytest.mark.parametrize("query", ["", "  ", "Tesla-Z", "NVIDIA Z", "NVIDIA"])
def test_nothing_near_lists_what_is_known(query: str) -> None:
    with pytest.raises(SynthError, match=r"known: NVIDIA H200, .*NVIDIA GB10"):
        find_devices(query)


def test_one_device_is_asked_for_and_several_match() -> None:
    with pytest.raises(SynthError, match=r"'RTX PRO 6000' means 3 devices; give one of .*Server Edition.*Max-Q"):
        get_device("RTX PRO 6000")


def test_numbers_are_plausible_and_sourced() -> None:
    for d in load_devices():
        assert d.source
        assert d.smem_block_bytes in (101376, 232448)
        assert set(d.tflops) <= set(QUANTS)
        peaks = [d.tflops[quant] for quant in ("bf16", "fp8", "nvfp4") if quant in d.tflops]
        assert peaks == sorted(peaks)
        assert d.tflops.get("mxfp8_mxfp4") in (None, d.tflops.get("fp8"))
        assert d.sms is None or 40 <= d.sms <= 200
        assert d.dram_gbs is None or 200 <= d.dram_gbs <= 10000


def test_peaks_of_sm120_cards_are_their_sms_and_one_clock() -> None:
    # FLOPs of an SM in one clock, see devices.toml; no card of these runs at more than 3 GHz.
    for d in load_devices():
        if d.arch == "sm120" and d.sms is not None:
            half = 2 if "GeForce" in d.name else 1
            per_clock = {"bf16": 1024 // half, "fp8": 2048 // half, "mxfp8_mxfp4": 2048 // half, "nvfp4": 4096}
            clocks = [1e6 * d.tflops[quant] / (d.sms * per_clock[quant]) for quant in QUANTS]
            assert max(clocks) == pytest.approx(min(clocks), rel=2e-3)
            assert 2000 < min(clocks) < 3000


def test_devices_with_tactics_have_what_a_roofline_needs() -> None:
    h200 = get_device("NVIDIA H200")
    assert (h200.arch, h200.sms, h200.dram_gbs, h200.tflops["bf16"]) == ("sm90", 132, 4800, 989)
    server = get_device(NAMES[0])
    assert (server.arch, server.sms, server.smem_block_bytes, server.tflops["nvfp4"]) == ("sm120", 188, 101376, 1871)


def test_gb10_runs_the_tactics_of_sm120() -> None:
    known = {t.arch for t in load_tables()}
    assert get_device("GB10").arch == "sm121"
    assert get_device("GB10").tactics_arch in known
    assert get_device("H200").tactics_arch in known
