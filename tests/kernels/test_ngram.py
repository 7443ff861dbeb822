"""Chains from a request's own text; through Triton's interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.kernels import ngram as module
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu

MOST = 4


def plain(text: list[int], length: int, nodes: int) -> list[int]:
    """The chain behind text[: length + 1], looked up place by place."""
    best, best_matched = 0, 0
    for end in range(length):
        matched = 0
        while matched < MOST and end >= matched and text[end - matched] == text[length - matched]:
            matched += 1
        if matched and matched >= best_matched:
            best, best_matched = end, matched
    period = max(length - best, 1)
    return [text[length], *(text[best + 1 + step % period] for step in range(nodes - 1))]


def run_grid() -> None:
    """Texts of few words and of many, lengths at edges of blocks, and one that is empty."""
    generator = torch.Generator().manual_seed(5)
    width = 2 * module.BLOCK + 40
    lengths = [0, 1, 2, 3, 50, module.BLOCK - 1, module.BLOCK, 2 * module.BLOCK + 3, width - 1]
    for words, nodes in ((3, 4), (40, 9), (2**40, 2)):
        history = torch.randint(0, words, (12, width + 7), generator=generator)
        slots = torch.tensor([3, 0, 11, 5, 7, 1, 2, 9, 4])
        kv_lens = torch.tensor(lengths)
        roots = history[slots, kv_lens]
        wanted = [
            plain(history[slot].tolist(), length, nodes)
            for slot, length in zip(slots.tolist(), lengths, strict=True)
        ]
        given = (history, slots, roots, kv_lens)
        reference = module.ngram_chain_reference(*given, width, nodes, MOST)
        assert reference[0].tolist() == wanted
        texts, at, last, known = (x.to(DEVICE) for x in given)
        found = module.ngram_chain_triton(texts, at, last, known, width, nodes, MOST)
        for ours, theirs in zip(found, reference, strict=True):
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels itself")
def test_interpreted_kernels_equal_reference() -> None:
    """Fault: an earlier place before a later one, a match over the text's start, a lost block."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_reference() -> None:
    """The same on the GPU."""
    run_grid()


def test_compiles_for_hopper() -> None:
    """Fault: kernels that only the interpreter takes."""
    for kernel, constants in (
        (module._suffix_search_kernel, {"MOST": MOST, "BLOCK": module.BLOCK}),
        (module._ngram_chain_kernel, {"BLOCKS": 128, "NODES": 8}),
    ):
        types: dict[str, Any] = {n: "*i64" for n in kernel.arg_names if n.endswith("_ptr")}
        types |= {n: "i32" for n in ("width", "stride", "blocks", "nodes") if n in kernel.arg_names}
        compiles(kernel, types, constants)


if __name__ == "__main__":
    run_grid()
