"""Train the decoder on the Python sources of this machine. Writes model/ and train.json into --out.

    python recipes/code-lm/train_code.py --out runs/code-lm/seed-0 --seed 0               # one H200
    python recipes/code-lm/train_code.py --out runs/dry --dry                             # CPU, seconds

--minutes counts the life of the command from its start, the corpus included, and that of earlier calls on the same
folder: called again after a kill, it goes on from the last checkpoint with the time that is left. Contexts are short for
the first --short-share of the time, then 16K. The rate is constant after a warm-up and falls to nothing over the last
--cool-share of the time. With --steps in place of --minutes, the same batches give the same weights, cut or not.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import corpus  # noqa: E402
from code_model import LONGEST_TOKENS, new_config, new_model, small_config, weights_of, write_folder  # noqa: E402

from sparroll import files, records, resume  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import OnProgress, Progress  # noqa: E402

KIND = "code_lm_training"
CHECKPOINT = "checkpoint.safetensors"
SHORT_TOKENS = 4096
HELD_OUT_ROWS = 8


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="folder of the corpus; default: corpus/ beside --out")
    parser.add_argument("--record", type=Path, help="also write train.json here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0, help="life of the command, all calls together")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps instead of --minutes")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--cool-share", type=float, default=0.4, help="of the time: the rate falls")
    parser.add_argument("--short-share", type=float, default=0.45, help="of the time: contexts are short")
    parser.add_argument("--short-tokens", type=int, default=SHORT_TOKENS, help="context at first")
    parser.add_argument("--long-tokens", type=int, default=LONGEST_TOKENS, help="context after that")
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="of a step")
    parser.add_argument("--pass-tokens", type=int, default=32_768, help="of one forward and backward; saves memory")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--checkpoint-seconds", type=float, default=90.0)
    parser.add_argument("--dry", action="store_true", help="small model, small corpus, few steps, on the CPU")
    corpus.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.dry:
        args.device, args.vocabulary, args.most_bytes = "cpu", 512, 400_000
        args.steps, args.warmup_steps, args.checkpoint_seconds = args.steps or 6, 2, 0.0
        args.short_tokens, args.long_tokens, args.batch_tokens, args.pass_tokens = 128, 256, 512, 256
        if args.roots == corpus.default_roots():
            args.roots = [args.roots[0] / name for name in ("json", "email", "http", "logging", "unittest", "asyncio")]
    args.corpus = args.corpus or args.out.parent / "corpus"
    for name in ("short_tokens", "long_tokens"):
        if args.pass_tokens % getattr(args, name) or args.batch_tokens % args.pass_tokens:
            parser.error("--batch-tokens must be a multiple of --pass-tokens, and that of both contexts")
    # A script's time counts from before its slow imports.
    args.began = BEGAN if argv is None else time.time()
    return args


class Windows:
    """Rows of `tokens` ids and the id after each of them, cut from one long row. Every pass over the text starts its cuts
    somewhere else and takes them in another order. Row number n is the same in every call."""

    def __init__(self, ids: np.ndarray, tokens: int, seed: int) -> None:
        self.rows = (len(ids) - 1) // tokens - 1
        if self.rows < 1:
            raise UserError(
                f"{len(ids):,} tokens of training text are too few for contexts of {tokens:,}", "add --roots"
            )
        self.ids, self.tokens, self.seed = ids, tokens, seed
        self._pass = -1

    def row(self, number: int) -> np.ndarray:
        turn, place = divmod(number, self.rows)
        if turn != self._pass:
            rng = np.random.default_rng([self.seed, self.tokens, turn])
            self._pass, self._shift, self._order = turn, int(rng.integers(self.tokens)), rng.permutation(self.rows)
        begin = self._shift + int(self._order[place]) * self.tokens
        return np.asarray(self.ids[begin : begin + self.tokens + 1]).astype(np.int64)


class CodeTrainer:
    """Model, optimizer, data and clock; one `step` at a time until `progress` reaches 1."""

    def __init__(self, args: argparse.Namespace, vocabulary: int) -> None:
        self.args = args
        config = small_config(vocabulary) if args.dry else new_config(vocabulary, longest_tokens=args.long_tokens)
        self.model = new_model(config, args.seed).to(args.device).train()
        self.model.config._attn_implementation = "sdpa"
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        gains = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")
        ids = corpus.read(args.corpus, "train")
        self.windows = {tokens: Windows(ids, tokens, args.seed) for tokens in (args.short_tokens, args.long_tokens)}
        self.rows_taken = dict.fromkeys(self.windows, 0)
        self.steps = self.tokens = 0
        self.spent = 0.0
        """Seconds of earlier calls."""
        self.curve: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        if args.compile:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    @property
    def seconds(self) -> float:
        return self.spent + time.time() - self.args.began

    @property
    def progress(self) -> float:
        args = self.args
        return self.steps / args.steps if args.steps else min(1.0, self.seconds / (60 * args.minutes))

    def step(self) -> None:
        args, progress = self.args, self.progress
        tokens = args.short_tokens if progress < args.short_share else args.long_tokens
        cooled = min(1.0, (1 - progress) / args.cool_share)
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * min(cooled, (self.steps + 1) / args.warmup_steps)
        passes, rows = args.batch_tokens // args.pass_tokens, args.pass_tokens // tokens
        total = torch.zeros((), device=args.device)
        for _ in range(passes):
            loss = self._loss(self._batch(tokens, rows)) / passes
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._losses.append(total)
        self.steps, self.tokens = self.steps + 1, self.tokens + args.batch_tokens

    def _batch(self, tokens: int, rows: int) -> torch.Tensor:
        """[rows, tokens + 1]"""
        begin = self.rows_taken[tokens]
        self.rows_taken[tokens] = begin + rows
        taken = np.stack([self.windows[tokens].row(begin + row) for row in range(rows)])
        return torch.from_numpy(taken).to(self.args.device, non_blocking=True)

    def _loss(self, ids_BS: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.args.device, dtype=torch.bfloat16, enabled=self.args.device == "cuda"):
            hidden = self.model.model(input_ids=ids_BS[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids_BS[:, 1:].flatten())

    def look(self) -> None:
        """Add a point to the curve: the mean loss since the last one."""
        if not self._losses:
            return
        loss, self._losses = torch.stack(self._losses).mean().item(), []
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at step {self.steps}", f"lower --lr (now {self.args.lr:g})")
        point = {"step": self.steps, "tokens": self.tokens, "seconds": round(self.seconds, 1), "loss": round(loss, 4)}
        self.curve.append(point)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats a token over the first rows of the held-out text, at the long context."""
        ids, tokens = corpus.read(self.args.corpus, "held-out"), self.args.long_tokens
        rows = min(HELD_OUT_ROWS, (len(ids) - 1) // tokens)
        if not rows:
            raise UserError(f"{len(ids):,} held-out tokens are too few for contexts of {tokens:,}", "add --roots")
        self.model.eval()
        cut = [np.asarray(ids[row * tokens : (row + 1) * tokens + 1]).astype(np.int64) for row in range(rows)]
        # These shapes are seen once, so compiling for them would only take time.
        with torch.compiler.set_stance("force_eager"):
            losses = [self._loss(torch.from_numpy(row)[None].to(self.args.device)).item() for row in cut]
        self.model.train()
        return sum(losses) / rows

    def save(self) -> None:
        """Everything that the next step depends on, in one file that is replaced at once."""
        tensors = {f"model.{name}": tensor for name, tensor in weights_of(self.model).items()}
        for place, kept in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{place}.{name}": tensor.to("cpu") for name, tensor in kept.items()}
        state = {
            "steps": self.steps,
            "tokens": self.tokens,
            "spent": self.seconds,
            "rows_taken": {str(tokens): rows for tokens, rows in self.rows_taken.items()},
            "curve": self.curve,
        }
        files.write_bytes(self.args.out / CHECKPOINT, save(tensors, metadata={"state": json.dumps(state)}))

    def go_on(self) -> None:
        """Continue from the checkpoint, where there is one."""
        path = self.args.out / CHECKPOINT
        if not path.exists():
            return
        with safe_open(path, "pt") as held:
            state = json.loads(held.metadata()["state"])
        tensors = load_file(path)
        weights = {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}
        self.model.load_state_dict(weights, strict=False)
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, place, what = name.split(".")
                moments.setdefault(int(place), {})[what] = tensor
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        self.steps, self.tokens, self.spent = state["steps"], state["tokens"], state["spent"]
        self.rows_taken = {int(tokens): rows for tokens, rows in state["rows_taken"].items()}
        self.curve = state["curve"]


def train(trainer: CodeTrainer, on_progress: OnProgress) -> None:
    """Steps until the time is over, with a checkpoint now and then and one at the end."""
    saved = time.time()
    while trainer.progress < 1:
        trainer.step()
        if time.time() - saved >= trainer.args.checkpoint_seconds:
            trainer.look()
            trainer.save()
            saved = time.time()
        loss = trainer.curve[-1]["loss"] if trainer.curve else "-"
        on_progress(
            round(1000 * trainer.progress), 1000, f"step {trainer.steps}, {trainer.tokens:,} tokens, loss {loss}"
        )
    trainer.look()
    trainer.save()


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Settings that change the weights. --minutes may be given anew: more time for a run that was cut."""
    names = ("seed", "steps", "lr", "warmup_steps", "cool_share", "short_share", "short_tokens", "long_tokens")
    return {name: getattr(args, name) for name in (*names, "batch_tokens", "pass_tokens", "minutes", "dry")}


def run(args: argparse.Namespace, progress: Progress) -> Path:
    text = corpus.build(args.corpus, args.roots, args.vocabulary, args.most_bytes, progress.bar("corpus"))
    request = asked(args) | {"corpus": text["digest"], "tokenizer": text["tokenizer_digest"]}
    begun = (args.out / CHECKPOINT).exists()
    resume.begin_or_resume(args.out / "asked.json", request, free=["minutes"], begun=begun)
    torch.set_float32_matmul_precision("high")
    trainer = CodeTrainer(args, text["vocabulary"])
    trainer.go_on()
    if trainer.steps and trainer.progress >= 1 and (args.out / "train.json").exists():
        if args.record is not None:
            files.write_bytes(args.record, (args.out / "train.json").read_bytes())
        return args.out / "train.json"
    train(trainer, progress.bar("training"))
    held_out = trainer.held_out_loss()
    weights = write_folder(args.out / "model", trainer.model, args.corpus / "tokenizer.json")
    results = {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": trainer.steps,
        "tokens": trainer.tokens,
        "tokens_by_context": {str(tokens): rows * tokens for tokens, rows in trainer.rows_taken.items()},
        "held_out_loss": round(held_out, 4),
        "corpus": corpus.summary(text),
        "weights_sha256": files.sha256(weights),
        "curve": trainer.curve,
    }
    seconds = round(trainer.seconds, 3)
    config = asked(args) | {"compile": args.compile}
    for path in filter(None, (args.record, args.out / "train.json")):
        records.write(path, KIND, results, config=config, seed=args.seed, wall_seconds=seconds)
    return args.out / "train.json"


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    try:
        with Progress() as progress:
            path = run(args, progress)
    except UserError as error:
        sys.exit(f"error: {error}")
    results = records.read(path, KIND)["results"]
    text = results["corpus"]["splits"]
    print(
        f"{results['parameters'] / 1e6:.1f}M parameters, {results['steps']} steps, {results['tokens']:,} tokens of "
        f"{text['train']['tokens']:,}; held-out loss {results['held_out_loss']:.3f} nats"
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    # The corpus is a matter of seconds on many cores, and of minutes on one.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    main()
