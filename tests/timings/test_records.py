from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.catalog.shapes import MoEShape
from synth.errors import SynthError
from synth.flashinfer.tactics import load_tables
from synth.timings.origin import Origin
from synth.timings.records import AGREED, DENIED, Agreement, Denial

SHIPPED = Path(__file__).parents[2] / "measurements"
H200 = Origin.make("NVIDIA H200", "sm90", "bf16")
OLMOE = MoEShape(2048, 1024, 64, 8)
KNOWN = [(stage, t) for table in load_tables() for stage in (1, 2) for _, t in table.items(stage)]
FIRST = Denial(1, KNOWN[0][1], OLMOE, 64, 0.5, "", "2025-12-02")


@st.composite
def denials(draw: st.DrawFn) -> Denial:
    stage, tactic = draw(st.sampled_from(KNOWN))
    shape = MoEShape(
        draw(st.integers(1, 9000)), draw(st.integers(1, 9000)), draw(st.integers(1, 500)), 1, draw(st.integers(1, 64)),
        draw(st.booleans()),
    )  # fmt: skip
    deviation = draw(st.floats(0, math.inf, allow_nan=False))
    return Denial(stage, tactic, shape, draw(st.integers(1, 1 << 20)), deviation, draw(st.text()), draw(st.text()))


@given(denial=denials())
def test_a_denial_survives_its_record(denial: Denial) -> None:
    assert Denial.parse(json.loads(json.dumps(denial.record(), allow_nan=False))) == denial


@st.composite
def agreements(draw: st.DrawFn) -> Agreement:
    first, second = ([t for stage, t in KNOWN if stage == wanted] for wanted in (1, 2))
    gemm1, gemm2 = draw(st.none() | st.sampled_from(first)), draw(st.none() | st.sampled_from(second))
    deviation = draw(st.floats(0, allow_nan=False, allow_infinity=False))
    return Agreement(OLMOE, gemm1, gemm2, draw(st.integers(1, 1 << 20)), deviation, draw(st.text()))


@given(agreement=agreements())
def test_an_agreement_survives_its_record(agreement: Agreement) -> None:
    assert Agreement.parse(json.loads(json.dumps(agreement.record(), allow_nan=False))) == agreement


@settings(max_examples=25)
@given(agreements=st.lists(agreements(), max_size=4))
def test_agreements_survive_their_file(tmp_path_factory: pytest.TempPathFactory, agreements: list[Agreement]) -> None:
    root = tmp_path_factory.mktemp("agreed")
    AGREED.add(agreements, H200, root)
    assert {a.case: a for a in AGREED.load([root], H200)} == {a.case: a for a in agreements}


@pytest.mark.parametrize(
    "change",
    [{"deviation": None}, {"deviation": -1}, {"tokens": 0}, {"gemm1": "none"}, {"shape": "h1"}, {"date": 3}],
    ids=repr,
)
def test_a_damaged_agreement_is_refused_with_its_place(tmp_path: Path, change: dict[str, object]) -> None:
    path = AGREED.add([Agreement(OLMOE, KNOWN[0][1], None, 64, 0.001, "2025-12-02")], H200, tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["agreed"][0].update(change)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SynthError, match=r"agreed\.json: compared pair 1: .*synth verify"):
        AGREED.load([tmp_path], H200)


@settings(max_examples=25)
@given(first=st.lists(denials(), max_size=4), second=st.lists(denials(), max_size=4))
def test_additions_are_merged_and_the_later_one_of_a_case_counts(
    tmp_path_factory: pytest.TempPathFactory, first: list[Denial], second: list[Denial]
) -> None:
    root = tmp_path_factory.mktemp("denied")
    for some in (first, second):
        path = DENIED.add(some, H200, root)
    expected = {d.case: d for d in (*first, *second)}
    assert {d.case: d for d in DENIED.load([root], H200)} == expected
    again = path.read_bytes()
    DENIED.add(second, H200, root)
    assert path.read_bytes() == again


def test_a_person_can_read_the_file(tmp_path: Path) -> None:
    path = DENIED.add([FIRST], H200, tmp_path)
    assert path == tmp_path / "nvidia-h200" / "flashinfer-0.7.4" / "bf16" / "denied.json"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert any(str(FIRST.tactic) in line and '"tokens": 64' in line for line in lines)
    assert str(FIRST).endswith("at 64 tokens: off by 50.0%")
    assert str(dataclasses.replace(FIRST, deviation=math.inf)).endswith("not finite")


@pytest.mark.parametrize("change", [{"device": "NVIDIA H100"}, {"flashinfer": "0.7.3"}, {"quant": "fp8"}])
def test_nothing_is_carried_over_to_another_device_version_or_quantization(
    tmp_path: Path, change: dict[str, str]
) -> None:
    DENIED.add([FIRST], H200, tmp_path)
    other = dataclasses.replace(H200, **change)
    assert DENIED.load([tmp_path], other) == ()
    # A file that was copied there is another one's.
    path = DENIED.path(other, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(DENIED.path(H200, tmp_path).read_bytes())
    with pytest.raises(SynthError, match=f"denied.json: its {next(iter(change))} is"):
        DENIED.load([tmp_path], other)


def test_simulated_denials_are_refused_for_a_real_device(tmp_path: Path) -> None:
    DENIED.add([FIRST], dataclasses.replace(H200, simulated=True), tmp_path)
    with pytest.raises(SynthError, match="its simulated is True and not False"):
        DENIED.load([tmp_path], H200)


def test_several_folders_are_read_as_one(tmp_path: Path) -> None:
    second = dataclasses.replace(FIRST, stage=2, deviation=math.inf)
    DENIED.add([FIRST], H200, tmp_path / "own")
    DENIED.add([FIRST, second], H200, tmp_path / "shipped")
    assert DENIED.load([tmp_path / "own", tmp_path / "shipped", tmp_path / "none"], H200) == (FIRST, second)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "is not a list of denied tactics"),
        (b'{"denied": {}}', "is not a list of denied tactics"),
        (b'{"schema": 9, "denied": []}', "its schema is 9"),
    ],
    ids=repr,
)
def test_a_damaged_file_is_one_line_with_the_way_out(tmp_path: Path, content: bytes, says: str) -> None:
    path = DENIED.path(H200, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(SynthError, match=says) as caught:
        DENIED.load([tmp_path], H200)
    assert str(path) in str(caught.value) and "mend the file or remove it" in str(caught.value)
    with pytest.raises(SynthError, match=says):
        DENIED.add([FIRST], H200, tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stage": 3}, "stage or its tokens"),
        ({"stage": True}, "stage or its tokens"),
        ({"tokens": 0}, "stage or its tokens"),
        ({"tactic": "fast"}, "not a tactic"),
        ({"tactic": 3}, "a text is not one"),
        ({"shape": "square"}, "square"),
        ({"deviation": -1}, "deviation"),
        ({"deviation": "much"}, "deviation"),
    ],
    ids=repr,
)
def test_a_damaged_record_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = DENIED.add([FIRST], H200, tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["denied"][0].update(change)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SynthError, match=f"denied tactic 1: .*{says}"):
        DENIED.load([tmp_path], H200)
    del content["denied"][0]["date"]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SynthError, match="lacks a field"):
        DENIED.load([tmp_path], H200)


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("agreed.json")), ids=lambda path: path.parent.name)
def test_shipped_agreements_are_written_as_they_lie(tmp_path: Path, path: Path) -> None:
    origin = dataclasses.replace(H200, quant=path.parent.name)
    assert path == AGREED.path(origin, SHIPPED)
    agreements = AGREED.load([SHIPPED], origin)
    assert len(agreements) > 20
    assert AGREED.add(agreements, origin, tmp_path).read_bytes() == path.read_bytes()
