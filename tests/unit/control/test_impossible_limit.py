"""Guard and controller on shares of impossible tokens that are known exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparroll.attention.selectors import PageMean
from sparroll.control.control_group import ControlGroupSettings
from sparroll.control.controller import Controller, Rules
from sparroll.control.guard import Guard, is_alarm
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.control.length_bins import LengthBins
from sparroll.control.paired_prompts import paired_prompts
from sparroll.control.reward_gap import RewardGap
from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import Decision, StepEvidence, Watcher
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics
from sparroll.schedule import Schedule, Step
from sparroll.train import load_config
from sparroll.train.schedules import make_cheaper_schedules, make_controller, make_guard
from tail_worlds import BIN, evidence

LOOSE, TIGHT = Schedule.fixed(64), Schedule.fixed(512)
LIMIT = ImpossibleLimit(nats=10, at_most=1e-2)
TOKENS = 100


def impossible(
    step: int, events: dict[int, int], rollouts: int = 20, acceptance: float = 0.99, nats: float = 12.0
) -> TailStatistics:
    """In bin number k, so many impossible tokens, each in a rollout of its own as far as there are enough. A rollout has
    TOKENS tokens in each bin, all with one acceptance."""
    statistics = TailStatistics(bin_tokens=BIN, replicates=20)
    context_T = torch.arange(len(events)).repeat_interleave(TOKENS) * BIN
    for rollout in range(rollouts):
        off_T = torch.zeros(len(context_T))
        for place, count in enumerate(events.values()):
            here = count // rollouts + (rollout < count % rollouts)
            off_T[place * TOKENS : place * TOKENS + here] = nats
        statistics.add(torch.full((len(context_T),), acceptance), context_T, f"{step}/{rollout}", off_T)
    return statistics


def shown(
    step: int, count: int, schedule: Schedule | None = LOOSE, *, dense: bool = False, **more: Any
) -> StepEvidence:
    return evidence(step, impossible(step, {0: count}, **more), schedule, dense=dense)


def guard(action: Any = "stop", limit: ImpossibleLimit = LIMIT, **more: Any) -> Guard:
    return Guard(action, None, impossible=limit, **more)


# -- the guard -------------------------------------------------------------------------------------------------------------


def test_a_share_that_is_surely_over_the_limit_is_an_alarm_although_every_percentile_is_fine() -> None:
    decision = guard().watch(shown(1, 80))
    assert decision.action == "stop"
    (event,) = decision.events
    assert event.startswith(
        "the share of sampled tokens more than 10 nats off at 0-2k is 0.04, surely over 0.01: lower bound 0.0"
    )
    assert event.endswith("by 80 of 2000 tokens of 20 rollouts (steps 1 to 1): stopped")


def test_every_alarm_is_known_by_its_words_and_other_events_are_none() -> None:
    dense = [number % 4 == 0 for number in range(64)]
    pairs = paired_prompts(1, dict(enumerate(map(str, range(16)))), dense, {"reward": [float(each) for each in dense]})
    gap = replace(shown(1, 0), pairs=tuple(pairs))
    for watch, step in (
        (guard(), shown(1, 80)),
        (Guard("warn", 0.86), shown(1, 0, acceptance=0.5)),
        (Guard("stop", None, reward_gap=RewardGap(ControlGroupSettings())), gap),
    ):
        (event,) = watch.watch(step).events
        assert is_alarm(event)
    (blind,) = Guard("warn", 0.86).watch(shown(1, 0, rollouts=2)).events
    assert not is_alarm(blind) and not is_alarm(Guard("warn", None).notice(False)[0])


def test_a_share_that_may_be_chance_waits_and_one_at_half_of_the_limit_never_alarms() -> None:
    watch = guard()
    found = [watch.watch(shown(step, 29)).action for step in range(1, 11)]
    assert found[0] == "none" and "stop" in found
    quiet = guard()
    assert [quiet.watch(shown(step, 10)).action for step in range(1, 31)] == ["none"] * 30


def test_events_of_one_rollout_are_not_taken_for_many() -> None:
    """Eighty in one rollout are one piece of evidence."""
    statistics = TailStatistics(bin_tokens=BIN, replicates=20)
    for rollout in range(20):
        off_T = torch.full((TOKENS,), 12.0 if rollout == 0 else 0.0)
        off_T[80:] = 0
        statistics.add(torch.ones(TOKENS), torch.zeros(TOKENS, dtype=torch.int64), rollout, off_T)
    assert guard().watch(evidence(1, statistics, LOOSE)) == Decision()


def test_only_tokens_beyond_the_distance_of_the_limit_count() -> None:
    assert guard(limit=ImpossibleLimit(20, 1e-2)).watch(shown(1, 80)) == Decision()
    assert guard(limit=ImpossibleLimit(5, 1e-2)).watch(shown(1, 80)).action == "stop"
    assert guard(limit=ImpossibleLimit(5, 1e-2)).watch(shown(1, 80, nats=4.0)) == Decision()


def test_the_worst_bin_is_named() -> None:
    decision = guard("warn").watch(evidence(1, impossible(1, {0: 70, 1: 200, 2: 0}), LOOSE))
    assert "at 2k-4k is 0.1," in decision.events[0]


def test_bins_are_tested_together_until_three_events_are_expected_at_the_limit() -> None:
    window = TailWindow(10)
    window.add(1, impossible(1, dict.fromkeys(range(6), 0)))
    assert ImpossibleLimit(10, 1e-2).groups(window, 200) == [[place * BIN] for place in range(6)]
    assert ImpossibleLimit(10, 1e-3).groups(window, 200) == [[0, BIN], [2 * BIN, 3 * BIN], [4 * BIN, 5 * BIN]]
    whole = [place * BIN for place in range(6)]
    assert ImpossibleLimit(10, 1e-5).groups(window, 200) == [whole], "too few: all together"
    assert ImpossibleLimit(10, 1e-5).groups(window, 20_000) == []


def test_a_share_far_over_a_small_limit_shows_in_few_tokens() -> None:
    decision = guard(limit=ImpossibleLimit(10, 1e-5)).watch(evidence(1, impossible(1, {0: 20, 1: 20}), LOOSE))
    assert "at 0-4k (2 bins together, which alone have too few tokens) is 0.01, surely over 1e-05" in decision.events[0]


def test_a_guard_of_both_statistics_watches_both_and_names_what_it_found() -> None:
    def both() -> Guard:
        return Guard("warn", 0.86, impossible=LIMIT)

    assert both().watch(shown(1, 0)) == Decision()
    assert both().watch(shown(1, 0, acceptance=0.5)).events[0].startswith("the tail")
    assert both().watch(shown(1, 80)).events[0].startswith("the share")
    (event,) = both().watch(shown(1, 80, acceptance=0.5)).events
    assert event.startswith("the tail") and "; the share of sampled tokens more than 10 nats off" in event


def test_an_alarm_that_no_schedule_could_avoid_says_so() -> None:
    step = replace(shown(1, 80), report={"mismatch/dense_ceiling_impossible_share_10": 0.02})
    assert guard("warn").watch(step).events[0].endswith("dense rollouts have 0.02 and miss it, too: no schedule can hold "
                                                         "this target")  # fmt: skip


def test_statistics_that_counted_none_are_refused_and_not_taken_for_zero() -> None:
    bare = TailStatistics(bin_tokens=BIN, replicates=20)
    bare.add(torch.ones(5), torch.arange(5), 0)
    with pytest.raises(UserError, match=r"(?s)the guard is to hold a share .* among 0 of .*off_nats_of"):
        guard().watch(evidence(1, bare, LOOSE))
    with pytest.raises(UserError, match="the controller is to hold a share"):
        controller().watch(evidence(1, bare, LOOSE))
    assert guard("off").watch(evidence(1, bare, LOOSE)) == guard().watch(evidence(1, bare, LOOSE, dense=True))


def test_a_switch_starts_anew_and_dense_ends_the_watch() -> None:
    watch = guard("warn", stricter=(TIGHT, None))
    first = watch.watch(shown(1, 80))
    assert (first.action, first.schedule) == ("switch", TIGHT) and not watch.window.evidence
    second = watch.watch(shown(2, 80, TIGHT))
    assert (second.action, second.schedule) == ("switch", None)
    assert watch.watch(shown(3, 80, None, dense=True)) == Decision()


def test_a_warning_comes_again_only_after_a_whole_window() -> None:
    watch = guard("warn", window_steps=3)
    assert [watch.watch(shown(step, 80)).action for step in range(1, 8)] == ["warn", "none", "none"] * 2 + ["warn"]


@pytest.mark.parametrize("kind", ["guard", "controller"])
def test_a_restored_watcher_goes_on_where_the_other_stood(kind: str) -> None:
    def made() -> Watcher:
        return guard("warn", stricter=(TIGHT, None)) if kind == "guard" else controller(patience=2)

    one, other = made(), made()
    for step in range(1, 4):
        one.watch(shown(step, 23, TIGHT))
    state = one.state()
    plain = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    other.restore(state | json.loads(json.dumps(plain)))
    counts = [23] * 6 + [0] * 6 + [300] * 3
    decisions = [(one.watch(each), other.watch(each)) for step, count in enumerate(counts, 4)
                 if (each := shown(step, count, TIGHT))]  # fmt: skip
    assert all(mine == theirs for mine, theirs in decisions)
    assert any(mine.action == "switch" for mine, _ in decisions)


# -- the controller --------------------------------------------------------------------------------------------------------


def controller(budget: int = 512, bins: int = 1, limit: ImpossibleLimit = LIMIT, **rules: Any) -> Controller:
    lengths = LengthBins(BIN, bins * BIN, PageMean())
    return Controller(Rules(impossible=limit, **rules), lengths, [budget] * bins, target=limit.table())


def budgets(made: Controller, counts: list[int], first: int = 1) -> list[int]:
    found = []
    for step, count in enumerate(counts, first):
        made.watch(evidence(step, impossible(step, {0: count}), made.schedule()))
        found.append(made.budgets[0])
    return found


def test_a_share_over_the_limit_raises_the_budget_by_as_much_and_twofold_at_most() -> None:
    (moved,) = budgets(controller(), [30])
    assert moved == 768, "1.5 times the limit"
    assert budgets(controller(), [500]) == [1024]
    made = controller()
    decision = made.watch(evidence(1, impossible(1, {0: 30}), made.schedule()))
    assert decision.action == "switch"
    assert decision.events[0].startswith(
        "controller: 0-2k: 512 -> 768 tokens: share of tokens more than 10 nats off 0.015 (0.00"
    )
    assert decision.report["controller/impossible_share_10_high/0-2k"] > 0.015
    assert "controller/tail_low/0-2k" not in decision.report


def test_an_upper_bound_over_the_limit_raises_by_a_small_step_once_no_more_evidence_comes() -> None:
    assert budgets(controller(window_steps=2), [18, 18]) == [512, 544]


def test_a_budget_is_lowered_slowly_and_only_while_the_upper_bound_is_under_half_of_the_limit() -> None:
    assert budgets(controller(patience=3), [0, 0, 0, 0]) == [512, 512, 496, 496]
    assert budgets(controller(patience=3), [8] * 8) == [512] * 8


def test_a_lowering_that_fails_goes_back_and_waits_twice_as_long() -> None:
    made = controller(patience=2)
    assert budgets(made, [0, 0])[-1] == 496
    assert budgets(made, [30], first=3)[-1] >= 512
    assert (made.states[0].failed, made.states[0].wait) == (496, 2)


def test_a_bin_with_few_tokens_moves_only_where_the_limit_is_surely_exceeded() -> None:
    """At 1e-3 a bin is judged by 10,000 tokens, and a step has 2,000."""
    few = ImpossibleLimit(10, 1e-3)
    assert budgets(controller(limit=few), [3]) == [512], "1.5e-3, and perhaps chance"
    assert budgets(controller(limit=few), [40]) == [1024]


def test_where_no_bin_can_be_judged_the_controller_says_so_and_what_to_do() -> None:
    made = controller(limit=ImpossibleLimit(10, 1e-4), window_steps=2)
    said = [made.watch(evidence(step, impossible(step, {0: 0}), made.schedule())) for step in range(1, 23)]
    assert [step for step, decision in enumerate(said, 1) if decision.events] == [2, 22]
    assert said[1].events[0] == (
        "controller: no length can be judged: the fullest one has 4000 tokens of 40 sparse rollouts in 2 steps, and a "
        "limit of 0.0001 needs 110000 tokens of 8 rollouts; --set control.window_steps=55, sample more rollouts a step, or "
        "use wider bins (mismatch.bin_tokens)"
    )
    few = controller(limit=ImpossibleLimit(10, 0.2), window_steps=2)
    said = [few.watch(evidence(step, impossible(step, {0: 0}, rollouts=1), few.schedule())) for step in (1, 2)]
    assert "200 tokens of 2 sparse rollouts" in said[1].events[0] and "window_steps=8," in said[1].events[0]


def test_the_schedule_that_it_writes_names_the_share_and_what_was_measured() -> None:
    made = controller()
    budgets(made, [4])
    table = made.measured_schedule({"command": "test"}).table()
    assert table["target"] == {"statistic": "impossible_share", "nats": 10, "at_most": 1e-2}
    measured = table["steps"][0]["measured"]
    assert measured["value"] == 0.002 and measured["low"] < 0.002 < measured["high"] and measured["rollouts"] == 20
    assert Schedule.from_table(table).table() == table


# -- where the limit comes from --------------------------------------------------------------------------------------------


def schedule_with(target: dict[str, Any] | None) -> Schedule:
    return Schedule.from_table(Schedule((Step(0, 64),), target=target, name="own").table(), "own")


def test_the_guard_takes_the_limit_of_the_section_the_controller_or_the_schedule() -> None:
    own = schedule_with(LIMIT.table())
    assert make_guard(load_config(), own).impossible == LIMIT and make_guard(load_config(), own).at_least is None
    asked = make_guard(load_config(None, ["guard.impossible_at_most=1e-3", "guard.impossible_nats=20"]), own)
    assert asked.impossible == ImpossibleLimit(20, 1e-3)
    other = make_guard(load_config(None, ["guard.at_least=0.8"]), own)
    assert (other.at_least, other.impossible) == (0.8, None)
    both = make_guard(load_config(None, ["guard.at_least=0.8", "guard.impossible_at_most=1e-3"]), own)
    assert (both.at_least, both.impossible) == (0.8, ImpossibleLimit(10, 1e-3))
    led = load_config(None, ["control.by=controller", "control.impossible_at_most=1e-3"])
    assert make_guard(led, None).impossible == ImpossibleLimit(10, 1e-3) and make_guard(led, None).at_least is None


def test_the_controller_holds_what_its_section_says() -> None:
    led = load_config(None, ["control.by=controller", "control.impossible_at_most=1e-3", "control.impossible_nats=5"])
    made = make_controller(led, None, 4000)
    assert made is not None and made.rules.impossible == ImpossibleLimit(5, 1e-3) and made.rules.target is None
    assert made.schedule().target == {"statistic": "impossible_share", "nats": 5, "at_most": 1e-3}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["guard.impossible_nats=20"], "guard.impossible_nats = 20 does nothing without guard.impossible_at_most"),
        (["guard.impossible_at_most=2"], r"guard\.impossible_at_most"),
        (["guard.impossible_at_most=1e-4", "guard.impossible_nats=7"], r"guard\.impossible_nats"),
        (["control.by=controller"], r"(?s)control\.target is missing.*control\.impossible_at_most = 1e-4"),
        (["control.by=controller", "control.target=0.9", "control.impossible_at_most=1e-4"], "exclude each other"),
        (
            ["control.by=controller", "control.target=0.9", "control.impossible_nats=5"],
            "control.impossible_nats = 5 does nothing",
        ),
        (
            ["control.by=controller", "control.impossible_at_most=1e-3", "guard.impossible_at_most=1e-4"],
            "asks for more than the controller holds",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, overrides)


def test_cheaper_schedules_refuse_a_target_that_a_replay_cannot_measure(tmp_path: Any) -> None:
    own = schedule_with(LIMIT.table())
    path = own.save(tmp_path / "own.toml")
    about = [f"attention.name={json.dumps(str(path))}", "attention.kind=schedule", "distill.objective=kl"]
    control = ["control.by=cheaper", f"control.schedules=[{json.dumps(str(path))}]"]
    with pytest.raises(UserError, match=r"(?s)measures replays, in which nothing is sampled.*control\.at_least=0\.86"):
        make_cheaper_schedules(load_config(None, [*about, *control]), own)


def test_few_rollouts_must_be_too_many_at_the_stricter_confidence() -> None:
    """28 of 800 tokens in all of 8 rollouts: the 95 % interval begins at .0163, above .01, and the stricter one does not."""
    statistics = TailStatistics(bin_tokens=BIN, replicates=20)
    for rollout in range(8):
        off = torch.zeros(TOKENS)
        off[: 28 // 8 + (rollout < 28 % 8)] = 12.0
        statistics.add(torch.full((TOKENS,), 0.99), torch.zeros(TOKENS, dtype=torch.int64), f"1/{rollout}", off)
    assert guard().watch(evidence(1, statistics, LOOSE)).action == "none"
