"""The controller of a configuration: where it starts, from which schedule, and what is refused before a run."""

from __future__ import annotations

import pytest

from sparroll.attention.selectors import PageMean
from sparroll.control.controller import Controller
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.train import load_config
from sparroll.train.schedules import make_controller, make_guard


def made(*overrides: str, schedule: Schedule | None = None, longest: int = 8000) -> Controller | None:
    return make_controller(
        load_config(None, ["control.by=controller", "control.target=0.86", *overrides]), schedule, longest
    )


def test_off_by_default_and_one_line_turns_it_on() -> None:
    assert make_controller(load_config(), None, 8000) is None
    one = made()
    assert one is not None
    assert one.budgets == [1008, 2000, 3008, 4000]
    assert one.schedule().selector == PageMean()
    assert one.schedule().target == {
        "statistic": "acceptance", "estimator": "top_k_lower", "top_k": 20, "quantile": 0.05, "at_least": 0.86,
    }  # fmt: skip


def test_a_start_share_of_one_is_dense() -> None:
    one = made("control.start_share=1")
    assert one is not None
    assert one.budgets == [2000, 4000, 6000, 8000]


def test_it_starts_from_a_schedule_on_its_own_bins_with_its_selector_and_dense_layers() -> None:
    selector = PageMean(page_tokens=4, first_tokens=4, recent_tokens=8)
    schedule = Schedule((Step(0, 400), Step(3000, 640), Step(4000, 600)), selector, dense_layers=(0,))
    one = made(schedule=schedule)
    assert one is not None
    assert one.budgets == [400, 640, 640, 640]
    assert one.schedule().selector == selector and one.schedule().dense_layers == (0,)
    assert not one.trust_start
    preset = made(schedule=Schedule.load("qwen3-1.7b-0.86"), longest=32_000)
    assert preset is not None and preset.trust_start and preset.bins.count == 16


def test_a_budget_beyond_the_bin_is_the_whole_bin() -> None:
    one = made("mismatch.bin_tokens=100", schedule=Schedule.fixed(512), longest=700)
    assert one is not None
    assert one.budgets == [112, 208, 304, 400, 512, 512, 512]
    assert one.widest().kv_budget_tokens(699) == 704


def test_a_start_above_the_limit_and_a_limit_that_is_no_budget_are_refused() -> None:
    with pytest.raises(UserError, match="has 512 tokens at 0-2k, more than control.most_budget_tokens = 256"):
        made("control.most_budget_tokens=256", schedule=Schedule.fixed(512))
    with pytest.raises(UserError, match=r"control.most_budget_tokens: .*multiple of page_tokens \(16\), got 250"):
        made("control.most_budget_tokens=250")
    with pytest.raises(UserError, match=r"control.least_budget_tokens: .*multiple of page_tokens \(16\), got 250"):
        made("control.least_budget_tokens=250")
    with pytest.raises(UserError, match="least_budget_tokens = 512 is more than most_budget_tokens = 256"):
        made("control.least_budget_tokens=512", "control.most_budget_tokens=256")


def test_a_run_with_too_few_rollouts_to_judge_any_bin_is_refused() -> None:
    few = ["train.prompts_per_step=1", "rollout.samples_per_prompt=3"]
    assert made(*few, "control.window_steps=3") is not None
    message = r"(?s)at least 8 rollouts.*window_steps = 2 steps of this run have 6.*--set control.window_steps=3"
    with pytest.raises(UserError, match=message):
        made(*few, "control.window_steps=2")


def test_an_adapter_may_start_from_the_controllers_own_share_of_the_context() -> None:
    config = load_config(None, ["control.by=controller", "control.target=0.86", "distill.rank=16"])
    assert config.attention.kind == "dense"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['control.stricter=["dense"]'], r'control\.stricter is for control\.by = "guard", and .* is "controller"'),
        (['control.schedules=["qwen3-1.7b-0.83"]'], r'control\.schedules is for control\.by = "cheaper"'),
        (["attention.kind=compression", "attention.policy=snap_kv"], '"controller" moves a schedule, and .* has none'),
        (["guard.at_least=0.9"], "guard.at_least = 0.9 asks for more than the controller holds"),
        (["control.margin=0.2"], "must be below 1, got 0.86 \\+ 0.2"),
        (["control.target=1"], "control.target: "),
    ],
)
def test_combinations_that_make_no_sense_are_refused_when_the_configuration_is_read(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, ["control.by=controller", "control.target=0.86", *overrides])


def test_the_guard_watches_the_controllers_target_unless_it_has_its_own() -> None:
    schedule = Schedule.load("qwen3-1.7b-0.92")
    assert make_guard(load_config(None, ["control.by=controller", "control.target=0.86"]), schedule).at_least == 0.86
    config = load_config(
        None, ["control.by=controller", "control.target=0.86", "guard.at_least=0.8", "guard.action=stop"]
    )
    assert make_guard(config, schedule).at_least == 0.8
