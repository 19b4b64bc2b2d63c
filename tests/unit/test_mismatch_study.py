"""recipes/mismatch-study: its rows and its settings."""

from __future__ import annotations

import json
import sys

import pytest

import study_recipe
from sparroll import files
from sparroll.attention.selectors import QuantizedMean
from sparroll.errors import UserError

registered = study_recipe.registered

import study  # noqa: E402
from study_folder import new_config  # noqa: E402
from study_rows import Settings, chosen, rows, run_config, schedule_path  # noqa: E402


def test_the_grid_holds_every_row_that_was_asked_for() -> None:
    names = list(rows(Settings("folder")))
    assert names[:6] == ["dense", *(f"fixed-{name}" for name in ("none", "tis", "icepop", "sparse_rl", "jackpot"))]
    evicting = ("r_kv-{}-none", "r_kv-{}-sparse_rl", "snap_kv-{}-none", "snap_kv-{}-sparse_rl")
    assert names[6:14] == [name.format(budget) for budget in (1024, 3584) for name in evicting]
    assert names[14:] == [
        *(f"calibrated-{t}" for t in ("0.75", "0.80", "0.86", "0.92")),
        "uniform",
        "narrow-first",
        *(f"calibrated-0.86-{name}" for name in ("none", "icepop", "sparse_rl", "jackpot")),
        "fixed-verified",
        *(f"fixed-verified-{check}" for check in ("32-0.01", "32-0.1", "32-0.5", "64-0.1", "64-0.5")),
        *(f"{name}-verified" for name in ("fixed-256", "fixed-512", "quantized-64", "quantized-128")),
        "quantized-192",
        "quantized-800",
        "quantized-192-wide",
        *(f"quantized-{units}-128-wide-verified" for units in ("4x4", "8x4")),
        *(f"{name}-verified" for name in ("calibrated-0.75", "calibrated-0.86")),
        "distill",
        "distill-kl",
        "controller",
        "controller-safe-start",
    ]


@pytest.mark.parametrize("name", list(rows(Settings("folder"))))
def test_every_row_is_a_configuration_that_differs_only_in_its_own_sections(name, tmp_path) -> None:
    settings = Settings("folder")
    row, dense = rows(settings)[name], rows(settings)["dense"]
    table = run_config(settings, tmp_path, row, 3).model_dump(mode="json")
    shared = run_config(settings, tmp_path, dense, 3).model_dump(mode="json")
    differing = {section for section in table if table[section] != shared[section]}
    expected = {section for section in row.tables if section != "correction" or row.tables[section] != {"name": "none"}}
    assert differing == expected | ({"attention"} if schedule_path(tmp_path, row) else set())
    assert table["train"]["seed"] == 3 and table["train"]["dtype"] == "bf16"


def test_the_narrow_first_bin_reads_what_fixed_rows_do_and_the_others_plenty() -> None:
    settings = Settings("folder")
    budgets = settings.fixed_schedules()[rows(settings)["narrow-first"].schedule].kv_budget_tokens
    assert [budgets(context) for context in (100, 4095, 4096, 4400)] == [128, 128, 1536, 1536]


def test_the_row_without_dense_layers_reads_four_times_as_much_in_the_first_two() -> None:
    settings = Settings("folder")
    schedule = settings.fixed_schedules()[rows(settings)["quantized-192-wide"].schedule]
    assert [schedule.of_layer(layer).kv_budget_tokens(4_000) for layer in (0, 1, 2, 7)] == [768, 768, 192, 192]
    assert settings.layers == new_config().num_hidden_layers
    schedule.check_layers(settings.layers)
    drafts = settings.fixed_schedules()[rows(settings)["quantized-8x4-128-wide-verified"].schedule]
    assert [drafts.of_layer(layer).kv_budget_tokens(4_000) for layer in (1, 2)] == [512, 128]
    assert drafts.selector == QuantizedMean(8, first_tokens=16, recent_tokens=32, bits=4)
    with pytest.raises(UserError, match="tokens x bits"):
        Settings("folder", draft_units=("4",)).fixed_schedules()
    with pytest.raises(UserError, match="3 layers or more"):
        Settings("folder", layers=2)


def test_every_row_that_can_have_a_control_group_has_the_one_that_was_asked_for(tmp_path) -> None:
    settings = Settings("folder", control_share=1 / 16)
    without, plain = [], Settings("folder")
    for name, row in rows(settings).items():
        config = run_config(settings, tmp_path, row, 0)
        before = run_config(plain, tmp_path, row, 0)
        assert before.control_share == 0 and before.guard.action == "off"
        if config == before:
            without.append(name)
            continue
        rollout = before.rollout.model_copy(update={"control_share": 1 / 16})
        guard = before.guard.model_copy(update={"action": "warn"})
        assert config == before.model_copy(update={"rollout": rollout, "guard": guard})
    assert without == ["dense", "distill", "distill-kl"]
    all_the_time = Settings("folder", control_share=0.5, control_share_first=0.5)
    assert run_config(all_the_time, tmp_path, rows(all_the_time)["uniform"], 0).rollout.control_share_first == 0.5
    with pytest.raises(UserError, match=r"control_share_first = 0\.25 must be at least control_share = 0\.5"):
        Settings("folder", control_share=0.5)


def test_settings_of_before_there_were_control_groups_mean_none() -> None:
    table = Settings("folder").table()
    new = ("control_share", "control_share_first", "wide_budget", "wide_from_tokens")
    old = {name: value for name, value in table.items() if name not in new}
    assert Settings.from_table(old) == Settings("folder") and Settings("folder").control_share == 0


def test_vllm_is_for_the_rows_that_do_not_evict(tmp_path) -> None:
    settings = Settings("folder", engine="vllm")
    engines = {name: run_config(settings, tmp_path, row, 0).engine.kind for name, row in rows(settings).items()}
    evicting = {name for name in engines if name.startswith(("r_kv", "snap_kv"))}
    assert {name for name, engine in engines.items() if engine == "hf"} == evicting


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="no row 'fixed-tiss'"):
        chosen(Settings("folder"), ["fixed-tiss"])
    with pytest.raises(UserError, match="no level 77"):
        Settings("folder", level=77)
    for same in ({"targets": (0.75, 0.754, 0.86)}, {"eviction_budgets": (1024, 1024)}):
        with pytest.raises(UserError, match="must differ"):
            Settings("folder", **same)
    with pytest.raises(UserError, match="no setting 'eviction_budget'"):
        Settings.from_table({"model": "folder", "eviction_budget": 1024})
    for name in ("corrected_target", "distill_target"):
        with pytest.raises(UserError, match=f"{name} must be one of"):
            Settings("folder", **{name: 0.5})


def test_settings_come_back_from_their_file() -> None:
    settings = Settings("folder", level=136, targets=(0.75, 0.86), budgets=(64, 128))
    assert Settings.from_table(json.loads(json.dumps(settings.table()))) == settings


@pytest.mark.parametrize(("asked", "named"), [([], "no GPU\n"), (["--gpus", "4", "5"], "no GPU 4, 5\n")])
def test_without_its_gpus_a_study_is_not_begun(monkeypatch, tmp_path, asked, named) -> None:
    monkeypatch.setattr(study.torch.cuda, "device_count", lambda: 2 if asked else 0)
    monkeypatch.setattr(sys, "argv", ["study.py", "--out", str(tmp_path / "study"), "--model", "folder", *asked])
    with pytest.raises(SystemExit, match=f"error: there is {named}hint: "):
        study.main()
    assert not (tmp_path / "study").exists()


def test_settings_that_agree_need_not_be_named_all_again(monkeypatch, tmp_path) -> None:
    arguments = ["study.py", "--out", str(tmp_path), "--targets", "0.5"]
    others = ["--model", "folder", "--corrected-target", "0.5", "--distill-target", "0.5"]
    monkeypatch.setattr(sys, "argv", arguments + others)
    files.write_json(tmp_path / "settings.json", study.read_settings(study.arguments()).table())
    monkeypatch.setattr(sys, "argv", arguments)
    assert study.read_settings(study.arguments()).corrected_target == 0.5
