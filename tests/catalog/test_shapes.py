from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.catalog import models
from synth.catalog.checkpoints import model_from_config
from synth.catalog.models import Model, deployments, family_of, find_model, load_models, select
from synth.catalog.schemes import QUANTS
from synth.catalog.shapes import ACTIVATIONS, MoEShape, check_supported, padded_shape
from synth.errors import SynthError, UnsupportedShapeError

SHAPES = st.builds(
    MoEShape,
    hidden=st.integers(1, 20000),
    inter=st.integers(1, 20000),
    experts=st.integers(16, 1000),
    top_k=st.integers(1, 16),
    ep_size=st.integers(1, 64),
    gated=st.booleans(),
)

# Every (label, shape) that has been timed on an H200.
TIMED = {
    "mixtral-8x7b": "h4096-i14336-e8-k2",
    "mixtral-8x7b-tp4": "h4096-i3584-e8-k2",
    "qwen3-30b-a3b": "h2048-i768-e128-k8",
    "qwen3-30b-a3b-tp2": "h2048-i384-e128-k8",
    "qwen3-235b": "h4096-i1536-e128-k8",
    "qwen3-235b-tp4": "h4096-i384-e128-k8",
    "deepseek-v3-tp8": "h7168-i256-e256-k8",
    "deepseek-v3-ep8": "h7168-i2048-e32-k8-ep8",
    "deepseek-v2-lite": "h2048-i1408-e64-k6",
    "glm-4.5-air": "h4096-i1408-e128-k8",
    "glm-4.6-tp8": "h5120-i192-e160-k8",
    "glm-5-tp8": "h6144-i256-e256-k8",
    "gpt-oss-20b": "h2880-i2880-e32-k4",
    "olmoe": "h2048-i1024-e64-k8",
    "minimax-m2-tp4": "h3072-i384-e256-k8",
    "gpt-oss-120b-tp4": "h2880-i768-e128-k4",
    "llama4-scout-tp4": "h5120-i2048-e16-k1",
    "granite-3b-a800m": "h1536-i512-e40-k8",
    "nemotron-3-nano": "h2688-i1856-e128-k6-ungated",
    "qwen3-coder-480b-tp8": "h6144-i320-e160-k8",
    "llama4-maverick-tp8": "h5120-i1024-e128-k1",
    "hunyuan-a13b-tp2": "h4096-i1536-e64-k8",
}


class TestMoEShape:
    @given(SHAPES)
    def test_text_round_trip(self, shape: MoEShape) -> None:
        assert MoEShape.parse(str(shape)) == shape

    @pytest.mark.parametrize("text", ["", "h1-i1-e1", "h1-i1-e1-k1-gated", "h1-i1-e1-k1 ", "h-1-i1-e1-k1"])
    def test_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(SynthError, match="is not a shape"):
            MoEShape.parse(text)

    def test_impossible_values_are_refused(self) -> None:
        with pytest.raises(SynthError, match="inter must be at least 1, not 0"):
            MoEShape(1, 0, 1, 1)
        with pytest.raises(SynthError, match="top_k 3 is more than the layer's 2 experts"):
            MoEShape(1, 1, 2, 3)

    def test_top_k_counts_the_experts_of_all_ranks(self) -> None:
        assert MoEShape(1, 1, 2, 4, ep_size=4).expert_probability == 0.5

    def test_a_gate_doubles_the_columns_of_gemm1(self) -> None:
        assert MoEShape(4096, 1536, 8, 2).gemm_nk(1) == (3072, 4096)
        assert MoEShape(4096, 1536, 8, 2, gated=False).gemm_nk(1) == (1536, 4096)
        assert MoEShape(4096, 1536, 8, 2).gemm_nk(2) == (4096, 1536)


class TestCatalogue:
    @pytest.mark.parametrize(("label", "shape"), TIMED.items())
    def test_timed_shapes_are_deployments(self, label: str, shape: str) -> None:
        found = {d.label: d.shape for d in deployments(load_models(), quants=["bf16"])}
        assert str(found[label]) == shape

    def test_size(self) -> None:
        assert len(load_models()) >= 45

    def test_names_and_aliases_are_unique_slugs(self) -> None:
        names = [n for m in load_models() for n in (m.name, *m.aliases)]
        assert len(names) == len(set(names))
        assert all(n == n.lower() and " " not in n and "/" not in n for n in names)

    def test_labels_are_unique_within_a_quantization(self) -> None:
        for quant in QUANTS:
            labels = [d.label for d in deployments(load_models(), quants=[quant])]
            assert len(labels) == len(set(labels))

    def test_a_family_lists_a_layer_once(self) -> None:
        layers = [(m.family, m.hidden, m.inter, m.experts, m.top_k, m.activation, m.bias) for m in load_models()]
        assert len(layers) == len(set(layers))

    def test_every_row_has_a_source_and_a_deployment(self) -> None:
        for m in load_models():
            assert m.source and m.deployments and m.quants, m.name
            assert len(set(m.deployments)) == len(m.deployments), m.name

    @pytest.mark.parametrize("quant", ["bf16", "fp8"])
    def test_every_bf16_and_fp8_deployment_is_supported(self, quant: str) -> None:
        for d in deployments(load_models(), quants=[quant]):
            check_supported(d.shape, quant)

    def test_deployments_can_leave_out_what_is_not_supported(self) -> None:
        gemma = find_model("gemma-4-26b-a4b")
        every = [d.label for d in deployments([gemma], quants=["nvfp4"])]
        assert every == ["gemma-4-26b-a4b", "gemma-4-26b-a4b-tp2"]
        # 704 / 2 is not a multiple of 64, and no engine pads a gated NVFP4 layer.
        assert [d.label for d in deployments([gemma], quants=["nvfp4"], supported=True)] == every[:1]


class TestFindModel:
    @pytest.mark.parametrize("name", ["glm-5", "GLM-5", "zai-org/GLM-5", "glm-5.2"])
    def test_by_name_alias_or_repository(self, name: str) -> None:
        assert find_model(name).name == "glm-5"

    def test_near_matches(self) -> None:
        with pytest.raises(SynthError, match=r"unknown model 'qwen3-30b'; did you mean .*qwen3-30b-a3b.*--config"):
            find_model("qwen3-30b")

    def test_nothing_near(self) -> None:
        with pytest.raises(SynthError, match="`synth models` lists them"):
            find_model("zzzzzzzz")

    @pytest.mark.parametrize(
        ("label", "family"),
        [
            ("glm-4.5-air", "glm"),
            ("mixtral-8x7b-tp4", "mistral"),
            ("deepseek-v3-ep8", "deepseek"),
            ("gpt-oss-120b-tp4", "gpt-oss"),
            ("olmoe", "olmo"),
            ("qwen3-coder-480b-tp8-ep2", "qwen"),
            ("acme-9000-tp2", "acme"),
            ("h2048-i1024-e64-k8", "h2048"),
        ],
    )
    def test_family_of_a_label(self, label: str, family: str) -> None:
        assert family_of(label) == family


class TestDeploy:
    def test_splits(self) -> None:
        d = find_model("deepseek-v3").deploy(2, 4, "fp8")
        assert (d.label, d.quant, d.activation, d.bias) == ("deepseek-v3-tp2-ep4", "fp8", "swiglu", False)
        assert d.shape == MoEShape(7168, 1024, 64, 8, ep_size=4)

    def test_undivided_label_is_the_name(self) -> None:
        assert find_model("olmoe").deploy(1, 1, "bf16").label == "olmoe"

    def test_padding_on_a_rank(self) -> None:
        assert find_model("gpt-oss-20b").deploy(2, 1, "bf16").shape.inter == 1472
        assert find_model("gpt-oss-20b").deploy(2, 1, "bf16").bias

    @pytest.mark.parametrize(
        ("model", "tp", "quant", "hidden", "inter"),
        [
            ("gpt-oss-120b", 1, "mxfp8_mxfp4", 2944, 2944),
            ("gpt-oss-120b", 2, "mxfp8_mxfp4", 2944, 1536),
            ("gpt-oss-120b", 4, "mxfp8_mxfp4", 2944, 768),
            ("gpt-oss-120b", 8, "mxfp8_mxfp4", 2944, 384),
            ("gpt-oss-120b", 4, "bf16", 2880, 768),
            ("nemotron-3-nano", 1, "nvfp4", 2688, 1920),
            ("nemotron-3-nano", 2, "nvfp4", 2688, 1024),
            ("nemotron-3-nano", 1, "fp8", 2688, 1856),
            ("qwen3-30b-a3b", 4, "mxfp8_mxfp4", 2048, 256),
            ("qwen3-30b-a3b", 4, "nvfp4", 2048, 192),
            ("qwen3-30b-a3b", 8, "nvfp4", 2048, 96),
            ("gemma-4-26b-a4b", 2, "nvfp4", 2816, 352),
        ],
    )
    def test_padded_where_the_kernels_need_it_and_an_engine_does_it(
        self, model: str, tp: int, quant: str, hidden: int, inter: int
    ) -> None:
        shape = find_model(model).deploy(tp, 1, quant).shape
        assert (shape.hidden, shape.inter) == (hidden, inter)

    @pytest.mark.parametrize(
        ("tp", "message"),
        [
            (2, r"gemma-4-26b-a4b-tp2 nvfp4: inter on a rank 352 .*\(pad it to 384\).*; --tp 1, 11 fit nvfp4$"),
            (3, r"--tp 3 doesn't divide the intermediate size 704; --tp 1, 11 fit nvfp4$"),
        ],
    )
    def test_a_refused_deployment_names_the_tp_sizes_that_fit(self, tp: int, message: str) -> None:
        with pytest.raises(SynthError, match=message):
            select([find_model("gemma-4-26b-a4b")], ["nvfp4"], quant="nvfp4", tp=tp, named=True)

    def test_a_layer_that_no_split_helps_says_so(self) -> None:
        odd = replace(find_model("olmoe"), hidden=2056, deployments=((2, 1),))
        with pytest.raises(UnsupportedShapeError, match="no --tp fits nvfp4"):
            select([odd], ["nvfp4"], quant="nvfp4", named=True)

    def test_what_one_engine_passes(self) -> None:
        nano = find_model("nemotron-3-nano").deploy(1, 1, "fp8")
        assert nano.shape_for("vllm").inter == 1920
        assert nano.shape_for("sglang") == nano.shape
        # 7688 / 8 = 961 of NemotronH in fp8.
        hybrid = replace(find_model("nemotron-3-nano"), inter=7688).deploy(8, 1, "fp8")
        assert (hybrid.shape_for("vllm").inter, hybrid.shape_for("sglang").inter) == (1024, 976)
        for engine in ("vllm", "sglang"):
            for d in deployments(load_models(), quants=["bf16"]):
                assert d.shape_for(engine) == d.shape

    def test_tp_sizes(self) -> None:
        gemma = find_model("gemma-4-26b-a4b")
        assert gemma.tp_sizes(1, "nvfp4") == (1, 11)
        assert gemma.tp_sizes(1, "bf16") == (1, 2, 4, 8, 11)
        assert find_model("qwen3-30b-a3b").tp_sizes(1, "nvfp4") == (1, 2, 3, 4, 6, 12)
        assert find_model("deepseek-v3").tp_sizes(1, "nvfp4") == (1, 2, 4, 8, 16)

    @pytest.mark.parametrize(
        ("tp", "ep", "quant", "message"),
        [
            (3, 1, "bf16", "--tp 3 doesn't divide the intermediate size 1024; --tp 1, 2, 4, 8, 16 fit bf16"),
            (1, 7, "bf16", "--ep 7 doesn't divide the 64 experts"),
            (0, 1, "bf16", "--tp 0"),
            (1, 0, "bf16", "--ep 0"),
            (1, 1, "int4", "unknown quantization 'int4'; known: bf16, fp8"),
        ],
    )
    def test_bad_splits(self, tp: int, ep: int, quant: str, message: str) -> None:
        with pytest.raises(SynthError, match=message):
            find_model("olmoe").deploy(tp, ep, quant)

    @pytest.mark.parametrize(
        "change",
        [
            {"activation": "tanh"},
            {"quants": ("int4",)},
            {"deployments": ((3, 1),)},
            {"deployments": ((1, 5),)},
            {"top_k": 65},
        ],
    )
    def test_a_contradictory_model_is_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(SynthError):
            replace(find_model("olmoe"), **change)


class TestSupport:
    @pytest.mark.parametrize(
        ("shape", "quant", "message"),
        [
            (
                "h4096-i352-e128-k8",
                "nvfp4",
                r"inter on a rank 352 is not a multiple of 64 \(pad it to 384\).*no engine is known to pad",
            ),
            (
                "h2688-i1856-e128-k6-ungated",
                "nvfp4",
                r"1856 is not a multiple of 128 \(pad it to 1920\).*vLLM pads it by itself",
            ),
            (
                "h2880-i2880-e32-k4",
                "mxfp8_mxfp4",
                r"hidden 2880 .*pad it to 2944.*inter on a rank 2880 .*2944.*vLLM pads it",
            ),
            ("h4100-i1024-e8-k2", "bf16", r"hidden 4100 is not a multiple of 8 \(pad it to 4104\)"),
            (
                "h4096-i1032-e8-k2",
                "fp8",
                r"inter on a rank 1032 is not a multiple of 16 \(pad it to 1040\).*vLLM and SGLang pad",
            ),
            ("h4112-i1024-e8-k2", "nvfp4", r"hidden 4112 is not a multiple of 32 \(pad it to 4128\)"),
        ],
    )
    def test_refused_with_reason_and_padded_size(self, shape: str, quant: str, message: str) -> None:
        with pytest.raises(UnsupportedShapeError, match=message):
            check_supported(MoEShape.parse(shape), quant)

    @pytest.mark.parametrize(
        ("shape", "quant"),
        [
            ("h4096-i1408-e128-k8", "nvfp4"),
            ("h5120-i192-e160-k8", "nvfp4"),
            ("h2880-i2880-e32-k4", "nvfp4"),
            ("h2944-i2944-e32-k4", "mxfp8_mxfp4"),
            ("h2688-i1856-e128-k6-ungated", "fp8"),
        ],
    )
    def test_supported(self, shape: str, quant: str) -> None:
        check_supported(MoEShape.parse(shape), quant)

    @given(SHAPES, st.sampled_from(QUANTS))
    def test_a_padded_shape_is_supported_and_the_smallest(self, shape: MoEShape, quant: str) -> None:
        padded = padded_shape(shape, quant)
        check_supported(padded, quant)
        assert padded_shape(padded, quant) == padded
        assert 0 <= padded.hidden - shape.hidden < 128
        assert 0 <= padded.inter - shape.inter < 128

    def test_an_unknown_quantization_is_refused(self) -> None:
        with pytest.raises(SynthError, match="unknown quantization"):
            check_supported(MoEShape(8, 8, 1, 1), "int4")

    def test_multiples_are_the_installed_flashinfers(self) -> None:
        flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")
        backend = Path(flashinfer.__file__).parent / "data/csrc/fused_moe/cutlass_backend"
        binding = (backend / "flashinfer_cutlass_fused_moe_binding.cu").read_text()
        kernels = (backend / "cutlass_fused_moe_kernels.cuh").read_text()
        assert "TVM_FFI_ICHECK_EQ(hidden_size % 128, 0)" in binding
        assert "TVM_FFI_ICHECK_EQ(inter_size % 128, 0)" in binding
        assert "hidden_size % (128 / sizeof_bits<WeightType>::value) == 0" in kernels
        assert "inter_size % (128 / sizeof_bits<WeightType>::value) == 0" in kernels


# What public repositories hold, shortened to the keys that matter and those that could mislead.
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4",
        "expert_dtype": "fp4",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "index_topk": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0"},
    },
    "qwen3.5-397b-a17b": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "mlp_only_layers": [],
            "moe_intermediate_size": 1024,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "shared_expert_intermediate_size": 1024,
        },
        "vision_config": {"depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152},
        "quantization_config": {
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "quant_method": "modelopt",
        },
    },
    "llama4-scout": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "hidden_act": "silu",
            "hidden_size": 5120,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "swiglu_limit": 7.0,
        "quantization_config": {"modules_to_not_convert": ["model.embed_tokens"], "quant_method": "mxfp4"},
    },
    "nemotron-3-super": {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "intermediate_size": 2688,
        "mamba_hidden_act": "silu",
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376,
        "n_routed_experts": 512,
        "n_shared_experts": 1,
        "num_experts_per_tok": 22,
        "time_step_limit": [0.0, float("inf")],
    },
    "kimi-k3": {
        "model_type": "kimi_k3",
        "text_config": {
            "hidden_act": "situ",
            "hidden_size": 7168,
            "intermediate_size": 33792,
            "moe_intermediate_size": 3072,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "routed_expert_hidden_size": 3584,
            "top_k": 50,
            "quantization_config": {"format": "mxfp4-pack-quantized", "quant_method": "compressed-tensors"},
        },
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4",
        "text_config": {
            "enable_moe_block": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_experts": 128,
            "top_k_experts": 8,
        },
    },
    "hunyuan-a13b": {
        "model_type": "hunyuan_v1_moe",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "mlp_bias": False,
        "moe_intermediate_size": [3072] * 32,
        "moe_layer_num_skipped": 0,
        "moe_topk": [8] * 32,
        "num_experts": 64,
        "num_shared_expert": [1] * 32,
    },
    "dbrx": {
        "model_type": "dbrx",
        "d_model": 6144,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": ""},
        "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_num_experts": 16, "moe_top_k": 4},
        "quantization_config": {"activation_scheme": "static", "quant_method": "fp8"},
    },
    "granite-3b-a800m": {
        "model_type": "granitemoe",
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_local_experts": 40,
    },
    "step-3.5-flash": {
        "model_type": "step3p5",
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1280,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "share_expert_dim": 1280,
    },
    "laguna-xs.2": {
        "model_type": "laguna",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "quantization_config": {"format": "float-quantized", "quant_method": "compressed-tensors"},
    },
    "jamba-1.5-mini": {
        "model_type": "jamba",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
    "grok-1": {
        "model_type": "grok",
        "hidden_act": "gelu_new",
        "hidden_size": 6144,
        "intermediate_size": 32768,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
}
EXPECTED_QUANT = {
    "deepseek-v3": "fp8",
    "deepseek-v4-flash": "mxfp8_mxfp4",
    "qwen3.5-397b-a17b": "nvfp4",
    "gpt-oss-20b": "mxfp8_mxfp4",
    "kimi-k3": "mxfp8_mxfp4",
    "dbrx": "fp8",
    "laguna-xs.2": "fp8",
}
SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def write_config(folder: Path, config: object, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


class TestModelFromConfig:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_public_configs_give_the_catalogues_layer(self, tmp_path: Path, name: str) -> None:
        read = model_from_config(write_config(tmp_path / name, CONFIGS[name]))
        known = find_model(name)
        assert read.quants == (EXPECTED_QUANT.get(name, "bf16"),)
        assert read == replace(
            known, quants=read.quants, deployments=((1, 1),), source="config.json", aliases=(), name=name
        )

    def test_quantization_in_modelopts_own_file(self, tmp_path: Path) -> None:
        nano = {
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "mlp_hidden_act": "relu2",
            "moe_intermediate_size": 1856,
            "moe_latent_size": None,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
        }
        write_config(
            tmp_path, {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "hf_quant_config.json"
        )
        read = model_from_config(write_config(tmp_path, nano))
        assert read.quants == ("nvfp4",)
        assert read.deploy(1, 1, "bf16").shape == MoEShape(2688, 1856, 128, 6, gated=False)

    @pytest.mark.parametrize(
        ("section", "quant"),
        [
            ({"quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}, "nvfp4"),
            (
                {
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {
                        "layers.0.self_attn.q_proj": {"quant_algo": "MXFP8"},
                        "layers.0.mlp.shared_experts.up_proj": {"quant_algo": "MXFP8"},
                        "layers.0.mlp.experts": {"quant_algo": "NVFP4"},
                    },
                },
                "nvfp4",
            ),
            ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
            ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ],
    )
    def test_the_experts_quantization_counts(self, tmp_path: Path, section: dict[str, Any], quant: str) -> None:
        path = write_config(tmp_path, SMALL | {"quantization_config": section})
        assert model_from_config(path).quants == (quant,)

    @pytest.mark.parametrize(
        "section",
        [
            {"quant_method": "gptq", "bits": 4},
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "FP8"},
            ["fp8"],
        ],
    )
    def test_a_quantization_without_tactics_is_refused(self, tmp_path: Path, section: object) -> None:
        path = write_config(tmp_path, SMALL | {"quantization_config": section})
        with pytest.raises(SynthError, match=r"quantization_config .* is none of bf16, fp8.*--quant"):
            model_from_config(path)

    def test_text_experts_of_ernie_vl_count(self, tmp_path: Path) -> None:
        config = {
            "model_type": "ernie4_5_moe_vl",
            "hidden_size": 2560,
            "moe_intermediate_size": [1536, 512],
            "moe_k": 6,
            "moe_num_experts": [64, 64],
        }
        read = model_from_config(write_config(tmp_path, config))
        assert (read.inter, read.experts, read.top_k) == (1536, 64, 6)

    def test_mistrals_own_format(self, tmp_path: Path) -> None:
        config = {
            "dim": 7168,
            "hidden_dim": 16384,
            "moe": {"num_experts": 128, "num_experts_per_tok": 4, "expert_hidden_dim": 4096},
        }
        read = model_from_config(write_config(tmp_path / "Mistral-Large-3", config, "params.json"))
        assert (read.name, read.hidden, read.inter, read.experts, read.top_k) == ("mistral-large-3", 7168, 4096, 128, 4)

    @pytest.mark.parametrize(
        ("folder", "name"),
        [
            ("GLM-5", "glm-5"),
            ("models--zai-org--GLM-5/snapshots/0123abcd", "glm-5"),
            ("My model (v2)", "my-model-v2"),
            ("---", "model"),
        ],
    )
    def test_named_after_its_folder(self, tmp_path: Path, folder: str, name: str) -> None:
        assert model_from_config(write_config(tmp_path / folder, SMALL)).name == name

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"hidden_size": 4096, "intermediate_size": 12288}, "no experts in it .*num_experts.*dense"),
            ({"text_config": {"hidden_size": 1, "num_experts": None, "top_k_experts": None}}, "dense"),
            (SMALL | {"num_experts": 1}, "dense"),
            ({k: v for k, v in SMALL.items() if k != "hidden_size"}, "no hidden size .*hidden_size, d_model"),
            ({k: v for k, v in SMALL.items() if k != "num_experts_per_tok"}, "no experts per token .*moe_topk"),
            (SMALL | {"moe_intermediate_size": None}, "no intermediate size"),
            (SMALL | {"moe_intermediate_size": "32"}, 'moe_intermediate_size is "32", not a positive integer'),
            (SMALL | {"hidden_size": True}, "hidden_size is true"),
            (SMALL | {"hidden_size": -64}, "hidden_size is -64"),
            (SMALL | {"num_experts_per_tok": []}, r"num_experts_per_tok is \[\]"),
            (SMALL | {"moe_intermediate_size": [32, 32, 64]}, "moe_intermediate_size differs between layers"),
            (SMALL | {"num_experts_per_tok": 9}, "top_k 9 is more than the layer's 8 experts"),
            (SMALL | {"hidden_act": "relu"}, 'hidden_act "relu" is not an activation .*--activation'),
            (SMALL | {"hidden_act": 3}, "hidden_act 3 is not an activation"),
            ([SMALL], "expected an object"),
            ('{"hidden_size": 64,', "is not JSON"),
            ("", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
        ],
    )
    def test_bad_configs_give_one_line_with_file_and_way_out(
        self, tmp_path: Path, config: object, message: str
    ) -> None:
        path = write_config(tmp_path, config)
        with pytest.raises(SynthError, match=message) as error:
            model_from_config(path)
        text = str(error.value)
        assert str(path) in text and "--hidden --inter --experts --top-k" in text and "\n" not in text

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_bytes(b"\xff\xfe\x00\xd8{}")
        with pytest.raises(SynthError, match="is not JSON"):
            model_from_config(path)

    def test_a_folder_and_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(SynthError, match=r"is a folder; name the config.json in it"):
            model_from_config(tmp_path)
        with pytest.raises(SynthError, match=r"can't read .*nowhere.json: No such file"):
            model_from_config(tmp_path / "nowhere.json")


def test_activations_are_flashinfers() -> None:
    enums = pytest.importorskip("flashinfer.tllm_enums", reason="flashinfer is not installed")
    names = {"swiglu": "Swiglu", "geglu": "Geglu", "geglu_tanh": "GegluTanh", "situ": "Situ", "relu2": "Relu2"}
    assert set(names) == set(ACTIVATIONS)
    for name in names.values():
        assert hasattr(enums.ActivationType, name)


def test_a_model_given_by_hand_needs_only_its_layer() -> None:
    model = Model("mine", "mine", hidden=4096, inter=1536, experts=128, top_k=8)
    assert model.deploy(4, 1, "nvfp4").label == "mine-tp4"
    assert family_of("mine-tp4") == "mine"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer": {"hiden": 4096}}, "hiden"),
        ({"family": None, "source": ...}, "source"),
        ({"quants": ["bf17"]}, "bf17"),
        ({"deployments": [[3, 1]]}, "--tp 3"),
        ({"deployments": [4]}, "cannot unpack"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_row_of_the_catalogue_is_one_line(change: dict[str, Any], says: str) -> None:
    layer = {"hidden": 4096, "inter": 1408, "experts": 128, "top_k": 8}
    row = {"name": "m", "family": "f", "layer": layer, "quants": ["bf16"], "deployments": [[1, 1]], "source": "s"}
    assert models._model(row).name == "m"
    row = {k: v for k, v in {**row, **change}.items() if v is not ...}
    with pytest.raises(SynthError, match=says) as e:
        models._model(row)
    assert "\n" not in str(e.value)
