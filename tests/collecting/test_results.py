from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from inline import InlinePool
from made_up import DEVICE, SMALL, small_plan

from synth.collecting.results import add_file, journal_to_measurements
from synth.collecting.runner import RunnerSpec
from synth.collecting.running import collect
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.timings.folders import load_shapes


def run(spec: RunnerSpec, journal: Path, **options: object) -> Path:
    collect(small_plan(**options), spec, journal, pool=InlinePool(spec))  # type: ignore[arg-type]
    return journal


def test_adding_a_journal_twice_changes_nothing(spec: RunnerSpec, tmp_path: Path) -> None:
    journal = run(spec, tmp_path / "j")
    (path,) = add_file(journal, tmp_path / "m")
    before = path.read_bytes()
    assert journal_to_measurements(journal, tmp_path / "m") == [path]
    assert path.read_bytes() == before


def test_a_later_state_of_a_run_replaces_an_earlier_and_never_the_other_way(spec: RunnerSpec, tmp_path: Path) -> None:
    early = shutil.copy(run(spec, tmp_path / "j", fraction=0.3), tmp_path / "early")
    late = run(spec, tmp_path / "j")
    for order in ((early, late), (late, early)):
        root = tmp_path / order[0].name
        root = root.with_name(f"m-{root.name}")
        for journal in order:
            add_file(journal, root)
        (part,) = load_shapes(root)
        assert len(part) == len(small_plan()) and list(part.passes) == [1]
        assert "resumed" in part.passes[1]


def test_two_runs_become_two_passes_that_keep_their_numbers(spec: RunnerSpec, tmp_path: Path) -> None:
    first, second = run(spec, tmp_path / "a", fraction=0.3), run(spec, tmp_path / "b")
    root = tmp_path / "m"
    add_file(first, root)
    add_file(second, root)
    run(spec, tmp_path / "a")
    add_file(first, root)
    add_file(second, root)
    (part,) = load_shapes(root)
    runs = {n: p["run"] for n, p in part.passes.items()}
    heads = [json.loads(j.read_text().split("\n")[0])["run"] for j in (first, second)]
    assert runs == {1: f"{heads[0]}/1", 2: f"{heads[1]}/1"}
    assert len(part) == 2 * len(small_plan())


def test_a_pass_says_under_what_it_was_taken(spec: RunnerSpec, tmp_path: Path) -> None:
    (path,) = add_file(run(spec, tmp_path / "j"), tmp_path / "m")
    (part,) = load_shapes(path)
    assert part.passes[1].keys() == {"source", "date", "driver", "policy", "reference", "run"} - {"policy"}
    assert part.passes[1]["reference"].keys() == {
        "stage", "tokens", "tactic", "times", "first_ms", "last_ms", "drift", "max_deviation",
    }  # fmt: skip
    assert part.label == "small"


def test_damaged_lines_of_a_journal_are_told(spec: RunnerSpec, tmp_path: Path) -> None:
    journal = run(spec, tmp_path / "j")
    lines = journal.read_text().split("\n")
    lines[10] = lines[10][:-9]
    journal.write_text("\n".join(lines))
    problems: list[object] = []
    (path,) = add_file(journal, tmp_path / "m", problems=problems)  # type: ignore[arg-type]
    assert len(problems) == 1 and "j:11" in str(problems[0])
    (part,) = load_shapes(path)
    assert len(part) == len(small_plan()) - 1


def test_measurements_files_can_be_added(spec: RunnerSpec, tmp_path: Path) -> None:
    (path,) = add_file(run(spec, tmp_path / "j"), tmp_path / "m")
    (copy,) = add_file(path, tmp_path / "other")
    assert copy.read_bytes() == path.read_bytes()
    (same,) = add_file(path, tmp_path / "m")
    assert same.read_bytes() == copy.read_bytes()


def test_flat_tables_can_be_added(tmp_path: Path) -> None:
    flat = tmp_path / "flat.csv"
    header = "pass,shape,dtype,hidden,inter,experts,top_k,ep_size,gated,stage,tokens,tactic,ms\n"
    rows = [f"{p},small,bf16,512,256,8,2,1,1,1,16,{i},0.5\n" for p in (1, 3) for i in load_table("sm90", "bf16").ids(1)]
    flat.write_text(header + "".join(rows))
    (path,) = add_file(flat, tmp_path / "m", device=DEVICE)
    (part,) = load_shapes(path)
    assert part.shape == SMALL.shape and len(part) == 90
    assert part.passes == {1: {"source": "flat.csv"}, 3: {"source": "flat.csv"}}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", b"", "is empty"),
        ("x.csv", b"a,b\n1,2\n", "lacks the columns"),
        ("x.csv.gz", b"\x1f\x8bjunk", "gzip"),
        ("x.bin", b"\0\1\2\n", "not UTF-8"),
        ("x.jsonl", b'{"synth journal": 1}\n', "first line is not"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(SynthError, match=message) as e:
        add_file(tmp_path / name, tmp_path / "m")
    assert name in str(e.value)
    assert not (tmp_path / "m").exists()


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="is not a file"):
        add_file(tmp_path, tmp_path / "m")
