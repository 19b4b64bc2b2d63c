"""Brings what the trainer knows of a rollout to the requests of verl's agent loops: whether it is of the control group, and
whether it is of a validation. The sampling parameters say it, so any agent loop that passes them on will do."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from sparroll.engines.vllm.attention.request_schedules import DENSE_REQUEST
from sparroll.integrations.verl.control_rows import FLAGS
from sparroll.integrations.verl.tap import VALIDATION


class SparrollWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *arguments: Any, **named: Any
    ) -> Any:
        """verl's call for one rollout. A prompt of a validation has no flags."""
        flags = named.pop(FLAGS, None)
        said = {}
        if flags is not None and flags[named["session_id"]]:
            said[DENSE_REQUEST] = True
        if trajectory["validate"]:
            said[VALIDATION] = True
        if said:
            more = sampling_params.get("extra_args") or {}
            sampling_params = {**sampling_params, "extra_args": {**more, **said}}
        return await super()._run_agent_loop(sampling_params, trajectory, *arguments, **named)


class SparrollManager(AgentLoopManagerTQ):
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.agent_loop_workers_class = ray.remote(SparrollWorker)
