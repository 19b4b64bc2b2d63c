"""vLLM's CPU worker with a runner that drafts and checks."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from sparroll.engines.vllm.windows.runner import with_windows
from sparroll.engines.vllm.worker import WorkerExtension


class WindowCPUWorker(CPUWorker, WorkerExtension):
    """Named by the plugin as `worker_cls` on CPU. worker.py says why it has the extension."""

    def init_device(self) -> None:
        super().init_device()
        with_windows(self.model_runner)
