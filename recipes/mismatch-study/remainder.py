"""Which correction of a remainder's weights helps: exact acceptance and KL, teacher-forced, by budget and correction.

python recipes/mismatch-study/remainder.py --packed recipes/mismatch-study/model
python recipes/mismatch-study/remainder.py --model tiny-reasoner

The weight of an unread page is corrected by one number, its spread, so each variant is a selector whose spread is
another one: `plain` 0; `keys` v, the variance of the page's keys, as the package has it; `noise` -w, the mean squared
error of the stored mean; `both` v - w. `none` has no remainder. The study's
model reads right solutions of held-out problems of level 6, up to --response-tokens; another model reads its own dense
samples. A minute for a line on one CPU core; --device cuda takes seconds. Results are printed and not kept.
"""

# T response tokens, V vocabulary

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from measure import references  # noqa: E402
from study_folder import load_packed, new_config  # noqa: E402
from study_rows import unit_and_bits  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from sparroll import tasks  # noqa: E402
from sparroll.attention.selectors import QuantizedMean, Remainder  # noqa: E402
from sparroll.engines import HFEngine  # noqa: E402
from sparroll.engines.scoring import last_hidden  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402
from sparroll.types import Rollout, TokenBatch  # noqa: E402


@dataclass(frozen=True)
class Plain(QuantizedMean):
    """Puts v and w into the spread with the factors of the subclass."""

    factors: ClassVar[tuple[int, int]] = (0, 0)

    def unit_spread(self, keys: Tensor) -> Tensor:
        of_keys, of_noise = self.factors
        error = self.mean_keys(self.build_index(keys), keys.shape[-1]) - keys.float().mean(-2)
        return of_keys * super().unit_spread(keys) + of_noise * error.square().mean(-1)


class Noise(Plain):
    factors = (0, -1)


class Both(Plain):
    factors = (1, -1)


VARIANTS = {"none": QuantizedMean, "plain": Plain, "noise": Noise, "keys": QuantizedMean, "both": Both}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--packed", type=Path, help="folder with weights-N.safetensors of the study")
    asked.add_argument("--model", help="any model that HFEngine loads; it samples the task `synthetic`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--response-tokens", type=int, default=400)
    parser.add_argument("--level", type=int, default=2, help="of `synthetic`")
    parser.add_argument("--units", nargs="+", default=["4x4", "2x2"], help="tokens x bits")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128])
    parser.add_argument("--groups", type=int, nargs="+", default=[16])
    parser.add_argument("--values", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    return parser.parse_args()


def rollouts_of(args: argparse.Namespace) -> tuple[PreTrainedModel, list[Rollout]]:
    if args.packed is not None:
        pairs = [(prompt, response[: args.response_tokens]) for prompt, response in references(6, args.rollouts)]
        given = [Rollout(prompt, response, torch.zeros(len(response)), "stop") for prompt, response in pairs]
        return load_packed(args.packed, new_config()).to(args.device), given
    engine = HFEngine(args.model, dtype=torch.float32, device=args.device)
    prompts = tasks.get("synthetic").prompts("eval", args.level, 0, args.rollouts)
    return engine.model, engine.generate([p.text for p in prompts], max_new_tokens=args.response_tokens)


@torch.inference_mode()
def logp(model: PreTrainedModel, rollout: Rollout, schedule: Schedule | None) -> Tensor:
    """[T, V] log-probabilities at the response's positions."""
    batch = TokenBatch.from_rollouts([rollout], 0, model.device)
    first, last = len(rollout.prompt_ids) - 1, len(rollout.prompt_ids) + len(rollout.response_ids) - 1
    hidden = last_hidden(model, batch, schedule, "reference")[0, first:last]
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    model, rollouts = rollouts_of(args)
    dense = [logp(model, rollout, None) for rollout in rollouts]
    contexts = [len(rollout.prompt_ids) + len(rollout.response_ids) for rollout in rollouts]
    print(f"{sum(len(each) for each in dense)} tokens, contexts up to {max(contexts)}, dense {args.dense_layers}")
    print("unit  budget group variant     p05     p01    mean       KL")
    for unit, bits in map(unit_and_bits, args.units):
        for budget, group, name in ((b, g, v) for b in args.budgets for g in args.groups for v in args.variants):
            began, kept = time.perf_counter(), None if name == "none" else Remainder(group, args.values)
            selector = VARIANTS[name](unit, 16, max(32, group), bits=bits, remainder=kept)
            schedule = Schedule.fixed(budget, selector, tuple(args.dense_layers))
            sparse = [logp(model, rollout, schedule) for rollout in rollouts]
            both = list(zip(dense, sparse, strict=True))
            acceptance = torch.cat([torch.minimum(p, q).exp().sum(-1) for p, q in both])
            nats = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in both])
            tail, far = (float(acceptance.quantile(share)) for share in (0.05, 0.01))
            print(
                f"{unit}x{bits}  {budget:6d} {group:5d} {name:7s} {tail:7.4f} {far:7.4f} {float(acceptance.mean()):7.4f}"
                f" {float(nats.mean()):8.5f}   ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
