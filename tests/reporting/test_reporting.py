from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reporting_pages as pages
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError

from synth.cli import main
from synth.configs.sidecar import sidecar_path
from synth.errors import SynthError
from synth.flashinfer.tactics import load_table
from synth.performance.model import PerformanceModel
from synth.performance.routing import Routing
from synth.reporting import plots, report
from synth.reporting.page import POLICY, TEMPLATES, templates
from synth.reporting.texts import foreign, letters, percent
from synth.timings.files import write
from synth.timings.folders import load_shapes
from synth.timings.records import AGREED, DENIED, Agreement, Denial
from synth.timings.rows import Row
from synth.timings.table import ShapeTimings

OLMOE = "h2048-i1024-e64-k8"
CSS = (TEMPLATES / "style.css").read_text(encoding="utf-8").rstrip("\n")
BEHIND = {"model_folders": [pages.MODELS], "measurements": [pages.MEASUREMENTS]}


class Page(HTMLParser):
    """A page taken apart as a browser does: its elements, and the text that is shown."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._page = page
        self.feed(page)
        self.close()
        assert self._open == [], "elements are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open[-1:]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        """What is shown, with plain spaces."""
        return " ".join("".join(f" {t} " for t in self.texts).replace("\xa0", " ").split())

    def card(self, name: str) -> str:
        """Return the text of one of the figures that come first."""
        (found,) = re.findall(f"<dt>{re.escape(name)}</dt><dd>(.*?)</dd>", self._page)
        return Page(found).text


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.h200(tmp_path_factory.mktemp("h200") / "h200.json")


@pytest.fixture(scope="module")
def analytical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.pro_6000(tmp_path_factory.mktemp("pro") / "pro.json")


@pytest.fixture(scope="module")
def choices(config: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(sidecar_path(config).read_bytes())["choices"]
    return found


@pytest.fixture(scope="module")
def page(config: Path) -> Page:
    return Page(report(config, **BEHIND))


def geomean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def timed_folder(folder: Path, change: Callable[[ShapeTimings], ShapeTimings], shape: str = OLMOE) -> Path:
    """Write a folder with the bf16 timings of one shape, changed."""
    source = pages.MEASUREMENTS / f"nvidia-h200/flashinfer-0.7.4/bf16/{shape}.csv.gz"
    (timings,) = load_shapes(source, problems=[])
    write(change(timings), folder)
    return folder


def rows_changed(t: ShapeTimings, change: Callable[[Row], Row], **origin: Any) -> ShapeTimings:
    from dataclasses import replace

    return ShapeTimings.from_rows(replace(t.origin, **origin), t.shape, t.label, t.passes, map(change, t.rows()))


# What the page says.


def test_the_first_figures_are_the_sidecars(page: Page, choices: list[dict[str, Any]], config: Path) -> None:
    written = [c for c in choices if c["written"]]
    entries = len(json.loads(config.read_bytes())) - 1
    by = Counter(source for key, source in {k: c["source"] for c in written for k in c["keys"]}.items())
    assert page.card("entries").startswith(
        f"{entries:,} {len(written):,} choices; {len(choices) - len(written)} left out"
    )
    timed = page.card("entries that were timed")
    assert timed.startswith(f"{100 * (by['measured'] + by['verified']) / entries:.1f} %")
    assert f"{by['measured']} measured" in timed and f"{by['predicted']} predicted" in timed
    for kind in ("measured", "predicted"):
        gains = [c["fallback_ms"] / c["ms"] for c in written if c["source"] == kind]
        assert page.card(f"gain over the fallback, {kind}") == (
            f"{geomean(gains):.2f}× geometric mean of {len(gains)} choices"
        )
    stated = [c["expected_regret"] for c in written]
    assert page.card("expected regret").startswith(f"{100 * np.mean(stated):.2f} % stated, not measured")
    model = PerformanceModel.load(pages.MODELS / "nvidia-h200/flashinfer-0.7.4/bf16.zip")
    assert page.card("regret held out").startswith(f"{model.held_out_['regret']['geomean']:.4f} bf16 measured")
    assert re.match(r"\d+ of \d+ pairs of tactics", page.card("outputs compared"))


def test_every_part_that_the_page_promises_is_there(page: Page) -> None:
    anchors = {a["id"] for tag, a in page.elements if tag == "section"}
    links = {str(a["href"]) for tag, a in page.elements if tag == "a"}
    assert links == {f"#{anchor}" for anchor in anchors}
    assert anchors == {
        "provenance", "coverage", "gain", "held-out", "sure", "worst", "drift", "map", "verification", "about",
    }  # fmt: skip
    for said in (
        "NVIDIA H200",
        "FlashInfer 0.7.4",
        "matches the config, entry by entry",
        "580.159.04",
        "1980 MHz of 1980",
        "90 % intervals of predicted times hold 89.9 %",
        "not a gain over FlashInfer's own tuning",
        "synth verify",
    ):
        assert said in page.text, said


def test_the_worst_entries_are_those_with_the_highest_expected_regret(
    page: Page, choices: list[dict[str, Any]]
) -> None:
    (first, *_) = sorted((c for c in choices if c["written"]), key=lambda c: -c["expected_regret"])
    after = page.text[page.text.index("The 15 entries with the highest expected regret") :]
    rank = f"{first['labels'][0]} {first['shape']} bf16 gemm{first['stage']} {first['bucket']:,} {first['source']}"
    assert f"{rank} {100 * first['expected_regret']:.1f} %" in after[:1000]


def test_claims_are_looked_up_in_the_timings(page: Page, choices: list[dict[str, Any]]) -> None:
    measured = sum(c["source"] == "measured" for c in choices)
    assert measured > 200
    assert (
        f"of {measured} choices that the sidecar calls measured or verified, {measured} were found in the timings with "
        f"the stated time, and {measured} with the fallback's as well" in page.text
    )


def test_a_claim_that_the_timings_dont_bear_out_is_no_measured_gain(config: Path, tmp_path: Path) -> None:
    slower = timed_folder(tmp_path / "m", lambda t: rows_changed(t, lambda r: r._replace(ms=r.ms * 1.01)))
    text = Page(report(config, model_folders=[pages.MODELS], measurements=[slower])).text
    assert "0 were found in the timings with the stated time, and 0 with the fallback's as well" in text
    assert "gain over the fallback, measured" not in text and "gain over the fallback, predicted" in text


def test_a_fallback_that_was_not_timed_makes_no_measured_gain(
    config: Path, tmp_path: Path, choices: list[dict[str, Any]]
) -> None:
    fallbacks = {load_table("sm90", "bf16").fallback_id(stage) for stage in (1, 2)}

    def without(t: ShapeTimings) -> ShapeTimings:
        kept = [row for row in t.rows() if row.tactic not in fallbacks]
        return ShapeTimings.from_rows(t.origin, t.shape, t.label, t.passes, kept)

    text = Page(report(config, measurements=[timed_folder(tmp_path / "m", without)])).text
    mine = sum(c["source"] == "measured" and c["shape"] == OLMOE for c in choices)
    assert f"{mine} were found in the timings with the stated time, and 0 with the fallback's as well" in text
    assert "gain over the fallback, measured" not in text


def test_without_timings_a_measured_gain_is_the_sidecars_word(config: Path, choices: list[dict[str, Any]]) -> None:
    text = Page(report(config)).text
    measured = sum(c["source"] == "measured" for c in choices)
    assert f"{measured} gains are called measured because the sidecar says so" in text
    assert "No timings of NVIDIA H200 under FlashInfer 0.7.4 are in the folders" in text
    assert "no model was found in the folders given" in text


def test_simulated_timings_count_as_none(config: Path, tmp_path: Path) -> None:
    folder = timed_folder(tmp_path / "m", lambda t: rows_changed(t, lambda r: r, simulated=True))
    assert report(config, measurements=[folder]) == report(config)


def test_an_analytical_config_is_called_that_and_nothing_of_it_measured(analytical: Path) -> None:
    made = report(analytical, **BEHIND)
    found = Page(made)
    written = [c for c in json.loads(sidecar_path(analytical).read_bytes())["choices"] if c["written"]]
    assert f"ANALYTICAL. {len(written):,} of {len(written):,} choices in the config are computed" in found.text
    assert "no held-out regret exists, since nothing of this GPU was timed" in found.text
    assert "gain over the fallback, ANALYTICAL" in found.text and "gain over the fallback, measured" not in found.text
    kinds = {str(a.get("class")) for tag, a in found.elements if tag in ("rect", "circle", "polyline", "polygon")}
    assert any("analytical" in k for k in kinds) and not any("measured" in k.split() for k in kinds)
    titles = [str(a["title"]) for tag, a in found.elements if tag == "td" and "title" in a]
    assert all("ANALYTICAL" in t for t in titles if "left out" not in t) and len(titles) > 100


def test_another_routing_is_said_first_and_nothing_is_measured(tmp_path: Path) -> None:
    found = Page(report(pages.h200(tmp_path / "r.json", routing=Routing.parse("zipf:1.2")), **BEHIND))
    assert "ROUTING. The choices are for tokens that spread over the experts as zipf:1.2" in found.text
    assert "gain over the fallback, measured" not in found.text


def test_a_ported_config_says_from_where(config: Path, tmp_path: Path) -> None:
    def port(value: dict[str, Any]) -> None:
        for choice in value["choices"]:
            choice.update(source="predicted", ported_from="0.7.2")

    text = Page(report(pages.edited(config, tmp_path, port), **BEHIND)).text
    assert "PORTED. Choices were made under FlashInfer 0.7.2 and carried over to 0.7.4" in text
    assert "gain over the fallback, measured" not in text


def test_a_bundled_module_makes_the_same_page_but_for_its_name_and_digest(config: Path, tmp_path: Path) -> None:
    module = pages.h200(tmp_path / "m.py", file_format="bundled")

    def plain(path: Path) -> str:
        text = Page(report(path, **BEHIND)).text
        return re.sub(r"[0-9a-f]{64}|v1 JSON|bundled module|h200\.json|m\.py", "", text)

    assert plain(module) == plain(config)


def test_without_a_sidecar_there_is_a_page_that_says_what_is_missing(config: Path, tmp_path: Path) -> None:
    found = Page(report(pages.copied(config, tmp_path, sidecar=False), **BEHIND))
    assert "NO SIDECAR. Beside the config there is no h200.json.provenance.json" in found.text
    assert "Not known: the fallback's times are not in these files." in found.text
    assert "The 15 entries with the least margin to the runner-up" in found.text
    assert "gain over the fallback, measured" not in found.text
    assert "0 entries could not be read" in found.text
    titles = [str(a["title"]) for tag, a in found.elements if tag == "td" and "title" in a]
    assert any("tma90" in t and "unknown" in t for t in titles)


def test_a_config_that_says_next_to_nothing_still_makes_a_page(tmp_path: Path) -> None:
    for name, text in (("empty.json", "{}"), ("odd.json", '{"x": [1], "(1,": {}, "_metadata": [3]}')):
        (tmp_path / name).write_text(text)
        found = Page(report(tmp_path / name, **BEHIND))
        assert "MoE tactics for an unnamed GPU" in found.text
    assert "2 entries could not be read" in found.text


def test_verified_numbers_and_denied_tactics_are_told(
    config: Path, tmp_path: Path, choices: list[dict[str, Any]]
) -> None:
    folder = timed_folder(tmp_path / "m", lambda t: t)
    (timings,) = load_shapes(folder, problems=[])
    origin, chosen = timings.origin, {}
    for c in choices:
        if c["shape"] == OLMOE and c["bucket"] == 64 and c["fused_finalize"] and c["written"]:
            chosen[c["stage"]] = next(
                t for _, t in load_table("sm90", "bf16").items(c["stage"]) if str(t) == c["tactic"]
            )
    right = Agreement(timings.shape, chosen[1], chosen[2], 64, 0.0042, "2026-12-02")
    elsewhere = Agreement(timings.shape, None, None, 8, 0.5, "2026-11-01")
    AGREED.add([right, elsewhere], origin, folder)
    text = Page(report(config, measurements=[folder])).text
    after = text[text.index("Outputs of whole layers") :]
    assert re.search(r"bf16 \d+ 1 0 of 4 1 0\.42 % 2 % 2026-12-02 0", after), after[:600]
    assert "NOT VERIFIED" not in text and "The other pairs were not compared" in text
    # What was denied since doesn't agree, and is called out where the config has it.
    DENIED.add([Denial(1, chosen[1], timings.shape, 64, 0.3, "", "2026-12-03")], origin, folder)
    text = Page(report(config, measurements=[folder])).text
    assert "NOT VERIFIED: no output of this config's tactics was compared" in text
    assert f"gemm1 {chosen[1]} {OLMOE} 64 off by 30.0 % 2026-12-03 YES" in text


def test_failures_throttling_and_unread_rows_are_counted(config: Path, tmp_path: Path) -> None:
    def break_some(t: ShapeTimings) -> ShapeTimings:
        def change(row: Row) -> Row:
            if row.tokens == 16 and row.tactic in (3, 4):
                return row._replace(ms=math.nan, error=f"<b>{row.tactic % 2}</b> =1+1")
            return row._replace(throttled=row.tokens == 32)

        return rows_changed(t, change)

    folder = timed_folder(tmp_path / "m", break_some)
    (timings,) = load_shapes(folder, problems=[])
    assert timings.path is not None
    text = gzip.decompress(timings.path.read_bytes()).decode() + "1,1,64,999,0.1,\n"
    timings.path.write_bytes(gzip.compress(text.encode()))
    found = Page(report(config, measurements=[folder]))
    failed, throttled = int(np.isnan(timings.ms).sum()), int(timings.throttled.sum())
    assert failed >= 4 and throttled > 100
    assert f"{failed} of {len(timings):,} timings failed; {throttled} were taken while the GPU throttled." in found.text
    assert "the 2 commonest of 2 kinds of failures" in found.text and "<b>0</b> =1+1" in found.text
    assert "1 row of the measurements could not be read" in found.text


def test_drift_between_passes_is_that_of_the_timings(config: Path, tmp_path: Path) -> None:
    def second_slower(t: ShapeTimings) -> ShapeTimings:
        first = [row for row in t.rows() if row.pass_ == 1]
        again = [row._replace(pass_=2, ms=row.ms * 1.02) for row in first if row.tokens <= 64]
        both = {1: t.passes[1], 2: {"source": "again", "reference": {"drift": 0.0321}}}
        return ShapeTimings.from_rows(t.origin, t.shape, t.label, both, [*first, *again])

    folder = timed_folder(tmp_path / "m", second_slower)
    (timings,) = load_shapes(folder, problems=[])
    cells = int((timings.pass_ == 2).sum())
    text = Page(report(config, measurements=[folder])).text
    assert f"bf16 2 {cells} 2.00 % 2.0 % 2.0 % 2.00 %" in text
    assert "by more than 1 % in 1 pass: olmoe (3.2 %)" in text


# Held-out figures, computed.


def test_held_out_figures_are_computed_when_asked_for(config: Path, tmp_path: Path) -> None:
    kept = (OLMOE, "h4096-i3584-e8-k2", "h2048-i768-e128-k8")
    folder = tmp_path / "nvidia-h200/flashinfer-0.7.4/bf16"
    folder.mkdir(parents=True)
    for shape in kept:
        shutil.copy(pages.MEASUREMENTS / f"nvidia-h200/flashinfer-0.7.4/bf16/{shape}.csv.gz", folder)
    steps: list[tuple[int, int]] = []
    asked = {"held_out": True, "progress": lambda done, total: steps.append((done, total))}
    text = Page(report(config, measurements=[tmp_path], **asked)).text
    assert steps[-1] == (3, 3)
    assert "held out by family, from the timings given, NOT those of this config's model" in text
    for said in ("tokens per expert", "Regret held out by tokens", "Whether stated probabilities come true"):
        assert said in text
    assert "take half a minute" not in text


def test_one_family_alone_cant_be_held_out_and_the_page_says_so(config: Path, tmp_path: Path) -> None:
    folder = timed_folder(tmp_path / "m", lambda t: t)
    text = Page(report(config, measurements=[folder], held_out=True)).text
    assert "bf16: not computed, only one family was timed" in text


# Files of strangers.


def test_a_sidecar_of_another_config_is_refused(config: Path, tmp_path: Path) -> None:
    path = pages.copied(config, tmp_path)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(SynthError, match="belongs to other contents"):
        report(path)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda v: v.update(device="NVIDIA H100"), "contradicts .*device is NVIDIA H100, the config's NVIDIA H200"),
        (lambda v: v.update(flashinfer="0.7.2"), "contradicts .*flashinfer is 0.7.2"),
        (lambda v: v["choices"].pop(), "contradicts .*of the config's not in it"),
        (lambda v: v["choices"][0]["keys"].append("more"), "contradicts .*1 of its keys are not in the config"),
        (lambda v: v["choices"][0].update(tactic=v["choices"][-1]["tactic"]), "another tactic|has no gemm1 tactic"),
        (lambda v: v["choices"][3].update(ms=-1.0), "choice 4: ms is -1"),
        (lambda v: v["choices"][3].update(ms=0), "choice 4: ms is 0"),
        (lambda v: v["choices"][3].update(fallback_ms=1e300), "choice 4: fallback_ms is 1e"),
        (lambda v: v["choices"][3].update({"within_2%": 1.5}), "choice 4: within_2% is 1.5"),
        (lambda v: v["choices"][3].update(bucket=2**40), "choice 4: its stage or its bucket"),
        (lambda v: v["choices"][3].update(stage=3), "choice 4: its stage or its bucket"),
        (lambda v: v["choices"][3].update(quant="<b>"), "choice 4: quant '<b>' is not one of"),
        (lambda v: v["choices"][3].update(shape="h1-i1-e1-k" + "9" * 6000), "choice 4: its shape is longer"),
        (lambda v: v["choices"][3].update(tactic="x" * 6000), "choice 4: its tactic is longer"),
        (lambda v: v["choices"][3].update(shape="<b>"), "choice 4: '<b>' is not a shape"),
    ],
)
def test_a_sidecar_that_cant_be_true_is_refused_in_one_line(
    config: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], says: str
) -> None:
    with pytest.raises(SynthError, match=says) as e:
        report(pages.edited(config, tmp_path, edit))
    assert "\n" not in str(e.value) and "sidecar" not in str(e.value)[:1] and len(str(e.value)) < 1000


def safe(page: str, allowed: set[str]) -> Page:
    """Assert that a page has no element and no attribute that runs, loads or leads anywhere."""
    found = Page(page)
    tags = {tag for tag, _ in found.elements}
    assert tags <= allowed, tags - allowed
    for tag, attributes in found.elements:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "srcdoc", "action", "style", "xlink:href"), tag
            assert name != "href" or (tag == "a" and str(value).startswith("#")), value
    assert [a["content"] for t, a in found.elements if t == "meta" and "http-equiv" in a] == [POLICY]
    (style,) = re.findall("<style>(.*?)</style>", page, re.S)
    assert style == CSS and not re.search(r"@import|url\((?!#fill-)", style)
    assert page.encode().decode() == page
    return found


@pytest.fixture(scope="module")
def tags(page: Page, analytical: Path) -> set[str]:
    """The elements of pages of files that are not hostile."""
    return {tag for found in (page, Page(report(analytical))) for tag, _ in found.elements}


def test_the_page_runs_nothing_and_loads_nothing(config: Path, tags: set[str]) -> None:
    assert "script" not in tags and "img" not in tags and "iframe" not in tags
    safe(report(config, **BEHIND), tags)


def test_hostile_texts_stay_texts(config: Path, tmp_path: Path, tags: set[str]) -> None:
    found = safe(report(pages.hostile(config, tmp_path), **BEHIND), tags)
    for text in pages.HOSTILE[:6]:
        assert text in found.text or f"'{text}" in found.text or foreign(text, 60) in found.text, text
    assert "\x00" not in found.text and "\u202e" not in found.text and "a" * 200 not in found.text


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=80), min_size=3, max_size=3))
def test_any_text_in_a_sidecar_stays_text(
    texts: list[str], config: Path, tmp_path_factory: pytest.TempPathFactory, tags: set[str]
) -> None:
    def edit(value: dict[str, Any]) -> None:
        value["synth"] = texts[0]
        value["sources"]["bf16"]["from"] = texts[1]
        for choice in value["choices"]:
            choice["labels"] = [texts[2]]

    found = safe(report(pages.edited(config, tmp_path_factory.mktemp("any"), edit)), tags)
    for text in texts[1:]:
        shown = " ".join(foreign(text, 60).replace("\xa0", " ").split())
        assert shown in found.text


def test_hostile_measurements_stay_texts(config: Path, tmp_path: Path, tags: set[str]) -> None:
    def change(t: ShapeTimings) -> ShapeTimings:
        names = ("source", "driver", "cuda", "torch", "date", "sm_clock_mhz")
        passes = {n: dict(zip(names, pages.HOSTILE, strict=False)) for n in t.passes}
        rows = [r._replace(ms=math.nan, error=pages.HOSTILE[5]) if r.tactic == 2 else r for r in t.rows()]
        return ShapeTimings.from_rows(t.origin, t.shape, pages.HOSTILE[2], passes, rows)

    found = safe(report(config, measurements=[timed_folder(tmp_path / "m", change)]), tags)
    assert all(t in found.text for t in (pages.HOSTILE[0], f"'{pages.HOSTILE[3]}", pages.HOSTILE[5]))


@given(st.text())
def test_foreign_text_is_one_visible_line_and_no_formula(text: str) -> None:
    shown = foreign(text)
    assert len(shown) <= 121 and not shown.startswith(tuple("=+-@\t"))
    assert shown.encode().decode() == shown
    assert shown == "" or shown.isprintable()


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "＝1", "\t=1", "\n\r=1", " =1", "\u200b=1"])
def test_what_a_spreadsheet_takes_for_a_formula_is_marked(text: str) -> None:
    assert foreign(text)[0] not in "=+-@＝ \t"


def test_shares_without_a_value_are_dashes() -> None:
    assert percent(-0.0001) == "0.0\xa0%" and percent(None) == "–" and percent(math.nan) == "–"


def test_templates_escape_what_they_are_given_and_know_no_other_name(page: Page) -> None:
    environment = templates()
    shown = environment.from_string("<b title='{{ text }}'>{{ text }}</b>").render(text="'\"<b>&")
    assert Page(shown).texts == ["'\"<b>&"] and Page(shown).elements == [("b", {"title": "'\"<b>&"})]
    with pytest.raises(UndefinedError):
        environment.from_string("{{ nothing }}").render()
    for path in TEMPLATES.glob("*.j2"):
        for marked in re.findall(r"[^{}]*\|\s*safe\b", path.read_text(encoding="utf-8")):
            assert "reasons[" in marked or "scope=" in marked, f"{path.name}: {marked}"


# Equal bytes.


def test_equal_files_make_equal_pages_wherever_they_lie(config: Path, tmp_path: Path) -> None:
    first = report(config, **BEHIND)
    measurements = shutil.copytree(pages.MEASUREMENTS, tmp_path / "elsewhere/m")
    copy = pages.copied(config, tmp_path / "other")
    assert report(copy, model_folders=[pages.MODELS], measurements=[measurements]) == first
    assert str(tmp_path) not in first and str(pages.ROOT) not in first


# Plots.


@given(st.floats(1e-4, 1e4), st.floats(1.0, 1e6))
def test_a_logarithmic_axis_holds_its_values_between_ticks(low: float, ratio: float) -> None:
    axis = plots.logarithmic(low, low * ratio)
    values = [v for v, _ in axis.ticks]
    assert axis.low <= low * (1 + 1e-6) and low * ratio <= axis.high * (1 + 1e-6)
    assert 2 <= len(values) <= 16 and values == sorted(values)
    assert (values[0], values[-1]) == (axis.low, axis.high)


@given(st.floats(1e-9, 1e12))
def test_a_linear_axis_holds_its_value_and_has_few_ticks(highest: float) -> None:
    axis = plots.linear(highest)
    assert axis.high >= highest * (1 - 1e-6) and 3 <= len(axis.ticks) <= 6
    assert axis.ticks[0] == (0.0, "0") and axis.ticks[-1][0] == pytest.approx(axis.high)


@given(st.sets(st.integers(1, 2**20), min_size=1, max_size=40))
def test_labels_of_token_counts_never_overlap(buckets: set[int]) -> None:
    axis = plots.of_tokens(sorted(buckets))
    assert [v for v, _ in axis.ticks] == sorted(buckets)
    labels = [(axis.at(v) * 288, len(text) * 6.6 / 2) for v, text in axis.ticks if text]
    assert labels
    for (a, half_a), (b, half_b) in itertools.pairwise(labels):
        assert a + half_a < b - half_b


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=40, unique=True))
def test_labels_of_bars_never_overlap_and_the_first_is_there(names: list[int]) -> None:
    axis = plots.of_names(names)
    assert [v for v, _ in axis.ticks] == list(range(len(names))) and axis.ticks[0][1] == str(names[0])
    labels = [(axis.across(v), len(text) * 6.6 / 2) for v, text in axis.ticks if text]
    for (a, half_a), (b, half_b) in itertools.pairwise(labels):
        assert a + half_a < b - half_b


def test_bars_are_stacked_and_none_is_drawn_for_nothing() -> None:
    bars = list(plots.stacked({"a": [1.0, 0.0], "b": [2.0, 3.0]}))
    assert bars == [("a", 0, 0.0, 1.0), ("b", 0, 1.0, 3.0), ("b", 1, 0.0, 3.0)]


@pytest.mark.parametrize(("number", "text"), [(0, "A"), (25, "Z"), (26, "AA"), (51, "AZ"), (52, "BA"), (702, "AAA")])
def test_letters_of_tactics(number: int, text: str) -> None:
    assert letters(number) == text


def test_every_plot_has_a_title_a_description_and_named_axes(config: Path) -> None:
    plots = re.findall(r'<svg [^>]*role="img"[^>]*>.*?</svg>', report(config, **BEHIND), re.S)
    assert len(plots) >= 6
    for plot in plots:
        assert re.search("<title>.+?</title><desc>.+?</desc>", plot)
        assert len(re.findall(r'class="name middle"', plot)) == 2 and len(re.findall('class="tick', plot)) >= 4


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_has_contrast_and_kinds_of_numbers_are_seen(scheme: int) -> None:
    roots = re.findall(r":root \{(.*?)\}", CSS, re.S)
    colors = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", roots[scheme]))
    for text, grounds in (
        ("ink", ("paper", "panel")),
        ("soft", ("paper", "panel")),
        ("link", ("paper",)),
        ("loud-ink", ("loud",)),
    ):
        assert all(contrast(colors[text], colors[ground]) >= 4.5 for ground in grounds), text
    assert all(contrast(colors[k], colors["paper"]) >= 3 for k in ("measured", "verified", "predicted", "analytical"))


def test_the_maps_tiles_get_darker_and_their_letters_are_readable() -> None:
    tiles = re.findall(r"\.t(\d+) \{ background: (#[0-9a-f]{6}); color: (#[0-9a-f]{3});", CSS)
    grounds = [luminance(ground) for _, ground, _ in tiles]
    assert [int(t) for t, _, _ in tiles] == [8, 16, 32, 64, 128, 256]
    assert grounds == sorted(grounds, reverse=True)
    assert all(contrast(ground, "#" + "".join(c * 2 for c in ink[1:])) >= 4 for _, ground, ink in tiles)


# The command.


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_what_is_next(config: Path, tmp_path: Path) -> None:
    path = pages.copied(config, tmp_path)
    empty = tmp_path / "own"
    empty.mkdir()
    options = ("--models", pages.MODELS, "--measurements", pages.MEASUREMENTS)
    done = run(path, *options)
    assert done.exit_code == 0, done.output
    written = tmp_path / "h200.json.html"
    assert "next: open" in done.output and str(written) in done.output
    assert written.read_text(encoding="utf-8") == report(path, **BEHIND)
    assert run(path, "-o", tmp_path / "new/p.html", *options, "--map-shapes", 2).exit_code == 0
    assert "2 more are not shown: --map-shapes 4 shows all" in Page((tmp_path / "new/p.html").read_text()).text


def test_a_page_needs_neither_scipy_nor_scikit_learn(config: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from synth.cli import main; main(sys.argv[1:], standalone_mode=False);"
        "print([m for m in sys.modules if m.split('.')[0] in ('scipy', 'sklearn', 'matplotlib', 'torch')])"
    )
    options = ("--models", str(pages.MODELS), "--measurements", str(pages.MEASUREMENTS))
    arguments = ["report", str(config), "-o", str(tmp_path / "p.html"), *options]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_command_doesnt_overwrite_the_config_or_a_folder(config: Path, tmp_path: Path) -> None:
    path = pages.copied(config, tmp_path)
    before = path.read_bytes()
    for output, says in ((path, "is the config itself"), (tmp_path, "a folder is in its place")):
        done = run(path, "-o", output)
        assert done.exit_code == 2 and says in done.stderr
    assert path.read_bytes() == before
