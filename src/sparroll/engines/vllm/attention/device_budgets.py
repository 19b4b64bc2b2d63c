"""The schedules in force as tensors on the device, where a CUDA graph reads them. vLLM is not imported."""

# R rows of a step, V schedules, S schedule steps, L layers of the model, dense ones included, X = 1 + L: where steps start,
# then layers

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparroll.engines.vllm.attention.decode_rows import DENSE, ENGINES
from sparroll.engines.vllm.capacity import MOST_REQUEST_SCHEDULES, MOST_STEPS
from sparroll.schedule import Schedule

UNLIMITED = 1 << 30
"""A budget above every context: the row reads everything."""


class DeviceBudgets:
    """KV budgets by schedule, context and layer, and which schedule each row has. All tensors stay where they are."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.layers, self.device = layers, device
        self._host_VXS: Tensor | None = None
        """Where each schedule's steps start, and below that the budgets of each layer. Each layer has a row of its own,
        whatever its group, so that a CUDA graph that knows the row holds for every grouping."""
        self._steps_VXS: Tensor | None = None
        """The same on the device."""
        self._which_R: Tensor | None = None
        """[most rows] int32, on the device: the number of the schedule of each row of the step whose metadata was built
        last."""
        self._said_which = b""
        """The same as the host said it last; empty where all rows have the engine's."""

    def set_schedules(self, schedules: Sequence[Schedule | None]) -> None:
        """What the steps from the next one on look up, by number; None: every layer reads everything."""
        # The device is named because vLLM builds models under another default device.
        shape = (1 + MOST_REQUEST_SCHEDULES, 1 + self.layers, MOST_STEPS)
        table_VXS = torch.full(shape, UNLIMITED, dtype=torch.int32, device="cpu")
        table_VXS[:, 0, 0] = 0
        for number, schedule in enumerate(schedules):
            for layers, part in schedule.parts(self.layers) if schedule else ():
                for place, step in enumerate(part.steps):
                    table_VXS[number, 0, place] = step.from_context_tokens
                    table_VXS[number, [1 + layer for layer in layers], place] = step.budgets[0]
        # A new tensor each time: an upload of the old one may still be under way.
        self._host_VXS = self._for_upload(table_VXS)
        if self._steps_VXS is not None:
            self._steps_VXS.copy_(self._host_VXS, non_blocking=True)

    def begin_step(self, which_R: np.ndarray | None, most_rows: int) -> None:
        """Bring what `of_step` looks up to the device, for the step whose metadata is being built. The host does not wait
        for it. which_R: the number of the schedule of each of the first rows; None: all have the engine's. most_rows: of
        any step."""
        if self._steps_VXS is None or self._which_R is None:
            assert self._host_VXS is not None, "budgets of no schedule"
            # Allocated at the first step, because an engine loses in its sleep what was allocated while the model
            # loads. Inference mode, in which steps run, is left, because its tensors could not be written to later.
            with torch.inference_mode(False):
                self._steps_VXS = self._host_VXS.to(self.device, non_blocking=True)
                self._which_R = torch.full((most_rows,), ENGINES, dtype=torch.int32, device=self.device)
        said = b"" if which_R is None else which_R.tobytes()
        if said == self._said_which:
            return
        # Rows behind those of this step are told as well: a later step may have more.
        host_R = torch.full((len(self._which_R),), ENGINES, dtype=torch.int32, device="cpu")
        if which_R is not None:
            host_R[: len(which_R)] = torch.from_numpy(which_R)
        self._which_R.copy_(self._for_upload(host_R), non_blocking=True)
        self._said_which = said

    def of_step(self, context_tokens_R: Tensor, out_LR: Tensor) -> Tensor:
        """KV budget of each row in each layer, on the device; 0 for padding rows (context 0), and UNLIMITED in dense layers
        and for rows that read everything. It may be part of a CUDA graph: all that changes from step to step is in tensors
        that stay where they are (`begin_step`)."""
        assert self._steps_VXS is not None and self._which_R is not None, "budgets before their step began"
        which_R = self._which_R[: len(context_tokens_R)]
        if self.device.type == "cuda":
            from sparroll.attention.decode import triton_budgets

            triton_budgets.budgets(context_tokens_R, self._steps_VXS, which_R, UNLIMITED, out_LR)
            return out_LR
        tables_RXS = self._steps_VXS[which_R.clamp(min=ENGINES)]
        step_R = (tables_RXS[:, 0] <= context_tokens_R[:, None]).sum(-1) - 1
        budgets_RL = tables_RXS[torch.arange(len(step_R)), 1:, step_R.clamp_(min=0)]
        torch.mul(budgets_RL.T, context_tokens_R > 0, out=out_LR)
        return out_LR.masked_fill_(which_R == DENSE, UNLIMITED)

    def _for_upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor
