"""Figures in sentences about verl and TRL. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
import step_costs
from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, results

from sparroll import records
from sparroll.integrations.verl.settings import CEILING_EVERY_STEPS

MOST_ADDED = 0.05
"""Of a step: what all that sparroll adds may be."""
RECORDED_EVERY_STEPS = 10
"""How often the ceiling was due when the records of verl were made."""


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
    }


def _added(name: str, case: str = "sparse") -> Figures:
    """What sparroll adds to a step of verl, by part, with the ceiling as often as it was due then, and as it is now. The
    whole only where the record has the plugin's case; `room` is what of the allowed share is left for it else."""
    rows = {row["case"]: row for row in results(name, "verl-steps")["cases"]}
    step, ceiling = step_costs.middle(rows[case]), step_costs.ceiling_seconds(rows[case])
    alone = step_costs.middle(rows[f"plugin-{case}"]) if f"plugin-{case}" in rows else None
    assert step is not None, f"{name} has no step that counts"
    said = {
        "step": down(step["step_seconds"]),
        "ceiling": up(ceiling, 1),
        "every": str(RECORDED_EVERY_STEPS),
        "every_now": str(CEILING_EVERY_STEPS),
    }
    for suffix, every in (("", RECORDED_EVERY_STEPS), ("_now", CEILING_EVERY_STEPS)):
        parts = step_costs.added_seconds(step, ceiling, every, alone)
        shares = step_costs.added_shares(parts, step["step_seconds"])
        own = sum(parts[part] for part in step_costs.MEASURED_PARTS)
        said |= {
            f"own{suffix}": up(own, 1),
            f"spread{suffix}": up(parts["ceiling"], 1),
            f"share{suffix}": up(100 * shares.get("whole", shares["known"]), 1),
            f"room{suffix}": down(MOST_ADDED * (step["step_seconds"] + parts["ceiling"]) - own - parts["ceiling"], 1),
        }
        if "sampling" in parts:
            said |= {f"sampling{suffix}": up(parts["sampling"], 1), f"added{suffix}": up(sum(parts.values()), 1)}
    return {key: bare(value) for key, value in said.items()}


def verl_steps() -> Figures:
    steps, together = _last_steps("verl-steps-h200", "verl-steps"), results("verl-steps-h200", "verl-steps")["together"]
    sparse, dense = steps["sparse"], steps["dense"]
    return {
        **_beside_dense("verl-steps-h200", "verl-steps"),
        "of_plugins": bare(down(together["sparse/of_plugins"], 2)),
        "sparse_update": up(sparse["metrics"]["timing_s/update_actor"], 1),
        "dense_update": down(dense["metrics"]["timing_s/update_actor"], 1),
        "step": down(together["sparse/step"], 2),
        "tail": bare(down(sparse["metrics"]["mismatch/dense_ceiling_q05"], 3)),
        "off": bare(up(dense["metrics"]["training/rollout_probs_diff_mean"], 3)),
    }


def verl_steps_added() -> Figures:
    return _added("verl-steps-h200")


def verl_two_replicas() -> Figures:
    return _added("verl-two-replicas-h200", "two-replicas")


def verl_tensor_parallel() -> Figures:
    return _added("verl-two-gpus-h200", "tensor-parallel")


def verl_16k() -> Figures:
    name, kind = "verl-steps-16k-h200", "verl-steps"
    steps, together = _last_steps(name, kind), results(name, kind)["together"]
    costs = step_costs.rescoring(steps["sparse"], ROLLOUTS)
    return {
        **_beside_dense(name, kind),
        "step": down(together["sparse/step"], 2),
        **{key: value for key, value in _added(name).items() if key != "step"},
        "rescoring": up(100 * costs["share"], 1),
        "from": up(costs["rollouts_for_3_percent"]),
        "low": up(100 * costs["default_of_128_low"], 1),
        "high": up(100 * costs["default_of_128_high"], 1),
        "verified_rollouts": down(together["verified/rollouts"], 2),
        "verified_step": down(together["verified/step"], 2),
        "verified_share": _added(name, "verified")["share"],
        "verified_share_now": _added(name, "verified")["share_now"],
    }


def verl_sparse_8k() -> Figures:
    """Today's defaults at 8,192 tokens; the plugin alone is that of an earlier record."""
    name = "verl-sparse-8k-h200"
    (row,) = [row for row in results(name, "verl-steps")["cases"] if row["case"] == "sparse"]
    step, added = step_costs.middle(row), _added(name)
    assert step is not None, f"{name} has no step that counts"
    alone = _last_steps("verl-steps-h200", "verl-steps")["plugin-sparse"]["rollout_seconds"]
    return {
        "rollouts": up(step["rollout_seconds"], 1),
        "step": down(step["step_seconds"], 1),
        "own": added["own_now"],
        "ceiling": added["ceiling"],
        "every_now": added["every_now"],
        "share_now": added["share_now"],
        "alone": down(alone, 1),
        "rescoring": up(100 * step_costs.rescoring(step, ROLLOUTS)["share"], 1),
    }


ROLLOUTS = 32
"""Of a step of the records of verl."""
STUDIES = ("verl-study-h200", "verl-study-seed-1-verl-h200", "verl-study-seed-1-own-h200")
"""Two runs in verl and two in our own loop."""


def verl_study() -> Figures:
    rewards = {"verl": "critic/rewards/mean", "own": "reward/mean"}
    said: dict[str, str] = {}
    solved: dict[str, int] = {}
    problems = 0
    for name, reward in rewards.items():
        tails: list[float] = []
        earned: list[float] = []
        before = after = problems = 0
        for record in STUDIES:
            run = records.read(RESULTS / f"{record}.json", "verl-study")
            asked = run["config"]["evaluate_prompts"]
            for row in run["results"]["cases"]:
                if row["case"] == name:
                    tails += row["series"]["mismatch/acceptance_q05"]
                    earned += row["series"][reward]
                    before += round(asked * row["dense_accuracy"][0][1])
                    after += round(asked * row["dense_accuracy"][-1][1])
                    problems += asked
        solved[name] = after
        said |= {
            f"{name}_tail": bare(down(fmean(tails), 2)),
            f"{name}_reward": bare(down(fmean(earned), 3)),
            f"{name}_before": str(before),
            f"{name}_after": str(after),
        }
        # Steps differ by their problems and draws.
        said["error"] = max(said.get("error", ""), bare(up(float(np.std(earned, ddof=1)) / len(earned) ** 0.5, 3)))
    share = sum(solved.values()) / (2 * problems)
    error = (2 * share * (1 - share) / problems) ** 0.5
    apart = abs(solved["verl"] - solved["own"]) / problems
    return said | {"problems": str(problems), "apart": up(100 * apart, 1), "apart_error": up(100 * error, 1)}


def trl_steps() -> Figures:
    steps, together = _last_steps("trl-steps-h200", "trl-steps"), results("trl-steps-h200", "trl-steps")["together"]
    return {
        **_beside_dense("trl-steps-h200", "trl-steps"),
        "added": up(steps["sparse"]["added_seconds"], 1),
        "share": up(100 * together["sparse/added_share"], 1),
        "sparse_step": up(steps["sparse"]["step_seconds"], 1),
        "dense_step": down(steps["dense"]["step_seconds"], 1),
        "verified_rollouts": down(together["verified/rollouts"], 2),
        "verified_step": up(steps["verified"]["step_seconds"], 1),
        "verified_share": up(100 * together["verified/added_share"], 1),
    }


def trl_sampling() -> Figures:
    """All that sparroll adds in TRL, the plugin alone beside it in the same call."""
    found = results("trl-sampling-h100", "trl-steps")
    together, middles = found["together"], {row["case"]: step_costs.middle(row) for row in found["cases"]}
    inside, alone = middles["sparse"], middles["plugin-sparse"]
    assert inside is not None and alone is not None, "the record has no step that counts"
    return {
        "inside": up(inside["rollout_seconds"], 1),
        "alone": down(alone["rollout_seconds"], 1),
        "whole": up(100 * together["sparse/added/whole"], 1),
        "rescoring": up(100 * together["sparse/rescoring/share"], 1),
        "step": down(inside["step_seconds"], 1),
    }


def trl_server() -> Figures:
    step = _last_steps("trl-server-h200", "trl-steps")["server"]
    metrics = step["metrics"]
    read, seconds = metrics["rescoring/read_tokens"], metrics["rescoring/seconds"]
    return {
        "read": f"{read:,.0f}",
        "seconds": up(seconds, 1),
        "rate": f"{int(read / seconds):,}",
        "share": up(100 * step["added_seconds"] / step["step_seconds"], 1),
    }


def server_lists() -> Figures:
    record = records.read(RESULTS / "server-lists-cpu.json", "server-lists")
    asked, found = record["config"], record["results"]
    said = {"tokens": f"{asked['rollouts'] * asked['response_tokens']:,}"}
    for what in ("scores", "samples"):
        said |= {
            f"{what}_bytes": up(found[what]["bytes"]["seconds"], 1),
            f"{what}_text": down(found[what]["text"]["seconds"], 1),
        }
    return said


PAGES: Mapping[str, Claims] = {
    "docs/verl.md": {
        "In the second step the rollouts took {sparse} instead of {dense} s. That is {rollouts} times as many tokens a "
        "second, and {of_plugins} of the speed-up that the plugin alone has on them. The update took {sparse_update} s, and "
        "{dense_update} s in the dense run.": verl_steps,
        "All that sparroll adds is {added} s, {share} % of the step: {own} s for measuring, correcting and deciding; "
        "{spread} s for the dense ceiling, which took {ceiling} s on one prompt and was due every {every} steps; and "
        "{sampling} s that the rollouts took longer than in the plugin alone. With a ceiling every {every_now} steps, which "
        "is the default since, it is {share_now} %.": verl_steps_added,
        "So a whole step there was only {step} times as fast with sparse rollouts.": verl_steps,
        "In the second step the rollouts took {sparse} instead of {dense} s, {rollouts} times as many tokens a second, and "
        "a whole step was {step} times as fast. Measuring, correcting and deciding took {own} s, and the dense ceiling "
        "on one prompt {ceiling} s, so every {every} steps: together {share} % of the step, and {share_now} % with a "
        "ceiling every {every_now} steps.": verl_16k,
        "Re-scoring a quarter of the rollouts, which is the default, is {rescoring} % of the step. By these seconds it is "
        "at most 3 % from {from} rollouts a step on, and {low} to {high} % with 128.": verl_16k,
        "less than {room_now} s there.": verl_16k,
        "(same record): {verified_rollouts} times as many tokens a second, and a step {verified_step} times as "
        "fast,": verl_16k,
        "All that sparroll adds but the sampling's loss is {verified_share} % of the step, and {verified_share_now} % with "
        "a ceiling every {every_now} steps.": verl_16k,
        "was {verl_tail} in verl and {own_tail} in our loop on average, and the sparse rollouts earned {verl_reward} and "
        "{own_reward}, with a standard error of {error} each. Before and after, the policy solved {verl_before} and "
        "{verl_after} of {problems} problems densely in verl, {own_before} and {own_after} in our loop. Afterwards the two "
        "are {apart} percentage points apart, with a standard error of {apart_error}.": verl_study,
        "rollouts took {rollouts} s, from the begin of the first request to the end of the last one. Measuring, correcting "
        "and deciding took {own} s, and the dense ceiling {ceiling} s every {every_now} steps: together {share_now} % of a "
        "step of {step} s. Re-scoring is {rescoring} % of it. The plugin alone took {alone} s on as many requests in "
        "`verl-steps-h200.json`, on another": verl_sparse_8k,
        "had a tail of {tail}; the trainer gave their tokens probabilities that were {off} off on average.": verl_steps,
        "together as many as tokens less rollouts. Measuring, correcting and deciding took {own} s of a step of {step} s; "
        "the dense ceiling took {ceiling} s, once.": verl_two_replicas,
        "(`verl-two-gpus-h200.json`). Measuring, correcting and deciding took {own} s of a step of {step} s; the dense "
        "ceiling took {ceiling} s, once.": verl_tensor_parallel,
    },
    "docs/trl.md": {
        "rollouts took {sparse} instead of {dense} s, {rollouts} times as many tokens a second, and a whole step "
        "{sparse_step} instead of {dense_step} s. Verified ones sampled {verified_rollouts} times as many tokens a second "
        "as dense ones, and a step took {verified_step} s. All that sparroll adds took {added} s, {share} % of the step "
        "with re-scoring, and {verified_share} % of it with verified rollouts.": trl_steps,
        "Rollouts took {inside} s in TRL and {alone} s in the plugin alone, so sampling loses nothing that shows. All that "
        "sparroll adds is {whole} % of a step of {step} s, and re-scoring {rescoring} % of it.": trl_sampling,
        "{read} tokens were read again in {seconds} s, {rate} a second, and all that sparroll adds took {share} % of the "
        "step.": trl_server,
        "those of {tokens} response tokens take {scores_bytes} instead of {scores_text} s of CPU time when they are read "
        "again, and {samples_bytes} instead of {samples_text} s when they are sampled,": server_lists,
    },
}
