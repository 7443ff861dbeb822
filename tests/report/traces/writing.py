"""Small traces written by hand, in the layout that torch's profiler gives those of engines.

A `Recorder` keeps a host clock and one clock a stream, so that launches, gaps and waits are known
to whoever wrote them. Kernel names are those that the engines show; times are made up.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BASE = 5119407085000.0
"""us; traces count from the start of the machine, so times are large."""


class K(NamedTuple):
    """A kernel: name, microseconds, grid."""

    name: str
    us: float
    grid: tuple[int, ...] = (1, 1, 1)


FLASH = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> > > > >(Params)"
)
COMBINE = "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8> > > >(P)"
NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)"
ROPE = "void (anonymous namespace)::fused_rope_kernel<true, 128l, true, __nv_bfloat16>(Params)"
KV_SGLANG = "void (anonymous namespace)::store_kvcache<2048l, 4, true, long>(StoreKVCacheParams)"
KV_VLLM = "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(__nv_bfloat16 const*)"
GATE = "void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16>(ActivationParams)"
QKV, OUT, UP, DOWN = (
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT",
    "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT",
    "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT",
    "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT",
)
PROMPT = "nvjet_sm90_tst_176x128_64x5_1x2_h_bz_TNN"
SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(Params)"
HEAD = "nvjet_sm90_tst_256x8_64x6_2x1_v_bz_TNT"
ARGMAX = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
    "at::native::ArgMaxOps<float>, unsigned int, long, 4, 4> >(Op)"
)
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)"
INDEX = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>(long)"
PLAN = "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)"
VERIFY_TREE = "void VerifyTreeGreedy<int, long>(int*, int*)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Recorder:
    """Writes events as a profiled process would have caused them."""

    def __init__(self, process: str = "python", device: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.host = BASE
        self.free: dict[int, float] = {}
        self.device = device
        self.process = process
        self.header: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": device, "name": "NVIDIA H200"}],
        }
        self._id = 100

    def launch(self, kernel: K, stream: int = 7, latency: float = 4.0) -> None:
        """Launch one kernel from the host."""
        self._work([kernel], "cudaLaunchKernel", stream, latency, 0.0)

    def graph(
        self, kernels: Sequence[K], gap: float = 0.5, latency: float = 8.0, early: float = 0.0
    ) -> None:
        """Launch kernels as one graph, `gap` us between them.

        Each begins `early` us before its turn, though not before the one it follows, and waits.
        """
        self._work(kernels, "cudaGraphLaunch", 7, latency, gap, early)

    def to_host(self, stream: int = 9, kind: str = "Memcpy DtoH (Device -> Pinned)") -> None:
        """Copy a little to the host, behind what stream 7 does."""
        self.free[stream] = max(self.free.get(stream, BASE), self.free.get(7, BASE))
        self._work([K(kind, 2.0)], "cudaMemcpyAsync", stream, 4.0, 0.0)

    def wait(self, name: str = "cudaStreamSynchronize") -> None:
        """Wait for the device."""
        end = max(self.free.values(), default=self.host)
        self._call(name, max(end - self.host, 1.0))

    def rest(self, us: float) -> None:
        """Let the host do something else."""
        self.host += us

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A span of host code."""
        start = self.host
        yield
        self._add("user_annotation", name, start, self.host - start, {"External id": 1})

    def _call(self, name: str, us: float) -> int:
        self._id += 1
        self._add("cuda_runtime", name, self.host, us, {"correlation": self._id})
        self.host += us
        return self._id

    def _work(
        self,
        kernels: Sequence[K],
        call: str,
        stream: int,
        latency: float,
        gap: float,
        early: float = 0.0,
    ) -> None:
        asked = self.host
        correlation = self._call(call, 5.0)
        at = begun = max(self.free.get(stream, BASE), asked + latency)
        for kernel in kernels:
            category = "gpu_memcpy" if kernel.name.startswith("Memcpy") else "kernel"
            arguments: dict[str, Any] = {
                "device": self.device,
                "stream": stream,
                "correlation": correlation,
            }
            if category == "kernel":
                arguments |= {"grid": list(kernel.grid), "block": [128, 1, 1]}
            begun = max(begun, at - early)
            took = at + kernel.us - begun
            self._add(category, kernel.name, begun, took, arguments, self.device, stream)
            at += kernel.us + gap
        self.free[stream] = at - gap

    def _add(
        self,
        category: str,
        name: str,
        ts: float,
        dur: float,
        args: dict[str, Any],
        pid: int = 4711,
        tid: int = 4711,
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
        self.events.append(event | {"ts": round(ts, 3), "dur": round(dur, 3), "args": args})

    def save(self, path: Path) -> Path:
        """Write the trace, device work first as profilers do, compressed if `path` says so."""
        order = {"kernel": 1, "gpu_memcpy": 1, "cuda_runtime": 2}
        events = sorted(self.events, key=lambda e: order.get(e["cat"], 0))
        named = {"name": "thread_name", "ph": "M", "ts": BASE, "pid": 4711, "tid": 4711}
        events.append(named | {"args": {"name": f"thread 4711 ({self.process})"}})
        text = json.dumps(self.header | {"traceEvents": events, "traceName": "t"}, indent=1)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def layer(rows: int, kv: str = KV_SGLANG, collective: K | None = None) -> list[K]:
    """Kernels of one layer; more rows make attention a little slower."""
    reduce = [collective] if collective else []
    return [
        K(QKV, 15.0, (4, 24, 1)),
        K(ROPE, 1.5, (rows, 1, 1)),
        K(kv, 1.5, (rows, 1, 1)),
        K(FLASH, 7.0 + 0.5 * rows, (132, 1, 1)),
        K(COMBINE, 2.5, (4 * rows, 1, 1)),
        K(OUT, 10.5, (2, 64, 1)),
        K(SPLIT, 2.0, (128, 1, 1)),
        *reduce,
        K(NORM, 2.5, (rows, 1, 1)),
        K(UP, 58.0, (2, 66, 1)),
        K(GATE, 1.5, (7 * rows, 1, 1)),
        K(DOWN, 30.0, (2, 64, 1)),
        K(SPLIT, 2.0, (128, 1, 1)),
        *reduce,
        K(NORM, 2.5, (rows, 1, 1)),
    ]


def forward(layers: int, rows: int, head_us: float, **how: Any) -> list[K]:
    """Kernels of a pass with its LM head."""
    inside = [kernel for _ in range(layers) for kernel in layer(rows, **how)]
    return [K(NORM, 2.0), *inside, K(HEAD, head_us, (2, 66, 1)), K(COPY, 4.0, (251, 1, 1))]


def prompt(recorder: Recorder, layers: int) -> None:
    """A prompt chunk, launched kernel by kernel."""
    for kernel in forward(layers, 64, 250.0):
        recorder.launch(K(PROMPT if "nvjet" in kernel.name else kernel.name, 3 * kernel.us))
    recorder.launch(K(ARGMAX, 27.0))


def sglang_decode(steps: int = 6, layers: int = 4, spans: bool = True) -> Recorder:
    """Plain decoding: one graph a step, metadata before it, argmax and a copy behind it."""
    r = Recorder("sglang::scheduler")
    with r.span("step[EXTEND bs=1 toks=64]"):
        prompt(r, layers)
    for _ in range(steps):
        with r.span("step[DECODE bs=1]" if spans else "step"):
            r.launch(K(PLAN, 3.0))
            r.graph(forward(layers, 1, 244.0))
        r.launch(K(ARGMAX, 27.0))
        r.launch(K(INDEX, 2.0))
        r.to_host()
        r.wait("cudaEventSynchronize")
    return r


def sglang_cycles(steps: int = 6, layers: int = 4, host_gap: float = 300.0) -> Recorder:
    """EAGLE-3 of two drafter passes and an eager extend, `host_gap` us of host before verify."""
    r = Recorder("sglang::scheduler")
    with r.span("step[EXTEND bs=1 toks=64]"):
        prompt(r, layers)
    drafting = [*forward(1, 1, 66.0), K(ARGMAX, 9.0), K(INDEX, 2.0)]
    for _ in range(steps):
        with r.span("draft"):
            r.graph([*drafting, *drafting])
        r.rest(host_gap)
        with r.span("step[TARGET_VERIFY bs=1]"):
            r.launch(K(PLAN, 3.0))
            r.graph(forward(layers, 4, 246.0))
        r.launch(K(ARGMAX, 27.0))
        r.launch(K(VERIFY_TREE, 3.0))
        with r.span("draft_extend"), r.span("step[DRAFT_EXTEND_V2 bs=1]"):
            for kernel in drafting[:-1]:
                r.launch(kernel)
        r.to_host()
        r.wait()
    return r


def vllm_cycles(steps: int = 6, layers: int = 4, spans: bool = True) -> Recorder:
    """Verify with a span, the LM head and rejection outside the graph, drafter graphs without."""
    r = Recorder("VLLM::EngineCore")
    drafting = [*forward(1, 1, 66.0, kv=KV_VLLM), K(ARGMAX, 29.0)]
    for _ in range(steps):
        with r.span("execute_context_0(0)_generation_1(4)" if spans else "execute"):
            r.launch(K("_prepare_pos_seq_lens_kernel", 1.5))
            r.launch(K("_compute_slot_mappings_kernel", 3.0))
            r.graph(forward(layers, 4, 250.0, kv=KV_VLLM)[:-2])
        r.launch(K(HEAD, 252.0, (2, 66, 1)))
        r.launch(K("_rejection_kernel", 4.0))
        r.launch(K("_resample_kernel", 17.0))
        for _ in range(3):
            r.launch(K("_update_draft_inputs_kernel", 2.0))
            r.graph(drafting)
        r.to_host()
    return r


def eyas_pass(layers: int, rows: int, head_us: float) -> list[K]:
    """Kernels of a pass of this engine, LM head and draws included."""
    one = [
        K("_norm_kernel", 2.0),
        K("_skinny_kernel", 14.0, (96, 1)),
        K("_kv_write_kernel", 2.0),
        K("_attention_kernel", 6.0 + 0.2 * rows),
        K("attention_merge_kernel", 2.0),
        K("_skinny_kernel", 10.0, (64, 1)),
        K("_norm_kernel", 2.0),
        K("_skinny_kernel", 57.0, (448, 1)),
        K("_gated_kernel", 1.5),
        K("_skinny_kernel", 30.0, (128, 1)),
    ]
    draws = [K("_draw_tile_kernel", 3.0, (rows, 63, 1)), K("_draw_row_kernel", 2.0)]
    return [*(one * layers), K("_norm_kernel", 2.0), K(HEAD, head_us), *draws]


def eyas_cycles(steps: int = 6, layers: int = 6, early: float = 0.0) -> Recorder:
    """This engine: a whole cycle is one graph, and tokens are copied to the host behind it."""
    r = Recorder("python")
    drafting = [*eyas_pass(1, 1, 60.0), K("_chain_begin_kernel", 1.5)]
    cycle = [
        K("_slot_rows_kernel", 1.5),
        *drafting,
        *drafting,
        *eyas_pass(layers, 4, 244.0),
        K("_accept_kernel", 2.0),
        K("_move_kv_kernel", 2.0),
        *eyas_pass(1, 4, 60.0),
        K("_slot_rows_kernel", 1.5),
    ]
    for _ in range(steps):
        r.graph(cycle, early=early)
        r.to_host(kind="Memcpy DtoH (Device -> Pinned)")
        r.wait("cudaEventSynchronize")
    return r


def eager_decode(steps: int = 8, layers: int = 4) -> Recorder:
    """Decoding without graphs or spans: every kernel is launched."""
    r = Recorder()
    for _ in range(steps):
        for kernel in [*forward(layers, 1, 244.0), K(ARGMAX, 27.0)]:
            r.launch(kernel)
    return r


def tensor_parallel(slow: int, ranks: int = 2, steps: int = 6, layers: int = 4) -> list[Recorder]:
    """One trace a rank; all wait 20 us in every collective for rank `slow`, whose take 8 us."""
    found = []
    for rank in range(ranks):
        r = Recorder("sglang::scheduler", device=rank)
        r.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": ranks}
        reduce = K(ALL_REDUCE, 8.0 if rank == slow else 28.0)
        for _ in range(steps):
            r.graph([*forward(layers, 1, 244.0, collective=reduce), K(ARGMAX, 27.0)])
            r.wait()
        found.append(r)
    return found
