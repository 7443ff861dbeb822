"""What a trace's record says, in a few sentences."""

from __future__ import annotations

from typing import Any

from eyas.report.traces.collectives import latest

NOTABLE = 0.05
"""Share of a cycle from which on a cause of idle time is named."""


def verdict(run: dict[str, Any]) -> str:
    """The sentences, of a record of one run."""
    if run["cycle_ms"] is None:
        return (
            f"No repeating cycle was found in {run['totals']['kernels']} kernels "
            f"({run['totals']['device_ms']:.2f} ms of device time): trace at least three steps."
        )
    what = {"speculative": "A speculative cycle", "decode": "A decode step"}
    cycle, device = run["cycle_ms"], run["device_ms"]
    sentences = [
        f"{what.get(run['kind'], 'A cycle')} takes {cycle:.2f} ms as traced: the device works "
        f"{run['busy_ms']:.2f} ms ({run['busy_ms'] / cycle:.0%}) and idles {run['idle_ms']:.2f} ms."
    ]
    causes = [f"{ms:.2f} ms {name}" for name, ms in ranked(run["idle"]) if ms >= NOTABLE * cycle]
    if causes:
        sentences.append(f"Idle: {', '.join(causes)} (profiling slows the host: an upper bound).")
    name, most = ranked(run["components"])[0]
    sentences.append(f"Most device time goes to {name}: {most:.2f} ms, {most / device:.0%}.")
    sentences += _waiting(run)
    sentences += _against(run)
    if run["unexplained_fraction"] > NOTABLE:
        sentences.append(f"{run['unexplained_fraction']:.0%} of the cycle is unexplained.")
    return " ".join(sentences)


def ranked(parts: dict[str, float]) -> list[tuple[str, float]]:
    """Parts by size, the largest first."""
    return sorted(parts.items(), key=lambda item: -item[1])


def _waiting(run: dict[str, Any]) -> list[str]:
    shared = run["collectives"]
    if not shared:
        return []
    wait = max(shared["waiting_ms"].values())
    rank = latest(shared)
    return [
        f"Collectives: {shared['transfer_ms']:.2f} ms transfer, up to {wait:.2f} ms waiting for "
        f"the slowest rank; rank {rank} comes last in {shared['last'][rank]:.0%}."
    ]


def _against(run: dict[str, Any]) -> list[str]:
    beside = run.get("against_decode")
    if not beside:
        return []
    over = beside["verify_ms"] - beside["decode_ms"]
    most = beside["extra"][0]
    sentences = [
        f"Verify takes {beside['verify_ms']:.2f} ms of device time against "
        f"{beside['decode_ms']:.2f} ms of decode ({over:+.2f}), most of it in {most['name']} "
        f"({most['ms']:+.2f}).",
        f"Speculation pays above {beside['break_even']:.2f} tokens a cycle as traced, above "
        f"{beside['break_even_device']:.2f} by device time.",
    ]
    if beside["speedup"]:
        sentences.append(f"With {run['accept_length']:.2f} it is {beside['speedup']:.2f} x.")
    return sentences
