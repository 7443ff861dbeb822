"""Train a small DeepSeek-V3-style model (MLA, 16 experts) on text that SmolLM2 wrote.

The network and its backward pass are transformers' own `DeepseekV3ForCausalLM`, so that eyas is
tested on weights that were not made by eyas. The result is a checkpoint folder in DeepSeek's block
FP8 with SmolLM2's tokenizer. Text comes from `eyas train --stage data --model smollm2`.

    python recipes/small_deepseek.py --texts run-0/text.safetensors --folder small-deepseek

Experts are balanced without an auxiliary loss, by moving the router's correction bias against the
load of the step before (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import rich
import torch
import torch.nn.functional as F
import transformers
from rich.progress import Progress
from safetensors.torch import save_file

from eyas.checkpoint import resolve
from eyas.fingerprint import fingerprint
from eyas.train.corpus import Corpus

BLOCK = 128
"""Side of an FP8 block that shares a scale."""
BIAS_STEP = 2e-3
"""How far a step moves the correction bias."""


def model_config(vocab_size: int, eos: int) -> Any:
    """27 M parameters: 8 layers of 256, the first dense, 16 experts of which 4 are taken."""
    return transformers.DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )


class Balance:
    """Counts what each layer's router chose and moves its correction bias."""

    def __init__(self, model: Any) -> None:
        self.layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.counts: list[torch.Tensor] = []
        for moe in self.layers:
            count = torch.zeros_like(moe.gate.e_score_correction_bias)
            self.counts.append(count)
            moe.gate.register_forward_hook(self._counting(moe, count))

    @staticmethod
    def _counting(moe: Any, count: torch.Tensor) -> Any:
        def counted(gate: Any, _: Any, output: Any) -> None:
            if isinstance(output, tuple):
                ids = output[-1]
            else:  # releases whose gate gives the logits alone: the choice, groups left out
                scores = output.sigmoid() + gate.e_score_correction_bias
                ids = scores.topk(moe.config.num_experts_per_tok).indices
            count.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=count.dtype))

        return counted

    @torch.no_grad()
    def move(self) -> torch.Tensor:
        """Push the bias of busy experts down; returns the worst load over the mean load."""
        worst = torch.ones((), device=self.counts[0].device)
        for moe, count in zip(self.layers, self.counts, strict=True):
            mean = count.mean()
            worst = torch.maximum(worst, count.max() / mean)
            moe.gate.e_score_correction_bias += BIAS_STEP * torch.sign(mean - count)
            count.zero_()
        return worst


def rows_of(texts: list[str], length: int) -> torch.Tensor:
    """All documents one behind the other, cut into rows int32[n, length + 1]."""
    corpora = [Corpus.load(Path(text)) for text in texts]
    merged = Corpus.merge(corpora, 0) if len(corpora) > 1 else corpora[0]
    tokens = torch.from_numpy(merged.tokens)
    count = (len(tokens) - 1) // length
    return tokens[: count * length + 1].unfold(0, length + 1, length).contiguous()


def train(model: Any, rows: torch.Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """AdamW with warm-up and cosine; ends after `args.minutes`. Returns the last figures."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    balance, device = Balance(model), next(model.parameters()).device
    held, rows = rows[:64].to(device).long(), rows[64:]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows), generator=generator)
    start, step, place, total = time.monotonic(), 0, 0, 0.0
    log: list[dict[str, float]] = []
    with Progress() as bar:
        task = bar.add_task("training", total=args.minutes * 60)
        while True:
            elapsed = time.monotonic() - start
            share = elapsed / (60 * args.minutes)
            if share >= 1 or step >= args.steps:
                break
            if place + args.batch > len(rows):
                order, place = torch.randperm(len(rows), generator=generator), 0
            batch = rows[order[place : place + args.batch]].to(device).long()
            place += args.batch
            warm = min(1.0, (step + 1) / 100)
            rate = args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
            for group in optimiser.param_groups:
                group["lr"] = rate
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            worst = balance.move()
            step, total = step + 1, total + batch.shape[0] * (batch.shape[1] - 1)
            if step % 50 == 0:
                figures = {
                    "step": step,
                    "loss": round(loss.item(), 4),
                    "worst_load": round(worst.item(), 2),
                    "tokens_per_s": round(total / (time.monotonic() - start)),
                }
                log.append(figures)
                bar.update(task, completed=elapsed, description=json.dumps(figures))
    model.eval()
    with torch.no_grad():
        held_loss = sum(loss_of(model, part).item() for part in held.split(16)) / 4
    return {"steps": step, "tokens": total, "held_out_loss": round(held_loss, 4), "log": log[-1:]}


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of rows int64[b, length + 1]."""
    kind = batch.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        logits = model(batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def quantised(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in e4m3 with the scale of every 128 x 128 block; other tensors in bfloat16."""
    if weight.dim() != 2 or name.endswith("gate.weight"):
        keep = torch.float32 if name.endswith("bias") else torch.bfloat16
        return {name: weight.to(keep)}
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    small = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return {name: small.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def save(model: Any, folder: Path, tokenizer: Path, facts: dict[str, Any]) -> None:
    """Write config, FP8 weights, tokenizer files and the run's figures."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "plain"
    model.to(torch.bfloat16).save_pretrained(plain)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in transformers.modeling_utils.load_state_dict(
        plain / "model.safetensors"
    ).items():
        tensors |= quantised(name, weight)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, folder / file)
    shutil.rmtree(plain)
    (folder / "run.json").write_text(json.dumps(facts, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = resolve("smollm2")
    known = json.loads((tokenizer / "config.json").read_text())
    model = transformers.DeepseekV3ForCausalLM(model_config(known["vocab_size"], 2)).to(device)
    size = sum(p.numel() for p in model.parameters())
    figures = train(model, rows_of(args.texts, args.length), args)
    facts = {"parameters": size, "args": vars(args), **figures, "machine": fingerprint()}
    save(model, Path(args.folder), tokenizer, facts)
    shown = {k: facts[k] for k in ("parameters", "steps", "tokens", "held_out_loss")}
    rich.print(json.dumps(shown))


if __name__ == "__main__":
    main()
