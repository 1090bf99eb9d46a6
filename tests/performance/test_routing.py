from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.errors import SynthError
from synth.performance import routing, routing_file
from synth.performance.routing import UNIFORM, Routing
from synth.performance.routing_file import read_counts

#: Tokens per expert of one layer; the last expert got none.
COUNTS = [24990.0, 39249.0, 13378.0, 13874.0, 22360.0, 0.0]


@st.composite
def layers(draw: st.DrawFn) -> tuple[Routing, int, int]:
    """A routing, and a layer's experts and top_k that it fits."""
    experts = draw(st.integers(1, 300))
    top_k = draw(st.integers(1, min(experts, 22)))
    counts = st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts)
    found = draw(
        st.one_of(
            st.floats(0.0, 10.0).map(Routing.zipf),
            st.integers(1, top_k).map(Routing.always),
            counts.filter(lambda c: sum(x > 0 for x in c) >= top_k).map(lambda c: Routing.counts([c])),
        )
    )
    return found, experts, top_k


def write(tmp_path: Path, content: str | bytes, name: str = "counts.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- inclusion -------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(layers())
def test_inclusion_is_proportional_to_the_weights_up_to_the_cap(layer: tuple[Routing, int, int]) -> None:
    found, experts, top_k = layer
    p = found.inclusion(experts, top_k)
    assert p.shape == (experts,) and (p >= 0.0).all() and (p <= 1.0).all()
    assert p.sum() == pytest.approx(top_k)
    assert (np.diff(p) <= 0.0).all()
    if found.hot:
        assert p[found.hot - 1] == 1.0 and len(set(p[found.hot :].tolist())) <= 1
        return
    weights = np.array(found.weights) if found.weights else np.arange(1.0, experts + 1.0) ** -found.exponent
    under = np.flatnonzero((p < 1.0) & (weights > 0.0))
    if len(under):
        ratio = p[under] / weights[under]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
        # Those at the cap would exceed it.
        capped = np.flatnonzero(p == 1.0)
        assert (ratio[0] * weights[capped] >= 1.0 - 1e-9).all()


def test_inclusion_by_hand() -> None:
    np.testing.assert_allclose(Routing.counts([[6, 2, 1, 1]]).inclusion(4, 2), [1.0, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(Routing.counts([[1, 0, 1, 0]]).inclusion(4, 2), [1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(Routing.zipf(1.0).inclusion(3, 1), np.array([6, 3, 2]) / 11)
    np.testing.assert_allclose(Routing.always(1).inclusion(5, 3), [1.0, 0.5, 0.5, 0.5, 0.5])


def test_counts_of_a_server_are_proportional_to_inclusion_already() -> None:
    rng = np.random.default_rng(0)
    before = Routing.zipf(0.8)
    tokens = 200_000
    counts = np.bincount(before.sample(32, 4, tokens, rng).ravel(), minlength=32)
    after = Routing.counts([counts.tolist()]).inclusion(32, 4)
    np.testing.assert_allclose(after, np.sort(counts)[::-1] / tokens, rtol=1e-9)
    np.testing.assert_allclose(after, before.inclusion(32, 4), atol=0.01)


def test_an_exponent_of_zero_is_uniform() -> None:
    assert Routing.zipf(0.0) == UNIFORM == Routing.uniform() and Routing.zipf(0.0).is_uniform
    np.testing.assert_allclose(UNIFORM.inclusion(64, 8), 8 / 64)
    assert not any(r.is_uniform for r in (Routing.zipf(0.1), Routing.always(1), Routing.counts([[1, 1]])))


def test_equal_routings_are_equal_whatever_they_are_called() -> None:
    assert Routing.counts([[3, 1]], "a") == Routing.counts([[10, 30]], "b")
    assert len({Routing.zipf(1.0), Routing.parse("zipf:1.0"), Routing.parse("zipf:1")}) == 1


@pytest.mark.parametrize(
    ("made", "experts", "top_k", "says"),
    [
        (Routing.counts([[3, 1]], "c"), 4, 1, "counts of 2 experts, but a layer has 4"),
        (Routing.counts([[3, 1, 1]], "c", padded=True), 2, 1, "counts of 3 experts, but a layer has 2"),
        (Routing.counts([[3, 0, 0]], "c"), 3, 2, "1 experts have tokens, fewer than the 2"),
        (Routing.always(3), 8, 2, "goes to 2 experts only"),
        (UNIFORM, 4, 5, "can't go to 5 of 4"),
    ],
)
def test_a_routing_of_another_model_is_refused(made: Routing, experts: int, top_k: int, says: str) -> None:
    with pytest.raises(SynthError, match=says):
        made.inclusion(experts, top_k)


# --- drawing ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(layers(), st.integers(0, 40), st.integers(0, 2**32))
def test_every_token_goes_to_distinct_experts(layer: tuple[Routing, int, int], tokens: int, seed: int) -> None:
    found, experts, top_k = layer
    picked = found.sample(experts, top_k, tokens, np.random.default_rng(seed))
    assert picked.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in picked.tolist())
    assert not tokens or (picked.min() >= 0 and picked.max() < experts)
    impossible = int((found.inclusion(experts, top_k) == 0.0).sum())
    assert len(np.unique(picked)) <= experts - impossible


@settings(max_examples=100)
@given(layers())
def test_whole_numbers_keep_the_sum_exactly(layer: tuple[Routing, int, int]) -> None:
    found, experts, top_k = layer
    p = found.inclusion(experts, top_k)
    whole = routing._in_whole_numbers(p, top_k)
    assert int(whole.sum()) == top_k << 40
    assert whole.min() >= 0 and whole.max() <= 1 << 40
    np.testing.assert_allclose(whole / 2.0**40, p, atol=1e-9)


@pytest.mark.parametrize("text", ["uniform", "zipf:0.6", "zipf:1.2", "zipf:4", "hot:1"])
def test_experts_are_drawn_with_their_inclusion_probabilities(text: str) -> None:
    found = Routing.parse(text)
    tokens = 40_000
    p = found.inclusion(24, 6)
    counts = np.bincount(found.sample(24, 6, tokens, np.random.default_rng(1)).ravel(), minlength=24)
    sd = np.sqrt(tokens * p * (1.0 - p))
    # Which expert is popular is drawn, so compare in order; neighbours of equal chance swap within the noise.
    assert (np.abs(np.sort(counts)[::-1] - tokens * p) <= 5.0 * sd + 1e-6).all()


def test_draws_are_repeatable_and_move_the_popular_experts() -> None:
    found = Routing.zipf(1.5)
    draw = [found.sample(64, 4, 500, np.random.default_rng(seed)) for seed in (3, 3, 4, 5, 6)]
    assert (draw[0] == draw[1]).all()
    assert len({int(np.bincount(d.ravel()).argmax()) for d in draw}) > 1


def test_batches_too_large_to_draw_at_once_are_drawn_in_parts() -> None:
    picked = Routing.zipf(4.0).sample(16384, 8, 600, np.random.default_rng(0))
    assert all(len(set(row)) == 8 for row in picked.tolist())
    # The most popular expert gets nearly every token, in the last part too.
    popular = int(np.bincount(picked.ravel()).argmax())
    assert (picked[-50:] == popular).any(axis=1).sum() >= 49


# --- balanced --------------------------------------------------------------------------------------------------------


def test_balanced_is_a_routing_of_its_own() -> None:
    found = Routing.parse("balanced")
    assert found == Routing.balanced() != UNIFORM
    assert found.is_balanced and not found.is_uniform and str(found) == "balanced"
    assert not any(r.is_balanced for r in (UNIFORM, Routing.zipf(1.0), Routing.always(1), Routing.counts([[1, 1]])))
    assert len({found, Routing.balanced(), UNIFORM}) == 2


def test_a_balanced_routing_is_recorded_apart_from_a_uniform_one() -> None:
    record = Routing.balanced().record()
    assert record["text"] == "balanced" and "counted" not in record
    assert record == Routing.balanced().record()
    assert record["digest"] != UNIFORM.record()["digest"]


def test_digests_of_routings_that_are_not_balanced_are_as_they_were() -> None:
    """A config's sidecar names them, so that they must not change with what else there is."""
    assert UNIFORM.record()["digest"] == "4e769dcb2ffa0ff0"
    assert Routing.zipf(1.2).record()["digest"] == "b2aed487ae3b5014"


@settings(max_examples=150)
@given(st.integers(1, 300), st.data(), st.integers(0, 400), st.integers(0, 2**32))
def test_tokens_are_dealt_so_that_no_two_experts_differ_by_more_than_a_row(
    experts: int, data: st.DataObject, tokens: int, seed: int
) -> None:
    top_k = data.draw(st.integers(1, min(experts, 22)))
    picked = Routing.balanced().sample(experts, top_k, tokens, np.random.default_rng(seed))
    assert picked.shape == (tokens, top_k) and picked.dtype == np.int64
    assert all(len(set(row)) == top_k for row in picked.tolist())
    rows = np.bincount(picked.ravel(), minlength=experts)
    assert len(rows) == experts and rows.max() - rows.min() <= 1


def test_every_expert_is_equally_likely_where_tokens_are_dealt() -> None:
    np.testing.assert_allclose(Routing.balanced().inclusion(64, 8), 8 / 64)
    first = {int(Routing.balanced().sample(64, 8, 1, np.random.default_rng(seed))[0, 0]) for seed in range(40)}
    # Which experts get one row more is drawn.
    assert len(first) > 10


def test_what_is_not_a_routing_names_balanced_among_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="uniform, balanced, zipf"):
        Routing.parse(str(tmp_path / "balance"))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "\n".join(map(str, COUNTS))),
        ("a.txt", "# tokens of layer 3\n\n" + "\r\n".join(map(str, COUNTS)) + "\n"),
        ("a.csv", "count\n" + "\n".join(map(str, COUNTS))),
        ("a.json", json.dumps(COUNTS)),
        ("a.json", json.dumps([COUNTS])),
        ("a.json", json.dumps([[COUNTS], [COUNTS]])),
        ("a.json", json.dumps({"logical_count": [[COUNTS, [0] * 6]]})),
        ("a", "\ufeff " + json.dumps(COUNTS)),
    ],
)
def test_every_form_of_the_same_counts_is_read(tmp_path: Path, name: str, content: str) -> None:
    found = Routing.parse(str(write(tmp_path, content, name)))
    assert found == Routing.counts([COUNTS])
    assert (str(found), found.padded) == (name, False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "expert,count\n" + "\n".join(f"{i},{c}" for i, c in reversed([*enumerate(COUNTS)]))),
        # As SGLang wrote it: experts without tokens are missing, ranks' files may be joined.
        ("a.csv", "layer_id,expert_id,count\n" + "".join(f"3,{i},{c}\n" for i, c in enumerate(COUNTS) if c)),
        ("a.csv", "expert_id,count\n" + "".join(f"{i},{c / 2}\n{i},{c / 2}\n" for i, c in enumerate(COUNTS))),
        ("a.tsv", "expert count\n" + "".join(f"{i}\t{c}\n" for i, c in enumerate(COUNTS))),
        ("a.json", json.dumps({str(i): c for i, c in enumerate(COUNTS) if c})),
    ],
)
def test_counts_that_name_their_experts_fit_a_model_with_more(tmp_path: Path, name: str, content: str) -> None:
    found = Routing.parse(str(write(tmp_path, content, name)))
    assert found.padded
    for experts in (6, 9):
        plain = Routing.counts([COUNTS + [0.0] * (experts - 6)])
        np.testing.assert_allclose(found.inclusion(experts, 2), plain.inclusion(experts, 2))


def test_layers_keep_their_skew_and_steps_add_up(tmp_path: Path) -> None:
    a, b = [8, 0, 0, 0], [0, 0, 4, 4]
    layers = Routing.parse(str(write(tmp_path, json.dumps([a, b]), "layers.json")))
    assert layers.weights == (0.75, 0.25, 0.0, 0.0) and layers.layers == 2
    steps = Routing.parse(str(write(tmp_path, json.dumps([[a], [b]]), "steps.json")))
    assert steps.weights == (0.5, 0.25, 0.25, 0.0) and steps.layers == 1
    csv = "layer,expert,count\n0,0,8\n1,2,4\n1,3,4\n"
    assert Routing.parse(str(write(tmp_path, csv, "c.csv"))).weights == (0.75, 0.25, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pt", b"PK\x03\x04", "torch.load('a.pt'"),
        ("a.pkl", b"\x80\x04K\x01.", "synth doesn't open"),
        ("a.npy", b"\x93NUMPY\x01", "synth doesn't open"),
        ("a.txt", b"\xff\xfe1\x00", "not a text file"),
        ("a.txt", "", "an empty file"),
        ("a.txt", "# nothing\n", "an empty file"),
        ("a.txt", "1\n2\n-3\n", "line 3: '-3' is not a count"),
        ("a.txt", "1\nnan\n", "line 2: 'nan' is not a count"),
        ("a.txt", "inf\n1\n", "line 1: 'inf' is not a count"),
        ("a.txt", "1\n1e999\n", "line 2: '1e999' is not a count"),
        ("a.txt", "1\n2 3\n", "line 2: several columns need a header"),
        ("a.txt", "0,5\n1,6\n", "line 1: several columns need a header"),
        ("a.txt", "0\n0\n", "no expert has a token"),
        ("a.csv", "name,count\na,1\n", "header 'name,count' must be"),
        ("a.csv", "expert,count\n0\n", "line 2: not 2 columns"),
        ("a.csv", "expert,count\n-1,3\n", "line 2: '-1' is not an expert's number"),
        ("a.csv", "expert,count\n99999,3\n", "line 2: '99999' is not an expert's number"),
        ("a.csv", "expert,count\n", "counts of 0 experts"),
        ("a.json", "[1, 2", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", "[NaN, 1]", "expert 0: 'nan' is not a count"),
        ("a.json", "[true, 1]", "expert 0: 'True' is not a count"),
        ("a.json", "[]", "counts of 0 experts"),
        ("a.json", "{}", "counts of 0 experts"),
        ("a.json", "[[1, 2], [3]]", "layer 1 has counts of 1 experts, another one 2"),
        ("a.json", "[[1, 2], 3]", "step 0 is not a list of layers"),
        ("a.json", "[[[1, 2]], [[3]]]", "step 1 has other layers or experts"),
        ("a.json", "[[[[1]]]]", "not a list of counts"),
        ("a.json", '{"logical_count": 3}', "not a list of counts"),
        ("a.json", '{"expert 0": 3}', "'expert 0' is not an expert's number"),
        ("a.json", '{"0": [3]}', "expert 0: '[3]' is not a count"),
        ("a.json", f"[{'1' * 400}]", "is not a count"),
    ],
)
def test_a_file_that_is_no_counts_is_refused_in_one_line(
    tmp_path: Path, name: str, content: str | bytes, says: str
) -> None:
    with pytest.raises(SynthError) as failed:
        Routing.parse(str(write(tmp_path, content, name)))
    assert says in str(failed.value)
    assert name in str(failed.value) and "\n" not in str(failed.value) and len(str(failed.value)) < 400


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("no-such-file", str(tmp_path), "a\0b"):
        with pytest.raises(SynthError, match=r"can't be read .*give uniform, balanced, zipf:1\.2"):
            Routing.parse(path)
    monkeypatch.setattr(routing_file, "MAX_BYTES", 3)
    with pytest.raises(SynthError, match="larger than"):
        read_counts(write(tmp_path, "1\n2\n"))
    with pytest.raises(SynthError, match="counts of 16385 experts"):
        Routing.counts([[1.0] * 16385])


@pytest.mark.parametrize("text", ["zipf:", "zipf:x", "zipf:-1", "zipf:nan", "zipf:11", "hot:", "hot:0", "hot:1.5"])
def test_numbers_that_make_no_routing_are_refused(text: str) -> None:
    with pytest.raises(SynthError, match=r"^(--routing )?(zipf|hot)"):
        Routing.parse(text)


@settings(max_examples=200)
@given(st.text(max_size=60) | st.text(alphabet='0123456789.,-e \n\t[]{}:"#expertcountlayer_id', max_size=80))
def test_any_file_is_a_routing_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    path = write(tmp_path_factory.getbasetemp(), content.encode("utf-8", "surrogatepass"), "any")
    try:
        found = read_counts(path)
    except SynthError as e:
        assert "any" in str(e)
    else:
        assert math.fsum(found.weights) == pytest.approx(1.0)


@settings(max_examples=100)
@given(st.lists(st.floats(0.0, 1e300), min_size=1, max_size=40).filter(any), st.booleans())
def test_counts_survive_a_file(tmp_path_factory: pytest.TempPathFactory, counts: list[float], as_json: bool) -> None:
    text = json.dumps(counts) if as_json else "\n".join(map(repr, counts))
    found = read_counts(write(tmp_path_factory.getbasetemp(), text, "kept"))
    assert found == Routing.counts([counts])
    assert list(found.weights) == sorted(found.weights, reverse=True)
    assert math.fsum(found.weights) == pytest.approx(1.0)


def test_the_record_says_what_was_counted_and_where_nothing_lies() -> None:
    found = Routing.counts([[8, 0, 0, 0], [0, 0, 4, 4]], "counts.json")
    record = found.record()
    assert record["text"] == "counts.json" and len(record["digest"]) == 16
    assert record["counted"] == {
        "experts": 4, "layers": 2, "without_tokens": 2, "share_of_first": 0.75, "share_of_first_tenth": 0.75,
        "share_of_last": 0.0,
    }  # fmt: skip
    digests = {r.record()["digest"] for r in (found, UNIFORM, Routing.zipf(1.0), Routing.zipf(1.1), Routing.always(1))}
    assert len(digests) == 5
    assert Routing.counts([[4, 4, 0, 0], [0, 8, 0, 0]], "other").record()["digest"] == record["digest"]
    json.dumps(record)
