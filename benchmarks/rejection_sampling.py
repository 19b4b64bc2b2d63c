"""Does optimal budgeted rejection sampling move a sampler towards the policy, whatever the budget? Random pairs of
distributions, every expectation summed and not sampled; a second on a CPU.

    python benchmarks/rejection_sampling.py --out benchmarks/results/rejection-sampling.json

p is a softmax of normal logits, and q has noise on them. A token of q is kept with probability min(1, p / (scale q)), so
what is kept is distributed as min(q, p / scale) / Z. The record has, for each noise and scale, the share of pairs that came
no further apart in KL(p to kept) and in total variation, both divergences before and after, and the share that is kept.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from sparroll import records

KIND = "rejection-sampling"
ROUNDING = 1e-12
"""A divergence that grew by less did not grow."""


def softmax(logits_NV: np.ndarray) -> np.ndarray:
    weights = np.exp(logits_NV - logits_NV.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def kl(p_NV: np.ndarray, q_NV: np.ndarray) -> np.ndarray:
    return (p_NV * np.log(p_NV / q_NV)).sum(axis=-1)


def distance(p_NV: np.ndarray, q_NV: np.ndarray) -> np.ndarray:
    """Total variation."""
    return np.abs(p_NV - q_NV).sum(axis=-1) / 2


def kept(p_NV: np.ndarray, q_NV: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """-> (distribution of the kept tokens, share that is kept)"""
    mass = np.minimum(q_NV, p_NV / scale)
    share = mass.sum(axis=-1)
    return mass / share[:, None], share


def row(p_NV: np.ndarray, q_NV: np.ndarray, noise: float, scale: float) -> dict[str, Any]:
    after, share = kept(p_NV, q_NV, scale)
    made: dict[str, Any] = {"noise": noise, "scale": scale, "pairs": len(p_NV), "kept_share": float(share.mean())}
    for name, of in (("kl", kl), ("distance", distance)):
        was, became = of(p_NV, q_NV), of(p_NV, after)
        made[f"{name}_before"], made[f"{name}_after"] = float(was.mean()), float(became.mean())
        made[f"{name}_not_larger_share"] = float((became <= was + ROUNDING).mean())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=5000, help="of each noise")
    parser.add_argument("--tokens", type=int, default=64, help="of the vocabulary")
    parser.add_argument(
        "--noises", type=float, nargs="+", default=[0.05, 0.2, 0.7, 2.0], help="deviation of q's logits"
    )
    parser.add_argument("--scales", type=float, nargs="+", default=[0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0])
    options = parser.parse_args()
    began, random, rows = time.perf_counter(), np.random.default_rng(options.seed), []
    for noise in options.noises:
        logits = 2 * random.normal(size=(options.pairs, options.tokens))
        p, q = softmax(logits), softmax(logits + noise * random.normal(size=logits.shape))
        rows += [row(p, q, noise, scale) for scale in options.scales]
    config = {name: value for name, value in vars(options).items() if name not in ("out", "seed")}
    about = {"config": config, "seed": options.seed, "wall_seconds": time.perf_counter() - began}
    print(f"wrote {records.write(options.out, KIND, rows, **about)}")


if __name__ == "__main__":
    main()
