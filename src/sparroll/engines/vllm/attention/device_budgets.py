"""The schedule in force as tensors on the device, where a CUDA graph reads them. vLLM is not imported."""

# R rows of a step, S schedule steps, L layers of the model, dense ones included, X = 1 + L: where steps start, then layers

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparroll.engines.vllm.capacity import MOST_STEPS
from sparroll.schedule import Schedule

UNLIMITED = 1 << 30
"""A budget above every context: the row reads everything."""


class DeviceBudgets:
    """KV budgets by context and layer, and which rows read everything. All tensors stay where they are."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.layers, self.device = layers, device
        self._host_XS: Tensor | None = None
        """Where the schedule's steps start, and below that the budgets of each layer. Each layer has a row of its own,
        whatever its group, so that a CUDA graph that knows the row holds for every grouping."""
        self._steps_XS: Tensor | None = None
        """The same on the device."""
        self._reads_all_R: Tensor | None = None
        """[most rows] bool, on the device: which rows of the step whose metadata was built last read everything."""
        self._said_reads_all = b""
        """The same as the host said it last; empty where none does."""

    def set_schedule(self, schedule: Schedule | None) -> None:
        """What the steps from the next one on look up; None: every layer reads everything."""
        # The device is named because vLLM builds models under another default device.
        table_XS = torch.full((1 + self.layers, MOST_STEPS), UNLIMITED, dtype=torch.int32, device="cpu")
        table_XS[0, 0] = 0
        for layers, part in schedule.parts(self.layers) if schedule else ():
            for number, step in enumerate(part.steps):
                table_XS[0, number] = step.from_context_tokens
                table_XS[[1 + layer for layer in layers], number] = step.budgets[0]
        # A new tensor each time: an upload of the old one may still be under way.
        self._host_XS = self._for_upload(table_XS)
        if self._steps_XS is not None:
            self._steps_XS.copy_(self._host_XS, non_blocking=True)

    def begin_step(self, reads_all_R: np.ndarray | None, most_rows: int) -> None:
        """Bring what `of_step` looks up to the device, for the step whose metadata is being built. The host does not wait
        for it. reads_all_R: which of the first rows read everything, whatever their budget; None: none. most_rows: of
        any step."""
        if self._steps_XS is None or self._reads_all_R is None:
            assert self._host_XS is not None, "budgets of no schedule"
            # Allocated at the first step, because an engine loses in its sleep what was allocated while the model
            # loads. Inference mode, in which steps run, is left, because its tensors could not be written to later.
            with torch.inference_mode(False):
                self._steps_XS = self._host_XS.to(self.device, non_blocking=True)
                self._reads_all_R = torch.zeros(most_rows, dtype=torch.bool, device=self.device)
        said = b"" if reads_all_R is None else reads_all_R.tobytes()
        if said == self._said_reads_all:
            return
        # Rows behind those of this step are told as well: a later step may have more.
        host_R = torch.zeros(len(self._reads_all_R), dtype=torch.bool, device="cpu")
        if reads_all_R is not None:
            host_R[: len(reads_all_R)] = torch.from_numpy(reads_all_R)
        self._reads_all_R.copy_(self._for_upload(host_R), non_blocking=True)
        self._said_reads_all = said

    def of_step(self, context_tokens_R: Tensor, out_LR: Tensor) -> Tensor:
        """KV budget of each row in each layer, on the device; 0 for padding rows (context 0), and UNLIMITED in dense layers
        and for rows that read everything. It may be part of a CUDA graph: all that changes from step to step is in tensors
        that stay where they are (`begin_step`)."""
        assert self._steps_XS is not None and self._reads_all_R is not None, "budgets before their step began"
        starts_S, budgets_LS = self._steps_XS[0], self._steps_XS[1:]
        reads_all_R = self._reads_all_R[: len(context_tokens_R)]
        if self.device.type == "cuda":
            from sparroll.attention.decode import triton_budgets

            triton_budgets.budgets(context_tokens_R, starts_S, budgets_LS, reads_all_R, UNLIMITED, out_LR)
            return out_LR
        step_R = torch.bucketize(context_tokens_R, starts_S, right=True) - 1
        torch.mul(budgets_LS[:, step_R.clamp_(min=0)], context_tokens_R > 0, out=out_LR)
        return out_LR.masked_fill_(reads_all_R, UNLIMITED)

    def _for_upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor
