"""docs/other-trainers.md and recipes/prime-rl: what a user copies is what the trainers' own code was given in the record,
and what came out of it is accepted on our side. tests/vllm/test_other_trainers.py goes on where vLLM is needed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparroll import records
from sparroll.corrections import correction
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE, VLLMSettings
from sparroll.errors import UserError
from sparroll.integrations.prime_rl import _usable
from sparroll.schedule import Schedule

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "other-trainers.md").read_text(encoding="utf-8")
FOUND: dict[str, Any] = records.read(ROOT / "benchmarks" / "results" / "other-trainers-cpu.json", "other-trainers")[
    "results"
]
RECIPE = tomllib.loads((ROOT / "recipes" / "prime-rl" / "rl.toml").read_text(encoding="utf-8"))
SOURCES = ("published", "release", "Polaris", "prime-rl", "ours")
VERSIONS = {"prime-rl": (0, 26), "SkyRL": (0, 26), "OpenRLHF": (0, 29)}
"""Of vLLM, as the page says."""


def block(section: str, language: str) -> str:
    """The first one of a section of the page."""
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M)
    assert text is not None, section
    code = re.search(rf"```{language}\n(.*?)```", text[1], flags=re.S)
    assert code is not None, f"{section} has no {language}"
    return code[1]


def settings_in(additional: Any) -> VLLMSettings:
    """What the plugin finds in a configuration of vLLM's."""
    found = VLLMSettings.find(SimpleNamespace(additional_config=additional))
    assert found is not None, "the plugin was not asked for"
    return found


# -- prime-rl ---------------------------------------------------------------------------------------------------------------


def test_the_page_has_the_lines_of_the_recipe_and_prime_rl_read_the_recipe() -> None:
    shown, asked = tomllib.loads(block("prime-rl", "toml")), FOUND["prime-rl"]
    assert shown["trainer"]["loss"] == RECIPE["trainer"]["loss"] == asked["loss"]
    assert shown["inference"]["vllm"].items() <= RECIPE["inference"]["vllm"].items()
    assert RECIPE["inference"]["vllm"] == asked["asked"]


def test_the_recipe_names_a_loss_that_can_be_imported_and_settings_that_it_has() -> None:
    loss = RECIPE["trainer"]["loss"]
    module, _, name = loss["import_path"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    settings = {key: value for key, value in loss["kwargs"].items() if key != "correction"}
    assert _usable(loss["kwargs"]["correction"], tuple(settings.items())) == correction("tis", weight_max=3.0)
    with pytest.raises(UserError, match="weight_limit"):
        _usable("tis", (("weight_limit", 3.0),))


def test_what_prime_rl_makes_of_the_recipe_asks_for_its_schedule_with_the_samplers_log_probabilities() -> None:
    arguments = FOUND["prime-rl"]["arguments"]
    assert settings_in(arguments["additional_config"]).load(RECIPE["model"]["name"]) == Schedule.load("qwen3-4b-0.86")
    assert arguments["logprobs_mode"] == "processed_logprobs"
    sampling = RECIPE["orchestrator"]["train"]["sampling"]
    assert sampling.items() <= FOUND["prime-rl"]["sampling"].items()
    # What is sampled and trained on fits the context that both are given.
    assert sampling["max_completion_tokens"] < RECIPE["seq_len"] == arguments["max_model_len"] == 40_960


def test_the_recipes_values_say_where_they_come_from_and_are_those_of_our_own_loops_recipe() -> None:
    lines = (ROOT / "recipes" / "prime-rl" / "rl.toml").read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if re.match(r"\w+ = ", line)]
    assert len(values) == 22
    for line in values:
        assert line.rpartition("#")[2].strip().startswith(SOURCES), line
    ours = tomllib.loads((ROOT / "recipes" / "polaris-grpo-qwen3-4b" / "train.toml").read_text(encoding="utf-8"))
    orchestrator, optim = RECIPE["orchestrator"], RECIPE["trainer"]["optim"]
    assert RECIPE["model"]["name"] == ours["model"]["name"]
    assert orchestrator["group_size"] == ours["rollout"]["samples_per_prompt"]
    assert orchestrator["batch_size"] == ours["train"]["prompts_per_step"] * orchestrator["group_size"]
    assert orchestrator["train"]["sampling"]["temperature"] == ours["rollout"]["temperature"]
    assert orchestrator["train"]["sampling"]["max_completion_tokens"] == ours["rollout"]["max_new_tokens"]
    assert (optim["lr"], optim["weight_decay"]) == (ours["train"]["lr"], ours["train"]["weight_decay"])
    kwargs = RECIPE["trainer"]["loss"]["kwargs"]
    assert (kwargs["correction"], kwargs["weight_max"]) == (
        ours["correction"]["name"],
        ours["correction"]["weight_max"],
    )


# -- SkyRL ------------------------------------------------------------------------------------------------------------------


def test_the_lines_for_skyrl_are_those_that_it_read_and_ask_for_the_schedule() -> None:
    assert shlex.split(block("SkyRL", "bash").replace("\\\n", " ")) == FOUND["skyrl"]["asked"]
    arguments = FOUND["skyrl"]["arguments"]
    assert settings_in(arguments["additional_config"]).load("Qwen/Qwen3-4B") == Schedule.load("qwen3-4b-0.86")
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_the_table_for_skyrl_has_the_settings_under_which_its_loss_is_ours() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*) \|$", PAGE, flags=re.M))
    tried = {row["ours"]: row["settings"] for row in FOUND["skyrl"]["corrections"]}
    assert rows.keys() == tried.keys()
    for name, settings in tried.items():
        assert re.findall(r"`(\w+=[\w.-]+)`", rows[name]) == [f"{key}={value}" for key, value in settings.items()]


# -- OpenRLHF ---------------------------------------------------------------------------------------------------------------


def test_the_variable_as_exported_for_openrlhf_asks_for_the_schedule_and_so_does_its_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported = re.findall(r"^export (\w+)=(\S+)", block("OpenRLHF", "bash"), flags=re.M)
    assert exported == [(SCHEDULE_VARIABLE, "qwen3-4b-0.86")]
    schedule = Schedule.load("qwen3-4b-0.86")
    for value in (exported[0][1], json.dumps(schedule.inline())):
        monkeypatch.setenv(SCHEDULE_VARIABLE, value)
        assert settings_in({}).load("Qwen/Qwen3-4B") == schedule
    # Misspelt, it is an error and no dense run.
    monkeypatch.setenv(SCHEDULE_VARIABLE, "qwen3-4b-0.68")
    with pytest.raises(UserError, match=r"qwen3-4b-0\.68"):
        settings_in({}).load("Qwen/Qwen3-4B")


def test_the_options_for_openrlhf_are_those_that_its_parser_read() -> None:
    command = block("OpenRLHF", "bash").replace("\\\n", " ").splitlines()[-1]
    assert shlex.split(command)[-len(FOUND["openrlhf"]["asked"]) :] == FOUND["openrlhf"]["asked"]
    icepop = next(row for row in FOUND["openrlhf"]["corrections"] if row["ours"] == "icepop")
    *_, mode, _, low, high = icepop["settings"]["options"]
    assert f"`--algo.advantage.is_correction_mode {mode}` with `{low} {high}`" in " ".join(PAGE.split())


def test_openrlhfs_actor_sampled_sparsely_under_the_variable_that_ray_was_started_with() -> None:
    actor = FOUND["openrlhf"]["actor"]
    assert actor["schedule_in_actor"] == actor["schedule_name"] == "fixed-64"
    steps, dense = actor["response_tokens"] - 1, Schedule.fixed(64).dense_layers
    for number, layer in enumerate(actor["layers"]):
        expected = (steps, 0) if number in dense else (0, steps)
        assert (layer["dense_steps"], layer["sparse_steps"]) == expected
    assert steps > 20 and len(actor["layers"]) > len(dense)


# -- all of them ------------------------------------------------------------------------------------------------------------


def test_every_correction_on_the_page_has_the_gradient_of_ours() -> None:
    for name, found in FOUND.items():
        for row in found["corrections"]:
            assert row["difference"] < 1e-6, (name, row)
            # Those that drop something dropped something, and not everything.
            assert (0.1 < row["kept_share"] < 0.99) == (row["ours"] not in ("tis", "seq_tis", "importance", "none"))


def test_each_of_them_wants_a_version_of_vllm_that_the_plugin_runs_on_a_gpu() -> None:
    rows = {name: line.split("|") for line in PAGE.splitlines() for name in VERSIONS if line.startswith(f"| [{name}]")}
    assert rows.keys() == VERSIONS.keys()
    for name, version in VERSIONS.items():
        compat.check_version(version, "cuda")
        assert rows[name][2].strip() == f"{version[0]}.{version[1]}"
    with pytest.raises(UserError, match="not tested"):
        compat.check_version((0, 27), "cuda")


def test_the_page_names_the_code_that_was_run() -> None:
    code = {name: found["read_at"] for name, found in FOUND.items()}
    assert code["openrlhf"] == "0.11.2" and "[OpenRLHF](#openrlhf) 0.11.2" in PAGE
    assert all(f"`{code[name][:7]}`" in PAGE for name in ("prime-rl", "skyrl"))
