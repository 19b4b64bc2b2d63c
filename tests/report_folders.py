"""The folders that a report reads, with made-up figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from report_data import row, schedule
from sparroll import records

REWARDS = (0.9, 0.1, 0.2, 0.5, 0.6, 0.3)


def write_run(folder: Path, model: str = "tiny-reasoner", **sections: dict[str, Any]) -> None:
    """A run of six steps; the fourth has no bin with enough tokens."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"step": 0, "evaluate/dense_accuracy": 0.0, "evaluate/dense_accuracy_low": 0.0,
         "evaluate/dense_accuracy_high": 0.265, "evaluate/prompts": 12.0},
    ]  # fmt: skip
    for step, reward in enumerate(REWARDS, 1):
        line = {"step": step, "reward/mean": reward, "rollout/kv_read_share": 0.5, "mismatch/acceptance_q05": 0.9}
        lines.append(line | ({} if step == 4 else {"mismatch/acceptance_q05_worst_bin": 0.8}))
    lines[-1]["events"] = ["something happened"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"model": {"name": model}, "attention": {"kind": "dense"}, "train": {"seed": 0}} | sections
    results = {"steps": 6, "reward_first": 0.4, "reward_last": 1.4 / 3, "reward_window_steps": 3}
    records.write(folder / "result.json", "train", results, config=config)


def write_profile(path: Path, model: str, kind: str = "profile") -> None:
    rows = [dataclasses.asdict(row(0, 0.9, 0.88, 0.92))]
    tail = {"estimator": "top_k_lower", "quantile": 0.05, "rows": rows, "overall": rows[0]}
    dense = {"mode": "dense", "name": "dense", "schedule": None, "tail": tail}
    fixed = {"mode": "faithful", "name": "fixed-64", "schedule": {"steps": [{"kv_budget_tokens": 64}]}, "tail": tail}
    results: dict[str, Any] = {"dense_ceiling": dense, "schedules": [fixed, dense]}
    if kind == "calibration":
        verification = {"rounds": [fixed], "bound": "low"}
        results |= {"schedule": schedule(64).table(), "notes": ["a note"], "verification": verification}
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(path, kind, results, config={"model": model})
