"""What Sparrow (arXiv 2606.08446) says of DistillSparse, pages and speed, and what our records say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import published_experiments
from published_claims import SHAPE, STUDY, TINY, Part, PublishedClaim, study_command
from published_figures import LAST, difference, less, over
from published_rules import Estimate, above, as_cheap, as_fast, as_good, inside
from record_tables import results
from render_speed import PAPER_SPEEDUP, SIZES, found_whole
from render_study import AGAIN, STUDIES

S25, S60 = STUDIES[25], STUDIES[60]
TAIL = "mismatch/acceptance_q05"
ROLLOUTS = tuple(f"rollout-qwen3-{size}-drained-h200" for size in SIZES)
PUBLISHED_STEP, PUBLISHED_DISTILLED = 1.97, 1.72
"""Speed-ups of a whole step of 1.7B: with the schedule of .86, and with that of .80 and an adapter."""
DENSE_STEPS = {
    "verl, 16K": ("verl-steps-16k-h200", "verl-steps"),
    "verl, 8K, without fused kernels": ("verl-steps-h200", "verl-steps"),
    "TRL, 8K": ("trl-steps-h200", "trl-steps"),
}
"""By the trainer and the length of its responses."""
PUBLISHED_ADAPTER_UPDATE = 0.55
"""Of the policy's update."""


def published_loss_raises() -> Sequence[Part]:
    short = less(over(AGAIN[25], "distill", TAIL, LAST), over(AGAIN[25], "calibrated-0.75", TAIL, LAST))
    long = less(over(AGAIN[60], "distill", TAIL, LAST), over(S60, "calibrated-0.75", TAIL, LAST))
    return [
        Part(f"{steps} steps", of, above(published_experiments.RAISED), sign=True)
        for steps, of in (("25", short), ("60", long))
    ]


def an_adapter_raises() -> Sequence[Part]:
    """With the KL over top-k lists."""
    parts = [
        Part(
            f"study, {steps} steps",
            less(over(record, "distill-kl", TAIL, LAST), over(record, "calibrated-0.75", TAIL, LAST)),
            above(0),
            sign=True,
        )
        for steps, record in STUDIES.items()
    ]
    for name, record in (("study, frozen policy", "mismatch-study-distill-h200"), ("tiny-reasoner", "distill-tiny")):
        parts.append(Part(name, _raised(results(record, "distill")), above(0), sign=True))
    return parts


def _raised(found: dict[str, Any]) -> Estimate:
    """Both tails have intervals of their own, from bootstraps over rollouts; their errors are taken as independent."""
    before, after = found["before"], found["after"]
    down = ((after["q05"] - after["q05_low"]) ** 2 + (before["q05_high"] - before["q05"]) ** 2) ** 0.5
    up = ((after["q05_high"] - after["q05"]) ** 2 + (before["q05"] - before["q05_low"]) ** 2) ** 0.5
    raised = after["q05"] - before["q05"]
    return Estimate(raised, raised - down, raised + up)


def adapter_trains() -> Sequence[Part]:
    than = difference(S60, "distill-kl", "calibrated-0.86")
    return [Part("schedule of .75 with an adapter, beyond that of .86", than, as_good(), sign=True)]


def last_steps() -> dict[str, dict[str, float]]:
    return {row["case"]: row["steps"][-1] for row in results("training-step-h200", "training-step")}


def adapter_costs() -> Sequence[Part]:
    last = last_steps()
    update = last["distill"]["distill_seconds"] / last["distill"]["update_seconds"]
    step = last["dense"]["step_seconds"] / last["distill"]["step_seconds"]
    return [
        Part(
            "adapter's update, of the policy's",
            Estimate.single(update),
            as_cheap(PUBLISHED_ADAPTER_UPDATE),
            2,
        ),
        Part("whole step, times dense", Estimate.single(step), as_fast(PUBLISHED_DISTILLED), 2),
    ]


def rollouts_dominate() -> Sequence[Part]:
    """The last dense step of each trainer, when everything is compiled."""
    steps = {"own loop, 12K tokens": last_steps()["dense"]}
    for label, (record, kind) in DENSE_STEPS.items():
        (case,) = [case for case in results(record, kind)["cases"] if case["case"] == "dense"]
        steps[label] = case["steps"][-1]
    shares = {label: step["rollout_seconds"] / step["step_seconds"] for label, step in steps.items()}
    return [Part(label, Estimate.single(of), inside(0.7, 0.9), 2) for label, of in shares.items()]


def rollout_speedups() -> Sequence[Part]:
    """The interval is what the interpolation may be off: its errors against whole runs, added up over both engines."""
    error = sum(abs(run.estimated_seconds / run.seconds - 1) for run in found_whole() if run.scale == 1)
    parts = []
    for size, name in zip(SIZES, ROLLOUTS, strict=True):
        speedup = results(name, "rollout")["speedup"]
        estimate = Estimate(speedup, speedup * (1 - error), speedup * (1 + error))
        parts.append(Part(size.upper(), estimate, as_fast(PAPER_SPEEDUP[size]), 2))
    return parts


def step_speedup() -> Sequence[Part]:
    last = last_steps()
    speedup = last["dense"]["step_seconds"] / last["sparse"]["step_seconds"]
    return [Part("1.7B, responses of 12K tokens", Estimate.single(speedup), as_fast(PUBLISHED_STEP), 2)]


WHOLE_STEP = (
    "python benchmarks/training_step.py --out benchmarks/results/training-step-h200.json --work /tmp/step "
    "--response-tokens 12288 --kv-cache-gib 52 --cases dense distill sparse --gpus 0 1 2"
)

SPEED_AND_ADAPTER = (
    PublishedClaim(
        name="page-size",
        title="smaller pages have the higher tail at equal eFLOPs",
        says="At equal eFLOPs smaller pages have a higher tail: at about 37e12, .818 with pages of 16, .790 with 32, .768 "
        "with 64 and .745 with 128",
        model=f"{STUDY}; {TINY}",
        experiment="page-size",
        settled=published_experiments.smaller_pages_are_better,
    ),
    PublishedClaim(
        name="published-loss-raises-tail",
        title="DistillSparse's published loss raises the tail",
        says="The published loss (PPO + .001 KL, k3) raises the tail by .035 to .05 in most bins",
        model=STUDY,
        records=(AGAIN[25], AGAIN[60], S60),
        parts=published_loss_raises,
        command=study_command(60, "distill", "calibrated-0.75"),
        experiment="distil-loss",
        settled=published_experiments.published_loss_raises,
    ),
    PublishedClaim(
        name="an-adapter-raises-tail",
        title="an adapter raises the tail without reading more (with our loss)",
        says="A LoRA that only the rollouts see raises the tail under the same schedule (here with the KL over lists)",
        model=f"{STUDY}; {TINY}",
        records=(S25, S60, "mismatch-study-distill-h200", "distill-tiny"),
        parts=an_adapter_raises,
        command=study_command(60, "distill-kl", "calibrated-0.75"),
        experiment="distil-loss",
        settled=published_experiments.an_adapter_raises,
    ),
    PublishedClaim(
        name="adapter-trains-as-well",
        title="a cheaper schedule with an adapter trains like that of .86",
        says="The schedule of .80 with an adapter reaches about .86 and trains like it",
        model=STUDY,
        records=(S60,),
        parts=adapter_trains,
        command=study_command(60, "distill-kl", "calibrated-0.86"),
        experiment="distil-loss",
        settled=published_experiments.adapter_trains,
    ),
    PublishedClaim(
        name="adapter-is-cheap",
        title="the adapter costs little",
        says=f"The adapter adds 55 % to the update, and the whole step is still {PUBLISHED_DISTILLED} times as fast",
        model=SHAPE,
        records=("training-step-h200",),
        parts=adapter_costs,
        command=WHOLE_STEP,
    ),
    PublishedClaim(
        name="rollouts-dominate",
        title="rollouts take 70 to 90 % of a step",
        says="70 to 90 % of a step is spent on generating responses",
        model=SHAPE,
        records=("training-step-h200", *(record for record, _ in DENSE_STEPS.values())),
        parts=rollouts_dominate,
        command=WHOLE_STEP,
    ),
    PublishedClaim(
        name="rollouts-twice-as-fast",
        title="the schedules of .86 make rollouts 1.5 to 2.4 times as fast",
        says=f"Rollouts are {' / '.join(map(str, PAPER_SPEEDUP.values()))} times as fast (1.7B / 4B / 8B / 14B, H200)",
        model="Qwen3's shapes, random weights",
        records=(*ROLLOUTS, "whole-run-qwen3-1.7b-dense-h200", "whole-run-qwen3-1.7b-triton-h200"),
        parts=rollout_speedups,
        command="python benchmarks/rollout.py --model qwen3-1.7b --out-folder benchmarks/results",
    ),
    PublishedClaim(
        name="steps-twice-as-fast",
        title="whole steps of 1.7B are twice as fast",
        says=f"A whole step is {PUBLISHED_STEP} times as fast for 1.7B (2.11 / 1.81 / 1.35 for 4B / 8B / 14B)",
        model=SHAPE,
        records=("training-step-h200",),
        parts=step_speedup,
        command=WHOLE_STEP,
    ),
)
