"""Keys, buckets and metadata against the installed FlashInfer's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from synth.catalog import shapes as catalogue
from synth.catalog.schemes import QUANTS, STAGES
from synth.catalog.shapes import Deployment, MoEShape
from synth.errors import SynthError
from synth.flashinfer import versions
from synth.flashinfer.buckets import is_grid_bucket, map_to_bucket, next_power_of_2, token_buckets
from synth.flashinfer.calls import ACTIVATION_TYPES, ACTIVATIONS, ENGINES, SIGNATURES, signatures
from synth.flashinfer.keys import file_keys, parse_key
from synth.flashinfer.reachability import unreachable
from synth.flashinfer.tactics import known_versions, load_table, load_tables
from synth.flashinfer.versions import (
    CONTRACTS,
    METADATA_KEYS,
    POLICY,
    build_metadata,
    contract_for,
    entry_id,
    served_id,
)
from synth.gpu.stub import StubbedFlashInfer, stubbed_gpu

NVFP4_TP8 = Deployment("deepseek-v3", 8, 1, "nvfp4", "swiglu", False, MoEShape(7168, 256, 256, 8))


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    ep = draw(st.sampled_from([1, 2, 8]))
    experts = draw(st.integers(1, 256))
    shape = MoEShape(
        hidden=16 * draw(st.integers(1, 500)),
        inter=16 * draw(st.integers(1, 500)),
        experts=experts,
        top_k=draw(st.integers(1, min(16, experts * ep))),
        ep_size=ep,
        gated=ACTIVATION_TYPES[ACTIVATIONS[activation]][1],
    )
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    return Deployment("any", tp, ep, draw(st.sampled_from(QUANTS)), activation, draw(st.booleans()), shape)


# ---- against the installed FlashInfer ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def h200() -> Iterator[StubbedFlashInfer]:
    pytest.importorskip("flashinfer.autotuner")
    with stubbed_gpu("NVIDIA H200", "sm90") as stub:
        yield stub


def keys_asked_for(stub: StubbedFlashInfer, d: Deployment, x: Any, maximum: int, fused: bool) -> list[str]:
    """Call FlashInfer's public operation with an engine's tensors and note the keys that it forms."""
    import torch
    from flashinfer.fused_moe.core import ActivationType

    s, packed = d.shape, d.quant in ("nvfp4", "mxfp8_mxfp4")
    n1 = (2 if s.gated else 1) * s.inter
    if packed:  # checkpoints hold two values a byte; the engines view them as int64
        w1 = torch.empty((s.experts, n1, s.hidden // 2), dtype=torch.uint8, device="meta").view(torch.long)
        w2 = torch.empty((s.experts, s.hidden, s.inter // 2), dtype=torch.uint8, device="meta").view(torch.long)
    else:
        dtype = torch.bfloat16 if d.quant == "bf16" else torch.float8_e4m3fn
        w1 = torch.empty((s.experts, n1, s.hidden), dtype=dtype, device="meta")
        w2 = torch.empty((s.experts, s.hidden, s.inter), dtype=dtype, device="meta")
    biased = d.bias and d.quant == "mxfp8_mxfp4"
    options: dict[str, Any] = {"use_mxfp8_act_scaling": True} if d.quant == "mxfp8_mxfp4" else {}
    asked: list[str] = []
    choose_one = stub.tuner.choose_one

    def noting(op: str, runners: list[Any], config: Any, inputs: list[Any], **kwargs: Any) -> Any:
        sizes = tuple(stub.tuner._get_input_sizes(inputs))
        extras = runners[0].get_cache_key_extras(inputs)
        asked.append(stub.tuner._get_cache_key(op, runners[0], sizes, config, extras).file_key)
        return choose_one(op, runners, config, inputs, **kwargs)

    stub.restart()
    stub.tuner.choose_one = noting
    try:
        stub.cutlass_fused_moe(
            input=x,
            token_selected_experts=torch.empty((x.shape[0], s.top_k), dtype=torch.int32, device="meta"),
            token_final_scales=torch.empty((x.shape[0], s.top_k), device="meta"),
            fc1_expert_weights=w1,
            fc2_expert_weights=w2,
            fc1_expert_biases=torch.empty((s.experts, n1), device="meta") if biased else None,
            fc2_expert_biases=torch.empty((s.experts, s.hidden), device="meta") if biased else None,
            output_dtype=torch.bfloat16,
            quant_scales=[],
            tp_size=d.tp,
            tp_rank=d.tp - 1,
            ep_size=d.ep,
            ep_rank=d.ep - 1,
            activation_type=ActivationType(ACTIVATIONS[d.activation]),
            tune_max_num_tokens=maximum,
            use_fused_finalize=fused,
            **options,
        )
    finally:
        del stub.tuner.choose_one
    return asked


def inputs_of(engine: str, d: Deployment, tokens: int) -> list[Any]:
    """Return x in every form that the engine passes."""
    import torch

    hidden = d.shape.hidden
    bf16 = torch.empty((tokens, hidden), dtype=torch.bfloat16, device="meta")
    fp4 = torch.empty((tokens, hidden // 2), dtype=torch.uint8, device="meta")
    if d.quant == "bf16":
        return [bf16]
    if d.quant == "nvfp4":
        return [fp4] if engine == "vllm" else [bf16, fp4]
    return [torch.empty((tokens, hidden), dtype=torch.float8_e4m3fn, device="meta")]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    d=deployments(),
    engine=st.sampled_from(ENGINES),
    tokens=st.integers(1, 40_000),
    maximum=st.sampled_from([1, 8, 500, 512, 4096, 8192, 32768]),
    fused=st.booleans(),
)
def test_keys_are_those_that_flashinfer_forms(
    h200: StubbedFlashInfer, d: Deployment, engine: str, tokens: int, maximum: int, fused: bool
) -> None:
    bucket = map_to_bucket(tokens, maximum)
    asked = [keys_asked_for(h200, d, x, maximum, fused) for x in inputs_of(engine, d, tokens)]
    for stage in (1, 2):
        written = file_keys(d, engine, bucket, stage, "sm90", fused_finalize=fused)
        assert list(written) == [pair[stage - 1] for pair in asked]


@settings(max_examples=500)
@given(
    tokens=st.integers(-5, 300) | st.integers(0, 5000) | st.integers(0, 100_000),
    maximum=st.integers(1, 300) | st.integers(1, 5000) | st.integers(1, 70_000),
)
def test_buckets_are_flashinfers(tokens: int, maximum: int) -> None:
    utils = pytest.importorskip("flashinfer.fused_moe.utils")
    assert token_buckets(maximum) == utils.get_hybrid_num_tokens_buckets(maximum)
    assert map_to_bucket(tokens, maximum) == utils.map_to_hybrid_bucket(tokens, maximum)


def test_activations_are_flashinfers() -> None:
    enums = pytest.importorskip("flashinfer.tllm_enums")
    real = {int(a): (a.name, a.is_gated) for a in enums.ActivationType if a.name != "InvalidType"}
    assert real == ACTIVATION_TYPES
    assert ACTIVATION_TYPES[ACTIVATIONS["relu2"]] == ("Relu2", False)


def test_metadata_and_policy_are_flashinfers(h200: StubbedFlashInfer) -> None:
    autotuner = pytest.importorskip("flashinfer.autotuner.autotuner")
    assert tuple(autotuner._collect_metadata()) == METADATA_KEYS
    assert h200.tuner._profiling_policy(h200.runner_class.tuning_config) == POLICY
    hard, soft = autotuner._classify_metadata_mismatches(
        build_metadata("NVIDIA H200", provenance={"by": "test"}), autotuner._collect_metadata()
    )
    assert (hard, soft) == ({}, {})


def test_flashinfers_own_bundled_keys_are_the_old_form() -> None:
    pytest.importorskip("flashinfer.autotuner")
    from pathlib import Path

    import flashinfer

    from synth.configs.reading import read

    folder = Path(flashinfer.__file__).parent / "tuning_configs"
    keys = read(folder / "v0_1_trtllm_fused_moe_NVIDIA_B200.py").raw
    key = file_keys(NVFP4_TP8, "vllm", 128, 1, "sm100", "0.6.12")[0]
    assert key in keys
    assert unreachable(parse_key(key), "0.6.12") is None


# ---- without FlashInfer ------------------------------------------------------------------------------------


def test_every_activation_of_the_catalogue_has_a_number() -> None:
    assert set(catalogue.ACTIVATIONS) <= set(ACTIVATIONS)


def test_every_engine_has_a_call_for_every_quantization_and_names_its_source() -> None:
    for engine in ENGINES:
        for quant in QUANTS:
            assert signatures(engine, quant)
    assert all(s.source.startswith(("vLLM", "SGLang")) for s in SIGNATURES)


@given(d=deployments(), engine=st.sampled_from(ENGINES), stage=st.sampled_from([1, 2]), bucket=st.integers(1, 40_000))
def test_keys_parse_back(d: Deployment, engine: str, stage: int, bucket: int) -> None:
    for text in file_keys(d, engine, bucket, stage, "sm90"):
        key = parse_key(text)
        assert (key.stage, key.bucket, key.rendered) == (stage, bucket, text)
        assert (key.shape(), key.quant()) == (d.shape, d.quant)
        assert unreachable(key, arch="sm90") is None
        assert unreachable(key, "0.7.1") is not None


def test_keys_of_versions_with_ranks_cover_every_rank() -> None:
    d = Deployment("any", 2, 4, "bf16", "swiglu", False, MoEShape(2048, 512, 16, 8, 4))
    keys = [parse_key(k) for k in file_keys(d, "vllm", 64, 2, "sm90", "0.7.1")]
    ranks = {(k.named("0.7.1")["tp_rank"], k.named("0.7.1")["ep_rank"]) for k in keys}
    assert ranks == {(t, e) for t in range(2) for e in range(4)}
    assert len(keys) == 8
    assert all(unreachable(k, "0.7.1") is None for k in keys)


def test_what_is_wrong_with_a_key_is_said_of_its_own_text() -> None:
    (text, *_) = file_keys(
        Deployment("any", 1, 1, "bf16", "swiglu", False, MoEShape(2048, 512, 16, 8)), "vllm", 64, 2, "sm90"
    )
    with pytest.raises(SynthError, match=r"^\"\('trtllm::fused_moe::gemm2', 'MoERunner', .* is not a file key"):
        parse_key(text[:-3])


def test_old_keys_have_the_forms_of_their_versions() -> None:
    shapes = "((64, 3584), (256, 512, 448), (0,), (256, 7168, 16), (0,))"
    head = f"('trtllm::fused_moe::gemm2', 'MoERunner', {shapes}"
    assert file_keys(NVFP4_TP8, "vllm", 64, 2, "sm120", "0.6.12") == (f"{head})",)
    assert file_keys(NVFP4_TP8, "vllm", 64, 2, "sm120", "0.6.17") == (f"{head}, ())",)


def test_old_versions_round_down_to_powers_of_two() -> None:
    assert token_buckets(600, "0.6.9") == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert [map_to_bucket(t, 600, "0.6.9") for t in (0, 1, 3, 65, 1023, 1024, 9000)] == [1, 1, 2, 64, 512, 600, 600]
    assert is_grid_bucket(4096, "0.6.9") and not is_grid_bucket(768, "0.6.9")


@given(st.integers(1, 1 << 20))
def test_the_next_power_of_2_is_the_smallest(tokens: int) -> None:
    power = next_power_of_2(tokens)
    assert power >= tokens and power & (power - 1) == 0 and (power == 1 or power // 2 < tokens)


def test_versions_are_in_order_without_overlap() -> None:
    spans = [(versions._release(c.first), versions._release(c.last)) for c in CONTRACTS]
    assert all(first <= last for first, last in spans)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    assert contract_for("0.6.7.post3") is CONTRACTS[1]


def test_every_release_with_tactics_has_a_contract_and_every_contract_a_release() -> None:
    assert {contract_for(v) for v in known_versions()} == set(CONTRACTS)
    for c in CONTRACTS:
        assert {c.first, c.last} <= set(known_versions())
        assert (c.entry_elements == 0) == (not c.metadata_keys)
    assert {v for v in known_versions() if contract_for(v).misreads_gemm2_ids} == set(
        known_versions()[: known_versions().index("0.6.15")]
    )


def test_up_to_0_6_14_unswapped_gemm2_tactics_of_sm120_nvfp4_are_tuned_and_the_swapped_ones_served() -> None:
    table = load_table("sm120", "nvfp4", "0.6.14")
    assert (len(table.gemm1), len(table.gemm2)) == (20, 40)
    for tactic_id, tactic in table.items(2):
        ran = table.tactic(served_id(table, 2, tactic_id))
        assert (ran.tile, ran.finalize, ran.swap_ab) == (tactic.tile, tactic.finalize, True)
    assert [served_id(table, 2, i) for i in (20, 39, 40, 59)] == [40, 59, 40, 59]
    assert entry_id(table, 2, table.tactic(20)) == 0
    assert entry_id(table, 2, table.tactic(40)) == 40


@pytest.mark.parametrize("version", ["0.6.4", "0.6.9", "0.6.14", "0.6.15", "0.7.4"])
def test_the_id_to_write_is_the_one_whose_tactic_runs(version: str) -> None:
    for table in load_tables(version):
        for stage in STAGES:
            written = [entry_id(table, stage, tactic) for _, tactic in table.items(stage)]
            assert [served_id(table, stage, i) for i in written] == list(table.ids(stage))
            if stage == 1 or not contract_for(version).misreads_gemm2_ids:
                assert written == list(table.ids(stage))


@pytest.mark.parametrize("version", ["0.7.5", "0.7.3", "1.0.0", "0.5.0", "main", ""])
def test_unknown_versions_are_refused(version: str) -> None:
    with pytest.raises(SynthError, match="FlashInfer"):
        contract_for(version)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "__import__('os').system('true')",
        "('a', 'b')",
        "('a', 'b', 3)",
        "('a', 'b', ((1, 2),), (x.y,))",
        "('a', 'b', ((1, 2),), (1.5,))",
        "('a', 'b', ((True, 2),), ())",
        "('a', 'b', ((1, 2),), (torch.nn.Module,))",
        "('a', 'b', ((1, 2),), ()" + "(" * 3000,
        "(" * 3000,
        "(-" * 1500 + "1",
        "('a', 'b', ((1, 2),), ('x',))",
        "a\0b",
        "('a', 'b', ((1, 2),)" + " " * 5000 + ")",
        "é" * 40,
    ],
)
def test_what_is_no_key_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SynthError) as e:
        parse_key(text)
    assert "\n" not in str(e.value)


@given(st.text(max_size=80))
def test_any_text_is_a_key_or_an_error(text: str) -> None:
    try:
        parse_key(text)
    except SynthError:
        pass
    else:
        raise AssertionError(text)


def mutated(old: str, new: str) -> str:
    key = file_keys(NVFP4_TP8, "vllm", 128, 1, "sm120")[0]
    assert old in key
    return key.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("gemm1", "gemm3", "unknown-op"),
        ("MoERunner", "TrtllmMoERunner", "key-runner"),
        ("(128, ", "(0, ", "bucket"),
        ("(128, 3584)", "(128,3584)", "key-spelling"),
        (", 8, 8, 1, 1, ", ", 8, 8, 0, 1, 0, ", "key-18-extras"),
        ("False, True)", "False, 1)", "extras-type"),
        (", 8, 8, 1, 1", ", 8, True, 1, 1", "extras-type"),
        ("bfloat16, 8, 8, 1", "bfloat16, 8, 0, 1", "extras-value"),
        ("True, 3,", "True, 11,", "activation"),
        ("True, 3,", "True, 6,", "gating"),
        ("True, 3,", "False, 3,", "enable-pdl"),
        ("False, True, 3", "True, True, 3", "min-latency"),
        ("1, False, False", "1, False, True", "sm90-only"),
        ("(256, 512, 448)", "(256, 512, 447)", "shapes"),
        ("(256, 512, 448)", "(128, 512, 448)", "shapes"),
        ("(256, 512, 448), (0,)", "(256, 512, 448), (256, 511)", "shapes"),
        ("(256, 512, 448), ", "", "shapes"),
        ("bfloat16, 8, 8", "bfloat16, 257, 8", "shapes"),
        ("torch.uint8", "torch.bfloat16", "shapes"),
    ],
)
def test_a_key_with_one_wrong_field_is_never_looked_up(old: str, new: str, code: str) -> None:
    why = unreachable(parse_key(mutated(old, new)), arch="sm120")
    assert why is not None
    assert why.code == code


def test_bad_arguments_are_named(olmoe: Deployment) -> None:
    def refused(match: str, **changes: Any) -> None:
        arguments = {"deployment": olmoe, "engine": "vllm", "bucket": 8, "stage": 1, "arch": "sm90"}
        with pytest.raises(SynthError, match=match):
            file_keys(**{**arguments, **changes})

    def like(**changes: Any) -> Deployment:
        return Deployment(**{**vars(olmoe), **changes})

    refused("engine", engine="trt")
    refused("stage", stage=3)
    refused("bucket", bucket=0)
    refused("architecture", arch="hopper")
    refused("quantization", deployment=like(quant="int4"))
    refused("activation", deployment=like(activation="tanh"))
    refused("gate", deployment=like(activation="relu2"))
    refused("pad it to 1008", deployment=like(quant="nvfp4", shape=MoEShape(2048, 1000, 64, 8)))
