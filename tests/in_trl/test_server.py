"""Server mode on a CPU: TRL's own client and a real server. TRL sends weights over NCCL, which needs GPUs, so they are not
sent here; the server has those of the first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_runs
from sparroll.control.control_group import dense_flags
from sparroll.engines.vllm.lists_route import ENGINES_PATH
from sparroll.engines.vllm.rescoring import RescoringSettings
from sparroll.engines.vllm.serve_args import serve_arguments
from sparroll.errors import UserError
from sparroll.integrations.trl import SparseRollouts
from sparroll.integrations.trl.server import SparseClient, listed_samples
from trl_runs import GROUP, GROUP_OF_CONTROL, MISMATCH, ROLLOUTS, START, Observed
from vllm_runs import serving

PROBE = 10


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """One step with a server that was started under a wider schedule than the run's."""
    from trl.generation.vllm_client import VLLMClient

    folder: Path = tmp_path_factory.mktemp("server")
    wide = type(START).fixed(256).save(folder / "wide.toml")
    patch = pytest.MonkeyPatch()
    for name in trl_runs._OF_THIS_PROCESS:
        patch.delenv(name, raising=False)
    patch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    patch.setattr(VLLMClient, "update_named_params", lambda self, metadata, named: list(named))
    with serving(serve_arguments(str(wide))) as address:
        changes: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": address, "max_steps": 1}
        changes |= {"per_device_train_batch_size": 2 * ROLLOUTS, "save_strategy": "no"}
        sparse = SparseRollouts(START, correction="icepop", mismatch=MISMATCH, probe_rollouts=PROBE, **GROUP_OF_CONTROL)
        yield trl_runs.train(folder, sparse=sparse, changes=changes)
    patch.undo()


def test_the_server_samples_under_the_runs_schedule_and_says_what_ran(served: Observed) -> None:
    (step,), (batch,) = served.history, served.batches
    tokens = int(batch["completion_mask"].sum())
    assert step["rollout/sparse_steps"] > 0
    # vLLM schedules ahead, so a response that ends with a stop id may have one more step.
    assert tokens - 2 * ROLLOUTS <= step["rollout/sparse_steps"] + step["rollout/dense_steps"] <= tokens
    # One of four samples is of the control group.
    assert step["rescoring/measured"] == PROBE and step["rescoring/not_chosen"] == 2 * ROLLOUTS * 3 // 4 - PROBE
    assert 0 < step["rescoring/measured_tokens"] < tokens
    # Draws are the server's own, so which of the two is larger in so few tokens is chance.
    assert 0 < step["mismatch/acceptance_mean"] < 1 and 0 < step["mismatch/dense_ceiling_mean"] <= 1
    assert step["correction/masked_token_share"] > 0


def test_the_probe_is_sampled_apart_and_comes_back_in_its_place(served: Observed) -> None:
    (batch,) = served.batches
    prompts = batch["prompt_ids"].tolist()
    assert all(prompts[row] == prompts[row - row % GROUP] for row in range(2 * ROLLOUTS))
    # The trainer's own dense log-probabilities belong to the same tokens as the server's sparse ones.
    off = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()]
    assert float(off.abs().median()) < 1e-2


def test_the_control_group_is_decoded_densely_and_comes_back_in_its_place(served: Observed) -> None:
    (step,), (batch,) = served.history, served.batches
    dense_B = torch.tensor(dense_flags(0, 1, 2 * ROLLOUTS // GROUP, GROUP, 1 / 4))
    mask_BT = batch["completion_mask"].bool()
    off_BT = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs() * mask_BT
    assert float(off_BT[dense_B].max()) < 1e-3 < float(off_BT[~dense_B].max())
    tokens, count = int(mask_BT[dense_B].sum()), int(dense_B.sum())
    # vLLM schedules ahead; see above.
    assert step["control/rollouts"] == count == 4 and tokens - count <= step["control/dense_steps"] <= tokens
    texts = served.trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    reward_PN, dense_PN = torch.tensor(trl_runs.reward(texts)).view(-1, GROUP), dense_B.view(-1, GROUP)
    gap_P = (reward_PN * dense_PN).sum(-1) - (reward_PN * ~dense_PN).sum(-1) / (GROUP - 1)
    assert step["control/reward_gap"] == pytest.approx(float(gap_P.mean()), abs=1e-5)
    assert step["mismatch/dense_ceiling_step"] == 0 and step["time/sparroll_ceiling_seconds"] == 0


def test_one_sample_of_each_prompt_before_a_second_one() -> None:
    settings = RescoringSettings(probe_rollouts=11)
    listed = listed_samples(8, 4, settings, "train/7")
    assert sorted(listed) == [1, 1, 1, 1, 1, 2, 2, 2]
    assert listed != listed_samples(8, 4, settings, "train/8")
    assert listed_samples(2, 4, settings, "train/7") == [4, 4]
    assert listed_samples(3, 4, RescoringSettings(), "train/7") == [4, 4, 4]


def test_a_servers_evaluation_is_dense_and_says_what_the_trainer_says(served: Observed) -> None:
    trainer = served.trainer
    trainer.model.load_state_dict(type(trainer.model).from_pretrained(trainer.model.name_or_path).state_dict())
    report = trainer.evaluate()
    assert report["eval_rollout/sparse_steps"] == 0 < report["eval_rollout/dense_steps"]
    assert report["eval_sampling/sampling_logp_difference/max"] < 1e-4


def test_a_server_without_its_development_endpoints_is_refused_with_the_command(served: Observed) -> None:
    client = served.trainer._sparse_engine
    engine = SparseClient.__new__(SparseClient)
    engine._client = client._client
    with pytest.raises(UserError, match="does not answer to sparroll_no_such_method") as refused:
        engine._ask("sparroll_no_such_method")
    assert "sparroll serve-args" in str(refused.value.hint)
    # As it is with a server of an older sparroll.
    with pytest.raises(UserError, match="does not answer to /sparroll/another_route: 404"):
        engine._route("/sparroll/another_route", {})


def test_checks_of_drafts_cannot_be_heard_over_http(served: Observed) -> None:
    settings = served.trainer.sparse_setup.rescoring()
    with pytest.raises(UserError, match="checks of drafts"):
        SparseClient(
            served.trainer._sparse_engine._client, capacity=START.checked(), settings=settings, of_control=settings
        )


def test_a_server_of_several_engines_is_refused() -> None:
    class OfTwoEngines(SparseClient):
        def _route(self, path: str, asked: dict[str, Any]) -> bytes:
            assert (path, asked) == (ENGINES_PATH, {})
            return b"2"

    with pytest.raises(UserError, match="among 2 engines") as refused:
        OfTwoEngines(None, capacity=START, settings=RescoringSettings(), of_control=RescoringSettings())
    assert "--tensor-parallel-size" in str(refused.value.hint)
