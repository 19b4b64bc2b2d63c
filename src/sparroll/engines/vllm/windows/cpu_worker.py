"""vLLM's CPU worker with a runner that drafts and checks."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from sparroll.engines.vllm.windows.runner import with_windows


class WindowCPUWorker(CPUWorker):
    """Named by the plugin as `worker_cls` on CPU."""

    def init_device(self) -> None:
        super().init_device()
        with_windows(self.model_runner)
