"""Steps of a worker as its state is told of them, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparroll import Schedule
from sparroll.engines.vllm.attention.batch import Rows
from sparroll.engines.vllm.attention.state import State
from sparroll.schedule import Step

RISING = Schedule(steps=(Step(0, 64), Step(100, 96), Step(250, 128)), name="rising")
GROUPED = Schedule(steps=(Step(0, (96, 64)), Step(100, (160, 80))), layer_groups=((2, 5), (3, 4)), name="grouped")


@dataclass
class Common:
    """The part of vLLM's CommonAttentionMetadata that is looked at."""

    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    is_prefilling: torch.Tensor | None
    num_reqs: int
    max_query_len: int

    @staticmethod
    def of(new_tokens: list[int], contexts: list[int], prefilling: list[bool]) -> Common:
        starts = torch.tensor([0, *np.cumsum(new_tokens)], dtype=torch.int32)
        return Common(starts, torch.tensor(contexts), torch.tensor(prefilling), len(new_tokens), max(new_tokens))


def started(schedule: Schedule | None = RISING) -> State:
    state = State()
    state.configure(schedule, 6, "cpu")
    return state


def run_step(state: State, contexts: list[int], ran: dict[int, str], may_replay: bool = False) -> None:
    """A step of decode rows, in which these layers are entered."""
    Rows.of(Common.of([1] * len(contexts), contexts, [False] * len(contexts))).count(state, may_replay)
    for layer, attention in ran.items():
        state.layer_ran(layer, attention)
