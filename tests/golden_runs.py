"""Short CPU runs whose bytes must not move when code only moves: `python tests/golden_runs.py OUT` before and after.

Dense, sparse, controlled and distilled training, two seeds each, of a random model. Prints a digest of the metrics (wall
times apart) and of the final weights for each run, and keeps the metrics in OUT, where two folders can be compared with
`diff -r`. The digests hold for one machine and one version of torch only, which is why no test compares stored ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from integration.train_runs import SHORT, lines, short_config, write_model
from sparroll.attention.selectors import PageMean
from sparroll.schedule import Schedule
from sparroll.train import train

SEEDS = (3, 4)
BRIEF: dict[str, dict[str, Any]] = SHORT | {"train": {"steps": 3}, "evaluate": {"prompts": 4}}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {"attention": {"kind": "dense"}},
    "sparse": {"correction": {"name": "tis"}},
    "jackpot": {"correction": {"name": "jackpot"}},
    "controller": {
        "attention": {"kind": "schedule", "name": "START"},
        "rollout": {"samples_per_prompt": 8},
        "control": {"by": "controller", "target": 0.8, "patience": 1, "window_steps": 2},
        "train": {"steps": 4},
    },
    "distill": {"distill": {"lr": 1e-2, "rank": 4}},
    "distill-kl": {"distill": {"lr": 1e-2, "rank": 4, "objective": "kl", "kl": "top_k"}},
}


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def golden_run(name: str, seed: int, model: str, out: Path) -> str:
    """-> one line: the run, the digest of its metrics, of its weights and of its optimizer."""
    changes = {section: BRIEF.get(section, {}) | RUNS[name].get(section, {}) for section in BRIEF | RUNS[name]}
    changes["train"] = changes.get("train", {}) | {"seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if changes.get("attention", {}).get("name") == "START":
            selector = PageMean(page_tokens=4, first_tokens=4, recent_tokens=8)
            start = Schedule.fixed(16, selector).save(Path(folder) / "start.toml")
            changes["attention"] = {"kind": "schedule", "name": str(start)}
        result = train(short_config(model, **changes), run)
        metrics = out / f"{name}-{seed}.json"
        metrics.write_text(json.dumps(lines(run), indent=1, sort_keys=True))
        weights = [
            digest_of(result.checkpoint / "model/model.safetensors"),
            digest_of(result.checkpoint / "optimizer.safetensors"),
        ]
        if (result.checkpoint / "adapter").is_dir():
            weights.append(digest_of(result.checkpoint / "adapter/adapter_model.safetensors"))
    return "  ".join([f"{name}-{seed}", digest_of(metrics), *weights])


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), layers=4)
        found = [golden_run(name, seed, model, out) for name in RUNS for seed in SEEDS]
    text = "\n".join(found) + "\n"
    (out / "digests.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
