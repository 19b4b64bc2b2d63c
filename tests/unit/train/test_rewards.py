"""Terms, weights and the overlong penalty: known answers."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll.errors import UserError
from sparroll.tasks.thinking import after_thinking
from sparroll.tasks.verdicts import Verdict
from sparroll.train.config.file import config_from, load_config, refuse_other_config
from sparroll.train.config.reward import RewardSection, RewardTerm
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.sampling.rewards import Graded, Rewards, agreed, overlong_penalty, reward_report
from sparroll.types import Prompt, Rollout

PROMPTS = [Prompt("p/0", "?", ""), Prompt("p/1", "?", "")]


class Right:
    """The task's verdict: whether the response is "a"; nothing can be said of "?"."""

    name = "right"

    def verdicts(self, prompts: Any, responses: Any) -> list[Verdict]:
        return [Verdict(None, "broken") if text == "?" else Verdict(float(text == "a")) for text in responses]


def short(prompt: Prompt, response_text: str, rollout: Rollout, worth: float = 1.0) -> float | None:
    return None if response_text == "!" else worth * len(rollout.response_ids)


def graded(words: str, samples: int = 2, most: int = 10, **settings: Any) -> Graded:
    """words: a word of as many letters as the response has tokens; the first letter is its text."""
    rollouts = [Rollout([1], [2] * len(word), torch.zeros(len(word)), "stop", text=word[0]) for word in words.split()]
    rewards = Rewards(RewardSection(**settings), samples, most)
    return rewards(Right(), PROMPTS[: len(rollouts) // samples], rollouts, lambda ids: "the prompt's end")  # type: ignore[arg-type]


def test_by_default_the_reward_is_the_tasks_verdict() -> None:
    made = graded("a b ? a")
    assert made.reward_GN.dtype == torch.float32
    assert made.reward_GN.nan_to_num(7).tolist() == [[1, 0], [7, 1]]
    assert made.terms_GN.keys() == {"task"}
    assert not made.penalty_GN.any()


def test_a_thinking_part_that_the_prompt_opens_belongs_to_the_response_that_the_task_reads() -> None:
    rollouts = [Rollout([1], [2], torch.zeros(1), "length", text=text) for text in ("a", "b</think>a")]
    read: list[str] = []

    class Reads(Right):
        def verdicts(self, prompts: Any, responses: Any) -> list[Verdict]:
            read.extend(responses)
            return super().verdicts(prompts, [after_thinking(response) for response in responses])

    made = Rewards(RewardSection(), 2, 10)(Reads(), PROMPTS[:1], rollouts, lambda ids: "Say: <think>\n")  # type: ignore[arg-type]
    assert read == ["<think>a", "<think>b</think>a"] and made.reward_GN.tolist() == [[0, 1]]


def test_terms_are_weighted_and_added_and_one_without_a_verdict_leaves_none() -> None:
    terms = [{"use": "task", "weight": 2.0}, {"use": "unit.train.test_rewards:short", "weight": -0.5, "name": "brief"}]
    made = graded("aaa b ?? !", terms=terms)
    assert made.reward_GN[0].tolist() == [2 - 1.5, -0.5]
    assert made.reward_GN[1].isnan().all()
    assert made.terms_GN["brief"].nan_to_num(9).tolist() == [[3, 1], [2, 9]]
    assert made.terms_GN["task"].nan_to_num(9).tolist() == [[1, 0], [9, 0]]


def test_a_term_without_weight_takes_no_response_from_training() -> None:
    brief = {"use": "unit.train.test_rewards:short", "weight": 0, "name": "brief"}
    made = graded("a ! b b", terms=[{"use": "task"}, brief])
    assert made.reward_GN.tolist() == [[1, 0], [0, 0]]
    assert made.terms_GN["brief"].nan_to_num(9).tolist() == [[1, 9], [1, 1]]


@pytest.mark.parametrize("weight", [1e7, -1e300])
def test_a_sum_too_large_for_fp32_to_tell_apart_is_refused(weight: float) -> None:
    with pytest.raises(UserError, match=r"(?s)reward\.terms add up to -?1e\+(07|300) .*hint: .*reward\.terms\.weight"):
        graded("a b", terms=[{"use": "task", "weight": weight}])


def test_settings_reach_the_function_and_the_task_need_not_be_a_term() -> None:
    made = graded("aa bbb", terms=[{"use": "unit.train.test_rewards:short", "settings": {"worth": -2}}])
    assert made.reward_GN.tolist() == [[-4, -6]]
    assert made.terms_GN.keys() == {"short"}


@pytest.mark.parametrize(
    ("tokens", "lost"), [(1, 0), (16_384, 0), (16_385, 1 / 4096), (18_432, 0.5), (20_479, 4095 / 4096), (20_480, 1)]
)
def test_the_overlong_penalty_rises_linearly_over_the_buffer(tokens: int, lost: float) -> None:
    """DAPO's setting: 16,384 tokens expected, a cache of 4,096, so 20,480 at most."""
    assert overlong_penalty(tokens, 20_480, 4096, 1.0) == pytest.approx(lost)
    assert overlong_penalty(tokens, 20_480, 4096, 0.25) == pytest.approx(lost / 4)


def test_the_penalty_is_taken_from_right_and_wrong_responses_alike() -> None:
    made = graded("a aaaaaaaaaa bbbbbbbb b", overlong_buffer_tokens=4, overlong_penalty=0.5)
    assert made.reward_GN.tolist() == [[1, 0.5], [-0.25, 0]]
    assert made.total_GN.tolist() == [[1, 1], [0, 0]]


def test_the_report_says_more_than_the_sum_only_where_there_is_more() -> None:
    plain = reward_report([graded("a b ? a")], RewardSection(), Ranks("cpu"))
    assert plain == pytest.approx(
        {
            "reward/mean": 2 / 3,
            "reward/std": math.sqrt(2) / 3,
            "reward/groups_all_equal_share": 0.5,
            "reward/rewarded_share": 2 / 3,
            "reward/ungraded_share": 0.25,
        }
    )
    terms = [{"use": "task"}, {"use": "unit.train.test_rewards:short", "weight": 0}]
    settings = {"terms": terms, "overlong_buffer_tokens": 4}
    # Two parts are two rounds.
    parts = [graded("aa bbbbbbbb", **settings), graded("a !", **settings)]
    report = reward_report(parts, RewardSection(**settings), Ranks("cpu"))  # type: ignore[arg-type]
    assert report["reward/term/task"] == pytest.approx(0.5)
    assert report["reward/term/short"] == pytest.approx((2 + 8 + 1) / 3)
    assert report["reward/overlong_share"] == 0.25
    assert report["reward/overlong_penalty_mean"] == pytest.approx(0.5 / 4)
    # "!" has no `short`, which has no weight: the task's 0 counts.
    assert report["reward/mean"] == pytest.approx((1 - 0.5 + 1 + 0) / 4)


def test_rewarded_means_above_zero_and_above_the_lowest_negative_reward() -> None:
    def share(*totals: float) -> float:
        total_GN = torch.tensor([totals])
        return reward_report([Graded({}, total_GN, torch.zeros_like(total_GN))], RewardSection(), Ranks("cpu"))[
            "reward/rewarded_share"
        ]

    assert share(0.0, 0.0, 0.0) == share(-1.0, -1.0) == 0.0
    assert share(1.0, 0.0, math.nan, 0.5) == pytest.approx(2 / 3)
    assert share(-1.0, -0.5, -0.2, -1.0) == 0.5
    assert share(1.0, 1.0) == 1.0


def test_the_penalty_for_length_is_no_reward() -> None:
    made = graded("bb bbbbbbbbbb", overlong_buffer_tokens=4)
    report = reward_report([made], RewardSection(overlong_buffer_tokens=4), Ranks("cpu"))
    assert report["reward/std"] > 0 and report["reward/rewarded_share"] == 0


def test_responses_without_an_answer_are_counted_where_the_task_has_answers() -> None:
    total_GN, none_GN = torch.zeros(1, 2), torch.tensor([[True, False]])
    parts = [Graded({}, total_GN, total_GN, none_GN), Graded({}, total_GN, total_GN, torch.tensor([[True, True]]))]
    assert reward_report(parts, RewardSection(), Ranks("cpu"))["reward/no_answer_share"] == 0.75
    assert "reward/no_answer_share" not in reward_report([graded("a b")], RewardSection(), Ranks("cpu"))


def test_a_step_that_nobody_can_grade_is_an_error() -> None:
    with pytest.raises(UserError, match="no response of this step could be graded"):
        reward_report([graded("? ?")], RewardSection(), Ranks("cpu"))


def test_a_term_that_never_says_anything_is_named() -> None:
    section = RewardSection(terms=(RewardTerm(), RewardTerm(use="unit.train.test_rewards:short")))
    made = graded("! !", terms=[{"use": "task"}, {"use": "unit.train.test_rewards:short"}])
    with pytest.raises(UserError, match=r"(?s)no response of this step.*hint: the reward term short gave none of them"):
        reward_report([made], section, Ranks("cpu"))


def test_an_error_of_one_process_is_raised_on_all() -> None:
    class Two(Ranks):
        def __init__(self) -> None:
            self.count = 2

        def gather(self, items: list[Any]) -> list[Any]:
            return [*items, ("the other's function broke", "mend it")]

    with pytest.raises(UserError, match="(?s)the other's function broke.*hint: mend it"):
        agreed(lambda: graded("a b"), Two())

    def broken() -> Graded:
        raise UserError("ours broke")

    with pytest.raises(UserError, match="ours broke"):
        agreed(broken, Two())


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"terms": []}, r"reward\.terms"),
        ({"terms": ["task"]}, r"reward\.terms\.0: input should be a valid dictionary .*got 'task'"),
        ({"async_seconds": math.inf}, r"reward\.async_seconds: input should be a finite number"),
        ({"terms": [{"use": "my_rewards"}]}, r"reward\.terms\.0\.use: .*got 'my_rewards'"),
        ({"terms": [{"use": "a:b", "wieght": 1}]}, r"unknown key 'wieght' of reward\.terms: did you mean 'weight'"),
        ({"terms": [{"use": "task"}, {"use": "my.task:task"}]}, r"two reward terms are named 'task'"),
        ({"terms": [{"use": "a:b", "weight": 0}]}, r"every weight of reward\.terms is 0"),
        ({"terms": [{"use": "task", "settings": {"a": 1}}]}, r"'task' takes no settings"),
        ({"overlong_penalty": 0.5}, r"does nothing without reward\.overlong_buffer_tokens"),
        ({"overlong_buffer_tokens": 2000}, r"= 2000 must not be more than rollout\.max_new_tokens = 1024"),
    ],
)
def test_every_mistake_in_the_section_is_one_line(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        config_from({"reward": reward})
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.dynamic_sampling_rounds=3"], "dynamic_sampling_rounds does nothing without"),
        (["rollout.dynamic_sampling_by=task"], "dynamic_sampling_by does nothing without"),
        (
            ["rollout.dynamic_sampling=true", "rollout.dynamic_sampling_by=tsk"],
            "'tsk' is no reward term; there are task",
        ),
    ],
)
def test_mistakes_in_dynamic_sampling_are_found_at_once(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, overrides)


def test_terms_can_be_overridden_and_names_come_from_the_path() -> None:
    config = load_config(None, ['reward.terms=[{use="task"}, {use="a.b:C.d", weight=0.5, settings={n=3}}]'])
    assert [term.name for term in config.reward.terms] == ["task", "d"]
    assert config.reward.terms[1].settings == {"n": 3}
    refuse_other_config(Path("run"), config.model_dump(mode="json"), config)
    other = load_config(None, ['reward.terms=[{use="task"}, {use="a.b:C.d", weight=0.6, settings={n=3}}]'])
    with pytest.raises(UserError, match=r"was made with reward\.terms = "):
        refuse_other_config(Path("run"), config.model_dump(mode="json"), other)


def test_the_limits_of_async_calls_may_change_on_a_resume() -> None:
    before = load_config(None, []).model_dump(mode="json")
    refuse_other_config(Path("run"), before, load_config(None, ["reward.async_seconds=600", "reward.async_at_once=2"]))
    with pytest.raises(UserError, match=r"reward\.leave_out_truncated = false"):
        refuse_other_config(Path("run"), before, load_config(None, ["reward.leave_out_truncated=true"]))


def test_the_record_of_a_function_is_json_whatever_its_settings() -> None:
    term = {"use": "unit.train.test_rewards:short", "settings": {"worth": date(2026, 1, 31)}}
    (table,) = Rewards(RewardSection(terms=(RewardTerm(**term),)), 2, 10).record()  # type: ignore[arg-type]
    assert table["settings"] == {"worth": "2026-01-31"}
    with pytest.raises(UserError, match=r"short has the settings \{'worth': \[inf\]\}, but a record cannot hold"):
        Rewards(RewardSection(terms=(RewardTerm(**term | {"settings": {"worth": [math.inf]}}),)), 2, 10)  # type: ignore[arg-type]


def test_names_may_be_in_any_script() -> None:
    config = load_config(None, ['reward.terms=[{use="größen.maße:übung"}]'])
    assert config.reward.terms[0].name == "übung"


def test_the_default_terms_written_out_are_the_default() -> None:
    assert config_from({"reward": {"terms": [{"use": "task", "weight": 1, "name": "task"}]}}) == config_from({})
