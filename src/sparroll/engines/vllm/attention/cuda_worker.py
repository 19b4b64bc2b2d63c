"""vLLM's GPU worker, which follows its requests from the end of the warm-up on. cpu_worker.py is the same for CPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from sparroll.engines.vllm.worker import WorkerExtension


class SparseWorker(Worker, WorkerExtension):
    """Named by the plugin as `worker_cls` on CUDA.

    It has the extension from the start: vLLM adds one to the class that it finds, and refuses a class that inherits it,
    as a class without would once the extension was added to vLLM's own in this process.
    """

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()
        self.sparroll_reset_report()
        return done
