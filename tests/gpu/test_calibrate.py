"""The profile of a GPU: measured within a minute, and near what the device is known for."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import pytest
import torch

from eyas.report.calibrate import calibrate
from eyas.report.options import CalibrateConfig
from eyas.report.timing import Timer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_gpus_profile() -> None:
    """Fault: a figure of an idle clock, of an empty graph, or of a cache instead of memory."""
    calibrate(CalibrateConfig(device="cuda", seconds=0.001))  # kernels compile
    start = perf_counter()
    found = calibrate(CalibrateConfig(device="cuda"))
    assert perf_counter() - start < 60
    assert found.read_gb_s > 0.5 * found.copy_gb_s > 100
    assert found.cache_gb_s >= found.read_gb_s
    large = found.linear_us.points[-1]
    assert 0.5 * found.read_gb_s < large[0] / large[1] / 1e3 < 1.1 * found.read_gb_s
    assert 0.3 < found.node_us < 5 < found.eager_us < 200
    assert found.rows_factor(16) < 1.3
    assert found.experts_us.points[-1][1] > found.experts_us.points[0][1] > 1
    for times in (found.attention_us, found.narrow_us, found.latent_us):
        for _, over_rows in times.members:
            for _, curve in over_rows.members:
                (num_bytes, us), (_, least) = curve.points[-1], curve.points[0]
                assert us > least > 1
                assert num_bytes / us / 1e3 < 1.1 * found.read_gb_s, "of a cache"
            assert over_rows(1e9, num_bytes) > 0.95 * over_rows(1, num_bytes)
    assert all(0.9 < factors(2) < 1.2 for _, factors in found.small_rows_factor.members)
    assert found.host_us > found.decode_us > 5


def test_handing_a_graph_over_is_not_timed() -> None:
    """Fault: what a graph's start takes, divided among its kernels, in the time of each."""
    device = torch.device("cuda")
    one, cushion = (torch.zeros(n, device=device) for n in (1, 2**27))
    times = [
        Timer(device=device, seconds=0.1, cushion=read).us([partial(one.add_, 1)])
        for read in (None, cushion)
    ]
    assert times[1] < times[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_collectives_of_two_gpus() -> None:
    """Fault: graphs with collectives that hang, or a size that costs nothing."""
    found = calibrate(CalibrateConfig(device="cuda", tp=2, seconds=0.05))
    (table,) = found.collectives
    assert (table.kind, table.ranks) == ("nccl", 2)
    assert all(2 < us < 1000 for _, us in table.us.points)
    assert found.skew_us < 100
