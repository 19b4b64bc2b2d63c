"""Brings the control group's flags from the trainer's batch to the requests of its rollouts: verl's agent loops, whose
sampling parameters say which of a prompt's rollouts are dense. Any agent loop that passes them on will do."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from sparroll.engines.vllm.attention.dense_requests import DENSE_REQUEST
from sparroll.integrations.verl.control_rows import FLAGS


class ControlGroupWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    async def _run_agent_loop(self, sampling_params: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """verl's call for one rollout. A prompt of validation has no flags."""
        flags = named.pop(FLAGS, None)
        if flags is not None and flags[named["session_id"]]:
            more = sampling_params.get("extra_args") or {}
            sampling_params = {**sampling_params, "extra_args": {**more, DENSE_REQUEST: True}}
        return await super()._run_agent_loop(sampling_params, *arguments, **named)


class ControlGroupManager(AgentLoopManagerTQ):
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.agent_loop_workers_class = ray.remote(ControlGroupWorker)
