"""The report in a real browser: nothing complains, nothing leaves, and it can be read on a phone and on a desk."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reporting_pages as pages
from browser import Browser, browser, find

from synth.reporting import report

PROGRAM = find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here, so the report isn't opened in a browser: apt-get install chromium"
)
NAMES = ("h200", "swept", "analytical", "hostile", "without-sidecar")
WIDTHS = (400, 1400)

#: Every text of every plot: where it is, and how large its letters are on the screen.
_TEXTS = """[...document.querySelectorAll('svg.plot')].map(plot => ({
  box: plot.getBoundingClientRect().toJSON(),
  texts: [...plot.querySelectorAll('text')].map(text => ({
    said: text.textContent, box: text.getBoundingClientRect().toJSON(),
    size: parseFloat(getComputedStyle(text).fontSize) * plot.getBoundingClientRect().width / plot.viewBox.baseVal.width,
  }))}))"""
#: Elements that reach beyond the window and are in no box that scrolls.
_BEYOND = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide') && !e.closest('svg.defs')
  && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 200))"""
#: Texts with small letters, which nobody reads on a phone.
_SMALL = """[...document.querySelectorAll('body *')].filter(e => !e.closest('svg')
  && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
  && parseFloat(getComputedStyle(e).fontSize) < 10).map(e => e.outerHTML.slice(0, 200))"""
#: Adds to the page what a text that was not escaped would; returns what the page's policy stopped.
_SLIPPED = """new Promise(done => {
  const stopped = [];
  document.addEventListener('securitypolicyviolation', e => stopped.push(e.effectiveDirective));
  const add = (tag, set) => document.body.appendChild(Object.assign(document.createElement(tag), set));
  add('img', {src: 'http://127.0.0.1:PORT/x.png'});
  add('script', {textContent: 'window.owned = true'});
  add('iframe', {src: 'http://127.0.0.1:PORT/'});
  add('link', {rel: 'stylesheet', href: 'http://127.0.0.1:PORT/x.css'});
  setTimeout(() => done(stopped), 1000);
})"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the pages, by what they are of."""
    folder = tmp_path_factory.mktemp("pages")
    config = pages.h200(folder / "h200.json", quants=("bf16", "fp8"))
    configs = {
        "h200": config,
        # Regrets of hundredths of a percent.
        "swept": pages.h200(folder / "swept.json", layers=pages.LAYERS[:2]),
        "analytical": pages.pro_6000(folder / "pro.json"),
        "hostile": pages.hostile(config, folder / "hostile"),
        "without-sidecar": pages.copied(config, folder / "bare", sidecar=False),
    }
    found = {}
    for name, path in configs.items():
        found[name] = folder / f"{name}.html"
        made = report(path, model_folders=[pages.MODELS], measurements=[pages.MEASUREMENTS])
        found[name].write_text(made, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM) as started:
        yield started


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_the_page_opens_without_a_complaint_and_asks_for_nothing(
    chromium: Browser, files: dict[str, Path], name: str, width: int, dark: bool, tmp_path: Path
) -> None:
    chromium.open(files[name], width, dark=dark)
    assert chromium.complaints() == []
    assert chromium.requests() == [files[name].as_uri()]
    assert "owned" not in chromium.evaluate("document.title")
    assert chromium.evaluate("getComputedStyle(document.body).display") == "block"
    shot = tmp_path / f"{name}-{width}.png"
    chromium.screenshot(shot)
    assert shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 50_000


@pytest.mark.parametrize("name", NAMES)
def test_the_page_fits_its_window_and_its_letters_are_large_enough(
    chromium: Browser, files: dict[str, Path], name: str, width: int
) -> None:
    chromium.open(files[name], width)
    # What is folded away has to fit too.
    chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth") == width
    assert chromium.evaluate(_BEYOND) == []
    assert chromium.evaluate(_SMALL) == []


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_plots_are_large_enough_inside_and_apart(
    chromium: Browser, files: dict[str, Path], name: str, width: int
) -> None:
    chromium.open(files[name], width)
    plots = chromium.evaluate(_TEXTS)
    assert len(plots) >= (2 if name == "without-sidecar" else 4)
    for plot in plots:
        assert len(plot["texts"]) >= 8
        for i, text in enumerate(plot["texts"]):
            assert text["size"] >= 10, text
            assert inside(text["box"], plot["box"]), (text, plot["box"])
            for other in plot["texts"][:i]:
                assert not overlap(text["box"], other["box"]), (text, other)


def inside(inner: dict[str, float], outer: dict[str, float]) -> bool:
    return (
        inner["left"] >= outer["left"] - 0.5
        and inner["right"] <= outer["right"] + 0.5
        and inner["top"] >= outer["top"] - 0.5
        and inner["bottom"] <= outer["bottom"] + 0.5
    )


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    # A line's box has room above and below its letters.
    across = min(a["right"], b["right"]) - max(a["left"], b["left"])
    down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
    return across > 0.5 and down > 3.0


def test_boxes_that_scroll_are_reached_by_the_keyboard_and_have_names(
    chromium: Browser, files: dict[str, Path]
) -> None:
    chromium.open(files["h200"], 400)
    boxes: list[dict[str, Any]] = chromium.evaluate(
        "[...document.querySelectorAll('.wide')].map(b => ({focus: b.tabIndex, name: b.getAttribute('aria-label'),"
        " scrolls: getComputedStyle(b).overflowX}))"
    )
    assert len(boxes) >= 8
    assert all(b["focus"] == 0 and b["name"] and b["scrolls"] == "auto" for b in boxes)


def test_what_is_marked_as_not_measured_looks_otherwise(chromium: Browser, files: dict[str, Path]) -> None:
    chromium.open(files["h200"], 1400)
    fills = chromium.evaluate(
        "['measured', 'predicted'].map(k => getComputedStyle(document.querySelector(`rect.bar.${k}`)).fill)"
    )
    dashes = chromium.evaluate(
        "['measured', 'predicted'].map(k => getComputedStyle(document.querySelector(`.line.${k}`)).strokeDasharray)"
    )
    assert fills[0].startswith("rgb") and fills[1] == 'url("#fill-predicted")'
    assert dashes[0] == "none" and dashes[1] != "none"


def received(server: socket.socket) -> bytes:
    """Return everything that was sent to a server by now."""
    said = b""
    server.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(TimeoutError):
                connection.settimeout(0.2)
                said += connection.recv(4096)
    return said


@pytest.mark.parametrize("policy", [True, False], ids=["with its policy", "without"])
def test_the_policy_stops_what_might_slip_through(
    chromium: Browser, files: dict[str, Path], policy: bool, tmp_path: Path
) -> None:
    text = files["h200"].read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(text if policy else text.replace("Content-Security-Policy", "Nothing"), encoding="utf-8")
    chromium.open(page, 1400)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stopped = chromium.evaluate(_SLIPPED.replace("PORT", str(server.getsockname()[1])))
        said = received(server)
    # Chromium connects ahead for a frame before it asks the policy, but sends nothing.
    assert (said == b"") is policy
    assert (chromium.evaluate("typeof window.owned") == "undefined") is policy
    assert ({"img-src", "script-src-elem", "frame-src", "style-src-elem"} <= set(stopped)) is policy
