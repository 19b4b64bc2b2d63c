"""Numbers, texts and truth values are not taken for each other, and nothing asks for more than memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparroll
from cli_runs import error_of, save_model
from sparroll.corrections import correction
from sparroll.engines import HFEngine
from sparroll.engines.generate_arguments import check_counts, seeds
from sparroll.engines.prompt_encoder import text_ids
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics
from sparroll.quickstart.settings import load_settings
from sparroll.train.config.file import load_config
from sparroll.types import TopK


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=true", "train.steps: must be a number, not true or false, got True"),
        ("train.lr=true", "train.lr: must be a number, not true or false, got True"),
        ('train.steps="5"', "train.steps: must be a number, not text, got '5'"),
        ("train.steps=4e21", "train.steps: must be below 2^63, got 4e+21"),
        ("train.normalise_advantage=1", "train.normalise_advantage: must be true or false, got 1"),
        ('train.normalise_advantage="yes"', "train.normalise_advantage: must be true or false, got 'yes'"),
        ("data.dedup=1", "data.dedup: must be true or false, got 1"),
        ("task.thinking=1", "task.thinking: must be true or false, got 1"),
        ("log.sinks=[jsonl]", "log.sinks: must be a list, got '[jsonl]'"),
        ("data.eval=aime24", "data.eval: must be a list, got 'aime24'"),
        ("guard.at_least=5", "guard.at_least: input should be less than or equal to 1, got 5"),
        ("rollout.samples_per_prompt=1000000000", "rollout.samples_per_prompt: input should be less than or equal to"),
        ("train.prompts_per_step=1000000000", "train.prompts_per_step: input should be less than or equal to"),
    ],
)
def test_a_setting_of_another_kind_is_refused_with_its_key(setting: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [setting])
    assert caught.value.message.startswith(message)


def test_a_budget_that_no_context_has_is_refused_in_a_configuration() -> None:
    with pytest.raises(UserError, match="attention.kv_budget_tokens: .* got 4e"):
        load_config(None, ["attention.kind=budget", "attention.kv_budget_tokens=4e21"])


def test_numbers_that_fit_are_taken_as_before() -> None:
    config = load_config(None, ["train.steps=1e2", "train.lr=1", "train.max_gradient_norm=none", "engine=vllm"])
    assert (config.train.steps, config.train.lr, config.train.max_gradient_norm) == (100, 1.0, None)


def test_the_quickstarts_sizes_are_as_strict(tmp_path: Path) -> None:
    path = tmp_path / "sizes.toml"
    path.write_text("seed = true\n[calibrate]\n")
    with pytest.raises(UserError, match="seed: must be a number, not true or false"):
        load_settings(path)


@pytest.mark.parametrize(
    "command",
    [
        ["rollout", "--n", "1000000000"],
        ["calibrate", "--samples", "1000000000", "--budget", "64"],
        ["profile", "--samples", "1000000000", "--budget", "64"],
        ["evaluate", "--tasks", "synthetic", "--samples", "1000000000"],
    ],
)
def test_a_command_for_a_billion_responses_is_refused_at_once(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, _ = error_of([*command, "--model", "tiny-reasoner", "--out", str(tmp_path)], capsys)
    assert message.endswith("less than or equal to 65536")


def test_a_call_for_more_responses_than_memory_holds_is_refused() -> None:
    with pytest.raises(UserError, match="at most 65,536 responses per prompt are possible, got 1,000,000,000"):
        check_counts(10**9, 10, 1.0, 0)
    with pytest.raises(UserError, match="100,000 prompts with 65,536 responses each"):
        seeds(0, 100_000, 65_536)
    with pytest.raises(UserError, match="max_new_tokens must be at most 1,073,741,824"):
        check_counts(1, 4 * 10**21, 1.0, 0)
    assert seeds(np.int64(3), 2, 1) == seeds(3, 2, 1)


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(UserError, match=r"prompt 3 has a lone surrogate \(U\+D83D\) at character 2"):
        text_ids(None, "a \ud83d", "prompt 3")


ONES = np.ones((2, 3), dtype=np.float32)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sparroll.acceptance(ONES, ONES), "dense_logits"),
        (lambda: sparroll.acceptance_top_k(ONES, ONES, ONES, ONES), "dense_logp"),
        (lambda: sparroll.acceptance_sampled(torch.zeros(2), ONES[0]), "sparse_logp"),
        (lambda: sparroll.tail(ONES[0], torch.arange(3), [1, 1, 2]), "acceptance"),
        (lambda: TailStatistics().add(torch.ones(3), np.arange(3), 0), "context_tokens"),
        (lambda: correction("tis")(dense_logp=-ONES, sparse_logp=-ONES, mask=ONES), "dense_logp"),
        (lambda: TopK(ONES, ONES), "ids"),
        (lambda: sparroll.acceptance([0.1], [0.2]), "dense_logits"),
    ],
)
def test_numpy_where_torch_belongs_is_refused_with_a_way_out(call: Any, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} must be a torch tensor, got a .*\nhint: torch.as_tensor\({name}\)"):
        call()


def test_ids_of_rollouts_may_be_a_numpy_array() -> None:
    tensors = torch.ones(3), torch.arange(3)
    assert sparroll.tail(*tensors, np.array([1, 1, 2])).rows == sparroll.tail(*tensors, [1, 1, 2]).rows


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    return HFEngine(save_model(tmp_path_factory.mktemp("model") / "small"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1.7, 2]]}, r"prompt 0 must hold whole numbers, got \[1.7, 2\]"),
        ({"prompts": [None]}, "prompt 0 must hold whole numbers, got None"),
        ({"prompts": [["a"]]}, "prompt 0 must hold whole numbers"),
        ({"prompts": [b"ab"]}, "prompt 0 must be a text or token ids, got b'ab'"),
        ({"n": 1.5}, "n must be a whole number, got 1.5"),
        ({"n": True}, "n must be a whole number, got True"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, got 2.5"),
        ({"temperature": float("nan")}, "temperature must be 0 or from 0.001 up, and finite, got nan"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"seed": "1"}, "seed must be a whole number or a list of them, got '1'"),
        ({"stop_ids": ["x"]}, "stop_ids must hold whole numbers"),
    ],
)
def test_generate_takes_numbers_for_numbers_only(engine: HFEngine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine.generate(**{"prompts": ["a b"], "max_new_tokens": 2} | changes)


def test_numpy_integers_are_numbers(engine: HFEngine) -> None:
    ids = np.array([[2, 3], [4, 5]])
    assert [rollout.prompt_ids for rollout in engine.generate(ids, max_new_tokens=1)] == ids.tolist()


def test_numpy_booleans_are_true_and_false(engine: HFEngine) -> None:
    engine.set_schedule(sparroll.Schedule.fixed(64, dense_layers=(0,)))
    found = engine.generate([[2], [4]], max_new_tokens=1, dense=np.array([True, False]))
    engine.set_schedule(None)
    assert [rollout.schedule_name for rollout in found] == [None, "fixed-64"]


def test_a_schedule_is_no_number_and_a_budget_is_a_whole_one(engine: HFEngine) -> None:
    with pytest.raises(UserError, match="a schedule is .*, got 64\nhint: a budget is Schedule.fixed"):
        engine.set_schedule(64)  # type: ignore[arg-type]
    for budget in (64.0, True, "64"):
        with pytest.raises(UserError, match="kv_budget_tokens must be a whole number of tokens"):
            sparroll.Schedule.fixed(budget)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="context_tokens must be integers, got 1.5"):
        sparroll.Schedule.fixed(64).kv_budget_tokens(1.5)  # type: ignore[type-var]
    with pytest.raises(UserError, match="a model is a name or a folder, got 5"):
        HFEngine(5)  # type: ignore[arg-type]
