"""vLLM's GPU worker with a runner that drafts and checks. cpu_worker.py is the same for CPU."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from sparroll.engines.vllm.windows.runner import with_windows


class WindowWorker(Worker):
    """Named by the plugin as `worker_cls` on CUDA."""

    def init_device(self) -> None:
        super().init_device()
        with_windows(self.model_runner)
