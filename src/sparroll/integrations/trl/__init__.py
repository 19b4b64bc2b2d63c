"""Sparse rollouts inside TRL: `SparseGRPOTrainer(..., sparse=SparseRollouts("qwen3-4b-0.86", correction="tis"))`.

The life of a step: `trainer.py` says which schedule is in force, TRL samples through `engine.py` (colocate) or
`server.py` (`measured_rounds.py` in common), which measure before the engine sleeps, TRL computes rewards, advantages
and dense log-probabilities, `loss.py` corrects the batch that TRL's loss reads, and `../watched.py` shows the step to
guard and controller. `rounds.py` counts the rounds. TRL keeps the loop, the loss, weight sync and checkpoints; nothing
of it is patched.

Not here: what is measured and how (engines/vllm/rescoring.py, mismatch/), the corrections (corrections/), and who may move
the schedule (control/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparroll.integrations.trl.settings import SparseRollouts

if TYPE_CHECKING:
    from sparroll.integrations.trl.trainer import SparseGRPOTrainer, SparseRolloutsMixin

__all__ = ["SparseGRPOTrainer", "SparseRollouts", "SparseRolloutsMixin"]


def __getattr__(name: str) -> Any:
    # TRL is imported only where a trainer is asked for, so that the settings can be read without it.
    if name in ("SparseGRPOTrainer", "SparseRolloutsMixin"):
        from sparroll.integrations.trl import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
