"""A request whose activations overflow spoils itself alone.

One token's embedding is not finite, as an overflow in float16 would make it. The pages such a
request wrote are read by others: masked, beside theirs, or after it has gone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.kv.pool import KVPool
from eyas.model_config import AttentionShape
from tests.helpers import (
    NONE,
    TREES,
    VOCAB,
    Job,
    ScriptedDrafter,
    alone,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)

CURSED = VOCAB - 1
JOBS = [
    Job(prompt=p, params=SamplingParams(max_tokens=15, temperature=t, seed=3))
    for p, t in zip(random_prompts([9, 20, 5], vocab=60), (0.0, 1.0, 0.0), strict=True)
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [NONE, chain(3), TREES[1]], ids=lambda s: str(s.eagle_topk))
@pytest.mark.parametrize("config", [{}, {"max_running_requests": 1, "page_size": 4}], ids=str)
def test_others_are_unharmed(
    shape: SpeculationConfig, value: float, config: dict[str, Any]
) -> None:
    """Fault: padded or hidden rows read memory that is not theirs (s#25512, v PR#43682)."""
    target = tiny_target()
    target.embed.weight.data[CURSED] = value
    expected = alone(target, JOBS)
    bad = Job(prompt=(1, CURSED, 2), params=SamplingParams(max_tokens=6))
    requests = run_all(make_engine(target, tiny_drafter(), shape, **config), [bad, *JOBS])
    assert outputs(requests[1:]) == expected


def test_a_drafted_token_harms_no_sibling() -> None:
    """Fault: a draft that overflows reaches the nodes beside it, or the tokens after it."""
    target = tiny_target()
    target.embed.weight.data[CURSED] = torch.nan
    expected = alone(target, JOBS)
    texts = [[*j.prompt, *text] for j, text in zip(JOBS, expected, strict=True)]
    shape = SpeculationConfig(num_steps=2, eagle_topk=3, num_draft_tokens=7)

    class Cursing(ScriptedDrafter):
        def _drafts(self, context: Any, row: int) -> list[int]:
            drafts = super()._drafts(context, row)
            right = set(drafts[self._place(0) :: 3][:1]) | {drafts[3 + self._place(1)]}
            return [token if token in right else CURSED for token in drafts]

    engine = make_engine(target, Cursing(texts, shape), shape)
    requests = run_all(engine, JOBS)
    assert outputs(requests) == expected
    assert all(max(r.accept_lengths) > 1 for r in requests)


def test_the_pool_keeps_finite_values_only() -> None:
    """What is not finite is stored as zero."""
    pool = KVPool(
        AttentionShape.heads(1, 1, 4),
        num_pages=2,
        page_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    values = torch.tensor([[[1.0, torch.nan, torch.inf, -torch.inf]]])
    pool.write(0, torch.tensor([5]), values, values.bfloat16())
    assert pool.k[0, 0, 5].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert pool.v[0, 0, 5].tolist() == [1.0, 0.0, 0.0, 0.0]
