"""Kernels of the engines' own names go to the components they are for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import eyas.kernels
from eyas.report.components import (
    ALL_REDUCE,
    ATTENTION,
    COPIES,
    DENSE,
    KV_WRITE,
    METADATA,
    MOE,
    NORM,
    SAMPLING,
    UNKNOWN,
)
from eyas.report.traces.rules import FOLLOWS, GENERIC, RULES, by_name
from tests.report.traces import writing as w

NAMES = {
    ALL_REDUCE: [
        w.ALL_REDUCE,
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "void sglang::cross_device_reduce_2stage<half, 8>(RankData*)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>()",
        "two_shot_all_reduce_kernel<float>",
        "void deep_ep::intranode::dispatch<8, 256>(int4*)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
    ATTENTION: [
        w.FLASH,
        w.COMBINE,
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(PosEncodingMode)0>(Params)",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<KTraits>(Params)",
        "void flash::flash_fwd_splitkv_mla_kernel<Traits>(Flash_fwd_mla_params)",
        "fmhaSm100Kernel_QkvBfloat16OBfloat16H128PagedKv",
        "_fwd_grouped_kernel_stage1_attn",
        "void vllm::paged_attention_v2_kernel<__nv_bfloat16, 128>(float*)",
    ],
    MOE: [
        "fused_moe_kernel",
        "fused_moe_kernel_gptq_awq",
        "void vllm::moe::topkGatingSoftmax<4, 64, 4, 16>(float const*)",
        "void moe_align_block_size_kernel<int>(int*)",
        "void deep_gemm::fp8_gemm_grouped_contiguous_kernel<128>(bf16*)",
        "void moe_fused_gate_kernel<float>(void*)",
    ],
    DENSE: [
        w.QKV,
        w.UP,
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_tn>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>(cublasGemvParamsEx)",
        "ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x6_tn",
        "void marlin::Marlin<__nv_bfloat16, 4>(int4 const*)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT64x16x64",
        "triton_tem_fused_mm_3",
    ],
    NORM: [
        w.NORM,
        w.ROPE,
        w.GATE,
        "triton_red_fused_fused_add_rms_norm_2",
        "triton_poi_fused_mul_silu_slice_1",
        "void vllm::rotary_embedding_kernel<__nv_bfloat16, true>(long const*)",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16>(__nv_bfloat16*)",
        "_norm_kernel",
        "void per_token_group_quant_8bit_kernel<__nv_bfloat16>(void const*)",
    ],
    KV_WRITE: [
        w.KV_SGLANG,
        w.KV_VLLM,
        "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>(__nv_bfloat16 const*)",
        "set_mla_kv_buffer_kernel",
        "void flashinfer::AppendPagedKVCacheKernel<128>(paged_kv_t)",
    ],
    SAMPLING: [
        w.ARGMAX,
        w.VERIFY_TREE,
        "_rejection_kernel",
        "_resample_kernel",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024>(float*)",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(Info)",
        "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*)",
        "fill_bonus_tokens",
    ],
    METADATA: [
        w.PLAN,
        "_fused_metadata_kernel_ps1_no_swa",
        "create_flashinfer_kv_indices_triton",
        "_compute_slot_mappings_kernel",
        "_gather_block_tables_kernel",
        "assign_req_to_token_pool",
        "build_tree_efficient(long*, long*, long*, bool*)",
        "compute_position_kernel",
        "void flash::get_mla_metadata_kernel(Mla_metadata_params)",
    ],
    COPIES: [
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "memcpy32_post",
    ],
    GENERIC: [w.COPY, w.INDEX, "triton_poi_fused_3", "triton_red_fused_0"],
    FOLLOWS: [w.SPLIT],
    UNKNOWN: ["my_secret_kernel_v7", "kernel_1"],
}


@pytest.mark.parametrize(
    ("component", "name"), [(c, n) for c, names in NAMES.items() for n in names]
)
def test_names_of_the_engines(component: str, name: str) -> None:
    """A rule widened for one kernel that swallows another's, as `flash` did FlashInfer's norms."""
    assert by_name(name) == component


def launched() -> list[tuple[str, str]]:
    """(file, name) of every Triton function of this package that is launched as a kernel."""
    found = []
    for path in sorted(Path(eyas.kernels.__path__[0]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = node.func.value
                if isinstance(called, ast.Name) and called.id.endswith("kernel"):
                    assert called.id in names or "merge" in called.id
                    found.append((path.stem, called.id))
    return sorted(set(found))


def test_own_kernels_have_telling_names() -> None:
    """A profile shows a kernel's function name alone: two of one name could not be told apart."""
    found = launched()
    assert len(found) > 12
    names = [name for _, name in found]
    assert len(names) == len(set(names)), found
    for file, name in found:
        assert by_name(name) not in (UNKNOWN, GENERIC), f"{file}.py: {name}"
    told = {name: by_name(name) for name in names}
    assert told["_attention_kernel"] == ATTENTION
    assert told["_route_kernel"] == told["_expert_down_kernel"] == MOE
    assert told["_kv_write_kernel"] == KV_WRITE
    assert told["_accept_kernel"] == told["_decree_kernel"] == SAMPLING
    assert told["_draw_tile_kernel"] == SAMPLING
    assert told["_gated_kernel"] == told["_norm_kernel"] == NORM


def test_every_rule_names_its_source() -> None:
    assert all(rule.source and rule.pattern for rule in RULES)
