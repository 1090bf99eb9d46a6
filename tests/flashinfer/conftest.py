"""Configs for the tests of what FlashInfer looks up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from synth.catalog.shapes import Deployment, MoEShape
from synth.catalog.tactics import load_table
from synth.flashinfer.contract import ENGINES, build_metadata, file_keys, token_buckets
from synth.flashinfer.formats import ConfigEntry, dumps_bundled, dumps_json

# Shared machines make single examples slow at times; that says nothing about the code.
settings.register_profile("synth", deadline=None)
settings.load_profile("synth")

H200 = "NVIDIA H200"
OLMOE = Deployment("olmoe", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 1024, 64, 8))


@pytest.fixture
def olmoe() -> Deployment:
    return OLMOE


@pytest.fixture
def entries() -> list[ConfigEntry]:
    """Every key of one layer, both engines, up to 8192 tokens; ids vary with the bucket."""
    table = load_table("sm90", "bf16")
    keys = {
        key: ConfigEntry(key, table.ids(stage)[i % len(table.ids(stage))], 0.25, 0.5, 1.0, 45)
        for engine in ENGINES
        for stage in (1, 2)
        for i, bucket in enumerate(token_buckets(8192))
        for key in file_keys(OLMOE, engine, bucket, stage, "sm90")
    }
    return list(keys.values())


@pytest.fixture
def write(tmp_path: Path, entries: list[ConfigEntry]) -> Callable[..., Path]:
    """Write a good file, changed as asked, and return its path."""

    def write_file(
        change: Callable[[dict[str, object]], object] | None = None,
        *,
        name: str = "config.json",
        metadata: dict[str, object] | None = None,
    ) -> Path:
        path = tmp_path / name
        metadata = build_metadata(H200) if metadata is None else metadata
        if path.suffix == ".py":
            path.write_bytes(dumps_bundled(metadata, entries))
            return path
        content = json.loads(dumps_json(metadata, entries))
        if change is not None:
            change(content)
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return write_file
