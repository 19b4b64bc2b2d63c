"""Two processes on gloo, each with its own vLLM: one tail, one correction, one decision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_runs
from free_ports import free_port
from sparroll.control.control_group import dense_flags
from sparroll.corrections import correction
from sparroll.engines.vllm.outputs import decode_contexts
from sparroll.schedule import Schedule
from trl_runs import GROUP, RANK_STEPS, ROLLOUTS, START


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(trl_runs.__file__)), str(folder), "rank"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            command,
            env=trl_runs.environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}: {said[rank][-3000:]}"
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def test_both_processes_see_one_tail_and_take_the_same_decisions(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["schedule"] == second["schedule"] and first["events"] == second["events"] != []
    assert torch.equal(first["weights"], second["weights"])
    for number, step in enumerate(first["history"]):
        tokens = sum(int(each["batches"][number]["completion_mask"].sum()) for each in ranks)
        flags_PN = torch.tensor(dense_flags(0, number + 1, 2, GROUP, 1 / 4)).view(2, GROUP)
        control = sum(
            int(each["batches"][number]["completion_mask"][flags_N].sum())
            for each, flags_N in zip(ranks, flags_PN, strict=True)
        )
        assert step["control/rollouts"] == 2 and step["control/dense_steps"] == control - 2
        assert step["rescoring/measured"] == ROLLOUTS - 2 and step["rescoring/measured_tokens"] == tokens - control
        bins = [value for name, value in step.items() if name.startswith("mismatch/tokens/")]
        assert sum(bins) == tokens - control
        assert step["rollout/sparse_steps"] + step["rollout/dense_steps"] == tokens - ROLLOUTS
    # The same prompt in both processes is sampled with different draws.
    ids = [each["batches"][0]["completion_ids"][0, :8].tolist() for each in ranks]
    assert ids[0] != ids[1]


def test_each_processs_own_engine_runs_the_schedule_that_the_controller_chose(ranks: list[dict[str, Any]]) -> None:
    """By the tokens that each layer of its attention read, which are those of the schedule at every decode step."""
    in_force = [[Schedule.load(inline, force=True) for inline, _ in each["ran"]] for each in ranks]
    assert in_force[0] == in_force[1] and len(in_force[0]) == RANK_STEPS
    assert in_force[0][0].steps == START.steps != in_force[0][-1].steps
    for rank, each in enumerate(ranks):
        for number, (schedule, (_, ran)) in enumerate(zip(in_force[rank], each["ran"], strict=True)):
            read, whole, sparse_steps = expected_reads(each["batches"][number], schedule, number, rank)
            # Under the first schedule it would have read less in the last round, so the move is seen.
            first = expected_reads(each["batches"][number], START, number, rank)[0]
            assert first < whole and (first < read) == (schedule.steps != START.steps)
            for place, layer in enumerate(ran.layers):
                is_dense = place in schedule.dense_layers
                assert layer.context_tokens == whole
                assert layer.read_tokens == (whole if is_dense else read), (rank, number, place)
                assert layer.sparse_steps == (0 if is_dense else sparse_steps)


def expected_reads(batch: dict[str, torch.Tensor], schedule: Schedule, number: int, rank: int) -> tuple[int, int, int]:
    """Of one process's rollouts in round `number`: tokens that a sparse layer reads, tokens in context, sparse steps."""
    flags = torch.tensor(dense_flags(0, number + 1, 2, GROUP, 1 / 4)).view(2, GROUP)[rank]
    read = whole = sparse_steps = 0
    for prompt, response, dense in zip(batch["prompt_mask"], batch["completion_mask"], flags, strict=True):
        contexts = decode_contexts(int(prompt.sum()), int(response.sum()))
        reads = contexts if dense else schedule.read_tokens(contexts)
        read, whole = read + int(reads.sum()), whole + int(contexts.sum())
        sparse_steps += int((reads < contexts).sum())
    return read, whole, sparse_steps


def test_both_processes_compare_the_same_prompts(ranks: list[dict[str, Any]]) -> None:
    first, second = ([step["control/reward_gap"] for step in each["history"]] for each in ranks)
    assert first == second and ranks[0]["history"][-1]["control/pairs"] == 2 * RANK_STEPS
    gaps = []
    for number in range(RANK_STEPS):
        flags_PN = torch.tensor(dense_flags(0, number + 1, 2, GROUP, 1 / 4)).view(2, GROUP)
        for each, flags_N in zip(ranks, flags_PN, strict=True):
            length_N = each["batches"][number]["completion_mask"].sum(-1).float()
            gaps.append(float(length_N[flags_N].mean() - length_N[~flags_N].mean()))
    assert ranks[0]["history"][-1]["control/length_gap"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-4)


def test_a_correction_that_normalises_does_so_over_both(ranks: list[dict[str, Any]]) -> None:
    batches = [each["batches"][0] for each in ranks]
    longest = max(batch["completion_mask"].shape[1] for batch in batches)

    def both(name: str) -> torch.Tensor:
        rows = [torch.nn.functional.pad(each[name], (0, longest - each[name].shape[1])) for each in batches]
        return torch.cat(rows)

    made, mask_BT = correction("sparse_rl_released"), both("completion_mask").bool()
    expected = made(dense_logp=both("old_per_token_logps"), sparse_logp=both("sampling_per_token_logps"), mask=mask_BT)
    kept_BT = expected.kept(mask_BT)
    torch.testing.assert_close(both("importance_sampling_ratio"), expected.weights, atol=1e-6, rtol=0)
    assert torch.equal(both("tool_mask").bool(), kept_BT)
    assert [int(each["num_items_in_batch"]) for each in batches] == [int(kept_BT.sum())] * 2
