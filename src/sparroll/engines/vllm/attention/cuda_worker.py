"""vLLM's GPU worker, which follows its requests from the end of the warm-up on, scores its tokens with our kernels, and has
CUDA graphs for steps that read everything. cpu_worker.py is the same for CPU, without kernels and graphs."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from sparroll.engines.vllm.attention import whole_graphs
from sparroll.engines.vllm.attention.landmarks import spare_metadata
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.scores import in_vllm
from sparroll.engines.vllm.worker import WorkerExtension
from sparroll.errors import UserError


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
        spare_metadata(self.model_runner)
        if STATE.has_index and whole_graphs.has_graphs(self.model_runner):
            whole_graphs.capture_both(self.model_runner.cudagraph_manager, STATE)
        done = super().compile_or_warm_up_model()
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if STATE.short_step_tokens and mode.has_full_cudagraphs() and not STATE.captured_whole:
            raise UserError(
                "short steps cannot be decoded densely: vLLM captured no full CUDA graphs for decode steps",
                "leave short_step_tokens out, or let cudagraph_capture_sizes have a size up to max_num_seqs",
            )
        self.sparroll_reset_report()
        return done
