"""One process of a case of benchmarks/trl_steps.py: a TRL trainer, or the plugin's engine alone. It writes a line for each
step as soon as that is done, and what it finds about the weights afterwards. Nothing is compared here.

Seconds of a step, which the process synchronises with its GPU to read:

    step      from TRL's begin of the step to its end
      round     `_generate_and_score_completions`: all that is not loss, gradient and optimizer
        sync      weights into the engine
        generate  the engine wakes, samples, and sleeps
        engine    of it, `generate` of what TRL holds as its engine; rollout: without what sparroll measures inside
        score     TRL's pass for the dense log-probabilities
        reward    of functions that take no time
      update    the rest of the step
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trainer_ceiling
from step_clock import Clock, append, used_gib

from sparroll.draft_check import DraftCheck
from sparroll.engines.load_model import load_tokenizer
from sparroll.schedule import Schedule

PROMPT_TOKENS = 64
"""Of every prompt, so that no row is padded and attention needs no mask."""
CONTEXT_ROOM = 256
"""Beside the response: the prompt, and a window of drafts."""
MOST_STEPS = 8
"""That there are prompts for."""
STEP_TOKENS = 4096
"""TRL's max_num_batched_tokens, which the plugin alone gets, too."""


@dataclass(frozen=True)
class Case:
    schedule: bool = True
    verified: bool = False
    trainer: bool = True
    """False: the plugin's engine alone."""
    server: bool = False
    processes: int = 1
    control: bool = False
    """Whether it has a control group, of --control-share of the rollouts."""

    @property
    def gpus(self) -> int:
        return 2 if self.server else self.processes


CASES = {
    "dense": Case(schedule=False),
    "sparse": Case(),
    "control": Case(control=True),
    "plugin-dense": Case(schedule=False, trainer=False),
    "plugin-sparse": Case(trainer=False),
    "verified": Case(verified=True),
    "plugin-verified": Case(trainer=False, verified=True),
    "server": Case(server=True),
    "processes": Case(processes=2),
}


# -- what every case is given --------------------------------------------------------------------------------------------


def schedule_of(options: argparse.Namespace) -> Schedule:
    return Schedule.load(str(options.work / "schedule.toml") if options.dry else options.schedule, force=True)


def response_tokens(options: argparse.Namespace, case: Case) -> int:
    return int(options.server_tokens if case.server else options.response_tokens)


def prompts(options: argparse.Namespace) -> list[str]:
    """Those of all steps, of PROMPT_TOKENS tokens each."""
    draw = random.Random(options.seed)
    words = [
        " ".join(str(draw.randrange(10)) for _ in range(PROMPT_TOKENS)) for _ in range(MOST_STEPS * options.prompts)
    ]
    tokenizer = load_tokenizer(str(options.work / "model"))
    assert all(len(tokenizer(text)["input_ids"]) == PROMPT_TOKENS for text in words), "a digit is not one token"
    return words


def drawn_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """As good as random, and different within a group."""
    return [sum(ids) % 101 / 100 for ids in completion_ids]


def verdicts(options: argparse.Namespace, case: Case) -> AbstractContextManager[None]:
    if not case.verified:
        return nullcontext()
    from forced_verdicts import verdicts_forced

    return verdicts_forced(options.kept_share)


# -- a trainer -----------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace, name: str, server_url: str | None) -> None:
    case, tokens = CASES[name], response_tokens(options, CASES[name])
    rank = int(os.environ.get("RANK", "0"))
    clock = Clock()
    trainer = make_trainer(options, case, server_url)
    generation = trainer.vllm_generation
    clock.watch(trainer, "_generate_and_score_completions", "round")
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "score", in_updates=False)
    clock.watch(trainer, "_calculate_rewards", "reward")
    clock.watch(generation, "sync_weights", "sync")
    clock.watch(generation, "generate", "generate")
    if not case.server or rank == 0:
        clock.watch(generation.vllm_client if case.server else generation.llm, "generate", "engine")
    trainer.add_callback(step_lines(options, name, clock, trainer, tokens, options.work / f"{name}-{rank}.jsonl"))
    path, sleeps = options.work / f"{name}-{rank}.jsonl", watched_sleeps(generation)
    append(path, {"started_seconds": time.time() - options.launched} | used_gib())
    with verdicts(options, case):
        trainer.train()
        append(path, {"in_force": in_force(trainer, tokens, sleeps, server_url)})
        if case.schedule:
            generation.max_completion_length = min(options.first_tokens, tokens)
            append(path, arrived(options, trainer, options.work / f"{name}-{rank}-ceiling"))
    trainer.accelerator.wait_for_everyone()
    # vLLM's own end takes seconds, and fails where torch's process groups are those of several trainers.
    os._exit(0)


def make_trainer(options: argparse.Namespace, case: Case, server_url: str | None) -> Any:
    from datasets import Dataset
    from trl import GRPOTrainer

    from sparroll.integrations.trl import SparseGRPOTrainer, SparseRollouts

    if options.dry:
        on_a_cpu()
    rows = [{"prompt": text} for text in prompts(options)]
    given: dict[str, Any] = {
        "model": str(options.work / "model"),
        "reward_funcs": drawn_reward,
        "args": arguments(options, case, server_url),
        "train_dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[: case.processes]),
        "processing_class": load_tokenizer(str(options.work / "model")),
    }
    if case.schedule:
        sparse = SparseRollouts(
            schedule_of(options),
            force_schedule=True,
            correction="tis",
            verify=DraftCheck(options.window_tokens, options.floor) if case.verified else None,
            probe_rollouts=options.probe or SparseRollouts.probe_rollouts,
            control_share=options.control_share if case.control else 0.0,
            # The larger share of the first rounds would stay for as long as nothing is known of a gap.
            control_share_first=options.control_share if case.control else SparseRollouts.control_share_first,
            guard={"action": "warn", "at_least": 0.86},
            seed=options.seed,
        )
        return SparseGRPOTrainer(**given, sparse=sparse)
    trainer = GRPOTrainer(**given)
    if options.dry:
        # On a CPU vLLM packs its weights, and TRL cannot load others.
        trainer.vllm_generation.sync_weights = lambda: None
    return trainer


def arguments(options: argparse.Namespace, case: Case, server_url: str | None) -> Any:
    from trl import GRPOConfig

    rows = options.prompts * options.samples // case.processes
    tokens = response_tokens(options, case)
    where: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": server_url, "vllm_server_timeout": 600}
    if not case.server:
        where = {
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": not options.dry,
            "vllm_gpu_memory_utilization": options.gpu_memory_share,
            "vllm_max_model_length": tokens + CONTEXT_ROOM,
        }
    else:
        where["vllm_group_port"] = options.group_port
    return GRPOConfig(
        output_dir=str(options.work / "out"),
        use_vllm=True,
        **where,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=rows // options.micro_batch,
        per_device_eval_batch_size=options.samples,
        num_generations=options.samples,
        max_completion_length=tokens,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        epsilon_high=0.28,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=options.dry,
        bf16=not options.dry,
        gradient_checkpointing=True,
        disable_tqdm=True,
        seed=options.seed,
    )


def on_a_cpu() -> None:
    """TRL gives vLLM neither a dtype nor a size of its cache, and there is no sending of weights without GPUs."""
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient

    from vllm import LLM

    vllm_generation.LLM = functools.partial(LLM, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**26)
    VLLMClient.init_communicator = lambda self, device: None
    VLLMClient.update_named_params = lambda self, metadata, named: list(named)


def step_lines(options: argparse.Namespace, name: str, clock: Clock, trainer: Any, tokens: int, path: Path) -> Any:
    """A callback that writes each step's line. The first step is short: it is there for what happens only once."""
    from transformers import TrainerCallback

    class StepLines(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.vllm_generation.max_completion_length = tokens if state.global_step else options.first_tokens
            used_gib()
            clock.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.line = {"step": state.global_step, "step_seconds": clock.since_start()} | used_gib()
            self.line |= {f"{part}_seconds": seconds for part, seconds in clock.seconds.items()}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if not logs or "loss" not in logs:
                return
            metrics = {key: float(value) for key, value in logs.items()}
            line = self.line
            inside = sum(metrics.get(f"time/sparroll_{part}_seconds", 0.0) for part in ("measure", "ceiling"))
            sampled = round(metrics["completions/mean_length"] * options.prompts * options.samples)
            line["rollout_seconds"] = line.get("engine_seconds", 0.0) - inside
            line["update_seconds"] = line["step_seconds"] - line["round_seconds"]
            append(path, line | {"rollout_tokens": sampled, "metrics": metrics})

    return StepLines()


# -- what is in force ----------------------------------------------------------------------------------------------------


def watched_sleeps(generation: Any) -> list[int]:
    """The levels of all later sleeps of an engine in this process, as they come."""
    levels: list[int] = []
    llm = own_llm(generation)
    if llm is not None:
        sleep = llm.sleep

        def watched(level: int = 1, *arguments: Any, **named: Any) -> Any:
            levels.append(level)
            return sleep(level, *arguments, **named)

        llm.sleep = watched
    return levels


def own_llm(generation: Any) -> Any:
    """TRL's vllm.LLM, behind what sparroll has put in front of it; None in server mode."""
    if generation.mode != "colocate":
        return None
    return vars(generation.llm).get("_llm", generation.llm)


def in_force(trainer: Any, tokens: int, sleeps: list[int], server_url: str | None) -> dict[str, Any]:
    """Settings, read from what runs."""
    import engine_facts
    import trl

    args, llm = trainer.args, own_llm(trainer.vllm_generation)
    model = trainer.accelerator.unwrap_model(trainer.model)
    found: dict[str, Any] = {
        "trl": trl.__version__,
        "trainer": engine_facts.of_model(model, torch.bfloat16 if args.bf16 else None),
        "rollouts": int(args.generation_batch_size),
        "response_tokens": int(trainer.vllm_generation.max_completion_length),
        "asked_response_tokens": tokens,
        "learning_rate": float(args.learning_rate),
    }
    if llm is not None:
        found["engine"] = engine_facts.of_engine(llm.llm_engine.vllm_config)
        found["engine"]["workers"] = llm.collective_rpc(engine_facts.of_worker)
        found |= {"sleep_levels": sorted(set(sleeps)), "sleeps": len(sleeps)}
    elif server_url is not None:
        found["server"] = engine_facts.of_server(server_url)
    setup = getattr(trainer, "sparse_setup", None)
    if setup is not None:
        table = {key: value for key, value in setup.table().items() if key not in ("attention", "control")}
        found["sparroll"] = table | {"schedule": setup.first_schedule().name}
    return found


# -- whether the engine has the trained weights, and how far it is from the trainer ----------------------------------------


def arrived(options: argparse.Namespace, trainer: Any, folder: Path) -> dict[str, Any]:
    """`arrived`: how far the engine's dense log-probabilities are from the trainer's, with the trained weights and with the
    first ones. The engine has the trained ones if the first figure is rounding and the second is not.

    `ceilings`: the same distance as a tail, with the trained weights: the engine's dense rollouts of an evaluation against
    the engine's prefill, and against the trainer's forward. Only where the engine re-scores.
    """
    from sparroll.engines.vllm.rescoring import Rescorer

    kept: list[dict[str, Any]] = []
    theirs, fold = trainer._generate_and_score_completions, Rescorer.fold

    def keep(inputs: Any) -> Any:
        kept.append(theirs(inputs))
        return kept[-1]

    def keep_rollout(self: Any, held: Any, dense: Any) -> None:
        trainer_ceiling.keep_rollout(folder, held.rollout, dense)
        fold(self, held, dense)

    trainer._generate_and_score_completions = keep
    Rescorer.fold = keep_rollout  # type: ignore[method-assign]
    report = trainer.evaluate()
    Rescorer.fold = fold  # type: ignore[method-assign]
    (batch,) = kept
    read_by_trainer(trainer, folder)
    ceilings = trainer_ceiling.ceilings(folder)
    found: dict[str, Any] = {"ceilings": ceilings} if ceilings else {}
    first = load_first(options, trainer.accelerator.device)
    trainer.model.load_state_dict(first)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        first_BT, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1], batch_size=options.micro_batch
        )
    off = (first_BT - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()]
    found["arrived"] = {
        "updates": float(trainer.state.global_step),
        "from_trained": report["eval_sampling/sampling_logp_difference/mean"],
        "from_first": float(off.abs().mean()),
        "eval_sparse_steps": report["eval_rollout/sparse_steps"],
    }
    return found


def read_by_trainer(trainer: Any, folder: Path) -> None:
    """The trainer's lists of the dense rollouts in a folder, by the forward that TRL's log-probabilities come from."""
    model, device = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator.device
    for name, ids_S, prompt_tokens in trainer_ceiling.waiting(folder):
        ids_BS = ids_S[None].to(device)
        with torch.no_grad(), trainer.accelerator.autocast():
            passed = model.base_model(input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS), use_cache=False)
            hidden_SD, head_VD = passed.last_hidden_state[0, :-1], model.get_output_embeddings().weight
            lists = trainer_ceiling.lists_of(hidden_SD, head_VD, ids_BS[0, 1:])
        trainer_ceiling.keep_scores(folder, name, prompt_tokens, *lists)


def load_first(options: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.work / "model", dtype=torch.float32)
    return {name: tensor.to(device) for name, tensor in model.state_dict().items()}


# -- the plugin alone ----------------------------------------------------------------------------------------------------


def sample_alone(options: argparse.Namespace, name: str) -> None:
    """VLLMEngine with the trainer's settings and requests of its size."""
    import engine_facts

    from sparroll.engines.vllm.engine import VLLMEngine

    case, path = CASES[name], options.work / f"{name}-0.jsonl"
    schedule = schedule_of(options) if case.schedule else None
    if schedule is not None and case.verified:
        schedule = schedule.checked(options.window_tokens, options.floor)
    tokenizer = load_tokenizer(str(options.work / "model"))
    asked = [tokenizer(text)["input_ids"] for text in prompts(options)]
    engine = VLLMEngine(
        str(options.work / "model"),
        schedule=schedule,
        sparse=case.schedule,
        dtype=torch.float32 if options.dry else torch.bfloat16,
        max_batch=options.prompts * options.samples,
        max_context_tokens=options.response_tokens + CONTEXT_ROOM,
        gpu_memory_share=options.gpu_memory_share,
        max_num_batched_tokens=STEP_TOKENS,
    )
    append(path, {"started_seconds": time.time() - options.launched} | used_gib())
    config = engine._llm.llm_engine.vllm_config
    worker = engine._llm.llm_engine.model_executor.driver_worker
    found = engine_facts.of_engine(config) | {"workers": [engine_facts.of_worker(worker)]}
    append(path, {"in_force": {"engine": found}})
    with verdicts(options, case):
        for step in range(1, options.steps + 1):
            of_step = asked[(step - 1) * options.prompts : step * options.prompts]
            tokens = options.response_tokens if step > 1 else options.first_tokens
            engine.reset_report()
            began = Clock.now()
            rollouts = engine.generate(of_step, options.samples, max_new_tokens=tokens, seed=step)
            seconds = Clock.now() - began
            line = {"step": step, "step_seconds": seconds, "rollout_seconds": seconds}
            made = sum(len(each.response_ids) for each in rollouts)
            append(path, line | {"rollout_tokens": made, "kv_read_share": engine.report().kv_read_share} | used_gib())
    engine.close()
