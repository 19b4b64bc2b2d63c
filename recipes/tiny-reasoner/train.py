"""Train tiny-reasoner. Writes model.safetensors, every mark and train.json under --out; measure.py comes after.

python recipes/tiny-reasoner/train.py --out runs/tiny-reasoner                      # one GPU, a few minutes
python recipes/tiny-reasoner/train.py --out runs/dry --device cpu --steps 4 --cool-steps 2 --batch-tokens 2432 \\
    --workers 1 --marks 1.0 --aim-levels 0 --dry                                    # does every part work?

The trunk trains at a constant rate. At each mark a copy is cooled down (its rate falls to nothing) and saved, so the
marks are models of rising skill. The one nearest to --aim on --aim-kinds at --aim-levels becomes model.safetensors:
reinforcement learning needs a model that is right about half of the time.
"""

from __future__ import annotations

import argparse
import copy
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
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from data import Batches  # noqa: E402
from folder import load_weights, new_config, new_model, stored_weights  # noqa: E402
from sampling import accuracy_table  # noqa: E402

from sparroll.tasks.synthetic.kinds import KINDS  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="weights to start from instead of random ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trunk-minutes", type=float, default=6.5, help="training at the constant rate")
    parser.add_argument("--steps", type=int, default=0, help="trunk of this many steps instead of --trunk-minutes")
    parser.add_argument("--marks", type=float, nargs="+", default=[0.4, 0.55, 0.7, 0.85, 1.0])
    parser.add_argument("--cool-steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--aim", type=float, default=0.5)
    parser.add_argument("--aim-kinds", nargs="+", default=["add", "chain"])
    parser.add_argument("--aim-levels", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--dry", action="store_true", help="tiny measurements only")
    return parser.parse_args()


def response_loss(model, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    inside = labels >= 0
    return F.cross_entropy(model.lm_head(hidden[inside]).float(), labels[inside])


class Trainer:
    """Model, optimizer and data; one `step` at a given rate."""

    def __init__(self, args, model) -> None:
        self.args, self.model = args, model
        weights = [p for p in model.parameters() if p.dim() > 1]
        gains = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=args.device == "cuda")
        self.batches = Batches(args.workers, args.seed, args.batch_tokens)
        self.steps = self.tokens = 0
        self.losses: list[torch.Tensor] = []

    def step(self, lr: float) -> None:
        ids, labels = (part.to(self.args.device, non_blocking=True).long() for part in next(self.batches))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(self.args.device, dtype=torch.bfloat16):
            loss = response_loss(self.model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())
        self.steps, self.tokens = self.steps + 1, self.tokens + ids.numel()

    def mean_loss(self) -> float:
        """Over the steps since the last call."""
        mean, self.losses = torch.stack(self.losses).mean().item(), []
        if not math.isfinite(mean):
            raise SystemExit(f"loss is {mean} at step {self.steps}\nhint: lower --lr (now {self.args.lr})")
        return round(mean, 4)

    def cooled(self) -> dict[str, torch.Tensor]:
        """Weights as stored, after a cool-down from here; the trunk is put back where it was."""
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.steps, self.tokens))
        for done in range(self.args.cool_steps):
            self.step(self.args.lr * (1 - done / self.args.cool_steps))
        print(f"  cooled: loss {self.mean_loss()}", flush=True)
        weights = stored_weights(self.model)
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.steps, self.tokens = saved[2:]
        return weights


def train(args, model, record: dict) -> list[dict[str, torch.Tensor]]:
    """The cooled weights at each mark."""
    trainer = Trainer(args, model)
    next(trainer.batches)
    marks, cooled, paused, began = list(args.marks), [], 0.0, time.time()
    while marks:
        seconds = time.time() - began - paused
        progress = trainer.steps / args.steps if args.steps else seconds / (60 * args.trunk_minutes)
        trainer.batches.set_progress(min(progress, 0.9999))
        if progress >= marks[0]:
            pause = time.time()
            print(f"mark {marks.pop(0)}: step {trainer.steps}", flush=True)
            cooled.append(trainer.cooled())
            save_file(cooled[-1], args.out / f"mark-{len(cooled) - 1}.safetensors", metadata={"format": "pt"})
            record["marks"].append(quick_look(args, cooled[-1]) | {"step": trainer.steps, "tokens": trainer.tokens})
            paused += time.time() - pause
            continue
        trainer.step(args.lr * min(1.0, (trainer.steps + 1) / 300))
        if trainer.steps % 250 == 0 or args.steps:
            point = {"step": trainer.steps, "tokens": trainer.tokens, "seconds": round(seconds, 1)}
            record["loss_curve"].append(point | {"loss": trainer.mean_loss()})
            print(record["loss_curve"][-1], flush=True)
    trainer.batches.close()
    record["train_seconds"] = round(time.time() - began, 1)
    return cooled


def quick_look(args, weights) -> dict:
    count = 128 if not args.dry else 2
    model = load_weights(new_model(new_config(), 0), weights).to(args.device)
    table, _ = accuracy_table(model, args.aim_levels, count, KINDS, math.inf)
    aimed = [row["accuracy"] for row in table if row["kind"] in args.aim_kinds]
    return {"aimed_accuracy": sum(aimed) / len(aimed), "accuracy": table}


def new_record(args, model) -> dict:
    gpu = torch.cuda.get_device_name(0) if args.device == "cuda" else None
    return {
        "config": {name: value for name, value in vars(args).items() if name not in ("out", "commit", "init")},
        "init": args.init.name if args.init else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "commit": args.commit,
        "hardware": {"gpu": gpu, "cpus": os.cpu_count(), "machine": platform.machine()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seed": args.seed,
        "loss_curve": [],
        "marks": [],
    }


def main() -> None:
    began, args = time.time(), arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    model = new_model(new_config(), args.seed)
    if args.init:
        load_weights(model, load_file(args.init))
    model.to(args.device)
    record = new_record(args, model)
    cooled = train(args, model, record)
    off = [abs(mark["aimed_accuracy"] - args.aim) for mark in record["marks"]]
    record["chosen_mark"] = chosen = off.index(min(off))
    save_file(cooled[chosen], args.out / "model.safetensors", metadata={"format": "pt"})
    record["wall_seconds"] = round(time.time() - began, 1)
    (args.out / "train.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"chose mark {chosen}; wrote {args.out / 'train.json'}", flush=True)


if __name__ == "__main__":
    main()
