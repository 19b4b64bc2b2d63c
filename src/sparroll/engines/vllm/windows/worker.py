"""vLLM's GPU worker with a runner that drafts and checks. cpu_worker.py is the same for CPU."""

from __future__ import annotations

from sparroll.engines.vllm.attention.cuda_worker import SparseWorker
from sparroll.engines.vllm.windows.runner import with_windows
from sparroll.engines.vllm.worker import WorkerExtension


class WindowWorker(SparseWorker, WorkerExtension):
    """Named by the plugin as `worker_cls` on CUDA. vLLM asks for the extension among the bases themselves."""

    def init_device(self) -> None:
        super().init_device()
        with_windows(self.model_runner)
