"""What the recipes' pages say against their configurations and against `sparroll plan`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from recipe_runs import RECIPES, recipe
from sparroll.cli import main
from sparroll.plan.model_shape import model_shape
from sparroll.rounding import rounded_down
from sparroll.train import load_config
from sparroll.train.config.rollout import ScheduleAttention

ROOT = Path(__file__).parents[2]
PLANNED = [folder for folder in RECIPES if "qwen3" in folder.name]
SOURCES = ("published", "release", "Polaris", "ours")


def _plan(folder: Path) -> list[str]:
    (command,) = re.findall(r"^sparroll plan .*?(?<!\\)$", (folder / "README.md").read_text(), flags=re.M | re.S)
    return shlex.split(command.replace("\\\n", " "))[1:]


@pytest.mark.parametrize("folder", PLANNED, ids=lambda folder: folder.name)
def test_the_hardware_of_a_recipe_is_what_plan_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, page, command = load_config(folder / "train.toml"), (folder / "README.md").read_text(), _plan(folder)
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert isinstance(config.attention, ScheduleAttention) and options["--schedule"] == config.attention.name
    assert int(options["--batch"]) == config.rollout.max_batch
    assert options["--lengths"].endswith(f"max={config.rollout.max_new_tokens}")
    assert config.model.name == f"Qwen/{options['--model']}"
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    dense, sparse = plan["dense"]["tokens_per_second"], plan["sparse"]["tokens_per_second"]
    assert f"decoding: {dense:,.0f} tokens/s dense, {sparse:,.0f} sparse, {rounded_down(plan['speedup'], 2)}x" in page
    parameters = model_shape(options["--model"]).parameters
    assert f"moments: {12 * parameters / 1e9:.1f} GB, during the update {16 * parameters / 1e9:.1f} GB" in page
    responses = config.train.prompts_per_step * config.rollout.samples_per_prompt
    median = int(options["--lengths"].removeprefix("lognormal:").split(",")[0])
    minutes = round(responses * median / sparse / 60)
    assert f"{responses:,} responses of {median:,} tokens: {minutes} minutes of decoding a step" in page
    assert f"step-{config.train.steps:06d}/model" in page


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_every_value_of_a_recipe_says_where_it_comes_from(folder: Path) -> None:
    text = (folder / "train.toml").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\w+ = ", line)]
    assert len(lines) == sum(len(section) for section in recipe(folder).values())
    for line in lines:
        key, _, comment = line.partition("#")
        # The name of a local data file says nothing of the run.
        assert comment.strip().startswith(SOURCES) or key.startswith('name = "data"'), line


def test_prompts_and_responses_fit_the_models_context() -> None:
    for folder in PLANNED:
        config = load_config(folder / "train.toml")
        assert config.data.max_prompt_tokens is not None
        # Qwen3's max_position_embeddings.
        assert config.data.max_prompt_tokens + config.rollout.max_new_tokens <= 40_960
        assert config.train.micro_batch_tokens >= config.data.max_prompt_tokens + config.rollout.max_new_tokens


def test_the_page_of_recipes_names_each_of_them() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert all(folder.name in text or f"`-{folder.name.rpartition('-')[2]}`" in text for folder in RECIPES)
