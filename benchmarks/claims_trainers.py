"""Figures in sentences about verl and TRL. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from claims_speed import Claims, Figures, bare, down, up
from record_tables import results


def _last_steps(name: str, kind: str) -> dict[str, dict[str, Any]]:
    """The last step of each case of a record."""
    return {row["case"]: row["steps"][-1] for row in results(name, kind)["cases"]}


def _beside_dense(name: str, kind: str) -> Figures:
    """What both trainers' sentences say of their last steps."""
    steps, together = _last_steps(name, kind), results(name, kind)["together"]
    return {
        "sparse": up(steps["sparse"]["rollout_seconds"], 1),
        "dense": down(steps["dense"]["rollout_seconds"], 1),
        "rollouts": down(together["sparse/rollouts"], 2),
        "added": up(steps["sparse"]["added_seconds"], 1),
        "share": up(100 * together["sparse/added_share"], 1),
    }


def verl_steps() -> Figures:
    steps, together = _last_steps("verl-steps-h200", "verl-steps"), results("verl-steps-h200", "verl-steps")["together"]
    sparse, dense = steps["sparse"], steps["dense"]
    return {
        **_beside_dense("verl-steps-h200", "verl-steps"),
        "of_plugins": bare(down(together["sparse/of_plugins"], 2)),
        "of_rollouts": up(100 * sparse["added_seconds"] / sparse["rollout_seconds"], 1),
        "sparse_update": up(sparse["metrics"]["timing_s/update_actor"], 1),
        "dense_update": down(dense["metrics"]["timing_s/update_actor"], 1),
        "step": down(together["sparse/step"], 2),
        "ceiling": bare(down(sparse["metrics"]["mismatch/dense_ceiling_q05"], 3)),
        "off": bare(up(dense["metrics"]["training/rollout_probs_diff_mean"], 3)),
    }


def verl_tensor_parallel() -> Figures:
    step = _last_steps("verl-two-gpus-h200", "verl-steps")["tensor-parallel"]
    return {"added": bare(up(step["added_seconds"], 1)), "step": down(step["step_seconds"])}


def trl_steps() -> Figures:
    steps = _last_steps("trl-steps-h200", "trl-steps")
    return {
        **_beside_dense("trl-steps-h200", "trl-steps"),
        "sparse_step": up(steps["sparse"]["step_seconds"], 1),
        "dense_step": down(steps["dense"]["step_seconds"], 1),
    }


PAGES: Mapping[str, Claims] = {
    "docs/verl.md": {
        "In the second step the rollouts took {sparse} instead of {dense} s. That is {rollouts} times as many tokens a "
        "second, and {of_plugins} of the speed-up that the plugin alone has on them. All that sparroll adds took {added} s: "
        "{share} % of the step, or {of_rollouts} % of its rollouts. The update took {sparse_update} s, and {dense_update} s "
        "in the dense run.": verl_steps,
        "So its whole step was only {step} times as fast with sparse rollouts.": verl_steps,
        "had a tail of {ceiling}; the trainer gave their tokens probabilities that were {off} off on average.": verl_steps,
        "(`verl-two-gpus-h200.json`). All that sparroll adds took {added} s of a step of {step} s.": verl_tensor_parallel,
    },
    "docs/trl.md": {
        "rollouts took {sparse} instead of {dense} s, {rollouts} times as many tokens a second, and a whole step "
        "{sparse_step} instead of {dense_step} s. All that sparroll adds took {added} s, {share} % of the step,": trl_steps,
    },
}
