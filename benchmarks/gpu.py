"""Builds, checks and times the engine on a GPU, and holds it against goals, floors and peers.

Real model shapes with random weights (one-layer EAGLE-3 drafter, 32,000 draft tokens), greedy,
prompts of 512 random tokens; a figure is the median of repeats within one run. Other parts take
real weights, attention alone, a process's start. Goals and peers stand in `gpu_parts/goals.py`.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --parts cycles waits --shapes llama-3.1-8b --seconds 300
    python benchmarks/gpu.py --parts start attention real

Nothing starts that would not end within `--seconds`; what was left out is listed. The record is
written after every figure, so a run that is cut short leaves what it found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_parts.builds import SPECS, Builds
from gpu_parts.parts import MAIN, PARTS, Options, units
from gpu_parts.record import Clock, Record, show
from rich.console import Console

from eyas.fingerprint import fingerprint

SIMULATED = "random weights, but in rows with the word real"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    epilog = "\n".join(f"  {name:15s}{part.help}" for name, part in PARTS.items())
    made = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"parts:\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    made.add_argument("--shapes", nargs="+", default=list(MAIN), help="shapes, or folders")
    made.add_argument("--runs", nargs="+", default=list(SPECS), choices=list(SPECS))
    made.add_argument("--batches", nargs="+", type=int, default=[], help="of cycles")
    made.add_argument("--seconds", type=float, default=3600.0, help="of the whole run")
    made.add_argument("--tokens", type=int, default=384, help="of an answer with real weights")
    made.add_argument("--tp", type=int, default=2, help="ranks of the part tp")
    made.add_argument("--device", default="cuda", help="cpu tries the script out, no more")
    made.add_argument("--json", type=Path)
    return made


def main(arguments: list[str] | None = None) -> Record:
    """Run the parts asked for, print goals, write the record."""
    args = parser().parse_args(arguments)
    flags = {name: str(value) if name == "json" else value for name, value in vars(args).items()}
    record = Record(
        Clock.of(args.seconds),
        Console(width=120),
        args.json,
        {"simulated": SIMULATED, "flags": flags, "provenance": fingerprint()},
    )
    options = Options(
        shapes=tuple(args.shapes),
        runs=tuple(args.runs),
        batches=tuple(args.batches),
        num_tokens=args.tokens,
        tp=args.tp,
    )
    builds = Builds(args.device)
    record.run(units(args.parts, options, builds))
    builds.free()
    show(record)
    return record


if __name__ == "__main__":
    main()
