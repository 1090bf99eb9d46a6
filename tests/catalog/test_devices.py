from __future__ import annotations

import pytest

from synth.catalog.devices import find_devices, get_device, load_devices, slug
from synth.catalog.tactics import QUANTS, load_tables
from synth.errors import SynthError

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
    ],
)
def test_whole_words_find_every_variant(query: str, names: list[str]) -> None:
    assert sorted(d.name for d in find_devices(query)) == sorted(names)


@pytest.mark.parametrize(
    ("query", "near"),
    [("H20", "did you mean NVIDIA H200"), ("RTX 5091", "NVIDIA GeForce RTX 5090"), ("GB20", "NVIDIA GB200")],
)
def test_a_wrong_name_lists_near_matches(query: str, near: str) -> None:
    with pytest.raises(SynthError, match=f"unknown device {query!r}; .*{near}"):
        find_devices(query)


@pytest.mark.parametrize("query", ["", "  ", "Tesla-Z", "NVIDIA Z"])
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
