"""What cells are made of: a training run of our own loop with its series, the tokens that an engine samples under a
reading, and the accuracy under a reading. Chooses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from claim_cells import Place, Table
from claim_figures import mean
from claim_tasks import ClaimTask, Reading, engine_kind, engine_options, run_config, schedule_of
from claim_tokens import Tokens, step_statistics
from transformers import PreTrainedModel

from sparroll import files, tasks
from sparroll.compression import make_compression
from sparroll.engines.base import Engine
from sparroll.engines.make import DTYPES, make_engine, roomiest
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.evaluate.accuracy import Accuracy, grade
from sparroll.train.config.rollout import DenseAttention
from sparroll.train.config.run import TrainConfig
from sparroll.train.dense_checks import first_accuracy
from sparroll.train.loop import Trainer
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.sampling.weight_sync import EngineWeights, SamplerWeights
from sparroll.train.setup import held_by_main, open_run
from sparroll.types import Rollout, StepReport

MEASURE_SEED = 50_000
"""Stream of prompts that no run trains on or is evaluated on."""
KEPT = ("reward/", "mismatch/", "correction/", "claims/", "control/", "distill/", "staleness/", "policy/clipped")
KEPT_ALONE = (
    "rollout/kv_read_share",
    "rollout/response_tokens_mean",
    "policy/gradient_norm",
    "compression/kv_saved_share",
)
SECONDS = ("time/rollout_seconds", "time/step_seconds", "time/distill_seconds")


SamplerMaker = Callable[[PreTrainedModel], SamplerWeights]
"""From the policy to the weights that sample in its place."""


def trained(
    place: Place, reading: Reading, seed: int, *, sampler: SamplerMaker | None = None, **sections: dict[str, Any]
) -> tuple[TrainConfig, Table]:
    """A training run of the task, from start to end or on from its last checkpoint. -> its configuration, its series

    Its folder is place.folder / "run"; the last checkpoints stay there until the cell is finished. sampler: other weights
    than the policy's that sample, made from the policy."""
    folder = place.folder / "run"
    config = run_config(place.task, reading, seed, place.folder, **sections)
    if not (folder / "result.json").is_file():
        resume = (folder / "config.json").is_file()
        first = first_figures(place, config)
        with held_by_main(folder, "recipes/claims/run.py", config.model.device):
            parts = open_run(config, folder, resume)
            if sampler is not None:
                dtype = DTYPES[config.rollout.dtype]
                parts.weights = EngineWeights(parts.scorer.model, parts.engine, sampler(parts.scorer.model), dtype)
            trainer = Trainer(parts, first, also_measure=step_statistics)
            with trainer.engine:
                trainer.run(place.on_progress)
    return config, series(read_lines(folder / "metrics.jsonl"))


def first_figures(place: Place, config: TrainConfig) -> StepReport:
    """The dense accuracy before the first step. All runs of a task and seed begin with the same weights and draws, so it
    is measured once for each engine."""
    about = f"{place.task.name}-{config.engine.kind}-{config.train.seed}"
    path = place.out / "first" / f"{about}.json"
    if not path.is_file():
        dense = config.model_copy(update={"attention": DenseAttention(), "distill": None})
        files.write_json(path, first_accuracy(dense))
    report: StepReport = files.read_table(path, f"delete {path} to measure it again")
    return report


def series(lines: Sequence[Mapping[str, Any]]) -> Table:
    """What a record keeps of a run: dense accuracy as [step, value, low, high], and every step's figures."""
    steps = [line for line in lines if "reward/mean" in line]
    names = dict.fromkeys(name for line in steps for name in line if name.startswith(KEPT) or name in KEPT_ALONE)
    accuracy = [
        [line["step"], *(_rounded(line[f"evaluate/dense_accuracy{end}"]) for end in ("", "_low", "_high"))]
        for line in lines
        if "evaluate/dense_accuracy" in line
    ]
    return {
        "dense_accuracy": accuracy,
        "accuracy_change": accuracy[-1][1] - accuracy[0][1],
        "steps": {name: [_rounded(line.get(name)) for line in steps] for name in names},
        "seconds": {name: mean([line.get(name) for line in steps]) for name in SECONDS},
    }


def run_mean(result: Table, name: str) -> float | None:
    """The mean over steps of a metric; None where the run has none."""
    return mean(result["steps"].get(name, []))


def first_step(result: Table, name: str) -> float | None:
    """The metric's value in the first step."""
    return (result["steps"].get(name) or [None])[0]


def last_checkpoint(place: Place) -> Path:
    """The folder of the run's last checkpoint; its model/ is a plain model."""
    return (place.folder / "run" / "checkpoints" / "latest").resolve()


@contextmanager
def opened(task: ClaimTask, model: str | Path, readings: Sequence[Reading]) -> Iterator[Engine]:
    """An engine with these weights that can run all of the readings."""
    schedules = [made for reading in readings if (made := schedule_of(task, reading)) is not None]
    kind = engine_kind(task, readings)
    engine = make_engine(
        kind,
        str(model),
        schedule=schedules[0] if schedules else None,
        capacity=roomiest(schedules),
        dtype=DTYPES[task.dtype],
        device=task.device,
        max_batch=task.max_batch,
        **engine_options(kind),
    )
    with engine:
        yield engine


def put(engine: Engine, task: ClaimTask, reading: Reading) -> None:
    """Let the engine decode with this reading from now on."""
    engine.set_compression(None)
    engine.set_schedule(schedule_of(task, reading))
    if reading["kind"] == "compression":
        settings = {name: value for name, value in reading.items() if name not in ("kind", "policy")}
        engine.set_compression(make_compression(reading["policy"], **settings))


def sampled(engine: Engine, task: ClaimTask, reading: Reading, seed: int = 0) -> list[Rollout]:
    """Rollouts of the held-out prompts under the reading."""
    put(engine, task, reading)
    engine.reset_report()
    asked = tasks.get(task.task).prompts("eval", task.level, MEASURE_SEED, task.measure_prompts)
    return engine.generate(
        PromptEncoder(engine.tokenizer).ids(asked),
        task.measure_samples,
        max_new_tokens=task.measure_new_tokens or task.max_new_tokens,
        temperature=task.temperature,
        seed=seed,
        top_k=task.top_k,
    )


def tokens_of(scorer: Scorer, task: ClaimTask, rollouts: list[Rollout]) -> Tokens:
    """These rollouts against the dense policy of the scorer."""
    with torch.autocast(task.device, dtype=torch.bfloat16, enabled=task.dtype == "bf16"):
        return Tokens.of(rollouts, scorer.dense(rollouts, temperature=task.temperature, top_k=task.top_k))


def scorer_of(task: ClaimTask, model: str | Path) -> Scorer:
    """The trainer's side: fp32 weights."""
    return Scorer(str(model), dtype=torch.float32, device=task.device)


def accuracy(engine: Engine, task: ClaimTask, reading: Reading, seed: int = 0) -> Table:
    """Accuracy on the held-out prompts of the training's own evaluation, under the reading."""
    put(engine, task, reading)
    known = tasks.get(task.task)
    prompts = known.prompts("eval", task.level, seed, task.evaluate_prompts)
    graded = grade(
        engine,
        known,
        prompts,
        PromptEncoder(engine.tokenizer).ids(prompts),
        lambda ids: str(engine.tokenizer.decode(ids, skip_special_tokens=True)),
        max_new_tokens=task.max_new_tokens,
        temperature=task.temperature,
        seed=seed,
    )
    found = Accuracy.of(graded)
    return {"value": found.value, "low": found.low, "high": found.high, "prompts": found.prompts}


def _rounded(value: float | None) -> float | None:
    """To five significant digits."""
    return None if value is None else float(f"{value:.5g}")
