"""Public measurements in their published form, whose times are computed from constants that are known here."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import evidence
import numpy as np
import pytest
from click.testing import CliRunner
from evidence import PUBLISHED, Evidence, evaluate, main, score_blind, score_layers, score_line, score_sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import public
from studies.public import LAYER_COLUMNS, fit_constants, read_folder

from synth.catalog.devices import get_device
from synth.catalog.models import load_models
from synth.catalog.shapes import MoEShape, padded_shape
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.performance.analytical import analytical_model, structure, suspects
from synth.performance.layers import LayerModel, LayerTimes
from synth.performance.model import Cells
from synth.performance.roofline import NEUTRAL, Hardware, Roofline
from synth.performance.routing import Routing
from synth.timings.folders import load

ROOT = Path(__file__).parents[2]
CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
SWEPT_CARD = "NVIDIA GeForce RTX 5090"
SWEPT_LAYER = MoEShape(2816, 704, 128, 8)
HEAD = f"# {SWEPT_CARD} (SM120), FlashInfer 0.6.18, NVFP4, 128 experts, top_k 8, hidden 2816, inter 704"
#: Hidden, undivided inter, experts and top_k of catalogue models, and how they are split.
MODELS = ((2048, 768, 128, 8), (2880, 2880, 128, 4), (4096, 1536, 128, 8), (2048, 1024, 64, 8), (5120, 8192, 16, 1),
          (7168, 2048, 256, 8), (4096, 14336, 8, 2), (2688, 1856, 128, 6))  # fmt: skip
SPLITS = ((1, 1), (4, 1), (1, 4))
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
ENGINES = {"TRTLLM": True, "VLLM": False}
#: What public layers have to show: off where the fit begins, as a device's constants are.
CHANGES = {0: 0.3, 1: 0.15, 6: -0.2, 8: 0.3}


def start(quant: str = "fp8") -> Roofline:
    found = structure(quant)
    assert found is not None
    return found.roofline_


def truth(begin: Roofline) -> LayerModel:
    constants = np.array(begin.constants)
    for i, change in CHANGES.items():
        constants[i] += change
    return LayerModel(Roofline(tuple(constants.tolist())), (-1.0, -0.7), dict.fromkeys(ENGINES, (-4.3, 0.1, -9.4)))


def row(engine: str, quant: str, tokens: int, layer: Sequence[int], split: tuple[int, int], ms: object) -> list[object]:
    hidden, inter, experts, top_k = layer
    return [engine, CARD, quant, tokens, hidden, inter, top_k, experts, *split, ms]


def as_csv(rows: Sequence[Sequence[object]], columns: Sequence[str] = LAYER_COLUMNS) -> str:
    out = io.StringIO()
    csv.writer(out).writerows([columns, *rows])
    return out.getvalue()


def public_layers(model: LayerModel, quant: str = "nvfp4", device: str = CARD) -> list[LayerTimes]:
    """Return what both engines take for every model, split and token count."""
    ungated = {(m.hidden, m.inter, m.experts) for m in load_models() if m.activation == "relu2"}
    shapes = {
        padded_shape(MoEShape(h, i // tp, e // ep, k, ep, (h, i, e) not in ungated), quant): f"h{h}-i{i}-e{e}-k{k}"
        for h, i, e, k in MODELS
        for tp, ep in SPLITS
        if i % tp == 0 and e % ep == 0
    }
    shape, tokens = (g.ravel() for g in np.meshgrid(np.arange(len(shapes)), TOKENS, indexing="ij"))
    card = get_device(device)
    table, hardware = load_table(card.tactics_arch, quant), Hardware.of(card, quant)
    found = []
    for engine, tuned in ENGINES.items():
        t = LayerTimes(
            device, quant, engine, tuned, Routing.balanced(), tuple(shapes), tuple(shapes.values()), shape, tokens,
            np.ones(len(shape)),
        )  # fmt: skip
        found.append(dataclasses.replace(t, ms=model.predict(t, table, hardware)))
    return found


def published(times: Sequence[LayerTimes]) -> str:
    """Return layers in the form in which they are published: sizes undivided."""
    rows = []
    for t in times:
        dtype = {"bf16": "bfloat16"}.get(t.quant, t.quant)
        for s, n, ms in zip(t.shape.tolist(), t.tokens.tolist(), t.ms.tolist(), strict=True):
            x, (h, i, e, k) = t.shapes[s], (int(part[1:]) for part in t.models[s].split("-"))
            rows.append([t.engine, t.device, dtype, n, h, i, k, e, round(i / x.inter) or 1, e // x.experts, ms])
    return as_csv(rows)


def sweep_text(head: str = HEAD, tokens: Sequence[int] = (64, 1024), rest_us: float = 40.0) -> str:
    """Return a sweep that the shipped model makes of a layer: one stage's GEMM, and the rest of the layer."""
    model = analytical_model(get_device(SWEPT_CARD), "nvfp4")
    lines = [head, "# the other stage is fixed", "stage,tokens,tile,swap_ab,layer_us"]
    for stage in (1, 2):
        ids = np.array(model.table.ids(stage))
        one = np.ones_like(ids)
        for n in tokens:
            ms = model.predict(Cells((SWEPT_LAYER,), one * 0, one * stage, one * n, ids)).ms
            for i, t in zip(ids.tolist(), ms.tolist(), strict=True):
                tactic = model.table.tactic(i)
                if not tactic.finalize:
                    lines.append(
                        f"{stage},{n},{'x'.join(map(str, tactic.tile))}B,{int(tactic.swap_ab)},{1e3 * t + rest_us!r}"
                    )
    return "\n".join([*lines, ""])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "evidence"
    path.mkdir()
    return path


def refusal(folder: Path, name: str) -> str:
    with pytest.raises(SynthError) as e:
        read_folder(folder)
    message = str(e.value)
    assert "\n" not in message and str(folder / name) in message
    return message


# --- reading ---------------------------------------------------------------------------------------------------------


def test_layers_are_read_as_what_one_rank_runs(folder: Path) -> None:
    rows = [
        row("TRTLLM", "nvfp4", 8, (4096, 1536, 128, 8), (2, 1), 0.25),
        row("TRTLLM", "nvfp4", 16, (4096, 1536, 128, 8), (1, 4), 0.5),
        row("TRTLLM", "nvfp4", 16, (2688, 1856, 128, 6), (1, 1), 0.75),
        row("VLLM", "bfloat16", 8, (4096, 1536, 128, 8), (2, 1), 0.125),
    ]
    (folder / "a.csv").write_text(as_csv(rows), encoding="utf-8")
    (folder / "notes.txt").write_text("not a table", encoding="utf-8")
    layers, sweeps = read_folder(folder)
    assert sweeps == []
    plain, tuned = layers
    assert (tuned.device, tuned.quant, tuned.engine, tuned.tuned) == (CARD, "nvfp4", "TRTLLM", True)
    assert (plain.quant, plain.engine, plain.tuned) == ("bf16", "VLLM", False)
    assert all(t.routing == Routing.balanced() for t in layers)
    # The catalogue's model of these sizes has no gate, and the kernels ask for its inter in whole tiles.
    assert tuned.shapes == (
        MoEShape(4096, 768, 128, 8), MoEShape(4096, 1536, 32, 8, 4), MoEShape(2688, 1920, 128, 6, gated=False),
    )  # fmt: skip
    # A model split in two ways is one model.
    assert tuned.models[0] == tuned.models[1] != tuned.models[2]
    assert (tuned.tokens.tolist(), tuned.ms.tolist()) == ([8, 16, 16], [0.25, 0.5, 0.75])


def test_splits_that_leave_a_fraction_are_passed_over(folder: Path) -> None:
    rows = [row("TRTLLM", "fp8", 8, (4096, 1536, 128, 8), split, 0.5) for split in ((1, 1), (5, 1), (1, 3))]
    (folder / "a.csv").write_text(as_csv(rows), encoding="utf-8")
    ((only,), _) = read_folder(folder)
    assert len(only) == 1 and only.shapes[0] == MoEShape(4096, 1536, 128, 8)


def test_sizes_that_the_kernels_do_not_take_are_padded_as_engines_do(folder: Path) -> None:
    rows = [row("TRTLLM", "nvfp4", 8, (2880, 2880, 128, 4), (4, 1), 0.5)]
    (folder / "a.csv").write_text(as_csv(rows), encoding="utf-8")
    ((only,), _) = read_folder(folder)
    assert only.shapes[0].inter >= 720 and only.shapes[0].inter % 32 == 0


def test_a_packed_file_is_read_like_a_plain_one(folder: Path) -> None:
    text = published(public_layers(truth(start())))
    (folder / "a.csv").write_text(text, encoding="utf-8")
    plain, _ = read_folder(folder)
    (folder / "a.csv").unlink()
    (folder / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    packed, _ = read_folder(folder)
    assert len(plain) == len(packed) == 2
    for a, b in zip(plain, packed, strict=True):
        assert (a.shapes, a.models, a.engine) == (b.shapes, b.models, b.engine)
        assert a.tokens.tolist() == b.tokens.tolist() and a.ms.tolist() == b.ms.tolist()


def test_layers_of_one_engine_in_two_files_are_refused(folder: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text(as_csv([row("TRTLLM", "nvfp4", 8, MODELS[0], (1, 1), 0.1)]))
    with pytest.raises(SynthError, match="TRTLLM are in two files; put them into one"):
        read_folder(folder)


def test_a_sweep_is_read_with_its_tactics(folder: Path) -> None:
    (folder / "s.csv").write_text(sweep_text(), encoding="utf-8")
    layers, (sweep,) = read_folder(folder)
    assert layers == []
    assert (sweep.device.name, sweep.quant, sweep.shape) == (SWEPT_CARD, "nvfp4", SWEPT_LAYER)
    assert sweep.source == HEAD.lstrip("# ")
    table = load_table("sm120", "nvfp4")
    unfused = {i for stage in (1, 2) for i, t in table.items(stage) if not t.finalize}
    assert set(sweep.tactic.tolist()) == unfused and len(sweep.ms) == 2 * len(unfused)
    assert [table.stage(i) for i in sweep.tactic.tolist()] == sweep.stage.tolist()


GOOD = row("TRTLLM", "fp8", 8, (4096, 1536, 128, 8), (1, 1), 0.5)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("framework", "SGLANG"),
        ("framework", ""),
        ("moe_dtype", "int4"),
        ("num_tokens", 0),
        ("num_tokens", -8),
        ("num_tokens", "8.5"),
        ("num_tokens", "many"),
        ("hidden_size", 0),
        ("hidden_size", -4096),
        ("inter_size", 0),
        ("topk", 0),
        ("topk", 129),
        ("num_experts", 0),
        ("latency", 0),
        ("latency", -1),
        ("latency", "nan"),
        ("latency", "inf"),
        ("latency", ""),
        ("latency", "fast"),
        ("moe_tp_size", ""),
        ("moe_ep_size", -1),
        ("moe_tp_size", -2),
    ],
)
def test_a_value_that_no_layer_has_names_file_and_row(folder: Path, column: str, value: object) -> None:
    bad = list(GOOD)
    bad[LAYER_COLUMNS.index(column)] = value
    (folder / "a.csv").write_text(as_csv([GOOD, bad]), encoding="utf-8")
    assert "row 3" in refusal(folder, "a.csv")


@pytest.mark.parametrize("column", ["moe_tp_size", "moe_ep_size"])
def test_a_layer_divided_by_nothing_names_file_and_row(folder: Path, column: str) -> None:
    bad = list(GOOD)
    bad[LAYER_COLUMNS.index(column)] = 0
    (folder / "a.csv").write_text(as_csv([GOOD, bad]), encoding="utf-8")
    assert "row 3" in refusal(folder, "a.csv")


def test_a_device_that_is_not_known_names_the_file(folder: Path) -> None:
    bad = list(GOOD)
    bad[1] = "NVIDIA A1 Made Up"
    (folder / "a.csv").write_text(as_csv([GOOD, bad]), encoding="utf-8")
    assert "NVIDIA A1 Made Up" in refusal(folder, "a.csv")
    (folder / "a.csv").write_text(sweep_text(HEAD.replace(SWEPT_CARD, "NVIDIA A1 Made Up")), encoding="utf-8")
    assert "NVIDIA A1 Made Up" in refusal(folder, "a.csv")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", b"a,b\n1,2\n"),
        ("a.csv", b"# only a comment\n"),
        ("a.csv", (",".join(LAYER_COLUMNS) + "\n").encode()),
        ("a.csv", b"\xff\xfe\x00"),
        ("a.csv", b'"' + b"x" * 200_000 + b'"\n1\n'),
        ("a.csv.gz", b"not packed"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n" * 1000, mtime=0)[:30]),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n" * 1000, mtime=0)[:20] + b"\xff" * 30),
    ],
    ids=lambda x: repr(x[:20]),
)
def test_a_file_that_is_no_table_is_one_line(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert "take it out of the folder" in refusal(folder, name)


def test_a_file_too_large_to_be_a_table_is_not_read_further(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "_MAX_BYTES", 1 << 20)
    (folder / "a.csv.gz").write_bytes(gzip.compress(as_csv([GOOD]).encode() * 20_000))
    assert "more than 1 MiB" in refusal(folder, "a.csv.gz")


def test_a_missing_or_empty_folder_is_one_line(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none", "no such folder"), (tmp_path, "no .csv")):
        with pytest.raises(SynthError, match=says) as e:
            read_folder(path)
        assert "public measurements" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "head",
    [
        "# a sweep",
        f"# {SWEPT_CARD} (SM120), NVFP4, 128 experts, top_k 8, hidden 2816",
        f"# {SWEPT_CARD} (SM120), INT3, 128 experts, top_k 8, hidden 2816, inter 704",
        "",
    ],
)
def test_a_sweep_that_does_not_say_what_it_is_of_is_one_line(folder: Path, head: str) -> None:
    (folder / "s.csv").write_text(sweep_text(head).lstrip("\n"), encoding="utf-8")
    refusal(folder, "s.csv")


@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace("top_k 8", "top_k 800"),
        HEAD.replace("hidden 2816", "hidden 0"),
        HEAD.replace("inter 704", "inter " + "9" * 5000),
        HEAD.replace(SWEPT_CARD, "NVIDIA B200"),
    ],
    ids=["top_k", "hidden", "digits", "no tactics"],
)
def test_a_sweep_of_a_layer_that_cannot_be_is_one_line(folder: Path, head: str) -> None:
    (folder / "s.csv").write_text(sweep_text(head), encoding="utf-8")
    refusal(folder, "s.csv")


@pytest.mark.parametrize(
    "bad", ["1,64,999x999x999B,0,50", "3,64,128x128x64B,0,50", "1,many,128x128x64B,0,50", "1,64,128x128x64B,0,", "1,64"]
)
def test_a_row_of_a_sweep_that_is_no_tactic_names_file_and_row(folder: Path, bad: str) -> None:
    (folder / "s.csv").write_text(f"{HEAD}\nstage,tokens,tile,swap_ab,layer_us\n{bad}\n", encoding="utf-8")
    assert "row 1" in refusal(folder, "s.csv")


@pytest.mark.parametrize("bad", ["1,64,128x128x64B,0,nan", "1,64,128x128x64B,0,-3", "1,0,128x128x64B,0,50"])
def test_a_time_of_a_sweep_that_cannot_be_names_file_and_row(folder: Path, bad: str) -> None:
    (folder / "s.csv").write_text(f"{HEAD}\nstage,tokens,tile,swap_ab,layer_us\n{bad}\n", encoding="utf-8")
    assert "row 1" in refusal(folder, "s.csv")


DAMAGE = [b"0", b"-1", b"nan", b"inf", b",", b"\n", b'"', b"#", b"1e400", b"9" * 30, b"\x00", b"\r", b"\xe2\x80\xa8"]
WHOLE = {
    "layers": as_csv([GOOD, row("VLLM", "nvfp4", 64, (2880, 2880, 128, 4), (4, 1), 0.3)]).encode(),
    "sweep": "\n".join(sweep_text(tokens=(64,)).splitlines()[:12]).encode(),
}


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(WHOLE)),
    st.lists(
        st.tuples(
            st.floats(0.0, 1.0),
            st.integers(0, 3),
            st.one_of(
                st.binary(max_size=4),
                st.sampled_from(DAMAGE),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_damaged_files_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, kind: str, edits: list[tuple[float, int, bytes]], packed: bool
) -> None:
    data = WHOLE[kind]
    for at, cut, new in edits:
        place = int(at * len(data))
        data = data[:place] + new + data[place + cut :]
    folder = tmp_path_factory.mktemp("damaged")
    (folder / ("a.csv.gz" if packed else "a.csv")).write_bytes(gzip.compress(data) if packed else data)
    try:
        layers, sweeps = read_folder(folder)
    except SynthError as e:
        assert "\n" not in str(e)
        return
    for t in layers:
        assert (t.ms > 0.0).all() and np.isfinite(t.ms).all() and (t.tokens > 0).all()
    assert layers or sweeps


@settings(max_examples=60)
@given(st.floats(0.0, 1.0), st.integers(0, 255))
def test_packed_files_with_damaged_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: float, value: int
) -> None:
    data = bytearray(gzip.compress(WHOLE["layers"], mtime=0))
    data[min(int(at * len(data)), len(data) - 1)] = value
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "a.csv.gz").write_bytes(bytes(data))
    try:
        read_folder(folder)
    except SynthError as e:
        assert "\n" not in str(e)


# --- judging ---------------------------------------------------------------------------------------------------------


def test_models_that_were_not_fitted_are_predicted_as_well_as_they_were_made() -> None:
    begin = start()
    scores, gain = score_layers(public_layers(truth(begin)), begin, splits=2)
    assert [(s.engine, s.tuned, s.models) for s in scores] == [("TRTLLM", True, 8), ("VLLM", False, 8)]
    for s in scores:
        assert (s.device, s.quant) == (CARD, "nvfp4")
        assert s.least <= s.error <= s.most < 0.01 < s.unfitted
        assert s.error <= s.p90 < 0.03
    assert gain is not None
    assert gain.correlation > 0.99
    assert gain.predicted == pytest.approx(gain.measured, rel=0.02)
    assert gain.measured > 1.05 and 0 < gain.sure < gain.layers and gain.sure_right == 1.0


def test_noise_is_not_learned() -> None:
    begin = start()
    rng = np.random.default_rng(0)
    noisy = [
        dataclasses.replace(t, ms=t.ms * np.exp(rng.normal(0.0, 0.1, len(t)))) for t in public_layers(truth(begin))
    ]
    scores, _ = score_layers(noisy, begin, splits=2)
    # The median of a normal error's absolute value is 0.67 of its deviation.
    assert all(0.05 < s.error < 0.09 for s in scores)


def test_an_engine_alone_has_no_gain_to_judge() -> None:
    begin = start()
    tuned, _ = public_layers(truth(begin))
    (score,), gain = score_layers([tuned], begin, splits=1)
    assert gain is None and score.error < 0.01


def of_first_model(times: LayerTimes) -> LayerTimes:
    mine = np.array([times.models[s] == times.models[0] for s in times.shape.tolist()])
    kept = times.models.count(times.models[0])
    return dataclasses.replace(times.select(mine), shapes=times.shapes[:kept], models=times.models[:kept])


def test_one_model_cannot_be_divided_and_is_not_judged() -> None:
    begin = start()
    times = [of_first_model(t) for t in public_layers(truth(begin))]
    assert score_layers(times, begin, splits=2) == ([], None)


def test_halves_in_which_an_engine_has_nothing_are_passed_over() -> None:
    begin = start()
    tuned, plain = public_layers(truth(begin))
    assert score_layers([tuned, of_first_model(plain)], begin, splits=3) == ([], None)


def test_a_sweep_that_the_model_made_is_ranked_right(folder: Path) -> None:
    (folder / "s.csv").write_text(sweep_text(), encoding="utf-8")
    _, (sweep,) = read_folder(folder)
    scores = score_sweep(sweep, analytical_model(sweep.device, sweep.quant))
    assert [(s.stage, s.tokens) for s in scores] == [(1, 64), (1, 1024), (2, 64), (2, 1024)]
    table = load_table("sm120", "nvfp4")
    for s in scores:
        assert s.rank_correlation == pytest.approx(1.0)
        assert s.regret == 1.0 <= s.fallback
        assert s.tactics == sum(not t.finalize for _, t in table.items(s.stage))


def test_a_sweep_in_reverse_is_ranked_wrong(folder: Path) -> None:
    (folder / "s.csv").write_text(sweep_text(), encoding="utf-8")
    _, (sweep,) = read_folder(folder)
    scores = score_sweep(dataclasses.replace(sweep, ms=1.0 / sweep.ms), analytical_model(sweep.device, sweep.quant))
    assert all(s.rank_correlation == pytest.approx(-1.0) and s.regret > 1.0 for s in scores)


def test_published_lines_are_compared_in_the_same_units() -> None:
    (line,) = PUBLISHED
    score = score_line(line, analytical_model(get_device(line.device), line.quant))
    assert score.line is line
    assert 0.0 <= score.error < 0.5
    assert score.slope == pytest.approx(line.slope, rel=0.5)


def test_constants_from_public_layers_choose_for_what_was_timed() -> None:
    """Layers that the H200's own model makes say enough of its GEMMs to choose well among them."""
    (timings,) = load(ROOT / "measurements", "NVIDIA H200", "fp8", problems=[])
    some = timings.select(np.isin(timings.tokens, [1, 64, 1024]) & (timings.pass_ == 1) & (timings.shape < 6))
    own = structure("fp8")
    assert own is not None
    layers = public_layers(LayerModel(own.roofline_, (-1.0, -0.7), dict.fromkeys(ENGINES, (-4.5, 0.0, -9.5))),
                           "fp8", "NVIDIA H200")  # fmt: skip
    score = score_blind(layers, some)
    assert (score.device, score.quant) == ("NVIDIA H200", "fp8")
    assert score.choices == len(some.buckets()[0])
    assert 1.0 <= score.regret < 1.05 and score.regret <= score.p95
    never = {i for i in range(len(some.table)) if (some.table.stage(i), some.table.tactic(i)) in suspects(some.table)}
    assert not never & {some.table.fallback_id(stage) for stage in (1, 2)}


def test_constants_are_fitted_to_a_draw_of_many_layers_and_the_same_seed_draws_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(public, "_FIT_LAYERS", 40)
    times = public_layers(truth(start()))
    assert min(map(len, times)) > 40
    a, b, c = (fit_constants(times, Roofline(NEUTRAL), seed) for seed in (0, 0, 1))
    assert a == b != c


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evidence]:
    folder = tmp_path_factory.mktemp("evidence")
    (folder / "layers.csv.gz").write_bytes(gzip.compress(published(public_layers(truth(start()))).encode()))
    (folder / "sweep.csv").write_text(sweep_text(), encoding="utf-8")
    return folder, evaluate(folder, splits=1)


def test_a_folder_is_judged_as_its_parts_are(judged: tuple[Path, Evidence]) -> None:
    _, found = judged
    scores, gain = score_layers(public_layers(truth(start())), start(), splits=1)
    assert list(found.layers) == scores
    assert list(found.gains) == [gain]
    assert len(found.sweeps) == 4 and len(found.lines) == len(PUBLISHED)
    # Nothing is timed on this card.
    assert found.blind == ()


def test_what_is_judged_is_printed_whole(judged: tuple[Path, Evidence], capsys: pytest.CaptureFixture[str]) -> None:
    _, found = judged
    evidence.tables(found)
    printed = capsys.readouterr().out
    for text in ("Whole layers", "TRTLLM", "VLLM", "fastest", "fallback", "rank correlation", "Published lines"):
        assert text in printed
    assert f"{found.layers[0].error:.1%}" in printed and f"{found.gains[0].measured:.3f}" in printed


def test_the_command_prints_json(judged: tuple[Path, Evidence], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = judged
    once = found
    monkeypatch.setattr(evidence, "evaluate", lambda path, report: once if path == folder else None)
    result = CliRunner().invoke(main, [str(folder), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"layers", "gains", "sweeps", "lines", "blind"}
    assert report["layers"][0]["error"] == found.layers[0].error
    assert math.isfinite(report["gains"][0]["predicted"])


def test_a_folder_that_is_not_there_or_empty_is_one_line(tmp_path: Path) -> None:
    for folder, says in ((tmp_path / "none", "no such folder"), (tmp_path, "no .csv")):
        result = CliRunner().invoke(main, [str(folder)])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and says in result.stderr
