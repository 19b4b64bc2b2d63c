"""For each named moment a training run that was killed with SIGKILL at that moment.

python killed_runs.py MODEL FOLDER RUN MOMENT...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.deaths import Death, run_and_die
from integration.train_runs import DYNAMIC, short_config
from sparroll.engines import HFEngine
from sparroll.tasks import reward_function as custom
from sparroll.train import between_steps, loop
from sparroll.train.runtime import checkpoint, sinks
from sparroll.train.sampling import groups
from sparroll.train.update import policy as update

MOMENTS: dict[str, Death] = {
    "first-rollouts": Death(HFEngine, "generate", 3),
    "later-rollouts": Death(HFEngine, "generate", 7),
    "forward": Death(update, "response_logp", 8),
    "optimizer-step": Death(torch.optim.AdamW, "step", 3),
    "weights-to-engine": Death(HFEngine, "load_weights", 4),
    "log-line": Death(sinks.JsonLines, "write", 5, lambda log, *_: os.write(log._handle, b'{"step": 4, "rew')),
    "state": Death(between_steps, "generator_state", 3),
    "save-model": Death(checkpoint, "_write_model", 2),
    "save-flush": Death(checkpoint, "_flush", 20),
    "save-point": Death(checkpoint, "_point", 2),
    "save-prune": Death(checkpoint, "_remove", 4),
    "summary": Death(between_steps, "summarise", 1),
}
DYNAMIC_MOMENTS: dict[str, Death] = {
    "later-round": Death(groups.Rounds, "add", 7),
    "choice": Death(groups.Rounds, "groups", 2),
    "reward": Death(custom.RewardFunction, "__call__", 8),
    "log-line": Death(sinks.JsonLines, "write", 3, lambda log, *_: os.write(log._handle, b'{"step": 3, "rew')),
}

PLAIN: dict[str, dict[str, Any]] = {"rollout": {"max_new_tokens": 40}}
"""Contexts of 20 to 100 tokens: below and above the budget of 64."""

RUNS: dict[str, tuple[dict[str, Any], dict[str, Death]]] = {
    "plain": (PLAIN, MOMENTS),
    "dynamic": (DYNAMIC, DYNAMIC_MOMENTS),
}
"""What a run is configured with, and when it may die."""


def main() -> None:
    torch.set_num_threads(1)
    model, folder, moments = sys.argv[1], Path(sys.argv[2]), sys.argv[4:]
    changes, deaths = RUNS[sys.argv[3]]
    config = short_config(model, **changes, checkpoint={"every_steps": 1, "keep": 1})
    run_and_die({moment: deaths[moment] for moment in moments}, lambda out: loop.train(config, out), folder)


if __name__ == "__main__":
    main()
