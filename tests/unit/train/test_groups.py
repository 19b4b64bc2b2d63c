"""The choice of groups, round by round: which prompts are dropped, how many more are asked for, what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparroll.train.config.file import config_from
from sparroll.train.config.run import TrainConfig
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.sampling.groups import Groups, Rounds, kind_of
from sparroll.train.sampling.rewards import Graded
from sparroll.types import Prompt, Rollout, TokenScores, TopK

NAN = float("nan")
RIGHT, WRONG, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


def config(wanted: int = 3, dynamic: bool = True, reward: dict[str, Any] | None = None, **rollout: Any) -> TrainConfig:
    table = {"dynamic_sampling": dynamic, "samples_per_prompt": 2} | rollout
    return config_from({"train": {"prompts_per_step": wanted}, "rollout": table, "reward": reward or {}})


def rollout(number: int, sample: int, finish: Any = "stop") -> Rollout:
    lists = TopK(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    return Rollout([1], [2], torch.zeros(1), finish, number, sample, top_k=lists)


class Share(Ranks):
    """One of several processes that really take turns: what each gathers is put together by `together`."""

    def __init__(self, rank: int, count: int, others: list[Any]):
        self.rank, self.count, self.others = rank, count, others

    def gather(self, items: list[Any]) -> list[Any]:
        return [*items, *self.others]


def add(rounds: Rounds, rewards: list[list[float]], penalties: list[list[float]] | None = None) -> list[Rollout]:
    numbers = range(rounds.drawn, rounds.drawn + len(rewards))
    rollouts = [rollout(number, sample) for number in numbers for sample in (0, 1)]
    total_GN = torch.tensor(rewards)
    graded = Graded({"task": total_GN}, total_GN, torch.tensor(penalties or torch.zeros(len(rewards), 2).tolist()))
    rounds.add({number: Prompt(f"p/{number}", "?", "") for number in numbers}, rollouts, graded)
    return rollouts


def chosen(groups: Groups) -> list[list[float]]:
    return groups.reward_GN.tolist()


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([1.0, 1.0, 1.0], "all_right"),
        ([0.0, 0.0], "all_wrong"),
        ([-0.5, -0.5], "all_wrong"),
        ([0.5, 0.5], "all_right"),
        ([0.0, 1.0, 1.0], "spread"),
        ([3.0, 3.0001], "spread"),
        ([NAN, 1.0, 1.0], "all_right"),
        ([NAN, 0.0, 1.0], "spread"),
        ([NAN, 0.0], "all_wrong"),
        ([NAN, NAN], "ungraded"),
    ],
)
def test_kinds_of_groups(rewards: list[float], kind: str) -> None:
    assert kind_of(torch.tensor(rewards)) == kind


def test_without_dynamic_sampling_one_round_keeps_every_prompt() -> None:
    rounds = Rounds(config(dynamic=False), Ranks("cpu"))
    assert rounds.asks_for == 3
    rollouts = add(rounds, [RIGHT, MIXED, WRONG])
    assert rounds.asks_for == 0
    groups = rounds.groups()
    assert groups.rollouts == groups.sampled == rollouts
    assert chosen(groups) == [RIGHT, MIXED, WRONG]
    assert not any(name.startswith("groups/") for name in groups.report)
    assert "reward/kept_mean" not in groups.report
    assert (groups.events, groups.left_out_B) == ([], None)


def test_prompts_are_sampled_until_enough_groups_differ() -> None:
    rounds = Rounds(config(), Ranks("cpu"))
    add(rounds, [RIGHT, MIXED, WRONG])
    # One of three was kept, so two more should come from six; never more than a step's prompts at once.
    assert rounds.asks_for == 3
    add(rounds, [MIXED, [1.0, 0.0], MIXED])
    assert rounds.asks_for == 0
    groups = rounds.groups()
    assert chosen(groups) == [MIXED, MIXED, [1.0, 0.0]]
    assert [one.prompt_index for one in groups.rollouts] == [0, 0, 1, 1, 2, 2]
    assert len(groups.sampled) == 12
    expected = {"rounds": 2, "sampled": 6, "kept": 3, "all_right": 1, "all_wrong": 1, "ungraded": 0, "spare": 1}
    assert {name: groups.report[f"groups/{name}"] for name in expected} == expected
    assert groups.report["reward/mean"] == 0.5
    assert groups.report["reward/kept_mean"] == 0.5
    assert groups.events == []


@pytest.mark.parametrize(
    ("wanted", "kept", "asks"), [(8, 6, 3), (8, 7, 2), (8, 2, 8), (8, 0, 8), (8, 8, 0), (10, 5, 10)]
)
def test_a_round_asks_for_what_should_fill_the_step(wanted: int, kept: int, asks: int) -> None:
    rounds = Rounds(config(wanted), Ranks("cpu"))
    add(rounds, [MIXED] * kept + [WRONG] * (wanted - kept))
    assert rounds.asks_for == asks


def test_after_the_last_round_the_step_goes_on_with_what_there_is() -> None:
    rounds = Rounds(config(dynamic_sampling_rounds=2), Ranks("cpu"))
    add(rounds, [WRONG, RIGHT, RIGHT])
    add(rounds, [WRONG, MIXED, [NAN, NAN]])
    assert rounds.asks_for == 0
    groups = rounds.groups()
    assert chosen(groups) == [MIXED]
    assert groups.events == [
        "dynamic sampling: 1 of 3 groups after 2 rounds of 6 prompts (2 all right, 2 all wrong): the step goes on with those"
    ]
    assert groups.report["groups/ungraded"] == 1


def test_without_any_group_the_last_round_is_measured_and_teaches_nothing() -> None:
    rounds = Rounds(config(dynamic_sampling_rounds=2, reward={"overlong_buffer_tokens": 5}), Ranks("cpu"))
    add(rounds, [WRONG, WRONG, RIGHT])
    late = add(rounds, [WRONG, WRONG, RIGHT], penalties=[[0.0, 0.5]] * 3)
    groups = rounds.groups()
    assert groups.rollouts == late
    assert [one.prompt_index for one in late] == [0, 0, 1, 1, 2, 2]
    assert not groups.advantages(True).any()
    assert groups.report["groups/kept"] == 0
    assert "reward/kept_mean" not in groups.report
    assert groups.events == []
    assert all(one.top_k is not None for one in late)


def test_what_is_dropped_lets_go_of_its_lists() -> None:
    rounds = Rounds(config(2), Ranks("cpu"))
    first = add(rounds, [WRONG, MIXED])
    add(rounds, [MIXED, MIXED])
    groups = rounds.groups()
    assert [one.top_k is None for one in first] == [True, True, False, False]
    assert [one.top_k is None for one in groups.sampled] == [True, True, False, False, False, False, True, True]


def test_what_checks_said_of_dropped_tokens_still_counts_in_the_metrics() -> None:
    rounds = Rounds(config(2), Ranks("cpu"))
    lists = TopK(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    for one in add(rounds, [WRONG, MIXED]):
        one.dense = TokenScores(torch.tensor([-0.5]), lists, torch.zeros(1, 2))
    add(rounds, [MIXED, MIXED])
    dropped = rounds.groups().sampled[0]
    # The lists are large; a number for each token is not.
    assert dropped.dense_logp is not None and dropped.dense_logp.tolist() == [-0.5]
    assert dropped.dense is not None and dropped.dense.top_k is None and dropped.dense.logp_at_ids is None


def test_the_penalty_makes_no_spread_and_one_term_may_decide() -> None:
    rounds = Rounds(config(1, dynamic_sampling_rounds=1), Ranks("cpu"))
    add(rounds, [WRONG], penalties=[[0.0, 0.5]])
    assert rounds.groups().report["groups/all_wrong"] == 1
    terms = [{"use": "task"}, {"use": "a:style"}]
    one = config(2, dynamic_sampling_by="task", dynamic_sampling_rounds=1, reward={"terms": terms})
    rounds = Rounds(one, Ranks("cpu"))
    task_GN, style_GN = torch.tensor([RIGHT, MIXED]), torch.tensor([[0.1, 0.7], [0.5, 0.5]])
    graded = Graded({"task": task_GN, "style": style_GN}, task_GN + style_GN, torch.zeros(2, 2))
    rollouts = [rollout(number, sample) for number in (0, 1) for sample in (0, 1)]
    rounds.add({0: Prompt("0", "", ""), 1: Prompt("1", "", "")}, rollouts, graded)
    assert torch.equal(rounds.groups().reward_GN, (task_GN + style_GN)[1:])


def test_a_group_that_differs_in_one_term_and_is_ungraded_by_another_has_no_mean() -> None:
    one = config(1, dynamic_sampling_by="task", reward={"terms": [{"use": "task"}, {"use": "a:style"}]})
    rounds = Rounds(one, Ranks("cpu"))
    right_GN, task_GN, nothing_GN = torch.tensor([RIGHT]), torch.tensor([MIXED]), torch.tensor([[NAN, NAN]])
    spare = Graded({"task": right_GN, "style": right_GN}, 2 * right_GN, torch.zeros(1, 2))
    rounds.add({0: Prompt("0", "", "")}, [rollout(0, 0), rollout(0, 1)], spare)
    graded = Graded({"task": task_GN, "style": nothing_GN}, nothing_GN, torch.zeros(1, 2))
    rounds.add({1: Prompt("1", "", "")}, [rollout(1, 0), rollout(1, 1)], graded)
    groups = rounds.groups()
    assert groups.report["groups/kept"] == 1
    assert "reward/kept_mean" not in groups.report
    assert not groups.advantages(True).any()


def test_truncated_responses_count_for_the_mean_and_have_no_advantage() -> None:
    rounds = Rounds(config(1, dynamic=False, reward={"leave_out_truncated": True}), Ranks("cpu"))
    rollouts = [rollout(0, 0), rollout(0, 1, "length")]
    total_GN = torch.tensor([[1.0, 0.0]])
    rounds.add({0: Prompt("0", "", "")}, rollouts, Graded({"task": total_GN}, total_GN, torch.zeros(1, 2)))
    groups = rounds.groups()
    assert groups.left_out_B.tolist() == [False, True]
    assert groups.advantages(False).tolist() == [[0.5, 0.0]]


def test_a_process_without_a_prompt_chooses_like_the_others() -> None:
    """Two processes of three prompts: ours has number 1, the other 0 and 2."""
    ranks = Share(1, 2, [(0, "spread"), (2, "all_wrong")])
    rounds = Rounds(config(3, dynamic_sampling_rounds=2), ranks)
    total_GN = torch.tensor([MIXED])
    rounds.add({1: Prompt("1", "", "")}, [rollout(1, 0), rollout(1, 1)], Graded({}, total_GN, torch.zeros(1, 2)))
    assert rounds.asks_for == 2
    ranks.others = [(3, "all_right"), (4, "spread")]
    nothing = torch.zeros(0, 2)
    rounds.add({}, [], Graded({}, nothing, nothing))
    assert (rounds.drawn, rounds.asks_for) == (5, 0)
    ranks.others = []
    groups = rounds.groups()
    assert [one.prompt_index for one in groups.rollouts] == [1, 1]
    assert chosen(groups) == [MIXED]
    assert groups.advantages(True).shape == (1, 2)
