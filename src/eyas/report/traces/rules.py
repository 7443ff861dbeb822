"""Which component a kernel belongs to, by its name; the first rule that matches decides.

Names are those that the named public projects give their kernels; `nvjet`, `cutlass` and
`xmma` names are what CUDA's libraries show in profiles. Names alone cannot tell an LM head from
another matmul, nor an element-wise kernel inside a layer from one that prepares metadata: such
kernels are `GENERIC` here, and `places.py` decides by what stands around them. What no rule knows
stays unknown.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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

GENERIC = "generic"
"""Torch's own small kernels and fused ones: their place decides."""
FOLLOWS = "follows"
"""Belongs to the matmul before it."""


class Rule(NamedTuple):
    """A pattern of kernel names, without regard to case, and what it stands for."""

    pattern: str
    component: str
    source: str


RULES = (
    Rule(r"^memcpy|^memset|memcpy32_post|memcpy_kernel|^copybuffer", COPIES, "CUDA runtime"),
    Rule(r"nccl|rccl", ALL_REDUCE, "NCCL, RCCL"),
    Rule(
        r"cross_device_reduce|(one|two)_?shot_?(push_|pull_)?all_?reduce|all_?reduce|all_?gather|"
        r"reduce_?scatter|all_?to_?all|multimem|quick_?reduce|lamport|nvshmem",
        ALL_REDUCE,
        "vLLM csrc/custom_all_reduce.cuh, SGLang sgl-kernel/csrc/allreduce, TensorRT-LLM "
        "customAllReduceKernels.cu, PyTorch CUDASymmetricMemory",
    ),
    Rule(
        r"deep_?ep|(internode|intranode)::|low_latency::(dispatch|combine)",
        ALL_REDUCE,
        "deepseek-ai/DeepEP csrc/kernels",
    ),
    Rule(
        r"fused_moe|moe_|_moe|topk_?gating|grouped_?topk|moe::|bmoe|expert|marlin_moe|"
        r"(group|grouped)_?gemm|gemm.*(grouped|moe)|permute_?(rows|tokens|kernel)|"
        r"silu_and_mul_masked|finalize_?moe|fused_gate|ep_(scatter|gather)|_route",
        MOE,
        "vLLM csrc/moe, SGLang sgl-kernel/csrc/moe, FlashInfer and TensorRT-LLM MoE kernels, "
        "deepseek-ai/DeepGEMM, eyas kernels/experts_triton.py, route.py and router.py",
    ),
    Rule(
        r"store_?kv_?cache|reshape_and_cache|concat_and_cache|set_mla_kv|set_kv_buffer|"
        r"append_?paged_?kv|kv_?write|write_kv|copy_kv|move_kv|quant.*insert_kv",
        KV_WRITE,
        "vLLM csrc/cache_kernels.cu, SGLang sgl-kernel store_cache, FlashInfer page.cuh, eyas "
        "kernels/kv_write.py and move.py",
    ),
    Rule(
        r"prepare_varlen|fused_metadata|mla_metadata|kv_?indices|kv_indptr|block_?tables?|"
        r"slot_mapping|req_to_token|cache_locs?|_position|pos_seq_lens|prepare_\w*inputs|"
        r"idx_mapping|update_draft_inputs|post_update|apply_write|gather_rows|seq_?lens|"
        r"assign_\w*(pool|locs)|build_tree|_chain_begin|_tree_(begin|plant|level)|_slot_rows|"
        r"_attention_order|combine_sampled|num_blocks_kernel|_plan_kernel|"
        r"plan_tiles|alloc_(extend|decode)|_suffix_search|_ngram_chain",
        METADATA,
        "FlashAttention hopper/flash_prepare_scheduler.cu, SGLang srt/speculative and "
        "srt/mem_cache, vLLM v1/worker/gpu, eyas kernels/begin, grow, tree, rows, ngram.py",
    ),
    Rule(
        r"sampl|argmax|gumbel|rejection|verifytree|verify_tree|tree_speculative|top_?[kp]_|topk|"
        r"softmax|multinomial|bonus_tokens|block_stats|num_sampled|radix_?sort|"
        r"bitonic|sort_?(kernel|pairs|by_key)|penalt|temperature|accept|decree|_draw|renorm|"
        r"mbtopk|gathertopk|(best|order)_of",
        SAMPLING,
        "PyTorch ArgMaxOps, cunn_SoftMax and topk kernels, FlashInfer sampling.cuh, SGLang "
        "sgl-kernel/csrc/speculative, vLLM v1/sample, eyas kernels/draw.py, accept.py and "
        "decree.py",
    ),
    Rule(
        r"rms_?norm|layer_?norm|norm::|_norm|norm_kernel|qk_norm|rope|rotary|act_and_mul|silu|gelu|"
        r"swiglu|gated_(silu|kernel)|_state_columns",
        NORM,
        "FlashInfer norm.cuh, SGLang and vLLM activation and rotary kernels, PyTorch inductor, "
        "eyas kernels/norm.py, gated.py and rows.py",
    ),
    Rule(
        r"flash|fmha|attn|attention|_mla|mla_|batch_?(decode|prefill)|merge_?state|xqa|"
        r"paged_?(kv|decode|prefill)|splitkv|mqa_logits",
        ATTENTION,
        "eyas kernels/paged_attention.py and splits.py, Dao-AILab/flash-attention hopper, "
        "flashinfer-ai/flashinfer, deepseek-ai/FlashMLA, "
        "vLLM csrc/attention, xformers",
    ),
    Rule(
        r"quantize|per_token_group_quant|scaled_fp8_quant|cvt_fp\d",
        NORM,
        "vLLM csrc/quantization, eyas kernels/planes_triton.py",
    ),
    Rule(r"splitk_?reduce|reduce_splitk", FOLLOWS, "cuBLASLt"),
    Rule(
        r"nvjet|gemm|gemv|cublas|cutlass|xmma|wgmma|s\d+_?(16816|884)|marlin|machete|awq|gptq|"
        r"_mm_|scaled_mm|matmul|linear|skinny|absorb|cijk_|dot_kernel|triton_tem",
        DENSE,
        "cuBLAS (nvjet, xmma, gemv), NVIDIA/cutlass, vLLM csrc/quantization, ROCm Tensile, eyas "
        "kernels/skinny_triton.py, planes_triton.py and absorb.py",
    ),
    Rule(
        r"at::native|at_cuda_detail|\bcub::|thrust::|elementwise|catarray|indexselect|gather|"
        r"scatter|embedding|triton_(poi|red|per|for)|fillfunctor|reduce_kernel|clamp",
        GENERIC,
        "PyTorch aten/src/ATen/native/cuda, NVIDIA/cccl, PyTorch inductor",
    ),
)
"""In order: a name that says two things, as `fused_moe_kernel_gptq_awq`, takes the first."""

_COMPILED = tuple((re.compile(rule.pattern, re.IGNORECASE), rule.component) for rule in RULES)


def by_name(name: str) -> str:
    """The component a kernel's name tells, `GENERIC`, `FOLLOWS`, or unknown."""
    for pattern, component in _COMPILED:
        if pattern.search(name):
            return component
    return UNKNOWN
