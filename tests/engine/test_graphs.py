"""What a graph runs and what runs without one, where no GPU is: decisions alone."""

from __future__ import annotations

import pytest

from eyas.batch import PassShape
from eyas.engine.graphs import GraphKey, Reason, buckets
from tests.helpers import make_engine, tiny_target


def shape(num_requests: int) -> PassShape:
    return PassShape(
        num_requests=num_requests, num_new=1, max_kv_len=64, sampled=False, filtered=False
    )


def test_more_requests_than_captured_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: batches that became slower without a word, or a word at every cycle."""
    engine = make_engine(tiny_target(), max_running_requests=6, cuda_graph_max_bs=3)
    graphs = engine.runner.graphs
    assert graphs.decide(shape(6)) is Reason.NO_GPU
    graphs._why_not = None
    assert buckets(engine.config) == [1, 2, 3]
    assert graphs.decide(shape(3)) == GraphKey(3, False, False)
    assert capsys.readouterr().err == ""
    for _ in range(3):
        reason = graphs.decide(shape(4))
        assert reason is Reason.BATCH_NOT_CAPTURED
        graphs.counts[reason] += 1
    told = capsys.readouterr().err
    assert told.count("warning: 4 requests at once") == 1
    assert "up to 3; raise cuda_graph_max_bs" in told
