"""Our Llama against transformers' on tiny random checkpoints; the checks are in `beside.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.models.registry import load_target
from tests.models.beside import (
    CPU,
    Pair,
    check_both_conventions,
    check_boundaries,
    check_chunks,
    check_prefill,
    check_single_tokens,
    check_training_forward,
    check_tree,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {"rope_parameters": YARN},
    "wide heads": {"head_dim": 32},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    save_llama: Callable[..., Any],
) -> Pair:
    """Ours and transformers' network of one tiny checkpoint."""
    folder: Path = tmp_path_factory.mktemp("llama")
    reference = save_llama(folder, **VARIANTS[request.param])
    return load_target(folder, torch.float32, CPU), reference


def test_one_shot_prefill(pair: Pair) -> None:
    """Fault: wrong arithmetic anywhere in the network (biases, tied head, rope, groups)."""
    check_prefill(pair)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_chunked_prefill(pair: Pair, page_size: int) -> None:
    """Fault: chunk edges."""
    check_chunks(pair, page_size)


def test_forward_of_training(pair: Pair) -> None:
    """Fault: training on other states than serving computes."""
    check_training_forward(pair)


def test_token_by_token(pair: Pair) -> None:
    """Fault: decode differs from prefill."""
    check_single_tokens(pair)


@pytest.mark.parametrize("count", [5, 24])
def test_verify_pass_over_a_random_tree(pair: Pair, count: int) -> None:
    """Fault: stale mask or wrong positions in verify."""
    check_tree(pair, count)


def test_aux_states_are_the_boundaries(pair: Pair) -> None:
    """Fault: aux layer ids off by one (v#43671)."""
    check_boundaries(pair)


def test_outputs_are_the_next_boundaries(pair: Pair) -> None:
    """Fault: ids of outputs read as boundaries."""
    check_both_conventions(pair)
