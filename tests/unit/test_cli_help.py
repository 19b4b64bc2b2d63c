"""What the command line says of itself: its version, its verbs and their options, and the settings of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli_reference import verbs
from cli_runs import error_of
from sparroll import __version__, corrections
from sparroll.cli import main
from sparroll.cli.shared.options import GROUPS, grouped
from sparroll.errors import UserError
from sparroll.schedule import MOST_TOKENS
from sparroll.train.config.describe import describe
from sparroll.train.config.distill import DistillConfig
from sparroll.train.config.file import load_config
from sparroll.train.config.run import TrainConfig


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparroll {__version__}\n"


@pytest.mark.parametrize("words", [[], ["schedule"], ["schedule", "show"], ["train"]])
def test_h_is_short_for_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "-h"]) == 0
    short = capsys.readouterr().out
    assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out == short != ""


def test_an_empty_output_folder_is_refused_in_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    having = [name for name, command in verbs() if any("--out" in each.opts for each in command.params)]
    assert {"rollout", "train", "evaluate", "plan", "report"} <= set(having)
    for name, command in verbs():
        for words in (["--out", ""], ["--out="]) if name in having else ():
            # Parsed and not run: a verb whose other options have defaults would begin to work.
            with pytest.raises(UserError, match="--out is empty") as refused:
                command.make_context(name, list(words))
            assert "--out runs/mine" in str(refused.value.hint)
    assert error_of(["rollout", "--model", "tiny-reasoner", "--prompts", "", "--out", "x"], capsys) == (
        "--prompts is empty",
        "name a path, such as --prompts prompts.jsonl",
    )


def test_the_list_of_verbs_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "..." not in shown.replace("[ARGS]...", "")
    for name, command in verbs():
        if " " not in name:
            assert f"{name} {command.get_short_help_str()}" in shown
            assert command.get_short_help_str().endswith(".")


def test_options_have_headings_and_each_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", "--help"])
    shown = capsys.readouterr().out
    headings = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Model and device",
        "Prompts",
        "Sampling",
        "What a decode step reads",
        "Measuring",
        "Output",
        "Options",
    ]
    for _, command in verbs():
        together = [each for members in grouped(command.params).values() for each in members]
        assert sorted(map(id, together)) == sorted(map(id, command.params))


def test_a_long_verb_has_few_options_without_a_heading() -> None:
    for name, command in verbs():
        loose = [each.name for each in grouped(command.params).get("Options", [])]
        assert len(loose) < 8, f"sparroll {name}: {loose} have no heading of {GROUPS}"


# -- sparroll config -----------------------------------------------------------------------------------------------------


def test_the_settings_explained_are_a_file_that_reads_back_as_the_defaults(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config"]) == 0
    path = tmp_path / "train.toml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path) == load_config()


@pytest.mark.parametrize("config", [TrainConfig, DistillConfig])
def test_every_field_of_every_kind_is_explained_with_its_docstring(config: Any) -> None:
    from sparroll.train.config.base import kinds_of, tag_of

    shown = " ".join(describe(config).replace("\n# ", " ").split())
    for name, field in config.model_fields.items():
        assert f"[{name}]" in shown
        for kind in kinds_of(field):
            for key, about in kind.model_fields.items():
                meaning = " ".join((about.description or "").split())
                assert meaning, f"{kind.__name__}.{key} has no docstring"
                assert meaning in shown, f"{name}.{key}"
                assert key == tag_of(kind) or f"{key} = " in shown, f"{name}.{key}"


def test_one_section_or_one_key_is_explained_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "train.lr"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "[train]"
    assert "lr = 1e-06  # a number, above 0" in shown
    assert "weight_decay" not in shown
    assert main(["config", "attention.kv_budget_tokens"]) == 0
    shown = capsys.readouterr().out
    assert 'with kind = "budget"' in shown
    values = f"a whole number, above 0, {MOST_TOKENS:,} or less; this is an example, there is no default"
    assert f"# kv_budget_tokens = 512  # {values}" in shown
    assert "compression" not in shown
    assert main(["config", "correction"]) == 0
    shown = capsys.readouterr().out
    assert all(f"# - {name}: " in shown for name in corrections.names())
    assert main(["config", "correction.veto_below"]) == 0
    shown = capsys.readouterr().out
    assert "# - veto: veto_below = " in shown
    assert "- tis" not in shown


def test_json_is_the_schema_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--distill", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"].keys() == DistillConfig.model_fields.keys()


@pytest.mark.parametrize("key", ["train", "train.lr"])
def test_json_of_one_setting_is_refused_because_the_schema_is_of_all(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message, hint = error_of(["config", key, "--json"], capsys)
    assert message == f"--json prints the JSON schema of all settings, and {key} alone is asked for"
    assert f"`sparroll config {key}`" in hint


def test_a_misspelt_setting_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(["config", "trian"], capsys) == ("there is no section [trian]", "did you mean 'train'?")
    assert error_of(["config", "lr"], capsys)[1] == "it is a key: train.lr, distill.lr"
    assert error_of(["config", "train.learning_rate"], capsys)[0] == "[train] has no key learning_rate"
    assert error_of(["config", "rollout.max_new_token"], capsys)[1] == "did you mean 'max_new_tokens'?"


def test_an_option_that_lacks_its_values_points_to_the_help_of_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(["evaluate", "--compare", "runs/a"], capsys)
    assert message == "Option '--compare' requires 2 arguments."
    assert hint == "`sparroll evaluate --help` lists the options"
