"""Short TRL runs for the tests in tests/in_trl: the tiny model, colocated vLLM on a CPU in fp32, a prompt list of its own.

python tests/trl_runs.py FOLDER kill     # the same run in a process of its own, which kills itself
python tests/trl_runs.py FOLDER rank     # one process of a run of two
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparroll import Schedule
from sparroll.models import resolve

STEPS, KILLED_IN_STEP = 4, 3
RANK_STEPS = 3
"""Of a run of two processes: the controller moves its schedule after the second one."""
ROLLOUTS, GROUP, NEW_TOKENS, CONTEXT = 8, 4, 120, 192
START = Schedule.fixed(64)
CONTROL = {"by": "controller", "target": 0.97, "window_steps": 2}
GROUP_OF_CONTROL: dict[str, float] = {"control_share": 0.25, "control_share_first": 0.25}
"""A control group of one rollout of each prompt."""
MISMATCH = {"bin_tokens": 64, "least_tokens": 50, "ceiling_every_steps": 0}


@dataclass
class Observed:
    """What a run did, and what it was given."""

    trainer: Any
    batches: list[dict[str, Any]] = field(default_factory=list)
    """What TRL's `_generate_and_score_completions` returned, after the correction; training first, then by time."""
    history: list[dict[str, Any]] = field(default_factory=list)

    def steps(self, name: str) -> list[float]:
        """A metric of each step."""
        return [each[name] for each in self.history if name in each]


def prompts(count: int = 16) -> list[dict[str, str]]:
    words = [" ".join([str(number % 10), "+", str(number // 3 % 10)]) for number in range(count)]
    return [{"prompt": text} for text in words]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def on_this_cpu() -> None:
    """TRL leaves it to vLLM to take bf16 for a model of fp32, and to compile it for a minute. In this process, vLLM is made
    once for each schedule that it starts with."""
    from trl.generation import vllm_generation

    from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE
    from vllm import LLM

    def made(**named: Any) -> Any:
        key = os.environ[SCHEDULE_VARIABLE]
        if key not in _ENGINES:
            _ENGINES.clear()
            _ENGINES[key] = LLM(**named, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**26)
        return _ENGINES[key]

    vllm_generation.LLM = made


_ENGINES: dict[str, Any] = {}


def arguments(folder: Path, **changes: Any) -> Any:
    from trl import GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROLLOUTS,
        "num_generations": GROUP,
        "max_completion_length": NEW_TOKENS,
        "max_steps": STEPS,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "epsilon_high": 0.28,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": CONTEXT,
        "seed": 3,
    }
    return GRPOConfig(**settings | changes)


def make(folder: Path, *, sparse: Any = None, changes: dict[str, Any] | None = None, **named: Any) -> Any:
    """The trainer of a run, ready to train."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from sparroll.integrations.trl import SparseGRPOTrainer, SparseRollouts

    on_this_cpu()
    model = str(resolve("tiny-reasoner"))
    if sparse is None:
        sparse = SparseRollouts(
            START, correction="icepop", control=CONTROL, mismatch=MISMATCH, probe_rollouts=None, **GROUP_OF_CONTROL
        )
    return SparseGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments(folder, **changes or {}),
        train_dataset=Dataset.from_list(prompts()),
        eval_dataset=Dataset.from_list(prompts(1)),
        processing_class=AutoTokenizer.from_pretrained(model),
        sparse=sparse,
        **named,
    )


def observe(trainer: Any) -> Observed:
    """Keep what the trainer samples from now on."""
    observed = Observed(trainer)
    theirs: Callable[[Any], dict[str, Any]] = trainer._generate_and_score_completions

    def keep(inputs: Any) -> dict[str, Any]:
        batch = theirs(inputs)
        observed.batches.append({"training": trainer.model.training} | dict(batch))
        return batch

    trainer._generate_and_score_completions = keep
    return observed


def train(folder: Path, resume: bool = False, **named: Any) -> Observed:
    observed = observe(make(folder, **named))
    observed.trainer.train(resume_from_checkpoint=True if resume else None)
    observed.history = [each for each in observed.trainer.state.log_history if "loss" in each]
    return observed


def environment(**changes: str) -> dict[str, str]:
    """For a process of its own: without what TRL says about this one."""
    ours = {name: value for name, value in os.environ.items() if name not in _OF_THIS_PROCESS}
    tests = Path(__file__).parent
    return ours | {"PYTHONPATH": f"{tests}:{tests.parent / 'src'}"} | changes


_OF_THIS_PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(folder: Path, what: str = "") -> None:
    from transformers import TrainerCallback

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if what == "kill" and state.global_step == KILLED_IN_STEP - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    if what == "rank":
        one_of_two(folder)
    else:
        train(folder, callbacks=[Kill()])


def reports_of_rounds(trainer: Any) -> list[tuple[Any, Any]]:
    """(The schedule that was in force, what this process's own engine says that it ran), of each round from now on."""
    found: list[tuple[Any, Any]] = []
    engine, rounds = trainer._sparse_engine, trainer.sparse_rounds
    theirs = engine.take

    def take() -> Any:
        step = theirs()
        # The watchers have not seen the round yet.
        found.append((rounds.schedule.inline(), step.ran))
        return step

    engine.take = take
    return found


def one_of_two(folder: Path) -> None:
    """One process of a run of two, with a correction that normalises over the whole batch."""
    from sparroll.integrations.trl import SparseRollouts

    sparse = SparseRollouts(
        START,
        correction="sparse_rl_released",
        control=CONTROL,
        mismatch=MISMATCH,
        probe_rollouts=None,
        **GROUP_OF_CONTROL,
    )
    changes = {"per_device_train_batch_size": ROLLOUTS // 2, "max_steps": RANK_STEPS}
    observed = observe(make(folder, sparse=sparse, changes=changes))
    ran = reports_of_rounds(observed.trainer)
    observed.trainer.train()
    observed.history = [each for each in observed.trainer.state.log_history if "loss" in each]
    rounds = observed.trainer.sparse_rounds
    said = {
        "batches": observed.batches,
        "ran": ran,
        "history": observed.history,
        "events": observed.trainer.sparse_events,
        "schedule": rounds.schedule.inline(),
        "weights": observed.trainer.model.get_input_embeddings().weight.detach(),
    }
    torch.save(said, folder / f"rank-{observed.trainer.accelerator.process_index}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
