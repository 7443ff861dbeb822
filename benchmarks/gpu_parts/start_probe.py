"""A process from its start to a first token, as JSON on its last line: run by `start.py`.

    python benchmarks/gpu_parts/start_probe.py MODEL DEVICE SINCE

SINCE is the clock when the process was started. Weights are drawn on the device, not read.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from eyas import LLM, EngineConfig, SamplingParams, SpeculationConfig

PROMPT = 512


def main() -> None:
    """Build, capture, answer one prompt, print seconds."""
    model, device, since = sys.argv[1], sys.argv[2], float(sys.argv[3])
    imported = time.time()
    config = EngineConfig(
        device=device, load_format="dummy", context_length=PROMPT + 512, chunked_prefill_size=PROMPT
    )
    llm = LLM(model, speculation=SpeculationConfig.chain(3), config=config)
    built = time.time()
    runner = llm.engine.runner
    capture, trial = runner.graphs.capture_seconds, runner.row_check.seconds
    vocab = llm.target_config.vocab_size
    prompt = torch.randint(vocab, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    request = llm.engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    while not request.output:
        llm.engine.step()
    first = time.time()
    found = {
        "import": imported - since,
        "build": built - imported - capture - trial,
        "trial of rows": trial,
        "capture": capture,
        "first prefill": first - built,
        "start to first token": first - since,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
