"""Train the study's model from random weights. Writes weights-N.safetensors and train.json into --out.

python recipes/mismatch-study/pretrain.py --out runs/study-model                     # one GPU, 7 minutes with everything
python recipes/mismatch-study/pretrain.py --out runs/more --start-from runs/study-model --first-stage 2 --earlier-share 0.4
python recipes/mismatch-study/pretrain.py --out runs/dry --dry                       # does every part work? CPU, seconds

--minutes counts from the start of this process. Tables are short until lookups work, then grow stage by stage; the
next stage begins as soon as one is learned, or its time is over. The rate is constant after a
warm-up and falls over the last --cool-share of the time. Only responses count in the loss.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from lean_qwen3 import hidden_states, logits  # noqa: E402
from skill import skill  # noqa: E402
from study_folder import load_packed, new_config, new_model, pack, small_config, stored_weights, write_folder  # noqa: E402
from table_batches import EARLIER_SHARE, STAGES, Batches  # noqa: E402
from table_sums import LEVELS, Role, Shape, problem  # noqa: E402

from sparroll import files, records  # noqa: E402

LEARNED = {
    "lookup": (0.15, 0.1, 0.03),
    "sum": (0.3, 0.1, 0.05),
    "operand": (0.2, 0.06, 0.04),
    "header": (0.3, 0.1, 0.03),
}
"""A stage is learned when tokens of these roles go wrong no more often; the last number holds for all further stages."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="also write a transformers folder here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=6.8, help="from the start of the process to the last step")
    parser.add_argument(
        "--steps", type=int, default=0, help="stop after so many steps, or earlier when the time is over"
    )
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--cool-share", type=float, default=0.3)
    about = "in the loss, where others have 1: they cannot be foretold, but are a policy to be learned too"
    parser.add_argument("--remark-weight", type=float, default=0.5, help=about)
    about = "in the loss, where others have 1: few, and the last to be learned"
    parser.add_argument("--operand-weight", type=float, default=2.0, help=about)
    parser.add_argument("--start-from", type=Path, help="folder with weights-N.safetensors instead of random weights")
    parser.add_argument("--first-stage", type=int, default=0)
    parser.add_argument("--last-stage", type=int, default=len(STAGES) - 1)
    parser.add_argument("--earlier-share", type=float, default=EARLIER_SHARE, help="of batches: from stages before")
    parser.add_argument("--batch-tokens", type=int, help="instead of the stages' own")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--log-seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", help="for the record, where the sources are no checkout")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training forward, shapes dynamic")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--dry", action="store_true", help="small model, few steps, short tables")
    args = parser.parse_args()
    if args.dry:
        args.small, args.steps, args.batch_tokens, args.last_stage, args.workers = True, args.steps or 6, 2048, 1, 1
        args.warmup_steps, args.log_seconds, args.device = 2, 0.0, "cpu"
    return args


def response_loss(
    model, shape: Shape, ids_BS: torch.Tensor, weights: dict[Role, float], body=hidden_states
) -> torch.Tensor:
    """weights: of tokens by their role, 1 for roles that are not named."""
    hidden = body(model, ids_BS)[:, shape.prompt_tokens - 1 : -1]
    weight_T = torch.tensor([weights.get(role, 1.0) for role in map(Role, shape.roles)], device=hidden.device)
    scores = logits(model, hidden).flatten(0, 1)
    loss_BT = F.cross_entropy(scores, ids_BS[:, shape.prompt_tokens :].flatten(), reduction="none").view(
        len(ids_BS), -1
    )
    return (loss_BT * weight_T).mean() / weight_T.mean()


class Trainer:
    """Model, optimizer, data, clock and stage; one `step` at a time until `progress` reaches 1."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.batches = Batches(args.workers, args.seed, args.batch_tokens, args.first_stage, args.earlier_share)
        self.config = small_config() if args.small else new_config()
        began_with = load_packed(args.start_from, self.config) if args.start_from else new_model(self.config, args.seed)
        self.model = began_with.to(args.device).train()
        self.body = torch.compile(hidden_states, dynamic=True) if args.compile else hidden_states
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        gains = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=args.device == "cuda")
        self.role_weights = {Role.REMARK: args.remark_weight, Role.OPERAND: args.operand_weight}
        self.steps = self.tokens = 0
        self.stage = args.first_stage
        self.stage_began_step = 0
        self.losses: list[torch.Tensor] = []
        self.first_step_at: float | None = None

    @property
    def progress(self) -> float:
        by_clock = (time.time() - BEGAN) / (60 * self.args.minutes)
        return max(by_clock, self.steps / self.args.steps if self.args.steps else 0.0)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.args.device, dtype=torch.bfloat16, enabled=self.args.device == "cuda")

    def step(self) -> tuple[Shape, torch.Tensor]:
        shape, ids = next(self.batches)
        ids = ids.to(self.args.device, non_blocking=True).long()
        left = (1 - self.progress) / self.args.cool_share
        rate = self.args.lr * min(1.0, (self.steps + 1) / self.args.warmup_steps, max(left, 0.01))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast():
            loss = response_loss(self.model, shape, ids, self.role_weights, self.body)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())
        self.steps, self.tokens = self.steps + 1, self.tokens + ids.numel()
        return shape, ids

    def look(self, shape: Shape, ids: torch.Tensor) -> dict:
        """A point of the curve. The skill is of the batch just trained on, which no step will see again."""
        loss, self.losses = torch.stack(self.losses).mean().item(), []
        if not math.isfinite(loss):
            raise SystemExit(f"loss is {loss} at step {self.steps}\nhint: lower --lr (now {self.args.lr})")
        rows = max(1, min(len(ids), 16_384 // ids.shape[1]))
        with self.autocast():
            errors = skill(self.model, shape, ids[:rows])
        point = {"seconds": round(time.time() - BEGAN, 1), "step": self.steps, "tokens": self.tokens}
        point |= {"stage": self.stage, "rows": shape.rows, "loss": round(loss, 4)}
        return point | {name: round(value, 5) for name, value in errors.items()}

    def grow(self, point: dict) -> None:
        """To the next stage when this one is learned, or when the last one has to begin."""
        last = min(self.args.last_stage, len(STAGES) - 1)
        own = STAGES[self.stage].rows[0] <= point["rows"]
        learned = own and all(point[role] <= most[min(self.stage, len(most) - 1)] for role, most in LEARNED.items())
        learned = learned and self.steps - self.stage_began_step >= 40
        if self.stage >= last or not (learned or self.progress >= STAGES[self.stage].latest):
            return
        self.stage += 1
        self.stage_began_step = self.steps
        self.batches.set_stage(self.stage)


def train(trainer: Trainer, record: dict) -> None:
    args, looked = trainer.args, 0.0
    while trainer.progress < 1:
        shape, ids = trainer.step()
        if time.time() - looked >= args.log_seconds:
            point = trainer.look(shape, ids)
            looked = time.time()
            record["loss_curve"].append(point | {"batches_waiting": trainer.batches.waiting()})
            print(" ".join(f"{name} {value}" for name, value in record["loss_curve"][-1].items()), flush=True)
            trainer.grow(point)
    trainer.batches.close()


def last_look(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Skill at the study's levels and two temperatures: what sampling will be like."""
    found = {}
    for level in (0,) if trainer.args.dry else (3, 4, 6, 8, 136):
        shape = LEVELS[level]
        ids = torch.tensor(
            [problem("eval", level, 0, index).tolist() for index in range(16)], device=trainer.args.device
        )
        for temperature in (1.0, 1.2):
            with trainer.autocast():
                found[f"level {level}, temperature {temperature}"] = skill(trainer.model, shape, ids, temperature)
    return found


def new_record(trainer: Trainer) -> dict:
    args = trainer.args
    paths = ("out", "folder", "start_from")
    return {
        "config": {name: value for name, value in vars(args).items() if name not in (*paths, "commit")},
        "continues": args.start_from is not None,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        **records.provenance(),
        **({"commit": args.commit} if args.commit else {}),
        "seed": args.seed,
        "loss_curve": [],
    }


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    # Every batch has a shape of its own, and cuDNN's attention plans anew for each.
    torch.backends.cuda.enable_cudnn_sdp(False)
    trainer = Trainer(args)
    record = new_record(trainer)
    print(f"{record['parameters'] / 1e6:.1f}M parameters, started after {time.time() - BEGAN:.1f} s", flush=True)
    train(trainer, record)
    record |= {"steps": trainer.steps, "tokens": trainer.tokens, "train_seconds": round(time.time() - BEGAN, 1)}
    weights = stored_weights(trainer.model)
    # Saved before anything else can go wrong.
    paths = pack(weights, args.out)
    files.write_json(args.out / "train.json", records.plain(record))
    if args.folder:
        write_folder(args.folder, weights, trainer.config)
    record["skill"] = last_look(trainer)
    for setting, found in record["skill"].items():
        print(setting, {name: round(value, 5) for name, value in found.items()}, flush=True)
    files.write_json(args.out / "train.json", records.plain(record))
    sizes = ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in paths)
    print(f"wrote train.json, {sizes} after {time.time() - BEGAN:.1f} s", flush=True)


if __name__ == "__main__":
    main()
