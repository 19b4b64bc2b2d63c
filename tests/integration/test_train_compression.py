"""Training on rollouts with eviction: what it logs, that the dense parts stay dense, and that it resumes to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from integration.train_runs import short_config
from sparroll.compression import compression_kinds
from sparroll.engines import HFEngine
from sparroll.train import train
from sparroll.train.runtime.sinks import read_lines
from sparroll.types import Rollout


def evicting(model: str, kind: str, steps: int, **changes: dict[str, Any]) -> Any:
    sections: dict[str, Any] = {
        "attention": {"kind": "compression", "policy": kind, "budget_tokens": 24, "every_tokens": 16},
        "rollout": {"samples_per_prompt": 3},
        "train": {"steps": steps, "prompts_per_step": 2},
        "mismatch": {"least_tokens": 20},
        "checkpoint": {"every_steps": 1},
        "evaluate": {"prompts": 2},
    }
    return short_config(model, **(sections | changes))


def lines(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without wall times."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_lines(out / "metrics.jsonl")]


@pytest.mark.parametrize("kind", compression_kinds())
def test_a_run_logs_what_it_saved_and_resumes_to_the_bit(
    kind: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str | None, set[str]]] = []
    generate = HFEngine.generate

    def watched(self: HFEngine, *args: Any, **kwargs: Any) -> list[Rollout]:
        rollouts = generate(self, *args, **kwargs)
        ran.append((self.compression and self.compression.kind, {rollout.attention for rollout in rollouts}))
        return rollouts

    monkeypatch.setattr(HFEngine, "generate", watched)
    train(evicting(model, kind, 2), tmp_path / "straight")
    # The first evaluation and the ceiling, two steps, the last evaluation.
    assert [name for name, _ in ran] == [None, None, kind, kind, None]
    for name, attention in ran:
        assert attention == {"dense"} if name is None else "evicted" in attention
    steps = [line for line in lines(tmp_path / "straight") if "reward/mean" in line]
    for line in steps:
        assert 0 < line["compression/kv_saved_share"] < 1
        assert line["compression/peak_kv_bytes"] > 0
        assert 0 < line["rollout/kv_read_share"] < 1
        assert line["rollout/sparse_share"] > 0
        assert line["mismatch/acceptance_mean"] < line["mismatch/dense_ceiling_mean"]
    train(evicting(model, kind, 1), tmp_path / "cut")
    train(evicting(model, kind, 2), tmp_path / "cut", resume=True)
    assert [line for line in lines(tmp_path / "cut") if "reward/mean" in line] == steps
    folders = (tmp_path / name / "checkpoints" / "step-000002" for name in ("cut", "straight"))
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in folders)
    assert all(one[key].equal(other[key]) for key in other)


def test_the_guard_watches_rollouts_with_eviction(model: str, tmp_path: Path) -> None:
    """A step has 6 rollouts, and 8 are needed."""
    guard = {"action": "stop", "at_least": 0.999}
    result = train(evicting(model, "streaming", 3, guard=guard, evaluate={"prompts": 0}), tmp_path / "run")
    assert result.steps == 2
    assert result.stopped.endswith("stopped")
