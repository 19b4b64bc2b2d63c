"""Train tiny-reasoner from scratch and measure it. Writes checkpoints and result.json under --out; ends by itself at --minutes.

python recipes/tiny-reasoner/train.py --out runs/tiny-reasoner                       # one GPU, about ten minutes
python recipes/tiny-reasoner/train.py --out runs/dry --device cpu --steps 5 --dry     # does every part work?
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from data import Batches  # noqa: E402
from folder import new_config, new_model, round_to_stored, save_weights, write_folder  # noqa: E402
from sampling import accuracy_table  # noqa: E402
from tail_probe import acceptance_by_bin  # noqa: E402

from sparroll.tasks.synthetic import LEVELS  # noqa: E402
from sparroll.tasks.synthetic_kinds import KINDS  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--train-minutes", type=float, default=6.3)
    parser.add_argument("--minutes", type=float, default=9.5, help="whole run, measuring included")
    parser.add_argument("--steps", type=int, default=0, help="train this many steps instead of --train-minutes")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--dry", action="store_true", help="measure a few short problems only")
    return parser.parse_args()


def learning_rate(args, step: int, progress: float) -> float:
    """Warm up over 300 steps, hold, then fall to nothing over the last 40 %."""
    return args.lr * min(1.0, (step + 1) / 300) * min(1.0, max(0.0, (1 - progress) / 0.4))


def response_loss(model, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    inside = labels >= 0
    return F.cross_entropy(model.lm_head(hidden[inside]).float(), labels[inside])


def train(args, model, record: dict, began: float) -> None:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=args.device == "cuda")
    batches = Batches(args.workers, args.seed, args.batch_tokens)
    next(batches)
    started, step, tokens, saved, summed = time.time(), 0, 0, 0, []
    bf16 = torch.autocast(args.device, dtype=torch.bfloat16)
    while True:
        spent = time.time() - started
        progress = step / args.steps if args.steps else spent / (60 * args.train_minutes)
        batches.set_progress(min(progress, 0.9999))
        if progress >= saved / args.checkpoints and saved:
            save_weights(model, args.out / f"checkpoint-{saved}of{args.checkpoints}.safetensors")
        saved = max(saved, int(progress * args.checkpoints) + 1)
        if progress >= 1:
            break
        ids, labels = (part.to(args.device, non_blocking=True).long() for part in next(batches))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, progress)
        with bf16:
            loss = response_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens, step = tokens + ids.numel(), step + 1
        summed.append(loss.detach())
        if step % 250 == 0 or args.steps:
            mean_loss, summed = torch.stack(summed).mean().item(), []
            point = {"step": step, "tokens": tokens, "seconds": round(time.time() - started, 1), "loss": round(mean_loss, 4)}
            record["loss_curve"].append(point)
            print(point | {"waiting": batches.waiting()}, flush=True)
            if not math.isfinite(mean_loss):
                raise SystemExit(f"loss is {mean_loss} at step {step}")
    batches.close()
    record["train_seconds"] = round(time.time() - started, 1)


def measure(args, model, record: dict, deadline: float) -> None:
    levels, count, keep = (LEVELS, 256, 24) if not args.dry else (LEVELS[:2], 4, 2)
    round_to_stored(model)
    model.eval()
    with torch.autocast(args.device, enabled=False):
        print("sampled accuracy", flush=True)
        record["accuracy"], samples = accuracy_table(model, levels, count, KINDS, deadline, keep=keep)
        write_record(args, record)
        budgets = (64, 96, 128, 192, 256, 384, 512, 768)
        settings = [(budget, page) for page in (16, 8, 4) for budget in budgets] if not args.dry else [(64, 16), (96, 4)]
        groups = [(kind, levels_of) for levels_of in ((1, 2, 3), (4, 5), (6, 7, 8)) for kind in KINDS]
        record["tail"] = []
        for kind, levels_of in groups:
            if time.time() > deadline:
                break
            pairs = [pair for level in levels_of for pair in samples.get((kind, level), [])]
            if pairs:
                rows = acceptance_by_bin(model, pairs, settings, 250, 8, deadline)
                record["tail"] += [{"kind": kind, "levels": levels_of, **row} for row in rows]
        write_record(args, record)
        print("greedy accuracy", flush=True)
        greedy_levels = LEVELS[:5] if not args.dry else LEVELS[:1]
        record["accuracy_greedy"], _ = accuracy_table(model, greedy_levels, count // 2, KINDS, deadline, greedy=True)
    write_record(args, record)


def write_record(args, record: dict) -> None:
    (args.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")


def hardware(device: str) -> dict:
    gpu = torch.cuda.get_device_name(0) if device == "cuda" else None
    return {"device": device, "gpu": gpu, "cpus": os.cpu_count(), "machine": platform.machine()}


def main() -> None:
    began, args = time.time(), arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    model = new_model(new_config(args.layers), args.seed).to(args.device)
    record = {
        "config": {k: v for k, v in vars(args).items() if k not in ("out", "commit")},
        "model": {"parameters": sum(p.numel() for p in model.parameters()), "layers": args.layers},
        "commit": args.commit, "hardware": hardware(args.device), "seed": args.seed,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()},
        "loss_curve": [],
    }
    write_folder(args.out / "folder", model.config) if args.dry else None
    train(args, model, record, began)
    write_record(args, record)
    measure(args, model, record, began + 60 * args.minutes)
    record["wall_seconds"] = round(time.time() - began, 1)
    write_record(args, record)
    print(f"wrote {args.out / 'result.json'}")


if __name__ == "__main__":
    main()
