from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.catalog.schemes import QUANTS, STAGES
from synth.errors import SynthError
from synth.flashinfer.tactics import DEFAULT_FLASHINFER, Tactic, TacticTable, known_versions, load_table, load_tables

SIZE = st.integers(1, 512)
TRIPLE = st.tuples(SIZE, SIZE, SIZE)
TMA = st.builds(
    Tactic,
    family=st.sampled_from(["tma90", "tma120"]),
    tile=TRIPLE,
    cluster=TRIPLE,
    swap_ab=st.booleans(),
    finalize=st.booleans(),
    mainloop=st.integers(0, 9),
    epilogue=st.integers(0, 9),
)
SM80 = st.builds(Tactic, family=st.just("sm80"), tile=TRIPLE, warp=TRIPLE, stages=st.integers(1, 9))

COUNTS = {
    ("sm90", "bf16"): (45, 81),
    ("sm90", "fp8"): (36, 72),
    ("sm120", "nvfp4"): (16, 32),
    ("sm120", "mxfp8_mxfp4"): (6, 12),
    ("sm120", "fp8"): (21, 21),
    ("sm120", "bf16"): (9, 9),
}
TABLES = [pytest.param(t, id=f"{t.arch}-{t.quant}") for t in load_tables()]
#: Releases that enumerate alike: first, last, number of SM120 tiles for NVFP4 and for MXFP8 activations with MXFP4
#: weights. Each tile makes two tactics of gemm1 and four of gemm2.
ERAS = (
    ("0.6.4", "0.6.7.post3", 4, 4),
    ("0.6.8", "0.6.10.post1", 6, 6),
    ("0.6.11", "0.7.0.post1", 10, 10),
    ("0.7.1", "0.7.4", 8, 3),
)


class TestTactic:
    @given(TMA | SM80)
    def test_text_round_trip(self, tactic: Tactic) -> None:
        assert Tactic.parse(str(tactic)) == tactic

    @given(TMA | SM80, TMA | SM80)
    def test_different_tactics_have_different_text(self, a: Tactic, b: Tactic) -> None:
        assert (str(a) == str(b)) == (a == b)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "tma90",
            "tma90 128x64x128B cl1x1x1 ml0 epi0 fin0 swap2",
            "tma90 128x64x128 cl1x1x1 ml0 epi0 fin0 swap1",
            "tma90 128x64x128B cl1x1x1 ml0 epi0 fin0 swap1 ",
            "sm80 64x128x64 stages3",
            "sm80 64x128x64B_w32x64x64 stages3",
            "sm90 128x64x128B cl1x1x1 ml0 epi0 fin0 swap1",
        ],
    )
    def test_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(SynthError, match=re.escape(f"{text!r} is not a tactic; expected, for example")):
            Tactic.parse(text)

    def test_a_swap_turns_the_tile(self) -> None:
        plain, swapped = (Tactic.parse(f"tma90 128x16x128B cl1x1x1 ml0 epi0 fin0 swap{s}") for s in (0, 1))
        assert (plain.tokens_tile, plain.columns_tile) == (128, 16)
        assert (swapped.tokens_tile, swapped.columns_tile) == (16, 128)


class TestTable:
    def test_counts(self) -> None:
        assert {(t.arch, t.quant): (len(t.gemm1), len(t.gemm2)) for t in load_tables()} == COUNTS

    @pytest.mark.parametrize("table", TABLES)
    def test_ids_and_meanings_are_one_to_one(self, table: TacticTable) -> None:
        seen = []
        for stage in STAGES:
            for tactic_id, tactic in table.items(stage):
                assert table.stage(tactic_id) == stage
                assert table.tactic(tactic_id) == tactic
                assert table.id_of(stage, tactic) == tactic_id
                seen.append(tactic_id)
        assert seen == list(range(len(table)))

    @pytest.mark.parametrize("table", TABLES)
    def test_the_fallback_is_the_first_of_its_stage(self, table: TacticTable) -> None:
        assert table.fallback_id(1) == 0
        assert table.fallback_id(2) == len(table.gemm1)

    @pytest.mark.parametrize("table", TABLES)
    def test_only_gemm2_fuses_finalize(self, table: TacticTable) -> None:
        assert not any(t.finalize for t in table.gemm1)
        tma = [t for t in table.gemm2 if t.family != "sm80"]
        assert sum(t.finalize for t in tma) * 2 == len(tma)

    @pytest.mark.parametrize("table", TABLES)
    def test_without_fused_finalize_gemm2_is_gemm1s_list(self, table: TacticTable) -> None:
        shorter = table.without_fused_finalize()
        assert shorter.gemm1 == table.gemm1
        assert shorter.gemm2 == table.gemm1
        assert shorter.ids(2) == range(len(table.gemm1), 2 * len(table.gemm1))
        assert shorter.id_of(2, shorter.gemm2[-1]) == len(shorter) - 1

    @pytest.mark.parametrize("table", TABLES)
    def test_ids_out_of_range_are_refused(self, table: TacticTable) -> None:
        for tactic_id in (-1, len(table)):
            with pytest.raises(SynthError, match=f"tactic id {tactic_id} does not exist: .* ids 0 to {len(table) - 1}"):
                table.tactic(tactic_id)
            with pytest.raises(SynthError, match="does not exist"):
                table.stage(tactic_id)

    def test_a_tactic_of_the_other_stage_is_refused(self) -> None:
        table = load_table("sm90", "bf16")
        fused = next(t for t in table.gemm2 if t.finalize)
        with pytest.raises(SynthError, match=rf"FlashInfer {DEFAULT_FLASHINFER} has no gemm1 tactic .* for sm90 bf16"):
            table.id_of(1, fused)

    def test_an_unknown_table_or_version_is_refused(self) -> None:
        with pytest.raises(SynthError, match=r"no tactics known for sm90 nvfp4 .*known: .*sm120 nvfp4"):
            load_table("sm90", "nvfp4")
        with pytest.raises(SynthError, match=r"no tactic table for FlashInfer 0\.0\.1; known: .*0\.7\.4"):
            load_table("sm90", "bf16", "0.0.1")

    def test_known_versions_have_every_table(self) -> None:
        assert DEFAULT_FLASHINFER in known_versions()
        assert {t.quant for t in load_tables()} == set(QUANTS)


def releases(first: str, last: str) -> tuple[str, ...]:
    known = known_versions()
    return known[known.index(first) : known.index(last) + 1]


class TestVersions:
    def test_every_release_is_known_from_the_oldest_to_the_newest(self) -> None:
        listed = [v for first, last, *_ in ERAS for v in releases(first, last)]
        assert listed == list(known_versions())
        assert (listed[0], listed[-1], len(listed)) == ("0.6.4", "0.7.4", 35)
        assert {t.flashinfer for v in listed for t in load_tables(v)} == set(listed)

    def test_a_release_that_never_was_is_refused(self) -> None:
        for version in ("0.7.3", "0.6.16.post5", "0.6.3"):
            with pytest.raises(SynthError, match=rf"FlashInfer {version}; known: 35 releases from 0\.6\.4 to 0\.7\.4"):
                load_table("sm90", "bf16", version)

    @pytest.mark.parametrize(("first", "last", "nvfp4", "mxfp4"), ERAS)
    def test_counts(self, first: str, last: str, nvfp4: int, mxfp4: int) -> None:
        for version in releases(first, last):
            counts = {(t.arch, t.quant): (len(t.gemm1), len(t.gemm2)) for t in load_tables(version)}
            assert counts == {
                **COUNTS,
                ("sm120", "nvfp4"): (2 * nvfp4, 4 * nvfp4),
                ("sm120", "mxfp8_mxfp4"): (2 * mxfp4, 4 * mxfp4),
            }

    @pytest.mark.parametrize(("first", "last", "nvfp4", "mxfp4"), ERAS)
    def test_ids_are_tiles_then_finalize_then_the_same_swapped(
        self, first: str, last: str, nvfp4: int, mxfp4: int
    ) -> None:
        for quant, tiles in (("nvfp4", nvfp4), ("mxfp8_mxfp4", mxfp4)):
            table = load_table("sm120", quant, last)
            order = [t.tile for t in table.gemm1[:tiles]]
            assert len(set(order)) == tiles
            assert [(t.tile, t.swap_ab) for t in table.gemm1] == [(t, s) for s in (False, True) for t in order]
            assert [(t.tile, t.finalize, t.swap_ab) for t in table.gemm2] == [
                (t, f, s) for s in (False, True) for f in (False, True) for t in order
            ]

    def test_only_sm120_fp4_was_ever_renumbered(self) -> None:
        for version in known_versions():
            for table in load_tables(version):
                if table.quant not in ("nvfp4", "mxfp8_mxfp4"):
                    now = load_table(table.arch, table.quant)
                    assert (table.gemm1, table.gemm2) == (now.gemm1, now.gemm2), version

    @pytest.mark.parametrize(
        ("tactic", "ids"),
        [
            # The † tiles, which no grouped kernel runs, were listed from 0.6.8 to 0.7.0.
            ("tma120 128x128x128B cl1x1x1 ml0 epi0 fin0 swap0", (0, 0, 0, 0)),
            ("tma120 256x128x64B cl1x1x1 ml0 epi0 fin0 swap0", (3, 2, 2, 2)),
            ("tma120 128x256x64B cl1x1x1 ml0 epi0 fin0 swap0", (2, 3, 3, 3)),
            ("tma120 128x128x256B cl1x1x1 ml0 epi0 fin0 swap0", (None, 4, 4, None)),
            ("tma120 256x128x128B cl1x1x1 ml0 epi0 fin0 swap1", (None, 11, 15, None)),
            ("tma120 128x32x64B cl1x1x1 ml0 epi0 fin0 swap1", (None, None, 17, 13)),
            ("tma120 128x64x64B cl1x1x1 ml0 epi0 fin0 swap1", (None, None, 19, 15)),
        ],
    )
    def test_a_tactic_has_another_id_in_another_era(self, tactic: str, ids: tuple[int | None, ...]) -> None:
        for (_, last, *_), expected in zip(ERAS, ids, strict=True):
            table = load_table("sm120", "nvfp4", last)
            if expected is None:
                with pytest.raises(SynthError, match=f"FlashInfer {last} has no gemm1 tactic"):
                    table.id_of(1, Tactic.parse(tactic))
            else:
                assert table.id_of(1, Tactic.parse(tactic)) == expected

    def test_the_same_tactic_before_and_after_the_pruning(self) -> None:
        before, after = load_table("sm120", "nvfp4", "0.6.17"), load_table("sm120", "nvfp4", "0.7.4")
        assert str(before.tactic(17)) == "tma120 128x32x64B cl1x1x1 ml0 epi0 fin0 swap1"
        assert {i: after.id_of(1, before.tactic(i)) for i in (16, 17)} == {16: 12, 17: 13}
        assert str(before.tactic(57)) == "tma120 128x32x64B cl1x1x1 ml0 epi0 fin1 swap1"
        assert after.id_of(2, before.tactic(57)) == 45

    @pytest.mark.parametrize(("first", "last", "nvfp4", "mxfp4"), ERAS)
    def test_without_fused_finalize_gemm2s_range_is_half_as_long(
        self, first: str, last: str, nvfp4: int, mxfp4: int
    ) -> None:
        for quant, tiles in (("nvfp4", nvfp4), ("mxfp8_mxfp4", mxfp4)):
            table = load_table("sm120", quant, last)
            shorter = table.without_fused_finalize()
            assert (table.ids(2), shorter.ids(2)) == (range(2 * tiles, 6 * tiles), range(2 * tiles, 4 * tiles))
            # The swapped half has other ids: the same entry means another tactic to a server that doesn't fuse.
            assert all(shorter.id_of(2, t) == i - tiles for i, t in table.items(2) if t.swap_ab and not t.finalize)


def function_body(source: str, name: str) -> str:
    """Return the body of a C++ function that starts at column 0."""
    match = re.search(rf"^[^\n ]*[^\n]*\b{name}\([^{{]*\{{\n(.*?)^\}}", source, re.DOTALL | re.MULTILINE)
    assert match, f"{name} is not in cutlass_heuristic.cpp"
    return match[1]


def tiles(code: str) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Return CTA and warp tiles in the order in which `code` names them; no warp tile reads as zeros."""
    found = re.findall(r"CtaShape(\d+)x(\d+)x(\d+)B?(?:_WarpShape(\d+)x(\d+)x(\d+))?\b", code)
    numbers = [tuple(int(x or 0) for x in groups) for groups in found]
    return [((a, b, c), (d, e, f)) for a, b, c, d, e, f in numbers]


def in_order(tactics: tuple[Tactic, ...]) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    return list(dict.fromkeys((t.tile, t.warp) for t in tactics))


@pytest.fixture(scope="module")
def heuristic() -> str:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    if flashinfer.__version__ not in known_versions():
        pytest.skip(f"no tactic table for the installed FlashInfer {flashinfer.__version__}")
    path = Path("data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/cutlass_heuristic.cpp")
    return (Path(flashinfer.__file__).parent / path).read_text()


class TestAgainstFlashInfer:
    """The tables hold the tiles that the installed FlashInfer's own C++ names, in its order."""

    @pytest.mark.parametrize("quant", ["bf16", "fp8"])
    def test_sm90_tma(self, heuristic: str, quant: str) -> None:
        body = function_body(heuristic, "get_candidate_tiles_sm90")
        grouped = body[body.index("GROUPED_GEMM") :]
        weights_as_activations = re.search(r"\} else \{\s*return \{(.*?)\};", grouped, re.DOTALL)
        assert weights_as_activations
        tma = tuple(t for t in load_table("sm90", quant).gemm1 if t.family == "tma90")
        assert in_order(tma) == tiles(weights_as_activations[1])

    @pytest.mark.parametrize("quant", ["bf16", "fp8"])
    def test_sm90_clusters(self, heuristic: str, quant: str) -> None:
        assert "multi-cast along M if the M tile is >= 128" in heuristic
        assert "multi-cast along N if the N tile is >= 128" in heuristic
        tma = [t for t in load_table("sm90", quant).gemm1 if t.family == "tma90"]
        for m, n, k in {t.tile for t in tma}:
            clusters = {t.cluster for t in tma if t.tile == (m, n, k)}
            along_m, along_n = (1, 2) if m >= 128 else (1,), (1, 2) if n >= 128 else (1,)
            assert clusters == {(x, y, 1) for x in along_m for y in along_n}

    def test_sm120_fp4(self, heuristic: str) -> None:
        body = function_body(heuristic, "get_candidate_configs_sm120")
        every = re.search(r"all_tiles\[\] = \{(.*?)\};", body, re.DOTALL)
        pruned = re.search(r"switch \(c\.tile_config_sm120\) \{(.*?)return true;(.*?)return fp8_act;", body, re.DOTALL)
        assert every and pruned
        never, not_with_fp8 = set(tiles(pruned[1])), set(tiles(pruned[2]))
        nvfp4 = [t for t in tiles(every[1]) if t not in never]
        assert in_order(load_table("sm120", "nvfp4").gemm1) == nvfp4
        assert in_order(load_table("sm120", "mxfp8_mxfp4").gemm1) == [t for t in nvfp4 if t not in not_with_fp8]

    def test_sm120_fp8(self, heuristic: str) -> None:
        body = function_body(heuristic, "get_candidate_tiles")
        ada = re.search(r"sm == 89 \|\| sm == 120 \|\| sm == 121\) \{\s*return \{(.*?)\};", body, re.DOTALL)
        assert ada
        assert in_order(load_table("sm120", "fp8").gemm1) == tiles(ada[1])

    @pytest.mark.parametrize("arch", ["sm90", "sm120"])
    def test_bf16_multistage(self, heuristic: str, arch: str) -> None:
        body = function_body(heuristic, "get_candidate_tiles")
        base = body[body.index("base_configs{") : body.index("switch (gemm_type)")]
        sm80 = tuple(t for t in load_table(arch, "bf16").gemm1 if t.family == "sm80")
        assert in_order(sm80) == tiles(base)

    def test_multistage_pipelines(self, heuristic: str) -> None:
        body = function_body(heuristic, "get_candidate_configs")
        assert re.search(r"min_stages = \(sm == 89\) \? 3 : int8_configs_only \? 3 : 2;", body)
        assert re.search(r"max_stages = int8_configs_only \? 6 : \(sm >= 80 \? 4 : 2\);", body)
        for table in load_tables():
            stages = [t.stages for t in table.gemm1 if t.family == "sm80"]
            assert stages == [2, 3, 4] * (len(stages) // 3)
