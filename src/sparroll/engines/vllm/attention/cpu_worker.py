"""vLLM's CPU worker, which follows its requests from the end of the warm-up on."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from sparroll.engines.vllm.attention.landmarks import spare_metadata
from sparroll.engines.vllm.worker import WorkerExtension


class SparseCPUWorker(CPUWorker, WorkerExtension):
    """Named by the plugin as `worker_cls` on CPU. cuda_worker.py says why it has the extension."""

    def compile_or_warm_up_model(self) -> Any:
        spare_metadata(self.model_runner)
        done = super().compile_or_warm_up_model()
        self.sparroll_reset_report()
        return done
