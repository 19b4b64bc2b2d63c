"""Whether vLLM's workers ran every decode step that rollouts needed, with the attention that they needed. Nothing is run
here, and vLLM is not imported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparroll.engines.report import EngineReport
from sparroll.engines.vllm import outputs
from sparroll.schedule import Schedule
from sparroll.types import Rollout


def check_ran(
    ran: EngineReport,
    rollouts: Sequence[Rollout],
    dense: Sequence[bool],
    schedules: Sequence[Schedule | None],
    own_rows: Sequence[tuple[Schedule, int]] = (),
) -> None:
    """Raise RuntimeError unless the backend counted every decode step that the rollouts needed.

    ran: what it counted meanwhile.  dense: which rollouts belong to dense requests.  schedules: what each was to be read by,
    one object for all that are alike; None: everything.  own_rows: schedules of requests, and the rows that were read by
    each.

    A response of T tokens needs T - 1 steps: its first token is sampled at the end of its prompt's prefill, and each
    other token in a decode row over all tokens before it. Only a preempted request differs: the prefill that computes
    it again samples one token at its end, at most once per preemption. The worker counts these tokens, and how many of
    them a decode row would have sampled sparsely; and the same of the tokens that checks gave behind whole windows. A
    step's rows count for the layers that ran, each with the attention that it says it ran.

    Steps that read everything because they were short are known to the state, not to the rollouts, and counted apart.

    So in each layer that ran, decode rows + resumed and extra tokens >= the sum of T - 1, and in a sparse layer the same
    holds for sparse rows, of which dense requests need none. Of these the worker must have known: their rows add up
    likewise. All sides are equal unless vLLM schedules ahead: a request that meets a stop id may then have run one more
    row, whose token is thrown away.
    """
    contexts = [outputs.decode_contexts(len(each.prompt_ids), len(each.response_ids)) for each in rollouts]
    tokens = [len(each) for each in contexts]
    resumed = min(ran.resumed_tokens, ran.preemptions)
    _check_dense_requests(ran, rollouts, dense, int(np.dot(dense, tokens)) - resumed)
    for own, count in own_rows:
        mine = [schedule is own for schedule in schedules]
        _check_own_rows(own, count, rollouts, mine, int(np.dot(mine, tokens)) - resumed, ran.preemptions)
    sparse = [0] * len(ran.layers)
    by_schedule = {id(schedule): schedule for schedule in schedules}
    for schedule in by_schedule.values():
        if schedule is None:
            continue
        own_T = np.concatenate([each for each, own in zip(contexts, schedules, strict=True) if own is schedule])
        for layers, part in schedule.parts(len(ran.layers)):
            for number in layers:
                sparse[number] += int((part.read_tokens(own_T) < own_T).sum())
    needed = sum(tokens) - resumed - ran.checks.extra_tokens
    names = ", ".join(dict.fromkeys(each.name if each else "dense" for each in by_schedule.values()))
    for number, layer in enumerate(ran.layers):
        rows = layer.sparse_steps + layer.dense_steps
        resumed_sparse = min(layer.resumed_sparse_tokens, ran.preemptions)
        needed_sparse = sparse[number] - resumed_sparse - layer.extra_sparse_tokens - layer.short_dense_steps
        if rows < needed or layer.sparse_steps < needed_sparse:
            raise RuntimeError(
                f"layer {number} ran {rows} decode steps through sparroll's backend, {layer.sparse_steps} of them sparse; "
                f"the rollouts needed {needed}, {needed_sparse} of them sparse under schedule "
                f"{names}, after {ran.preemptions} preemptions: vLLM ran another "
                "attention backend, or rows were lost"
            )


def _check_dense_requests(ran: EngineReport, rollouts: Sequence[Rollout], dense: Sequence[bool], needed: int) -> None:
    needed -= _extra_tokens(rollouts, dense)
    if ran.dense_request_steps < needed:
        raise RuntimeError(
            f"vLLM's worker decoded {ran.dense_request_steps} rows of dense requests, and {needed} were needed after "
            f"{ran.preemptions} preemptions: it did not know which requests are dense, and read a part of their context"
        )


def _check_own_rows(
    schedule: Schedule, rows: int, rollouts: Sequence[Rollout], own: Sequence[bool], needed: int, preemptions: int
) -> None:
    needed -= _extra_tokens(rollouts, own)
    if rows < needed:
        raise RuntimeError(
            f"vLLM's worker read {rows} decode rows by the schedule {schedule.name} of requests, and {needed} were needed "
            f"after {preemptions} preemptions: it did not know which requests have it, and read them by the engine's"
        )


def _extra_tokens(rollouts: Sequence[Rollout], own: Sequence[bool]) -> int:
    """Tokens of some of the rollouts that checks gave behind whole windows, without a decode row."""
    checks = [rollout.checks for rollout, mine in zip(rollouts, own, strict=True) if mine]
    return sum(each.extra_tokens for each in checks if each is not None)
