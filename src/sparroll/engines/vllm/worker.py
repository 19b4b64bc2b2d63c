"""What VLLMEngine, or whoever runs a server, asks of vLLM's workers: vLLM adds these methods to its worker class
(`worker_extension_cls`), and `collective_rpc` calls them by name. Imports vLLM only where a method runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sparroll.errors import UserError

EXTENSION = "sparroll.engines.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker, so `self` is the worker. Names begin with sparroll_: vLLM refuses any that it has itself."""

    model_runner: Any
    vllm_config: Any

    def sparroll_load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into the running model, which repacks them as when it was loaded."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=weights, is_checkpoint_format=True)
            _repack_head(self.model_runner.get_model())

    def sparroll_set_schedule(self, table: dict[str, Any] | None, name: str) -> None:
        """The schedule of a file's tables from the next step on; None reads everything."""
        from sparroll.engines.vllm.attention.state import STATE
        from sparroll.schedule import Schedule

        STATE.set_schedule(None if table is None else Schedule.from_table(table, name))

    def sparroll_report(self) -> dict[str, Any]:
        """What ran in this worker since `sparroll_reset_report`: an EngineReport's table, plain data. Counting starts there,
        since vLLM runs steps of its own when it starts, and an extension is not asked before a method of it is called."""
        from sparroll.engines.vllm.attention import preemptions as steps
        from sparroll.engines.vllm.attention.state import STATE

        if not steps.watched(self.model_runner):
            raise UserError("nothing was counted yet", "call sparroll_reset_report first")
        return STATE.report().table()

    def sparroll_reset_report(self) -> None:
        """Count from here on; not while requests run."""
        from sparroll.engines.vllm.attention import preemptions as steps
        from sparroll.engines.vllm.attention.state import STATE

        steps.watch(self.model_runner, STATE)
        STATE.reset_report()


def _repack_head(model: nn.Module) -> None:
    """A head that shares the embedding's weight gets none of its own in a reload, so vLLM (0.32) does not process it
    again; on CPU, where processing packs a copy, its logits would stay those of the old weights."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    weight = getattr(head, "weight", None)
    if method is not None and isinstance(weight, Tensor) and weight.device.type == "cpu":
        method.process_weights_after_loading(head)
