"""vLLM's GPU worker, which follows its requests from the end of the warm-up on, scores its tokens with our kernels, and has
CUDA graphs for steps that read everything. cpu_worker.py is the same for CPU, without kernels and graphs."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from sparroll.engines.vllm.attention import whole_graphs
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.scores import in_vllm
from sparroll.engines.vllm.worker import WorkerExtension


class SparseWorker(Worker, WorkerExtension):
    """Named by the plugin as `worker_cls` on CUDA.

    It has the extension from the start: vLLM adds one to the class that it finds, and refuses a class that inherits it,
    as a class without would once the extension was added to vLLM's own in this process.
    """

    def compile_or_warm_up_model(self) -> Any:
        model = self.vllm_config.model_config
        # The older runner has a sampler of its own.
        if self.use_v2_model_runner and in_vllm.take_over():
            in_vllm.compile_ahead(model.get_vocab_size(), model.dtype, self.device)
        if STATE.has_index and whole_graphs.has_graphs(self.model_runner):
            whole_graphs.capture_both(self.model_runner.cudagraph_manager, STATE)
        done = super().compile_or_warm_up_model()
        self.sparroll_reset_report()
        return done
