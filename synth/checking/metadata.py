"""What a config says of itself, held against what FlashInfer compares: metadata, a manifest, a module's name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from synth.catalog.untrusted import shown
from synth.checking.findings import Finding, finding
from synth.configs.model import BUNDLED_PREFIX, RECORDS, Config
from synth.configs.store import MANIFEST, STORE_SCHEMA
from synth.flashinfer.versions import CONTRACTS, contract_for

_INDETERMINATE = (None, "unknown", "None")


def check_form(config: Config, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    """Find what keeps FlashInfer from taking the file as a whole.

    Parameters
    ----------
    expected : mapping
        What the environment has for the metadata keys, as far as it is known.
    """
    yield from _check_newer(config, flashinfer)
    if config.form == "bundled":
        yield from _check_bundled(config, expected)
    elif config.form == "store":
        yield from _check_store(config, flashinfer, expected)
    elif not contract_for(flashinfer).metadata_keys:
        yield finding("no-json", flashinfer=flashinfer)
    else:
        if not isinstance(config.members.get(RECORDS, {}), dict):
            yield finding("crash/records", name=RECORDS)
        yield from _check_metadata(config.metadata, flashinfer, expected)


def _check_newer(config: Config, flashinfer: str) -> Iterator[Finding]:
    version = config.flashinfer
    newest = CONTRACTS[-1].last
    if version is not None and _release(version) > _release(newest):
        yield finding("newer-flashinfer", version=shown(version), newest=newest, flashinfer=flashinfer)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _check_metadata(metadata: object, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    if metadata is None:
        yield finding("no-metadata")
        return
    if not isinstance(metadata, dict):
        yield finding("metadata-form", kind=type(metadata).__name__)
        return
    for name in contract_for(flashinfer).metadata_keys:
        saved = metadata.get(name)
        wanted = expected.get(name)
        if name not in metadata:
            yield finding("metadata-missing", name=name)
        elif any(saved is v or (isinstance(saved, str) and saved == v) for v in _INDETERMINATE):
            yield finding("metadata-unknown", name=name, saved=shown(saved))
        elif saved == "*":
            if name in ("flashinfer_version", "gpu"):
                yield finding("metadata-wildcard", name=name)
        elif wanted is None:
            yield finding("metadata-pinned", name=name, saved=shown(saved))
        elif saved != wanted:
            yield finding("metadata-mismatch", name=name, saved=shown(saved), wanted=wanted)


def _check_store(config: Config, flashinfer: str, expected: Mapping[str, str]) -> Iterator[Finding]:
    if not contract_for(flashinfer).managed_store:
        yield finding("no-store", flashinfer=flashinfer)
        return
    for name, why in config.passed_over.items():
        if name == MANIFEST:
            yield finding("store-folder", why=why)
        else:
            yield finding("store-entry", name=shown(name), why=why)
    manifest = config.said
    for name in (*contract_for(flashinfer).metadata_keys, "cache_schema"):
        wanted = STORE_SCHEMA if name == "cache_schema" else expected.get(name)
        if name not in manifest or (wanted is not None and manifest[name] != wanted):
            yield finding(
                "metadata-mismatch/store",
                name=name,
                saved=f"is {shown(manifest[name])}" if name in manifest else "is missing",
                wanted=f", the environment has {wanted!r}" if wanted is not None else "",
            )


def _check_bundled(config: Config, expected: Mapping[str, str]) -> Iterator[Finding]:
    yield finding("bundled")
    version, flashinfer = config.flashinfer, expected["flashinfer_version"]
    if version is not None and version != flashinfer:
        yield finding("bundled-version", version=shown(version), flashinfer=flashinfer)
    gpu = expected.get("gpu")
    stem = config.path.stem if config.path is not None else ""
    named = stem.startswith(BUNDLED_PREFIX)
    device = gpu if gpu is not None else stem.removeprefix(BUNDLED_PREFIX) if named else ""
    if any(c in device for c in "./"):
        yield finding("not-importable", device=shown(device))
    elif not named or (gpu is not None and stem != BUNDLED_PREFIX + gpu.replace(" ", "_")):
        module = BUNDLED_PREFIX + (gpu.replace(" ", "_") if gpu else "<GPU with _ for spaces>")
        yield finding("bundled-name", module=module, name=config.path.name if config.path is not None else "")
