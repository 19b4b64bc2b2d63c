"""Watches verl from inside: verl imports this file in every process of a case (VERL_USE_EXTERNAL_MODULES=verl_watch), and it
writes into the folder SPARROLL_WATCH what is in force and what each replica did. verl_seen.py reads it afterwards.

    engine-R.json    of replica R: vLLM's settings, those of its workers, and verl's settings of its server
    trainer.json     of the model that is trained
    run.json         verl's sizes, and sparroll's settings
    sleeps-R.jsonl   each time that the replica slept, with the level
    requests-R.jsonl each of its requests: version of the weights, begin and end
    counts-R.jsonl   each time that the driver took what the replica counted, with the schedule and every worker's counts
    arrived.jsonl    how far the engine's log-probabilities are from the trainer's, where SPARROLL_ARRIVAL is set
    ceiling/         dense rollouts and the trainer's lists of them, where SPARROLL_TRAINER_CEILING is set

Two things change what a run does: SPARROLL_FIRST_TOKENS is the length of the first step's responses, which is there for
what happens only once; and SPARROLL_FIRST_WEIGHTS keeps the first weights in vLLM, because verl alone cannot give a CPU's
vLLM others.

verl's modules are hooked as soon as they are imported, and none is imported for that.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

FOLDER, FIRST_TOKENS, FIRST_WEIGHTS = "SPARROLL_WATCH", "SPARROLL_FIRST_TOKENS", "SPARROLL_FIRST_WEIGHTS"
ARRIVAL, TRAINER_CEILING = "SPARROLL_ARRIVAL", "SPARROLL_TRAINER_CEILING"
COMPARED_ROWS = 4
"""Of a batch, whose log-probabilities are compared in a step."""
Hook = Callable[[Any], None]


class _Hooks(MetaPathFinder):
    """Calls a hook with its module right after that was executed."""

    def __init__(self) -> None:
        self.waiting: dict[str, Hook] = {}

    def add(self, name: str, hook: Hook) -> None:
        if name in sys.modules:
            hook(sys.modules[name])
        else:
            self.waiting[name] = hook

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        hook = self.waiting.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                hook(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def folder() -> Path:
    return Path(os.environ[FOLDER])


def write(name: str, found: Any) -> None:
    from sparroll import files
    from sparroll.records import plain

    folder().mkdir(parents=True, exist_ok=True)
    files.write_json(folder() / name, plain(found))


def append(name: str, line: dict[str, Any]) -> None:
    import step_clock

    folder().mkdir(parents=True, exist_ok=True)
    step_clock.append(folder() / name, line)


# -- the engine's server, verl's or sparroll's -----------------------------------------------------------------------------


def watch_servers(module: Any) -> None:
    server = module.vLLMHttpServer
    run_server, generate = server.run_server, server.generate

    async def watched_run_server(self: Any, *arguments: Any, **named: Any) -> None:
        await run_server(self, *arguments, **named)
        await write_engine(self)
        watch_sleep(self)

    async def watched_generate(
        self: Any, prompt_ids: Any, sampling_params: dict[str, Any], *arguments: Any, **named: Any
    ) -> Any:
        if not self.global_steps and FIRST_TOKENS in os.environ:
            sampling_params = {**sampling_params, "max_tokens": int(os.environ[FIRST_TOKENS])}
        weights, began = self.global_steps, time.time()
        output = await generate(self, prompt_ids, sampling_params, *arguments, **named)
        line = {"weights": weights, "began": began, "ended": time.time()}
        append(f"requests-{self.replica_rank}.jsonl", line)
        return output

    server.run_server, server.generate = watched_run_server, watched_generate
    # sparroll's server is this one's subclass, and its module may have been under way before this file was.
    server.__init_subclass__ = classmethod(watch_sparrolls_server)


async def write_engine(server: Any) -> None:
    import engine_facts

    told = server.config
    found = engine_facts.of_engine(server.engine.vllm_config)
    found["workers"] = await server.engine.collective_rpc("watched_facts")
    found["server"] = {
        "mode": server.rollout_mode.name.lower(),
        "prompt_tokens": int(told.prompt_length),
        "response_tokens": int(told.response_length),
        "temperature": float(told.temperature),
        "ignores_end": bool(told.ignore_eos),
        "frees_cache": bool(told.free_cache_engine),
        "load_format": str(told.load_format),
    }
    write(f"engine-{server.replica_rank}.json", found)


def watch_sleep(server: Any) -> None:
    engine = server.engine
    sleep = engine.sleep

    async def watched_sleep(level: int = 1, *arguments: Any, **named: Any) -> Any:
        append(f"sleeps-{server.replica_rank}.jsonl", {"level": level})
        return await sleep(level, *arguments, **named)

    engine.sleep = watched_sleep


def watch_workers(module: Any) -> None:
    def watched_facts(self: Any) -> dict[str, Any]:
        import engine_facts

        return engine_facts.of_worker(self)

    module.vLLMColocateWorkerExtension.watched_facts = watched_facts
    if FIRST_WEIGHTS in os.environ:
        module.vLLMColocateWorkerExtension._update_weights = lambda *arguments, **named: None


# -- sparroll's server -----------------------------------------------------------------------------------------------------


def watch_sparrolls_server(server: Any) -> None:
    if "sparroll_take" not in vars(server):
        return
    take, set_schedule = server.sparroll_take, server.sparroll_set_schedule

    async def watched_take(self: Any) -> Any:
        taken = await take(self)
        workers = await self.engine.collective_rpc("sparroll_report")
        line = {"weights": self.global_steps, "schedule": self.watched_schedule, "measures": self.engine.measures}
        line |= counts_of(taken.ran.layers) | {"measured": taken.counts.measured}
        append(f"counts-{self.replica_rank}.jsonl", line | {"workers": [worker_counts(each) for each in workers]})
        return taken

    async def watched_set_schedule(self: Any, inline: Any, measures: bool, with_weights: bool = False) -> None:
        await set_schedule(self, inline, measures, with_weights)
        if not with_weights:
            self.watched_schedule = "dense" if inline is None else inline["name"]

    async def dense_logp(self: Any, rows: list[tuple[list[int], list[int]]]) -> tuple[Any, list[list[float]]]:
        """(version of the weights, the engine's dense log-probabilities of each response), by a prefill."""
        return self.global_steps, [await prefilled(self, *row) for row in rows]

    server.sparroll_take, server.sparroll_set_schedule = watched_take, watched_set_schedule
    server.watched_dense_logp = dense_logp


def counts_of(layers: Any) -> dict[str, int]:
    """Of the layer that was sparse most often."""
    if not layers:
        return {"sparse_steps": 0, "dense_steps": 0}
    layer = max(layers, key=lambda each: each.sparse_steps)
    return {"sparse_steps": layer.sparse_steps, "dense_steps": layer.dense_steps}


def worker_counts(table: dict[str, Any]) -> dict[str, int]:
    """The same of one worker, since it began."""
    from sparroll.engines.report import EngineReport

    return counts_of(EngineReport.from_table(table).layers)


async def prefilled(server: Any, prompt_ids: list[int], response_ids: list[int]) -> list[float]:
    import uuid

    import torch

    from sparroll.engines.vllm.rescoring import request_of, scores_of
    from sparroll.types import Rollout

    rollout = Rollout(prompt_ids, response_ids, torch.zeros(len(response_ids)), "length")
    ids, parameters = request_of(rollout, 1, int(server.config.max_model_len))
    asked = {"prompt_token_ids": ids}
    said = server.engine.generate(prompt=asked, sampling_params=parameters, request_id=f"watched-{uuid.uuid4().hex}")
    output = [each async for each in said][-1]
    vocabulary = int(server.model_config.hf_config.vocab_size)
    scores = scores_of(output.prompt_logprobs, rollout, len(ids), top_k=1, vocabulary=vocabulary)
    logp: list[float] = scores.logp.tolist()
    return logp


def watch_tap(module: Any) -> None:
    """Keep the dense rollouts of the control group with the engine's lists, for the trainer to read."""
    if TRAINER_CEILING not in os.environ:
        return
    init = module.Tap.__init__

    def watched_init(self: Any, *arguments: Any, **named: Any) -> None:
        import trainer_ceiling

        init(self, *arguments, **named)
        fold = self.control.fold

        def watched_fold(held: Any, dense: Any) -> None:
            trainer_ceiling.keep_rollout(folder() / "ceiling", held.rollout, dense)
            fold(held, dense)

        self.control.fold = watched_fold

    module.Tap.__init__ = watched_init


# -- the trainer -----------------------------------------------------------------------------------------------------------


def watch_training_worker(module: Any) -> None:
    import functools

    worker = module.ActorRolloutRefWorker
    init_model = worker.init_model

    # verl finds its calls by what it has written onto the functions.
    @functools.wraps(init_model)
    def watched_init_model(self: Any, *arguments: Any, **named: Any) -> Any:
        import engine_facts

        made = init_model(self, *arguments, **named)
        if self.actor is not None and self.rank == 0:
            engine = self.actor.engine
            found = engine_facts.of_model(engine.module, getattr(engine, "_autocast_dtype", None))
            found |= {"processes": int(self.world_size), "strategy": str(self.config.actor.strategy)}
            found |= {"fused_log_probs": bool(engine.engine_config.use_fused_kernels)}
            write("trainer.json", found)
        return made

    worker.init_model = watched_init_model


def watch_log_probs(module: Any) -> None:
    """The trainer's lists of the dense rollouts, from the pass that computes its log-probabilities."""
    if TRAINER_CEILING not in os.environ:
        return
    forward = module.FusedLinearForPPO.forward

    def watched_forward(
        self: Any, hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: Any = 1.0
    ) -> Any:
        import torch
        import trainer_ceiling

        if not torch.is_grad_enabled():
            known = trainer_ceiling.waiting(folder() / "ceiling")
            for hidden_SD, labels_S in zip(hidden_states, input_ids, strict=True) if known else ():
                # verl's labels are the row itself, moved by one.
                found = trainer_ceiling.row_of(torch.roll(labels_S, 1), known)
                if found is not None:
                    name, tokens, prompt_tokens = found
                    lists = trainer_ceiling.lists_of(hidden_SD[: tokens - 1], vocab_weights, labels_S[: tokens - 1])
                    trainer_ceiling.keep_scores(folder() / "ceiling", name, prompt_tokens, *lists)
        return forward(self, hidden_states, vocab_weights, input_ids, temperature)

    module.FusedLinearForPPO.forward = watched_forward


# -- the driver ------------------------------------------------------------------------------------------------------------


def watch_driver(module: Any) -> None:
    trainer = module.PPOTrainer
    setup, old_log_prob = trainer._setup, trainer._compute_old_log_prob

    def watched_setup(self: Any) -> None:
        write_run(self)
        setup(self)

    def watched_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = old_log_prob(self, batch, metrics)
        if ARRIVAL in os.environ:
            append("arrived.jsonl", arrival(self, batch))
        return batch

    trainer._setup, trainer._compute_old_log_prob = watched_setup, watched_old_log_prob


def write_run(trainer: Any) -> None:
    import verl

    config, own = trainer.config, getattr(trainer, "settings", None)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    found: dict[str, Any] = {
        "verl": verl.__version__,
        "mode": str(config.trainer.v1.trainer_mode),
        "steps": int(trainer.config.trainer.total_training_steps),
        "prompts": int(config.data.train_batch_size),
        "samples": int(rollout.n),
        "prompts_of_an_update": int(actor.ppo_mini_batch_size),
        "rollouts_of_a_pass": int(actor.ppo_micro_batch_size_per_gpu),
        "learning_rate": float(actor.optim.lr),
        "training_gpus": int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes),
    }
    if own is not None:
        table = own.inline()
        start = own.first_schedule()
        found["sparroll"] = {name: table[name] for name in table if name not in ("schedule", "control")}
        found["sparroll"] |= {"schedule": "dense" if start is None else start.name}
        found["sparroll"] |= {"control_by": table["control"]["by"]}
    write("run.json", found)


def arrival(trainer: Any, batch: Any) -> dict[str, Any]:
    """How far the engine's dense log-probabilities are from the trainer's: of rows of this step, with the weights that the
    trainer has now, and of rows of the first step, with the weights that it had then."""
    import transfer_queue as tq

    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")][:COMPARED_ROWS]
    names = ["prompts", "responses", "old_log_probs"]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)
    prompts, responses, logp = (
        [each.tolist() for each in data[name].unbind()] for name in ("prompts", "responses", "old_log_probs")
    )
    rows = list(zip(prompts, responses, strict=True))
    if not hasattr(trainer, "watched_first"):
        trainer.watched_first = (rows, logp)
    first_rows, first_logp = trainer.watched_first
    said = trainer._ask("watched_dense_logp", [*rows, *first_rows])
    version, of_engine = said[0]
    return {
        "step": int(trainer.global_steps),
        "engine_weights": version,
        "updates": int(trainer.global_steps) - 1,
        "from_trained": distance(of_engine[: len(rows)], logp),
        "from_first": distance(of_engine[len(rows) :], first_logp),
    }


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """Mean absolute difference over all tokens that both have: of a response that fills the engine's context, the last one
    has no score."""
    pairs = [pair for mine, theirs in zip(one, other, strict=True) for pair in zip(mine, theirs, strict=False)]
    return sum(abs(mine - theirs) for mine, theirs in pairs) / len(pairs)


HOOKS: dict[str, Hook] = {
    "verl.workers.rollout.vllm_rollout.vllm_async_server": watch_servers,
    "verl.workers.rollout.vllm_rollout.utils": watch_workers,
    "verl.workers.engine_workers": watch_training_worker,
    "verl.utils.experimental.torch_functional": watch_log_probs,
    "verl.trainer.ppo.v1.trainer_base": watch_driver,
    "sparroll.integrations.verl.tap": watch_tap,
}

if FOLDER in os.environ:
    _hooks = _Hooks()
    sys.meta_path.insert(0, _hooks)
    for _name, _hook in HOOKS.items():
        _hooks.add(_name, _hook)
