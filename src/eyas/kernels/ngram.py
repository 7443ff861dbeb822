"""Drafts from a request's own text: what followed the latest earlier occurrence of its suffix.

Prompt-lookup decoding (github.com/apoorvumang/prompt-lookup-decoding) on the device, in two
launches: blocks of the text are searched side by side, then a chain is copied from the best place.
The longest matching suffix wins, then the latest place; a run that reaches the end of the text
repeats from its start. Integers alone: kernels and reference agree exactly.
"""

from __future__ import annotations

import torch

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns

BLOCK = 1024
"""Places that a program searches."""


def ngram_chain_reference(
    history: torch.Tensor,
    slots: torch.Tensor,
    roots: torch.Tensor,
    kv_lens: torch.Tensor,
    width: int,
    nodes: int,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ngram_chain`."""
    text, last = history[slots, :width], kv_lens[:, None]
    ends = torch.arange(width, device=text.device)
    matched = torch.zeros_like(text)
    running = ends < last
    for back in range(most):
        suffix = text.gather(1, (last - back).clamp(min=0))
        running = running & (text.roll(back, dims=1) == suffix) & (ends >= back)
        matched = matched + running
    best = (matched * width + ends * (matched > 0)).max(1, keepdim=True).values % width
    steps = torch.arange(nodes - 1, device=text.device)
    drafts = text.gather(1, best + 1 + steps % (last - best).clamp(min=1))
    tokens = torch.cat((roots[:, None], drafts), dim=1)
    return tokens, last + torch.arange(nodes, device=text.device)


@triton.jit(do_not_specialize=["width", "stride"])
def _suffix_search_kernel(  # type: ignore[no-untyped-def]
    history_ptr, slots_ptr, kv_lens_ptr, found_ptr, width, stride,
    MOST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (request, block of places): the largest of matched tokens * width + place."""
    take_turn(EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = history_ptr + tl.load(slots_ptr + request) * stride
    last = tl.load(kv_lens_ptr + request)
    end = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    running = end < last
    matched = tl.zeros([BLOCK], tl.int64)
    for back in tl.static_range(MOST):
        suffix = tl.load(row + tl.maximum(last - back, 0))
        running &= end >= back
        running &= tl.load(row + end - back, running, -1) == suffix
        matched += running
    found = tl.max(tl.where(matched > 0, matched * width + end, 0), 0)
    tl.store(found_ptr + request * tl.num_programs(1) + tl.program_id(1), found)


@triton.jit(do_not_specialize=["width", "stride", "blocks", "nodes"])
def _ngram_chain_kernel(  # type: ignore[no-untyped-def]
    history_ptr, slots_ptr, roots_ptr, kv_lens_ptr, found_ptr, tokens_ptr, positions_ptr,
    width, stride, blocks, nodes, BLOCKS: tl.constexpr, NODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (request): the chain behind the best place of all blocks."""
    take_turn(EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = history_ptr + tl.load(slots_ptr + request) * stride
    last = tl.load(kv_lens_ptr + request)
    block, node = tl.arange(0, BLOCKS), tl.arange(0, NODES)
    best = tl.max(tl.load(found_ptr + request * blocks + block, block < blocks, 0), 0) % width
    place = best + 1 + (node - 1) % tl.maximum(last - best, 1)
    drafts = tl.load(row + place, (node > 0) & (node < nodes), 0)
    token = tl.where(node == 0, tl.load(roots_ptr + request), drafts)
    tl.store(tokens_ptr + request * nodes + node, token, node < nodes)
    tl.store(positions_ptr + request * nodes + node, last + node, node < nodes)


def ngram_chain_triton(
    history: torch.Tensor,
    slots: torch.Tensor,
    roots: torch.Tensor,
    kv_lens: torch.Tensor,
    width: int,
    nodes: int,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ngram_chain`."""
    assert history.stride(1) == 1, "a text's tokens lie side by side"
    count, blocks = slots.shape[0], triton.cdiv(width, BLOCK)
    found = roots.new_empty(count, blocks)
    tokens, positions = roots.new_empty(count, nodes), roots.new_empty(count, nodes)
    _suffix_search_kernel[(count, blocks)](
        history,
        slots,
        kv_lens,
        found,
        width,
        history.stride(0),
        MOST=most,
        BLOCK=BLOCK,
        **turns(slots),
    )
    _ngram_chain_kernel[(count,)](
        history,
        slots,
        roots,
        kv_lens,
        found,
        tokens,
        positions,
        width,
        history.stride(0),
        blocks,
        nodes,
        BLOCKS=block_of(blocks),
        NODES=block_of(nodes),
        **turns(slots),
    )
    return tokens, positions


def ngram_chain(
    history: torch.Tensor,
    slots: torch.Tensor,
    roots: torch.Tensor,
    kv_lens: torch.Tensor,
    width: int,
    nodes: int,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, positions) int64[B, nodes] of chains: roots, then what followed their suffixes.

    history int64[S, M] holds texts, row `slots[b]` known up to place kv_lens[b], which is less than
    `width`; slots, roots and kv_lens are int64[B]. Suffixes of `most` tokens at most are looked up.
    Where nothing matches the chain is the text from its second token on.
    """
    run = ngram_chain_triton if runs_kernels(slots) else ngram_chain_reference
    return run(history, slots, roots, kv_lens, width, nodes, most)


def cost(requests: int, width: int, nodes: int, most: int) -> tuple[int, int]:
    """(operations, bytes) of chains for so many requests with texts of `width` tokens."""
    return requests * width * most, 8 * requests * (width * most + 3 * nodes)
