"""A GPU's clock at work, as the driver's tool tells it."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from eyas.gpu_state import GpuState, answer_beside, parsed, state_under

LINE = "1530, 1980, 696.54, 54, 0x0000000000000004\n"


def test_an_answer_is_a_state() -> None:
    """Faults: columns mixed up; a limit of power that is not told."""
    assert parsed(LINE) == GpuState(
        clock_mhz=1530,
        most_mhz=1980,
        power_w=696.54,
        celsius=54,
        held_by=("the limit of its power",),
    )
    assert parsed("1980, 1980, 240, 44, 0x0\n").held_by == ()  # type: ignore[union-attr]
    idle = parsed("345, 1980, 78.04, 39, 0x0000000000000001\n")
    assert idle is not None and idle.held_by == (), "an idle GPU is not held back"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "1530, 1980\n",
        "1530, 1980, [N/A], 54, 0x4\n",
        'Field "x" is not a valid field\n',
        "a,b,c",
    ],
)
def test_what_is_no_answer_is_no_state(answer: str) -> None:
    """Fault: a run that fails for want of a number that only describes it."""
    assert parsed(answer) is None


def test_work_goes_on_until_there_is_an_answer() -> None:
    """Faults: a state of a GPU that has nothing to do; words cut off."""
    times: list[float] = []

    def work() -> None:
        times.append(time.perf_counter())
        time.sleep(0.01)

    program = "import time; time.sleep(0.3); print('word ' * 1000)"
    start = time.perf_counter()
    answer = answer_beside(work, [sys.executable, "-c", program])
    assert answer.split() == ["word"] * 1000
    assert len(times) > 3 and times[-1] - start > 0.2


def test_a_tool_that_hangs_is_left_alone() -> None:
    """Fault: a run that never ends since the driver's tool does not answer."""
    start, count = time.perf_counter(), 0

    def work() -> None:
        nonlocal count
        count += 1
        time.sleep(0.01)

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert answer_beside(work, command, patience=0.2) == ""
    assert count and time.perf_counter() - start < 30


def test_a_failure_of_the_work_is_not_hidden() -> None:
    """Fault: a process left behind, or an engine's error lost."""

    def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        answer_beside(work, [sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_cpu_has_none_and_works_not_at_all() -> None:
    """Fault: work done for nothing."""
    assert state_under(lambda: pytest.fail("it worked"), torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_tells_its_clock() -> None:
    """Faults: a query that the driver refuses; another GPU's state."""
    x, count = torch.ones(4096, 4096, device="cuda"), 0

    def work() -> None:
        nonlocal count
        torch.mm(x, x)
        torch.cuda.synchronize()
        count += 1

    state = state_under(work, torch.device("cuda"))
    assert state is not None and count >= 1
    assert 100 < state.clock_mhz <= state.most_mhz and state.power_w > 10 and state.celsius > 0
