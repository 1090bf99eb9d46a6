"""The installed FlashInfer serves a config from its managed store, and from the files that servers keep."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from installs import install, uninstall

from synth.cli import main
from synth.configs.reading import read
from synth.errors import SynthError
from synth.flashinfer.versions import build_metadata
from synth.gpu.asking import Asking
from synth.gpu.replay import replay, replay_file, replay_store
from synth.gpu.store import environment, gpu_here, store_files
from synth.gpu.stub import StubbedFlashInfer, stubbed_gpu
from synth.servers.placing import KEPT

pytest.importorskip("flashinfer.autotune_cache")

H200 = "NVIDIA H200"
Write = Callable[..., Path]


@pytest.fixture
def h200() -> Iterator[StubbedFlashInfer]:
    with stubbed_gpu(H200, "sm90") as stub:
        yield stub


def everything(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def cache(root: Path) -> Any:
    """FlashInfer's own store at `root`, in the environment of now."""
    autotuner = importlib.import_module("flashinfer.autotuner.autotuner")
    return importlib.import_module("flashinfer.autotune_cache").ManagedAutotuneCache(
        autotuner._collect_metadata(), root
    )


# ---- the managed store -------------------------------------------------------------------------------------


def test_every_lookup_is_served_from_the_store_and_none_is_timed_again(
    write: Write, tmp_path: Path, h200: StubbedFlashInfer
) -> None:
    config = write()
    done = install(config, "flashinfer", folder=tmp_path / "store")
    assert done.folder == cache(tmp_path / "store").env_dir
    assert done.report is not None and done.report.ok
    assert done.report.keys == len(read(config).raw) == done.entries
    assert done.report.hits == done.report.lookups > 10 * done.entries
    # A server that tunes, as vLLM on one GPU does, asks for the same profiling policy.
    assert done.report.reprofiled == 0
    assert done.variables == {"FLASHINFER_AUTOTUNE_CACHE_DIR": str(tmp_path / "store")}


def test_flashinfers_strict_replay_accepts_a_whole_store_and_not_one_that_lacks_an_entry(
    write: Write, tmp_path: Path
) -> None:
    module = importlib.import_module("flashinfer.autotune_cache")
    config = read(write())

    def ask() -> tuple[Any, Asking]:
        asking = Asking(config)
        with (
            stubbed_gpu(H200, "sm90") as stub,
            module.autotune_v2(
                mode="replay", cache_root=tmp_path, cache_scope="context", strict_replay=True
            ) as coverage,
        ):
            asking.ask(stub)
        return coverage, asking

    with stubbed_gpu(H200, "sm90"):
        install(write(), "flashinfer", folder=tmp_path)
        store = cache(tmp_path)
    coverage, asking = ask()
    assert (coverage.misses, coverage.skipped, asking.misses) == (0, 0, {}) and coverage.hits >= asking.hits

    lost = config.entries[0].text
    store._entry_path(lost).unlink()
    coverage, asking = ask()
    assert coverage.misses > 0
    assert any(key == lost and "strict" in miss.reason.lower() for (key, _), miss in asking.misses.items())


def test_the_store_is_what_flashinfer_itself_preloads(write: Write, tmp_path: Path, h200: StubbedFlashInfer) -> None:
    config = read(write())
    files = store_files(config, tmp_path, environment(config))
    assert everything(tmp_path) == {tmp_path / "config.json": (tmp_path / "config.json").read_bytes()}
    for name, data in files.files.items():
        (files.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (files.folder / name).write_bytes(data)
    entries, total, skipped = cache(tmp_path).preload()
    assert (len(entries), total, skipped) == (len(config.raw), len(config.raw), 0)
    assert {str(fields): entry.tactic for fields, entry in entries} == {e.text: e.tactic_id for e in config.entries}
    assert json.loads(files.files["manifest.json"]) == cache(tmp_path).manifest


def test_what_isnt_served_from_the_store_is_a_miss(write: Write, tmp_path: Path, h200: StubbedFlashInfer) -> None:
    config = read(write())
    install(write(), "flashinfer", folder=tmp_path)
    lost, changed = config.entries[3], config.entries[40]
    cache(tmp_path)._entry_path(lost.text).unlink()
    cache(tmp_path).publish(changed.text, "MoERunner", changed.tactic_id + 1)
    report = replay_store(config, tmp_path)
    assert {m.key: m.code for m in report.misses} == {lost.text: "not-found", changed.text: "wrong-tactic"}
    assert report.keys_hit == len(config.raw) - 2 and report.hits < report.lookups


def test_what_a_server_published_comes_back_and_what_it_published_since_stays(
    write: Write, tmp_path: Path, h200: StubbedFlashInfer
) -> None:
    config = read(write())
    store, key = cache(tmp_path / "store"), config.entries[0].text
    store.publish(key, "MoERunner", 5)
    store.publish("another key", "Other", 1)
    before = everything(tmp_path / "store")
    done = install(write(), "flashinfer", folder=tmp_path / "store")
    assert done.report is not None and done.report.ok
    kinds = [c.kind for c in done.changes]
    assert (kinds.count("replaced"), kinds.count("made")) == (1, len(config.raw) - 1)
    assert cache(tmp_path / "store").lookup("another key").tactic == 1
    store.publish("a later key", "Other", 2)
    later = {p: d for p, d in everything(tmp_path / "store").items() if b"a later key" in d}
    uninstall("flashinfer", folder=tmp_path / "store")
    assert everything(tmp_path / "store") == {**before, **later}


def test_undo_leaves_no_trace_of_a_store_that_was_not_there_and_keeps_one_that_has_become_a_servers(
    write: Write, tmp_path: Path, h200: StubbedFlashInfer
) -> None:
    root = tmp_path / "new" / "store"
    install(write(), "flashinfer", folder=root)
    uninstall("flashinfer", folder=root)
    assert not root.exists()
    install(write(), "flashinfer", folder=root)
    cache(root).publish("a server's key", "Other", 2)
    uninstall("flashinfer", folder=root)
    assert sorted(p.name for p in everything(root)) == sorted(
        ["manifest.json", cache(root)._entry_path("a server's key").name]
    )


@pytest.mark.parametrize("environments_folder", [False, True])
def test_a_store_is_replayed_by_its_folder(
    write: Write, tmp_path: Path, h200: StubbedFlashInfer, environments_folder: bool
) -> None:
    done = install(write(), "flashinfer", folder=tmp_path / "store")
    report = replay(done.folder if environments_folder else tmp_path / "store")
    assert report.ok and (report.keys, report.hits) == (done.entries, report.lookups)


def test_a_smaller_config_takes_the_place_of_a_larger_one(
    write: Write, tmp_path: Path, h200: StubbedFlashInfer
) -> None:
    install(write(), "flashinfer", folder=tmp_path / "store")

    def half(content: dict[str, object]) -> None:
        for key in [k for k in content if k.startswith("(")][::2]:
            del content[key]

    smaller = write(half, name="smaller.json")
    done = install(smaller, "flashinfer", folder=tmp_path / "store")
    assert done.report is not None and done.report.ok
    _, total, _ = cache(tmp_path / "store").preload()
    assert total == done.entries == len(read(smaller).raw)


def test_a_dry_run_names_the_place_and_touches_nothing(write: Write, tmp_path: Path, h200: StubbedFlashInfer) -> None:
    config, root = write(), tmp_path / "store"
    before = everything(tmp_path)
    arguments = [str(config), "--engine", "flashinfer", "--folder", str(root), "--dry-run"]
    shown = CliRunner().invoke(main, ["install", *arguments])
    assert shown.exit_code == 0
    for text in (str(cache(root).env_dir), f"FLASHINFER_AUTOTUNE_CACHE_DIR={root}", KEPT, "would be made", "dry run"):
        assert text in shown.output
    assert everything(tmp_path) == before and not root.exists()


def test_the_command_says_how_many_lookups_hit_and_how_to_take_it_back(
    write: Write, tmp_path: Path, h200: StubbedFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, root = write(), tmp_path / "store"
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_CACHE_DIR", str(root))
    shown = CliRunner().invoke(main, ["install", str(config), "--engine", "flashinfer"])
    report = replay_store(read(config), root)
    assert shown.exit_code == 0
    assert f"{report.keys} of {report.keys} keys and {report.lookups} of {report.lookups} lookups hit" in shown.output
    assert f"--undo --engine flashinfer --folder {root}" in shown.output
    assert CliRunner().invoke(main, ["install", "--undo", "--engine", "flashinfer"]).exit_code == 0


def test_a_config_for_another_environment_is_refused_with_the_fields(
    write: Write, tmp_path: Path, h200: StubbedFlashInfer
) -> None:
    for change, message in (
        ({"gpu": "NVIDIA B200"}, "gpu is 'NVIDIA B200', here 'NVIDIA H200'; emit a config for this GPU"),
        ({"cuda_version": "12.9"}, "cuda_version is '12.9', here"),
        ({"flashinfer_version": "0.7.2"}, "--to 0.7.4 -o OUT"),
    ):
        config = write(metadata={**build_metadata(H200), **change})
        with pytest.raises(SynthError, match=message):
            install(config, "flashinfer", folder=tmp_path / "store")
    with pytest.raises(SynthError, match=r"--device names NVIDIA B200, but NVIDIA H200 is here"):
        install(write(), "flashinfer", folder=tmp_path / "store", device="NVIDIA B200")
    assert not (tmp_path / "store").exists()


def test_without_a_gpu_a_store_needs_an_environment_that_could_have_one(write: Write, tmp_path: Path) -> None:
    if gpu_here() is not None:
        pytest.skip("a GPU is here")
    for options in ({}, {"folder": tmp_path / "store"}, {"device": H200}):
        with pytest.raises(SynthError, match=r"no GPU is here.*--device and the store's root with --folder"):
            install(write(), "flashinfer", **options)  # type: ignore[arg-type]
    torch = importlib.import_module("torch")
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA")
    with pytest.raises(SynthError, match="torch is built without CUDA here"):
        install(write(), "flashinfer", folder=tmp_path / "store", device=H200)
    assert not (tmp_path / "store").exists()


def test_an_environment_without_its_gpu_is_prepared_with_two_notes(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu_here() is not None:
        pytest.skip("a GPU is here")
    torch = importlib.import_module("torch")
    # What a torch that is built with CUDA says without a GPU.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    done = install(write(), "flashinfer", folder=tmp_path / "store", device=H200)
    assert done.report is not None and done.report.ok
    assert json.loads((done.folder / "manifest.json").read_text())["gpu"] == H200
    assert any("isn't here" in note for note in done.notes)
    unknown = [k for k, v in json.loads((done.folder / "manifest.json").read_text()).items() if v == "unknown"]
    assert all(any(name in note for note in done.notes) for name in unknown)


def test_links_out_of_the_store_are_refused(write: Write, tmp_path: Path, h200: StubbedFlashInfer) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store" / "v2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SynthError, match="is a link out of the store"):
        install(write(), "flashinfer", folder=tmp_path / "store")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    # Of the root itself the user has said that it is meant.
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    done = install(write(), "flashinfer", folder=tmp_path / "link")
    assert done.report is not None and done.report.ok and (tmp_path / "elsewhere" / "v2").is_dir()


# ---- files that servers keep -------------------------------------------------------------------------------


@pytest.fixture
def ranks(write: Write, tmp_path: Path, h200: StubbedFlashInfer, entries: list[Any]) -> list[Path]:
    """Two ranks' files as FlashInfer saves them: some of the layer's keys, and another operation's."""

    def other_tactics(content: dict[str, Any]) -> None:
        for key in [k for k in content if k.startswith("(")][6:]:
            del content[key]
        for key in [k for k in content if k.startswith("(")]:
            content[key][1] += 1
        content["('fp4_gemm', 'CutlassFp4GemmRunner', ((64, 1024),), ())"] = ["CutlassFp4GemmRunner", 3]

    assert h200.tuner.load_configs(str(write(other_tactics, name="tuned.json")))
    folder = tmp_path / ("ab" * 8)
    paths = [folder / f"rank_tp{rank}_pp0_dp0.json" for rank in range(2)]
    for path in paths:
        h200.tuner.save_configs(str(path))
    return paths


def test_every_lookup_is_served_from_a_servers_file(write: Write, ranks: list[Path]) -> None:
    config = write()
    done = install(config, "sglang", folder=ranks[0].parent)
    assert done.report is not None and done.report.ok and done.report.path == str(ranks[0])
    assert done.report.keys == len(read(config).raw) and done.report.reprofiled == 0
    m = done.merged[ranks[0].name]
    assert (m.replaced, m.kept) == (6, 1)


def test_the_file_is_the_one_that_flashinfer_would_save(
    write: Write, ranks: list[Path], h200: StubbedFlashInfer
) -> None:
    install(write(), "sglang", folder=ranks[0].parent)
    ours = ranks[0].read_bytes()
    h200.tuner.clear_cache()
    assert h200.tuner.load_configs(str(ranks[0]))
    # Its own save gives the same bytes, the hash of the content included.
    h200.tuner.save_configs(str(ranks[0]))
    assert ranks[0].read_bytes() == ours == ranks[1].read_bytes()
    assert not install(write(), "sglang", folder=ranks[0].parent).is_new


def test_what_isnt_served_from_a_servers_file_is_a_miss(write: Write, ranks: list[Path]) -> None:
    config = read(write())
    install(write(), "sglang", folder=ranks[0].parent)
    content = json.loads(ranks[0].read_text())
    lost, changed = config.entries[3].text, config.entries[40].text
    del content[lost]
    content[changed][1] += 1
    ranks[0].write_text(json.dumps(content))
    report = replay_file(config, ranks[0])
    assert {m.key: m.code for m in report.misses} == {lost: "not-found", changed: "wrong-tactic"}
    content["_metadata"]["gpu"] = "NVIDIA B200"
    ranks[0].write_text(json.dumps(content))
    report = replay_file(config, ranks[0])
    assert not report.loaded and report.hits == 0 and {m.code for m in report.misses} == {"metadata"}


def test_the_command_exits_with_1_where_flashinfer_serves_nothing_from_there(write: Write, ranks: list[Path]) -> None:
    for path in ranks:
        # What another producer left: FlashInfer raises on it, with or without synth's entries.
        path.write_text(json.dumps({**json.loads(path.read_text()), "_records": []}))
    config = write()
    shown = CliRunner().invoke(main, ["install", str(config), "--engine", "sglang", "--folder", str(ranks[0].parent)])
    assert shown.exit_code == 1
    assert f"0 of {len(read(config).raw)} keys and 0 of 0 lookups hit" in shown.output
    assert shown.output.count("miss: ") == 10 and "load_configs raises ValueError" in shown.output


def test_the_command_says_that_the_other_ranks_hold_the_same(write: Write, ranks: list[Path]) -> None:
    shown = CliRunner().invoke(main, ["install", str(write()), "--engine", "sglang", "--folder", str(ranks[0].parent)])
    assert shown.exit_code == 0
    assert "lookups hit; the other file holds the same entries" in shown.output
