"""Plain decoding of eyas against transformers' `generate`: same weights, dtype, threads, prompts.

    python benchmarks/plain_against_transformers.py [--rounds 3] [--tokens 64] [--json FILE]

Greedy, batch 1, CPU, bfloat16; the two take turns, after one answer each to warm up. Rates count
written tokens over the whole call, prefill included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from eyas import LLM, EngineConfig, SamplingParams, SpeculationConfig
from eyas.checkpoint import resolve
from eyas.fingerprint import fingerprint
from eyas.report.prompts import PROMPTS


def main() -> None:
    """Time both on the built-in prompts and report medians and the ratio of pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = EngineConfig(device="cpu", dtype="bfloat16", max_running_requests=1)
    plain = SpeculationConfig(algorithm="NONE")
    llm = LLM("smollm2", drafter=None, speculation=plain, config=config)
    folder = resolve("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)

    def ours(ids: list[int]) -> float:
        start = time.perf_counter()
        llm.generate([ids], params)
        return options.tokens / (time.perf_counter() - start)

    def theirs(ids: list[int]) -> float:
        start = time.perf_counter()
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=options.tokens,
            min_new_tokens=options.tokens,
            do_sample=False,
        )
        return options.tokens / (time.perf_counter() - start)

    prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) for _, text in PROMPTS[:3]]
    ours(prompts[0])
    theirs(prompts[0])
    pairs = [(ours(ids), theirs(ids)) for _ in range(options.rounds) for ids in prompts]
    record = {
        "eyas_tok_per_s": statistics.median(a for a, _ in pairs),
        "transformers_tok_per_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
        "pairs": pairs,
        "tokens": options.tokens,
        "provenance": fingerprint(),
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    Console().print_json(json.dumps(record))


if __name__ == "__main__":
    main()
