"""The schedule file's contract: what a valid one answers, and how each broken one is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparroll.attention.selectors import OracleToken, PageMean
from sparroll.errors import UserError
from sparroll.presets import presets
from sparroll.schedule import Schedule, Step

VALID = """
format = 1
model = "Qwen/Qwen3-1.7B"
selector = { kind = "page_mean", page_tokens = 16, first_tokens = 16, recent_tokens = 32 }
dense_layers = [0, 1]
target = { statistic = "acceptance", estimator = "top_k_lower", top_k = 20, quantile = 0.05, at_least = 0.86 }

[[steps]]
from_context_tokens = 0
kv_budget_tokens = 512
measured = { value = 0.866, low = 0.861, high = 0.871, tokens = 81234 }

[[steps]]
from_context_tokens = 2000
kv_budget_tokens = 1024
"""


def write(folder: Path, text: str) -> str:
    path = folder / "schedule.toml"
    path.write_text(text)
    return str(path)


def test_lists_are_taken_as_tuples() -> None:
    """Otherwise a schedule would differ from itself once it was saved."""
    made = Schedule([Step(0, 128)], dense_layers=[0, 1])  # type: ignore[arg-type]
    assert made == Schedule.from_table(made.table(), made.name) and made.dense_layers == (0, 1)
    grouped = Schedule([Step(0, (128, 256))], dense_layers=[], layer_groups=[[0, 1], [2]])  # type: ignore[arg-type]
    assert {made.kind, grouped.kind} and grouped.layer_groups == ((0, 1), (2,))


def test_published_preset_has_the_published_budgets() -> None:
    schedule = Schedule.load("qwen3-1.7b-0.86")
    assert [schedule.kv_budget_tokens(length) for length in (1, 1999, 2000, 17_000, 100_000)] == [
        512, 512, 1024, 3584, 4096,
    ]  # fmt: skip


def test_tensor_lookup_equals_int_lookup_for_any_shape_and_integer_type() -> None:
    schedule = Schedule.load("qwen3-8b-0.92")
    lengths = torch.tensor([[0, 1, 1999, 2000], [2001, 31_999, 32_000, 10**9]])
    for dtype in (torch.int64, torch.int32):
        found = schedule.kv_budget_tokens(lengths.to(dtype))
        assert found.tolist() == [[schedule.kv_budget_tokens(n) for n in row] for row in lengths.tolist()]
    with pytest.raises(UserError, match="integers"):
        schedule.kv_budget_tokens(torch.tensor([1.0]))
    with pytest.raises(UserError, match="negative"):
        schedule.kv_budget_tokens(-1)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "uint64"])
def test_lengths_of_any_integer_type_give_the_same_counts(dtype: str) -> None:
    schedule = Schedule.load("qwen3-1.7b-0.86")
    lengths = [0, 100] if dtype.endswith("t8") else [0, 100, 20_000]
    reads, unread = [0, 100, 4096][: len(lengths)], [0, 0, 26 * (20_000 - 4096)][: len(lengths)]
    arrays = np.array(lengths, dtype=dtype), torch.tensor(lengths, dtype=getattr(torch, dtype))
    for given in arrays:
        assert schedule.read_tokens(given).tolist() == reads
        assert schedule.unread_tokens(given, 28).tolist() == unread
    for length, read in zip(arrays[0], reads, strict=True):
        assert schedule.read_tokens(length) == read and type(schedule.read_tokens(length)) is int
        assert schedule.unread_tokens(length, 28) == 26 * (int(length) - read)


def test_what_is_no_length_is_refused() -> None:
    schedule = Schedule.fixed(512)
    for ask in (schedule.kv_budget_tokens, schedule.read_tokens, lambda given: schedule.unread_tokens(given, 4)):
        for negative in (-1, np.int64(-1), np.array([5, -1]), torch.tensor([[5], [-1]])):
            with pytest.raises(UserError, match="context_tokens must not be negative, got -1"):
                ask(negative)
        for wrong in ([1999, 2000], "x", None, 1.5, np.array([1.5]), torch.tensor([1.5])):
            with pytest.raises(UserError, match="context_tokens must be integers, got"):
                ask(wrong)
    assert schedule.read_tokens(np.array([], dtype=np.int32)).shape == (0,)
    assert schedule.read_tokens(torch.zeros(2, 0, dtype=torch.int32)).shape == (2, 0)


def test_all_twenty_presets_load_and_name_their_model() -> None:
    assert len(presets()) == 20
    for name in presets():
        schedule = Schedule.load(name)
        assert schedule.name == name and schedule.target is not None
        assert name.startswith(schedule.model.rsplit("/", 1)[-1].lower())
        assert schedule.target["at_least"] == float(name.rsplit("-", 1)[-1])


def test_a_stricter_preset_never_reads_less() -> None:
    lengths = torch.arange(0, 40_000, 500)
    for model in ("qwen3-1.7b", "qwen3-4b", "qwen3-8b"):
        family = [Schedule.load(name).kv_budget_tokens(lengths) for name in presets() if name.startswith(model)]
        for looser, stricter in zip(family, family[1:], strict=False):
            assert bool((looser <= stricter).all())


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    schedule = Schedule.load(write(tmp_path, VALID))
    assert schedule.steps[0].measured == {"value": 0.866, "low": 0.861, "high": 0.871, "tokens": 81234}
    again = Schedule.load(schedule.save(tmp_path / "again" / "copy.toml"))
    assert json.dumps(again.table()) == json.dumps(schedule.table())


def test_numbers_of_numpy_can_be_saved(tmp_path: Path) -> None:
    groups = {"dense_layers": (0,), "layer_groups": ((1,), (2,))}
    for schedule, same in (
        (Schedule.fixed(np.int64(512)), Schedule.fixed(512)),
        (Schedule.fixed(64).checked(np.int64(6), np.float32(0.5)), Schedule.fixed(64).checked(6, 0.5)),
        (Schedule((Step(np.uint16(0), 64), Step(np.int32(99), np.int64(80)))), Schedule((Step(0, 64), Step(99, 80)))),
        (Schedule((Step(0, (np.int64(64), 80)),), **groups), Schedule((Step(0, (64, 80)),), **groups)),
    ):
        assert schedule == same and json.dumps(schedule.inline()) == json.dumps(same.inline())
        assert Schedule.load(schedule.save(tmp_path / "saved.toml")).table() == same.table()


def test_a_step_keeps_every_figure_that_a_calibration_writes(tmp_path: Path) -> None:
    figures = "tokens = 81234, rollouts = 512, verified = true, interpolated = false, dense = true"
    written = VALID.replace("tokens = 81234", f"{figures}, at_kv_budget_tokens = 384")
    measured = Schedule.load(write(tmp_path, written)).steps[0].measured
    assert measured is not None and len(measured) == 9 and measured["at_kv_budget_tokens"] == 384


def test_a_schedule_given_inline_needs_no_file_and_keeps_its_name(tmp_path: Path) -> None:
    schedule = Schedule.load(write(tmp_path, VALID)).checked(64)
    inline = schedule.inline()
    given = [inline, json.dumps(inline), "\n  " + json.dumps(inline)]
    assert all(Schedule.load(each) == schedule and Schedule.load(each).name == schedule.name for each in given)
    assert "name" in inline, "load must not change what it is given"
    assert Schedule.load(Schedule.fixed(512).table()).name == "inline"
    with pytest.raises(UserError, match="made for"):
        Schedule.load(inline, model="meta-llama/Llama-3")
    assert Schedule.load(inline, model="meta-llama/Llama-3", force=True).any_model


def test_a_broken_inline_schedule_says_what_is_wrong() -> None:
    for given, message in (
        ('{"format": 1', "not valid JSON"),
        ({**Schedule.fixed(512).inline(), "name": 3}, "name of a schedule must be text, got 3"),
        ({**Schedule.fixed(512).inline(), "stepps": []}, "schedule fixed-512: unknown key 'stepps'"),
        ({**Schedule.fixed(512).inline(), 1: 2}, "schedule fixed-512: unknown key 1"),
        ('{"format": 3}', "schedule inline: format must be 1 or 2, got 3"),
    ):
        with pytest.raises(UserError, match=message):
            Schedule.load(given)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("format = 1", "format = 3", "format must be 1 or 2, got 3"),
        ("format = 1", "", "format must be 1 or 2, got None\nhint: write format = 1"),
        ("format = 1", "format = [", "not valid TOML"),
        ("dense_layers = [0, 1]", "", "'dense_layers' is missing"),
        ("dense_layers = [0, 1]", "dense_layers = [1, 0]", "distinct layer numbers in rising order"),
        ("dense_layers = [0, 1]", 'dense_layers = [0, "x"]', "distinct layer numbers"),
        ("from_context_tokens = 0", "from_context_tokens = 16", "first step must start at 0"),
        ("from_context_tokens = 2000", "from_context_tokens = 0", "strictly rising"),
        ("kv_budget_tokens = 512", "kv_budget_tokens = 500", "multiple of page_tokens (16), got 500\nhint: use 496 or 512"),
        ("kv_budget_tokens = 512", "kv_budget_tokens = 48", "must be at least 64"),
        ("kv_budget_tokens = 512", "kv_budget_tokens = -16", "whole number of tokens, got -16"),
        ("kv_budget_tokens = 512", "kv_budget_tokens = 512.0", "whole number of tokens, got 512.0"),
        ("kv_budget_tokens = 512", "kv_budget = 512", "unknown key 'kv_budget' in a step\nhint: did you mean"),
        ("target =", "targets =", "unknown key 'targets'\nhint: did you mean 'target'?"),
        ('"page_mean"', '"page_meen"', "unknown selector kind 'page_meen'\nhint: did you mean 'page_mean'?"),
        ("page_tokens = 16", "page_token = 16", "no setting 'page_token'\nhint: did you mean 'page_tokens'?"),
        ("page_tokens = 16", "page_tokens = 129", "page_tokens must lie in 1..128, got 129"),
        ("page_tokens = 16", "page_tokens = true", "page_tokens must be a whole number"),
        ("recent_tokens = 32", "recent_tokens = 40", "recent_tokens must be a multiple"),
        ("recent_tokens = 32", "recent_tokens = 0", "at least 16, got 0"),
        ("kv_budget_tokens = 512", "kv_budget_tokens = true", "kv_budget_tokens must be a whole number of tokens, got True"),
        ("kv_budget_tokens = 512", f"kv_budget_tokens = {4 * 10**21}", "kv_budget_tokens must be at most 1,073,741,824"),
        ("kv_budget_tokens = 512", "kv_budget_tokens = 4e21", "must be a whole number of tokens, got 4e+21"),
        ("context_tokens = 2000", f"context_tokens = {4 * 10**21}", "from_context_tokens must be at most 1,073,741,824"),
        ("at_least = 0.86", "at_least = 5", "target.at_least must be above 0 and at most 1, got 5"),
        ("at_least = 0.86", "at_least = nan", "target.at_least must be above 0 and at most 1, got nan"),
        ("at_least = 0.86", "at_least = true", "target.at_least must be above 0 and at most 1, got True"),
        ("quantile = 0.05", "quantile = 5", "target.quantile must be between 0 and 1, got 5"),
        ("top_k = 20", "top_k = 0", "target.top_k must be a whole number of 1 or more, got 0"),
        ('"top_k_lower"', '"top_k"', "target.estimator must be one of exact, top_k_lower"),
        ("value = 0.866", "value = nan", "measured.value must lie in [0, 1], got nan"),
        ("low = 0.861", "low = -inf", "measured.low must lie in [0, 1], got -inf"),
        ("tokens = 81234", "tokens = 1.5", "measured.tokens must be a whole number, got 1.5"),
        ("{ value = 0.866", "{ valeu = 0.866", "unknown key 'valeu' in measured\nhint: did you mean 'value'?"),
        ("low = 0.861", "low = 0.9", "between measured.low and measured.high, got low = 0.9, value = 0.866, high = 0.871"),
        ("value = 0.866, low = 0.861", "low = 0.9", "between measured.low and measured.high, got low = 0.9, high = 0.871"),
        ("tokens = 81234", "verified = 1", "measured.verified must be true or false, got 1"),
        ("tokens = 81234", "at_kv_budget_tokens = -1", "measured.at_kv_budget_tokens must be a whole number, got -1"),
        ("measured = {", "measured = 3 # {", "measured must be a table of figures, got 3"),
        ('model = "Qwen/Qwen3-1.7B"', "model = 5", "model must be text, got 5"),
        ("target = {", "target = 5 # {", "target must be a table, got 5"),
        ("format = 1", "format = 1\nfingerprint = { layer = 2 }", "unknown key 'layer' in the fingerprint\nhint: did you"),
        ("format = 1", "format = 1\nfingerprint = { layers = true }", "fingerprint.layers must be a whole number, got True"),
    ],
)  # fmt: skip
def test_each_broken_invariant_is_a_clear_error(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in VALID
    with pytest.raises(UserError) as caught:
        Schedule.load(write(tmp_path, VALID.replace(before, after)))
    assert message in str(caught.value)


def test_a_missing_schedule_never_turns_into_another_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'qwen3-14b-0.86'"):
        Schedule.load("qwen3-14-0.86")
    with pytest.raises(UserError, match="no schedule file at"):
        Schedule.load(tmp_path / "gone.toml")
    with pytest.raises(UserError, match="needs at least one step"):
        Schedule(steps=())


def test_a_schedule_for_another_model_is_refused_unless_forced(tmp_path: Path) -> None:
    path = write(tmp_path, VALID)
    assert Schedule.load(path, model="models/qwen3-1.7b").model == "Qwen/Qwen3-1.7B"
    with pytest.raises(UserError, match="made for Qwen/Qwen3-1.7B, not for Qwen/Qwen3-4B"):
        Schedule.load(path, model="Qwen/Qwen3-4B")
    assert Schedule.load(path, model="Qwen/Qwen3-4B", force=True).name == "schedule"
    with pytest.raises(UserError, match="names layer 1, but the model has layers 0..0"):
        Schedule.load(path).check_layers(1)
    forced = Schedule.load(path, force=True)
    forced.check_model("Qwen/Qwen3-4B")
    replace(forced, name="another").check_model("Qwen/Qwen3-4B")


def test_a_budget_of_a_command_has_the_same_limit() -> None:
    with pytest.raises(UserError, match="kv_budget_tokens must be at most 1,073,741,824, got 4,000,000,000,000"):
        Schedule.fixed(4 * 10**21)


def test_budgets_are_whole_units_of_the_selector() -> None:
    assert Schedule.fixed(50, OracleToken(first_tokens=3, recent_tokens=5)).kv_budget_tokens(10) == 50
    with pytest.raises(UserError, match="multiple"):
        Schedule(steps=(Step(0, 50),), selector=PageMean(page_tokens=4, first_tokens=4, recent_tokens=4))


# -- groups of layers ------------------------------------------------------------------------------------------------------

GROUPED = """
format = 2
model = "Qwen/Qwen3-1.7B"
selector = { kind = "page_mean", page_tokens = 16, first_tokens = 16, recent_tokens = 32 }
dense_layers = [0]
layer_groups = [[1, 2, 3], [4, 5]]

[[steps]]
from_context_tokens = 0
kv_budget_tokens = [512, 256]
measured = { value = 0.866, low = 0.861, high = 0.871, tokens = 81234 }

[[steps]]
from_context_tokens = 2000
kv_budget_tokens = 1024
"""


def test_each_group_of_layers_is_a_schedule(tmp_path: Path) -> None:
    schedule = Schedule.load(write(tmp_path, GROUPED))
    assert schedule.layer_groups == ((1, 2, 3), (4, 5))
    for layer, budget in ((1, 512), (3, 512), (4, 256), (5, 256)):
        own = schedule.of_layer(layer)
        assert [own.kv_budget_tokens(length) for length in (1, 1999, 2000)] == [budget, budget, 1024]
        assert (own.selector, own.dense_layers, own.layer_groups) == (schedule.selector, (0,), ())
        assert own.read_tokens(torch.tensor([600, 1000])).tolist() == [budget - 8, budget - 8]
    assert schedule.parts(6) == (((1, 2, 3), schedule.of_layer(1)), ((4, 5), schedule.of_layer(4)))
    # 1000 tokens: three layers read 504 and two read 248.
    assert schedule.unread_tokens(1000, 6) == 3 * (1000 - 504) + 2 * (1000 - 248)
    assert schedule.unread_tokens(torch.tensor([[256], [400]]), 6).tolist() == [[0], [2 * 144]]
    assert (schedule.step_at(1999).kv_budget_tokens, schedule.step_at(2000).kv_budget_tokens) == ((512, 256), 1024)


def test_a_schedule_without_groups_is_its_own_part() -> None:
    schedule = Schedule.fixed(512)
    assert schedule.parts(5) == (((2, 3, 4), schedule),) and schedule.of_layer(3) is schedule
    assert schedule.groups == (schedule,) and schedule.unread_tokens(1024, 5) == 3 * 512
    assert schedule.plain_budgets() == [[0, 512]]


def test_a_grouped_schedule_has_no_common_budget(tmp_path: Path) -> None:
    schedule = Schedule.load(write(tmp_path, GROUPED))
    for ask in (schedule.kv_budget_tokens, schedule.read_tokens):
        with pytest.raises(UserError, match="budgets for 2 groups of layers, and no common one") as caught:
            ask(1000)
        assert "schedule.of_layer(4)" in (caught.value.hint or "")
    with pytest.raises(UserError, match="layer 0 is dense"):
        schedule.of_layer(0)
    with pytest.raises(UserError, match="layer 6 is in none of the layer_groups"):
        schedule.of_layer(6)
    one = replace(schedule, layer_groups=((1, 2, 3, 4, 5),), steps=(Step(0, (512,)), Step(9, 1024)))
    assert one.kv_budget_tokens(torch.tensor([8, 9])).tolist() == [512, 1024]


def test_groups_survive_files_and_messages_and_other_schedules_keep_their_format(tmp_path: Path) -> None:
    schedule = Schedule.load(write(tmp_path, GROUPED), force=True).checked(64)
    again = Schedule.load(schedule.save(tmp_path / "copy.toml"))
    assert again == replace(schedule, name="copy") and again.table() == schedule.table()
    assert schedule.table()["format"] == 2 and schedule.table()["steps"][0]["kv_budget_tokens"] == [512, 256]
    assert Schedule.load(json.dumps(schedule.inline())) == schedule
    assert json.loads(json.dumps(schedule.plain_budgets())) == schedule.plain_budgets()
    equal = replace(schedule, steps=(schedule.steps[0], Step(2000, (1024, 1024))))
    assert equal.plain_budgets() == schedule.plain_budgets() != replace(schedule, steps=(Step(0, 512),)).plain_budgets()
    plain = Schedule.load(write(tmp_path, VALID))
    assert plain.table()["format"] == 1 and "layer_groups" not in plain.table()
    assert "layer_groups" not in plain.save(tmp_path / "plain.toml").read_text()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("format = 2", "format = 1", "layer_groups needs format = 2, got 1\nhint: set format = 2"),
        ("[[1, 2, 3], [4, 5]]", "[1, 2]", "layer_groups must be a list of lists of layers, got [1, 2]"),
        ("[[1, 2, 3], [4, 5]]", "[]", "layer_groups must be a list of lists of layers, got []"),
        ("[[1, 2, 3], [4, 5]]", "[[1, 2, 3], []]", "distinct layer numbers in rising order, got []"),
        ("[4, 5]", "[5, 4]", "distinct layer numbers in rising order, got [5, 4]"),
        ("[4, 5]", "[4, -5]", "distinct layer numbers in rising order, got [4, -5]"),
        ("[4, 5]", '[4, "5"]', "distinct layer numbers in rising order, got [4, '5']"),
        ("[4, 5]", "[4, true]", "distinct layer numbers in rising order, got [4, True]"),
        ("[4, 5]", "[3, 4, 5]", "layer 3 is in two of the layer_groups: [1, 2, 3] and [3, 4, 5]\nhint: name each layer"),
        ("[1, 2, 3]", "[0, 1, 2, 3]", "layer 0 is in dense_layers and in a group of layer_groups"),
        ("[512, 256]", "[512, 256, 128]", "step from 0 on has 3 budgets, the schedule has 2 layer_groups\nhint: give one"),
        ("[512, 256]", "[512]", "step from 0 on has 1 budgets, the schedule has 2 layer_groups"),
        ("[512, 256]", "[]", "step from 0 on has 0 budgets"),
        ("[512, 256]", "[512, 250]", "multiple of page_tokens (16), got 250"),
        ("[512, 256]", "[512, 48]", "must be at least 64"),
        ("[512, 256]", "[512, 2.5]", "whole number of tokens, got [512, 2.5]"),
        ("layer_groups = [[1, 2, 3], [4, 5]]", "", "has 2 budgets, the schedule has no layer_groups\nhint: give a single"),
        ("layer_groups", "layer_group", "unknown key 'layer_group'\nhint: did you mean 'layer_groups'?"),
    ],
)  # fmt: skip
def test_each_group_that_cannot_be_is_a_clear_error(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in GROUPED
    with pytest.raises(UserError) as caught:
        Schedule.load(write(tmp_path, GROUPED.replace(before, after)))
    assert message in str(caught.value)


def test_groups_are_together_all_sparse_layers_of_the_model(tmp_path: Path) -> None:
    schedule = Schedule.load(write(tmp_path, GROUPED))
    schedule.check_layers(6)
    with pytest.raises(UserError, match="layer_groups names layer 5, but the model has layers 0..4"):
        schedule.check_layers(5)
    with pytest.raises(UserError, match=r"leaves out the layers \[6, 7\] of the model") as caught:
        schedule.check_layers(8)
    assert "or into dense_layers" in (caught.value.hint or "")


def test_steps_start_at_whole_numbers_of_tokens() -> None:
    with pytest.raises(UserError, match=r"steps start at whole numbers of tokens, got 10\.5"):
        Schedule((Step(0, 64), Step(10.5, 80)))  # type: ignore[arg-type]


def test_a_date_of_toml_is_text_in_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "dated.toml"
    path.write_text(Schedule.fixed(512).save(path).read_text() + "\n[made_by]\ndate = 2025-01-01\n")
    schedule = Schedule.load(path)
    assert schedule.made_by == {"date": "2025-01-01"}
    assert json.loads(json.dumps(schedule.inline()))["made_by"] == schedule.made_by


def with_target(**target: object) -> dict[str, Any]:
    return Schedule.fixed(512).table() | {"target": target}


def test_a_target_may_be_a_share_of_impossible_tokens() -> None:
    table = with_target(statistic="impossible_share", nats=10, at_most=1e-4)
    schedule = Schedule.from_table(table)
    assert schedule.target == {"statistic": "impossible_share", "nats": 10, "at_most": 1e-4}
    assert schedule.table() == table


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"statistic": "impossible_shares", "nats": 10, "at_most": 1e-4},
            r"(?s)unknown target.statistic.*impossible_share",
        ),
        ({"statistic": "impossible_share", "nats": 10, "at_mots": 1e-4}, r"(?s)unknown key 'at_mots'.*'at_most'"),
        ({"statistic": "impossible_share", "nats": 10}, "needs at_most"),
        ({"statistic": "impossible_share", "at_most": 1e-4}, "needs nats"),
        (
            {"statistic": "impossible_share", "nats": 7, "at_most": 1e-4},
            "target.nats must be one of 2, 5, 10, 20, got 7",
        ),
        ({"statistic": "impossible_share", "nats": 10, "at_most": 2}, "target.at_most must be between 0 and 1, got 2"),
        ({"statistic": "impossible_share", "nats": 10, "at_most": 1e-4, "quantile": 0.05}, "belongs to the statistic"),
        ({"statistic": "acceptance", "at_least": 0.86, "at_most": 1e-4}, "target.at_most belongs to the statistic"),
        ({"statistic": ["acceptance"]}, "unknown target.statistic"),
        ({"at_least": 0.86, "at_lest": 0.86}, r"(?s)unknown key 'at_lest'.*'at_least'"),
        ({"kl_at_most": "abc"}, "target.kl_at_most must be above 0 and finite, got 'abc'"),
        ({"kl_at_most": math.inf}, "target.kl_at_most must be above 0 and finite"),
        ({"far_mass_at_most": 7}, "target.far_mass_at_most must be from 0 to 1, got 7"),
        ({"far_mass_at_most": 0.1, "far_mass_nats": 3}, "target.far_mass_nats must be one of 2, 5, 10, 20, got 3"),
    ],
)
def test_a_target_that_nobody_could_hold_is_refused(target: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Schedule.from_table(with_target(**target))
