"""A config goes where vLLM and SGLang look for it, among what the server has tuned, and can be taken back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from configs import config_of
from hypothesis import given
from hypothesis import strategies as st
from installs import install, uninstall

from synth.catalog.shapes import Deployment, MoEShape
from synth.cli import main
from synth.configs.merging import merge, same, without
from synth.configs.model import Entry
from synth.configs.module import dumps_bundled
from synth.configs.v1 import dumps_as_served, dumps_json
from synth.errors import SynthError
from synth.flashinfer.buckets import token_buckets
from synth.flashinfer.keys import file_keys
from synth.flashinfer.tactics import load_table
from synth.flashinfer.versions import build_metadata
from synth.servers.placing import KEPT

H200 = "NVIDIA H200"
OLMOE = Deployment("olmoe", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 1024, 64, 8))
#: What a server's FlashInfer says of its environment.
SERVER = {
    "flashinfer_version": "0.7.4",
    "cuda_version": "13.0",
    "cublas_version": "13.1.0",
    "cudnn_version": "91500",
    "cudnn_frontend_version": "1.18.0",
    "cutlass_dsl_version": "4.3.5",
    "gpu": H200,
}
OTHER = "('fp4_gemm', 'CutlassFp4GemmRunner', ((64, 1024), (2048, 1024)), ())"
OTHER_ENTRY = ["CutlassFp4GemmRunner", 3, ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"]]
Content = dict[str, Any]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("VLLM_CACHE_ROOT", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "SGLANG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def entries(buckets: int = 3, shift: int = 0) -> list[Entry]:
    table = load_table("sm90", "bf16")
    return [
        Entry(key, table.ids(stage)[(i + shift) % len(table.ids(stage))], 0.25, 0.5, 1.0, 45)
        for stage in (1, 2)
        for i, bucket in enumerate(token_buckets(512)[:buckets])
        for key in file_keys(OLMOE, "vllm", bucket, stage, "sm90")
    ]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_config(
        some: list[Entry] | None = None,
        *,
        name: str = "config.json",
        provenance: dict[str, object] | None = None,
        change: Callable[[Content], object] | None = None,
    ) -> Path:
        path = tmp_path / name
        content = json.loads(dumps_json(build_metadata(H200, provenance=provenance), some or entries()))
        if change is not None:
            change(content)
        path.write_text(json.dumps(content))
        return path

    return write_config


def keys(config: Path) -> list[str]:
    return [key for key in load(config) if not key.startswith("_")]


def load(path: Path) -> Content:
    content: Content = json.loads(path.read_text())
    return content


def server_file(tuned: Content | None = None, **metadata: object) -> bytes:
    return dumps_as_served(
        config_of({**SERVER, **metadata}, {OTHER: OTHER_ENTRY, **(tuned or {})}, {"_generation": "0" * 64})
    )


def vllm_folder(home: Path, files: dict[str, bytes] | None = None, name: str = "ab" * 32) -> Path:
    folder = home / ".cache/vllm/flashinfer_autotune_cache/0.7.4/90a" / name
    folder.mkdir(parents=True)
    for file, data in (files or {f"autotune_configs_dp0_rank{r}.json": server_file() for r in range(3)}).items():
        (folder / file).write_bytes(data)
    return folder


def sglang_folder(home: Path, files: dict[str, bytes] | None = None) -> Path:
    folder = home / ".cache/sglang/flashinfer/autotune/0.7.4/sm90" / ("ab" * 8)
    folder.mkdir(parents=True)
    for file, data in (files or {f"rank_tp{r}_pp0_dp0.json": server_file() for r in range(3)}).items():
        (folder / file).write_bytes(data)
    return folder


MAKE = {"vllm": vllm_folder, "sglang": sglang_folder}


def everything(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["install", *map(str, arguments)])


# ---- into the servers' files -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", MAKE)
def test_entries_go_into_every_ranks_file_and_the_servers_own_stay(home: Path, write: Write, engine: str) -> None:
    config = write()
    tuned = {keys(config)[0]: ["MoERunner", 40, ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"]]}
    folder = MAKE[engine](home)
    for path in folder.iterdir():
        path.write_bytes(server_file(tuned))
    before = everything(folder)
    done = install(config, engine)
    assert (done.folder, done.entries, done.is_new, done.variables) == (folder, 6, True, {})
    ours = {k: v for k, v in load(config).items() if k != "_metadata"}
    for path in before:
        content = load(path)
        assert next(iter(content)) == "_metadata" and content.pop("_metadata") == SERVER
        assert list(content)[-1] == "_generation" and content.pop("_generation") != "0" * 64
        assert content == {OTHER: OTHER_ENTRY, **ours}
        m = done.merged[path.name]
        assert (m.added, m.replaced, m.same, m.kept) == (5, 1, 0, 1)
    # The same once more changes nothing.
    after = everything(folder)
    assert not install(config, engine).is_new
    assert everything(folder) == after
    assert [c.kind for c in uninstall(engine).changes] == ["restored"] * 3
    assert everything(folder) == before


@pytest.mark.parametrize("engine", MAKE)
def test_a_dry_run_prints_paths_and_variables_and_changes_nothing(
    home: Path, write: Write, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MAKE[engine](tmp_path / "elsewhere")
    root = tmp_path / "elsewhere" / ".cache" / engine
    variable = "VLLM_CACHE_ROOT" if engine == "vllm" else "SGLANG_CACHE_DIR"
    monkeypatch.setenv(variable, str(root))
    before = everything(tmp_path)
    config = write()
    shown = run(config, "--engine", engine, "--dry-run")
    assert shown.exit_code == 0
    for text in (str(folder), *(p.name for p in before if folder in p.parents), KEPT, f"{variable}={root}"):
        assert text in shown.output
    assert "would be replaced: 6 added, 0 in place of the server's own, 1 others stay" in shown.output
    assert {**before, config: config.read_bytes()} == everything(tmp_path)


def test_one_file_of_an_earlier_vllm_is_taken_as_well(home: Path, write: Write) -> None:
    folder = vllm_folder(home, {"autotune_configs.json": server_file()})
    install(write(), "vllm")
    assert len(load(folder / "autotune_configs.json")) == 9


def test_a_file_that_says_the_same_is_left_byte_by_byte(home: Path, write: Write) -> None:
    folder = sglang_folder(home)
    config = write()
    install(config, "sglang")
    for path in folder.glob("rank*"):
        path.write_text(json.dumps(load(path)))
    after = everything(folder)
    assert not install(config, "sglang").is_new
    assert everything(folder) == after


@pytest.mark.parametrize("engine", MAKE)
def test_another_config_takes_the_place_of_the_last_one_and_not_of_what_the_server_tuned_since(
    home: Path, write: Write, engine: str
) -> None:
    first, second = write(entries(5)), write(entries(2, shift=1), name="second.json")
    original = {keys(first)[4]: ["MoERunner", 7]}
    folder = MAKE[engine](home)
    for path in list(folder.iterdir()):
        path.write_bytes(server_file(original))
    before = everything(folder)
    install(first, engine)
    tuned = {"('another', 'Runner', ((1,),), ())": ["Runner", 1]}
    for path in before:
        content = load(path)
        content.update(tuned)
        path.write_text(json.dumps(content))
    install(second, engine)
    ours = {k: v for k, v in load(second).items() if k != "_metadata"}
    for path in before:
        found = {k: v for k, v in load(path).items() if not k.startswith("_")}
        # Of the first config nothing is left, and where it had hidden an entry of the server's, that one is back.
        assert found == {OTHER: OTHER_ENTRY, **original, **tuned, **ours}
    undone = uninstall(engine)
    assert {path: path.read_bytes() for path in before} == before
    # What the server had written between the two installs is kept.
    copies = sorted(p.name for p in folder.glob("*.synth-kept"))
    assert copies == sorted(f"{p.name}.synth-kept" for p in before)
    assert all(tuned.items() <= load(folder / name).items() for name in copies)
    assert not any(c.copy for c in undone.changes)


def test_what_a_server_saved_after_the_install_is_not_lost_by_undo(home: Path, write: Write) -> None:
    folder = sglang_folder(home)
    before = everything(folder)
    install(write(), "sglang")
    (folder / "rank_tp1_pp0_dp0.json").write_bytes(b"saved by the server")
    (folder / "rank_tp2_pp0_dp0.json").unlink()
    shown = run("--undo", "--engine", "sglang", "--dry-run")
    assert "would be kept as rank_tp1_pp0_dp0.json.synth-kept" in shown.output
    shown = run("--undo", "--engine", "sglang")
    assert "the server has written it since; that is kept as rank_tp1_pp0_dp0.json.synth-kept" in shown.output
    assert everything(folder) == {**before, folder / "rank_tp1_pp0_dp0.json.synth-kept": b"saved by the server"}


# ---- which folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", MAKE)
def test_without_a_folder_the_way_out_is_to_start_the_server_once(home: Path, write: Write, engine: str) -> None:
    with pytest.raises(SynthError, match=r"has no files at .*0\.7\.4.*; start .* once as you serve"):
        install(write(), engine)


def test_on_one_gpu_vllm_has_flashinfers_store_and_the_command_for_it_is_named(
    home: Path, write: Write, tmp_path: Path
) -> None:
    config = write()
    with pytest.raises(SynthError) as e:
        install(config, "vllm", environment={"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(tmp_path / "cache")})
    assert str(e.value).endswith(f"synth install {config} --engine flashinfer --folder {tmp_path / 'cache'}")


def test_several_folders_are_listed_and_one_can_be_named(home: Path, write: Write) -> None:
    a, b = vllm_folder(home), vllm_folder(home, {"autotune_configs.json": server_file(gpu="NVIDIA B200")}, "cd" * 32)
    with pytest.raises(SynthError) as e:
        install(write(), "vllm")
    assert f"{a} (3 files, NVIDIA H200, FlashInfer 0.7.4)" in str(e.value)
    assert f"{b} (1 file, NVIDIA B200, FlashInfer 0.7.4)" in str(e.value)
    assert install(write(), "vllm", folder=a).folder == a
    # Only one of them has something to take back.
    assert uninstall("vllm").folder == a


def test_a_folder_of_another_version_is_answered_with_port(home: Path, write: Write) -> None:
    folder = vllm_folder(home)
    folder.parents[1].rename(folder.parents[2] / "0.7.2.post1")
    with pytest.raises(SynthError, match=r"but some of FlashInfer 0\.7\.2\.post1, .*synth port .* --to 0\.7\.2\.post1"):
        install(write(), "vllm")


def test_a_folder_that_is_a_link_is_the_users_own_choice(home: Path, write: Write, tmp_path: Path) -> None:
    folder = vllm_folder(home)
    (tmp_path / "link").symlink_to(folder)
    assert install(write(), "vllm", folder=tmp_path / "link").folder == folder


@pytest.mark.parametrize("engine", MAKE)
def test_a_folder_without_files_of_ranks_is_refused(home: Path, write: Write, engine: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "has no "), (tmp_path / "none", "no such folder")):
        with pytest.raises(SynthError, match=message):
            install(write(), engine, folder=folder)
    with pytest.raises(SynthError, match="nothing that `synth install` has put there"):
        uninstall(engine, folder=tmp_path / "empty")


# ---- which files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVER)
def test_a_file_of_another_environment_is_refused_and_a_wildcard_on_either_side_is_not(
    home: Path, write: Write, name: str
) -> None:
    def exact(content: Content) -> None:
        content["_metadata"] = dict(SERVER)

    config = write(change=exact)
    folder = vllm_folder(home, {"autotune_configs.json": server_file(**{name: "0.7.2"})})
    before = everything(folder)
    with pytest.raises(SynthError, match=f"{name} is '0.7.2', in .* '{SERVER[name]}'") as e:
        install(config, "vllm", folder=folder)
    assert ("synth port" in str(e.value)) == (name == "flashinfer_version")
    assert ("synth emit --device" in str(e.value)) == (name == "gpu")
    assert everything(folder) == before

    (folder / "autotune_configs.json").write_bytes(server_file(**{name: "*"}))
    install(config, "vllm", folder=folder)
    if name not in ("flashinfer_version", "gpu"):
        uninstall("vllm", folder=folder)
        (folder / "autotune_configs.json").write_bytes(server_file(**{name: "0.7.2"}))
        install(write(), "vllm", folder=folder)


def test_a_file_that_flashinfer_would_ignore_is_refused(home: Path, write: Write) -> None:
    folder = vllm_folder(home, {"autotune_configs.json": dumps_as_served(config_of({"gpu": H200}, {}))})
    with pytest.raises(SynthError, match=r"lacks flashinfer_version, .*start the server once more"):
        install(write(), "vllm")
    (folder / "autotune_configs.json").write_bytes(dumps_as_served(config_of(None, {})))
    with pytest.raises(SynthError, match="no _metadata that says what it was tuned on"):
        install(write(), "vllm")
    (folder / "autotune_configs.json").write_bytes(b"{")
    with pytest.raises(SynthError, match=r"autotune_configs.json is not JSON"):
        install(write(), "vllm")


def test_ranks_that_sglang_would_discard_are_refused(home: Path, write: Write) -> None:
    files = {f"rank_tp{r}_pp0_dp0.json": server_file() for r in range(2)}
    files["rank_tp1_pp0_dp0.json"] = server_file({"('a', 'R', ((1,),), ())": ["R", 1]})
    # Another stage of a pipeline has layers of its own.
    files["rank_tp0_pp1_dp0.json"] = server_file({"('b', 'R', ((1,),), ())": ["R", 1]})
    folder = sglang_folder(home, files)
    before = everything(folder)
    with pytest.raises(SynthError, match=r"rank_tp0_pp0_dp0.json and rank_tp1_pp0_dp0.json hold different entries"):
        install(write(), "sglang")
    assert everything(folder) == before
    (folder / "rank_tp1_pp0_dp0.json").write_bytes(server_file())
    install(write(), "sglang")


def test_ranks_that_vllm_would_no_longer_load_are_refused(home: Path, write: Write) -> None:
    config = write()
    files = {
        "autotune_configs_dp0_rank0.json": server_file({keys(config)[0]: ["MoERunner", 1]}),
        "autotune_configs_dp0_rank1.json": server_file({"('a', 'R', ((1,),), ())": ["R", 1]}),
    }
    vllm_folder(home, files)
    with pytest.raises(SynthError, match="different numbers of entries afterwards"):
        install(config, "vllm")


def test_ranks_of_unequal_numbers_of_entries_are_noted(home: Path, write: Write) -> None:
    more = server_file({"('a', 'R', ((1,),), ())": ["R", 1]})
    vllm_folder(home, {"autotune_configs_dp0_rank0.json": server_file(), "autotune_configs_dp0_rank1.json": more})
    shown = run(write(), "--engine", "vllm")
    assert "note: the files of 2 ranks differ" in shown.output and shown.exit_code == 0


# ---- which configs -----------------------------------------------------------------------------------------


def test_what_is_not_fit_to_be_served_is_refused(home: Path, write: Write, tmp_path: Path) -> None:
    folder = vllm_folder(home)
    before = everything(folder)
    bundled = tmp_path / "config.py"
    bundled.write_bytes(dumps_bundled(build_metadata(H200), entries()))
    first = entries()[0].text
    cases: list[tuple[Path, str]] = [
        (bundled, "not FlashInfer's v1 JSON"),
        (write(name="a.json", change=lambda c: c.pop("_metadata")), "says None for flashinfer_version"),
        (write(name="b.json", change=lambda c: c["_metadata"].update(gpu="*")), r"says '\*' for gpu"),
        (write(name="c.json", change=lambda c: c[first].__setitem__(1, 999)), "isn't fit to be served: 1 errors"),
        (write(name="d.json", change=lambda c: c.update({first: {}})), "isn't fit to be served"),
        (write(name="e.json", provenance={"entries": {"simulated": 6}}), "rests on simulated timings"),
        (write(name="f.json", provenance={"sources": {"bf16": {"from": "model (simulated)"}}}), "simulated"),
    ]
    for path, message in cases:
        for dry_run in (True, False):
            with pytest.raises(SynthError, match=message) as e:
                install(path, "vllm", dry_run=dry_run)
            assert str(path) in str(e.value) and "\n" not in str(e.value)
    assert everything(folder) == before


def test_analytical_entries_are_installed_with_one_loud_line(home: Path, write: Write) -> None:
    config = write(provenance={"entries": {"analytical": 4, "measured": 2}})
    vllm_folder(home, {"autotune_configs.json": server_file({keys(config)[0]: ["MoERunner", 1]})})
    shown = run(config, "--engine", "vllm")
    assert shown.exit_code == 0
    (line,) = [line for line in shown.stderr.splitlines() if "WARNING" in line]
    assert "4 of 6 entries are ANALYTICAL" in line and "1 entries take the place of what the server has tuned" in line


# ---- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", MAKE)
def test_the_command_installs_says_whether_it_was_replayed_and_takes_back(
    home: Path, write: Write, engine: str
) -> None:
    folder = MAKE[engine](home)
    before = everything(folder)
    shown = run(write(), "--engine", engine)
    assert shown.exit_code == 0
    # The server's file is for CUDA 13.0, the tests' FlashInfer, where there is one, isn't.
    assert "not replayed: " in shown.output and "run the same command in the server's environment" in shown.output
    assert f"to take it back: synth install --undo --engine {engine} --folder {folder}" in shown.output
    assert run("--undo", "--engine", engine, "--folder", folder).exit_code == 0
    assert everything(folder) == before
    assert run("--undo", "--engine", engine).exit_code == 2
    assert "name the config" in run("--engine", engine).stderr
    assert "--device is for" in run(write(), "--engine", engine, "--device", H200).stderr


# ---- merging -----------------------------------------------------------------------------------------------

some_keys = st.sampled_from(["a", "b", "c", "d", "e"])
values = st.lists(st.integers(0, 2) | st.booleans() | st.just(1.0) | st.none(), max_size=2)
raws = st.dictionaries(some_keys, values, max_size=5)


@given(ours=raws, theirs=raws, tuned=raws)
def test_a_merge_can_be_taken_out_again_whatever_was_tuned_since(
    ours: dict[str, object], theirs: dict[str, object], tuned: dict[str, object]
) -> None:
    config, original = config_of({}, ours), config_of(SERVER, theirs, {"_records": {"x": 1}})
    merged = merge(config, original)
    content = json.loads(merged.data)
    assert content.pop("_metadata") == SERVER and content.pop("_records") == {"x": 1}
    assert same(content, {**theirs, **ours})
    assert merged.added + merged.replaced + merged.same == len(ours)
    assert merged.kept + len(ours) == len(content)
    assert same(without(config_of(SERVER, content), config, original).raw, theirs)

    later = {**content, **tuned}
    back = without(config_of(SERVER, later), config, original).raw
    for key in later:
        if key in ours and same(later[key], ours[key]):
            assert (key in back) == (key in theirs) and same(back.get(key), theirs.get(key))
        else:
            assert same(back[key], later[key])
