"""Two processes on gloo, each with its own vLLM: one tail, one correction, one decision."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_runs
from sparroll.corrections import correction
from trl_runs import ROLLOUTS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(Path(trl_runs.__file__)), str(folder), "rank"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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
        assert step["rescoring/measured"] == ROLLOUTS and step["rescoring/measured_tokens"] == tokens
        bins = [value for name, value in step.items() if name.startswith("mismatch/tokens/")]
        assert sum(bins) == tokens
        assert step["rollout/sparse_steps"] + step["rollout/dense_steps"] == tokens - ROLLOUTS
    # The same prompt in both processes is sampled with different draws.
    ids = [each["batches"][0]["completion_ids"][0, :8].tolist() for each in ranks]
    assert ids[0] != ids[1]


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
