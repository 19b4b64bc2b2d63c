"""What VLLMEngine, or the user of a server, can ask of vLLM's workers. vLLM adds these methods to its worker class
(`worker_extension_cls`), and `collective_rpc` calls them by name. vLLM is imported only where a method runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sparroll.engines.vllm.windows.packing import packed
from sparroll.errors import UserError

EXTENSION = "sparroll.engines.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker, so `self` is the worker. Names begin with sparroll_, because vLLM refuses names that
    its worker has."""

    model_runner: Any
    vllm_config: Any

    def sparroll_load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into the running model, which repacks them as it did when it was first loaded."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=weights, is_checkpoint_format=True)
            _repack_head(self.model_runner.get_model())

    def sparroll_set_schedule(self, table: dict[str, Any] | None, name: str, window_follows: bool = False) -> None:
        """Set the schedule, given as a schedule file's table, from the next step on; None reads everything.

        window_follows: whether the caller tells vLLM's scheduler of another window. Where that lives in another process,
        as in a server, nobody can, so a schedule with another window than the engine was started with is refused."""
        from sparroll.engines.vllm.attention.state import STATE
        from sparroll.schedule import Schedule

        STATE.set_schedule(None if table is None else Schedule.from_table(table, name), window_follows)

    def sparroll_set_request_schedules(self, tables: list[tuple[dict[str, Any], str]], numbers: dict[str, int]) -> None:
        """Give requests that have not begun schedules of their own: as (table, name), and by vLLM's name of each request the
        number of its schedule, from 1 on. Others keep the engine's. Must not be called while requests run."""
        from sparroll.engines.vllm.attention.state import STATE
        from sparroll.schedule import Schedule

        STATE.set_request_schedules([Schedule.from_table(table, name) for table, name in tables], numbers)

    def sparroll_rows_of_own_schedules(self) -> list[int]:
        """How many decode rows were read by each of these schedules, in their order. Must not be called while requests
        run."""
        from sparroll.engines.vllm.attention.state import STATE

        return STATE.rows_of_own_schedules()

    def sparroll_report(self) -> dict[str, Any]:
        """What ran in this worker since vLLM's warm-up or the last `sparroll_reset_report`, as the table of an
        EngineReport. With another worker class than ours nothing is counted before the first reset, because an extension
        cannot act before one of its methods is called."""
        from sparroll.engines.vllm.attention import preemptions as steps
        from sparroll.engines.vllm.attention.state import STATE

        if not steps.watched(self.model_runner):
            raise UserError("nothing was counted yet", "call sparroll_reset_report first")
        report, counted = STATE.report(), getattr(self.model_runner, "window_counters", None)
        return (report if counted is None else counted.added_to(report)).table()

    def sparroll_take_checked(self) -> dict[str, dict[str, Any]]:
        """What the checks of drafts said of each request's response since the last call, by vLLM's name of it. Must not
        be called while requests run. The first call starts to keep this for requests that end; whoever makes it must go
        on, or memory fills."""
        runner = self.model_runner
        return runner.take_checked() if hasattr(runner, "take_checked") else {}

    def sparroll_take_checked_packed(self) -> bytes:
        """The same as bytes, for an engine in another process than its user."""
        return packed(self.sparroll_take_checked())

    def sparroll_take_short_reads(self) -> dict[str, int]:
        """Tokens that requests read in short steps beyond the schedule, summed over all layers, by vLLM's name of each,
        since the last call. Must not be called while requests run. The first call starts to keep this; whoever makes it
        must go on, or memory fills."""
        from sparroll.engines.vllm.attention.state import STATE

        return STATE.take_short_reads()

    def sparroll_reset_report(self) -> None:
        """Start counting anew. Must not be called while requests run."""
        from sparroll.engines.vllm.attention import preemptions as steps
        from sparroll.engines.vllm.attention.state import STATE

        steps.watch(self.model_runner, STATE)
        STATE.reset_report()
        if hasattr(self.model_runner, "window_counters"):
            self.model_runner.window_counters = type(self.model_runner.window_counters)()


def _repack_head(model: nn.Module) -> None:
    """Process the output head again after a reload. A head that shares the embedding's weight is not reloaded by
    itself, so vLLM (0.32) does not process it again. On CPU, where processing packs a copy, its logits would stay those
    of the old weights."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    weight = getattr(head, "weight", None)
    if method is not None and isinstance(weight, Tensor) and weight.device.type == "cpu":
        method.process_weights_after_loading(head)
