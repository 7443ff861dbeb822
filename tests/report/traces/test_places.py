"""What a name does not tell, a kernel's place tells."""

from __future__ import annotations

from eyas.report.components import (
    ATTENTION,
    DENSE,
    DEVICE,
    LM_HEAD,
    METADATA,
    MOE,
    NORM,
    SAMPLING,
    UNKNOWN,
)
from eyas.report.traces.places import components
from eyas.report.traces.reading import read_trace
from tests.report.traces.conftest import Save
from tests.report.traces.writing import (
    ARGMAX,
    COPY,
    FLASH,
    HEAD,
    INDEX,
    QKV,
    SPLIT,
    UP,
    K,
    Recorder,
)
from tests.report.traces.writing import (
    NORM as NORM_KERNEL,
)


def placed(save: Save, *names: str) -> list[str]:
    r = Recorder()
    for name in names:
        r.launch(K(name, 1.0 if "router" in name else 9.0))
    [trace] = read_trace(save(r))
    return [DEVICE[c] for c in components(trace)[0]]


def test_the_last_matmul_before_a_draw_is_the_head(save: Save) -> None:
    """Also where its split-K reduction and small kernels stand between."""
    found = placed(save, QKV, FLASH, UP, SPLIT, NORM_KERNEL, HEAD, SPLIT, COPY, ARGMAX, INDEX, QKV)
    assert found == [
        DENSE, ATTENTION, DENSE, DENSE, NORM, LM_HEAD, LM_HEAD, SAMPLING, SAMPLING, NORM, DENSE,
    ]  # fmt: skip


def test_a_matmul_before_attention_is_no_head(save: Save) -> None:
    assert placed(save, QKV, FLASH, ARGMAX) == [DENSE, ATTENTION, SAMPLING]


def test_a_router_is_no_head(save: Save) -> None:
    """A router's softmax looks like sampling, in every layer."""
    layer = [QKV, FLASH, "router_gemm_kernel", "void at::native::softmax_warp_forward<float>()", UP]
    found = placed(save, *layer * 6, HEAD, ARGMAX)
    assert found == [DENSE, ATTENTION, MOE, MOE, DENSE] * 6 + [LM_HEAD, SAMPLING]


def test_small_kernels_go_with_what_stands_around_them(save: Save) -> None:
    found = placed(save, INDEX, COPY, QKV, COPY, FLASH, INDEX, UP, FLASH, HEAD, ARGMAX, COPY, COPY)
    assert found[:2] == [METADATA, NORM]
    assert (found[3], found[5]) == (NORM, NORM)
    assert found[-2:] == [METADATA, METADATA]


def test_what_no_rule_knows_stays_unknown_inside_layers(save: Save) -> None:
    assert placed(save, QKV, "mystery", FLASH, UP)[1] == UNKNOWN
