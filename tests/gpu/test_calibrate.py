"""The profile of a GPU: measured within a minute, and near what the device is known for."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch

from eyas.report.calibrate import calibrate
from eyas.report.options import CalibrateConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_gpus_profile() -> None:
    """Fault: a figure of an idle clock, of an empty graph, or of a cache instead of memory."""
    start = perf_counter()
    found = calibrate(CalibrateConfig(device="cuda"))
    assert perf_counter() - start < 60
    assert found.read_gb_s > 0.5 * found.copy_gb_s > 100
    assert found.cache_gb_s >= found.read_gb_s
    large = found.linear_us.points[-1]
    assert 0.5 * found.read_gb_s < large[0] / large[1] / 1e3 < 1.1 * found.read_gb_s
    assert 0.3 < found.node_us < 5 < found.eager_us < 200
    assert found.rows_factor(16) < 1.3
    for curve in (found.attention_us, found.latent_us, found.experts_us):
        assert curve.points[-1][1] > curve.points[0][1] > 1
    assert found.host_us > found.decode_us > 5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_collectives_of_two_gpus() -> None:
    """Fault: graphs with collectives that hang, or a size that costs nothing."""
    found = calibrate(CalibrateConfig(device="cuda", tp=2, seconds=0.05))
    (table,) = found.collectives
    assert (table.kind, table.ranks) == ("nccl", 2)
    assert all(2 < us < 1000 for _, us in table.us.points)
    assert found.skew_us < 100
