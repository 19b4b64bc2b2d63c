"""vLLM's CPU worker with a runner that drafts and checks."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from sparroll.engines.vllm.windows.runner import with_windows
from sparroll.engines.vllm.worker import WorkerExtension


class WindowCPUWorker(CPUWorker, WorkerExtension):
    """Named by the plugin as `worker_cls` on CPU.

    It has the extension from the start: vLLM adds one to the class that it finds, and refuses a class that inherits it,
    as this one does once an engine without checks ran in the same process.
    """

    def init_device(self) -> None:
        super().init_device()
        with_windows(self.model_runner)
