"""vLLM's CPU worker with a runner that drafts and checks."""

from __future__ import annotations

from sparroll.engines.vllm.attention.cpu_worker import SparseCPUWorker
from sparroll.engines.vllm.windows.runner import with_windows
from sparroll.engines.vllm.worker import WorkerExtension


class WindowCPUWorker(SparseCPUWorker, WorkerExtension):
    """Named by the plugin as `worker_cls` on CPU. worker.py says why the extension is named again."""

    def init_device(self) -> None:
        super().init_device()
        with_windows(self.model_runner)
