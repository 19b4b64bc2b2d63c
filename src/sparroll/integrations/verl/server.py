"""A replica of verl whose server samples sparsely, under the schedule that the driver sets, and measures itself. It is
verl's vLLM server with a few methods overridden; nothing is patched."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.arguments import widest
from sparroll.engines.vllm.capacity import block_tokens
from sparroll.engines.vllm.rescoring import RescoringSettings
from sparroll.engines.vllm.settings import KEY
from sparroll.engines.vllm.windows.configure import V2_VARIABLE
from sparroll.errors import UserError
from sparroll.integrations.measured import EngineStep
from sparroll.integrations.tail import State
from sparroll.integrations.verl.checked_logp import CheckedResponse
from sparroll.integrations.verl.tap import Tap
from sparroll.integrations.verl.worker import EXTENSION
from sparroll.models import fingerprint
from sparroll.schedule import Schedule


class SparrollHttpServer(vLLMHttpServer):
    """Ray runs one on each node of a replica; only the first one has the engine."""

    engine: Any
    _next: tuple[dict[str, Any] | None, bool] | None = None
    """The schedule that waits for the new weights, and whether what is sampled under it is measured."""

    @property
    def _own(self) -> Any:
        """What the driver filled in: SparseSettings.engine_table."""
        own = self.config.custom["sparroll"]["_engine"]
        return OmegaConf.to_container(own) if OmegaConf.is_config(own) else own

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        own = self._own
        config = self.model_config.hf_config
        capacity = widest(Schedule.load(dict(own["capacity"])), self.config.max_model_len, config.num_hidden_layers)
        if own["start"] is not None and not own["forced"]:
            start = Schedule.load(dict(own["start"]))
            start.check_model(str(self.model_config.local_path), fingerprint.of_config(config))
            start.check_layers(config.num_hidden_layers)
        additional = dict(engine_kwargs.get("additional_config") or {})
        if KEY in additional:
            raise UserError(
                f"engine_kwargs.vllm.additional_config.{KEY} and custom.sparroll would both set the schedule",
                "leave the first one out",
            )
        additional[KEY] = {"schedule": capacity.inline(), "attention": own["attention"], "force_schedule": True}
        engine_kwargs["additional_config"] = additional
        # -1: no limit. Requests ask for as many as the measurement needs.
        engine_kwargs["max_logprobs"] = -1
        if torch.cuda.is_available():
            engine_kwargs.setdefault("block_size", block_tokens(capacity.selector))
        if capacity.check is not None:
            # vLLM asks the environment which runner to take; only this one drafts.
            os.environ[V2_VARIABLE] = "0"
        self._checks_drafts = capacity.check is not None

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        own = self._own
        self.engine = Tap(
            self.engine,
            RescoringSettings(**own["rescoring"]),
            replica=self.replica_rank,
            vocabulary=int(self.model_config.hf_config.vocab_size),
            context_limit=int(self.config.max_model_len),
            checks_drafts=self._checks_drafts,
            keeps_dense_logp=own["keeps_dense_logp"],
        )
        await self.engine.collective_rpc("sparroll_reset_report")
        await self.engine.collective_rpc("sparroll_take_checked_packed")
        self._taken = await self._report()
        start = own["start"]
        await self.sparroll_set_schedule(None if start is None else dict(start), True)

    async def set_global_steps(self, global_steps: int) -> None:
        """verl calls this when new weights are in."""
        await super().set_global_steps(global_steps)
        rescorer = self.engine.rescorer
        rescorer.in_force = replace(rescorer.in_force, weight_version=global_steps)

    async def sparroll_set_schedule(
        self, inline: dict[str, Any] | None, measures: bool, with_weights: bool = False
    ) -> None:
        """The schedule from now on; None is dense. measures: whether what is sampled under it is measured.

        with_weights: from the next weights on. Where requests are always under way, no part of one is then sampled under
        two schedules.
        """
        if with_weights:
            self._next = inline, measures
            return
        self._next = None
        table = None if inline is None else {key: value for key, value in inline.items() if key != "name"}
        name = "dense" if inline is None else inline["name"]
        await self.engine.collective_rpc("sparroll_set_schedule", args=(table, name))
        self.engine.change_schedule()
        self.engine.measures = measures
        # Cached responses were computed under the old schedule.
        if not await self.engine.reset_prefix_cache():
            raise RuntimeError("the schedule was set while requests were running, whose K and V are of the one before")

    async def sparroll_measure(self) -> None:
        """Measure what was sampled since the last time, before it is too late: call it before the weights change. A
        replica that is paused, or lent to training, was measured when it was."""
        if not self._submission_paused:
            await self.engine.measure()

    async def abort_all_requests(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """verl's call before weights change or a replica is handed back to training. A paused engine takes requests and
        never answers them, so what has ended is measured before."""
        if self.node_rank == 0:
            await self.sparroll_measure()
        aborted: dict[str, Any] = await super().abort_all_requests(*arguments, **named)
        return aborted

    async def resume_engine_generation(self) -> None:
        """verl's call when a paused replica has its new weights. Nothing runs yet."""
        if self.node_rank == 0 and self._next is not None:
            await self.sparroll_set_schedule(*self._next)
        await super().resume_engine_generation()

    async def sparroll_take(self) -> EngineStep:
        """What the replica measured and counted since the last call."""
        report = await self._report()
        state, counts, estimator, checked = self.engine.take()
        ceiling, spent = self.engine.take_control()
        counts.charge(spent)
        ran, self._taken = report.since(self._taken), report
        return EngineStep(state, counts, estimator, ran, checked, ceiling)

    async def sparroll_take_responses(self) -> list[CheckedResponse]:
        """The dense log-probabilities of what the replica measured since the last call."""
        return self.engine.take_responses()

    async def sparroll_probe(self, probe_rollouts: int | None, of_control: int | None, expected_rollouts: int) -> None:
        """How many rollouts of a step this replica re-scores: sparse ones, and those of the control group. None: all.
        expected_rollouts: how many it samples, about."""
        self.engine.expected_rollouts = expected_rollouts
        for rescorer, count in ((self.engine.rescorer, probe_rollouts), (self.engine.control, of_control)):
            rescorer.settings = replace(rescorer.settings, probe_rollouts=count)

    async def sparroll_dense_ceiling(self, prompts: int, max_tokens: int) -> State:
        """Sample a response to each of so many of the last step's prompts, and measure them like rollouts. The caller
        has set dense attention, and nothing else may run."""
        return await self.engine.dense_ceiling(prompts, max_tokens)

    async def _report(self) -> EngineReport:
        ran, *others = await self.engine.collective_rpc("sparroll_report")
        for rank, other in enumerate(others, 1):
            if other["layers"] != ran["layers"]:
                raise RuntimeError(f"worker {rank} of the replica did not run the layers as the first one did")
        return EngineReport.from_table(ran)


class SparrollReplica(vLLMReplica):
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.server_class = ray.remote(SparrollHttpServer)
