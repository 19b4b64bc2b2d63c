"""The controller's decisions, one by one, on tails whose 5th percentile is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sparroll.attention.selectors import PageMean
from sparroll.control.controller import Controller, Rules
from sparroll.control.length_bins import LengthBins
from sparroll.control.tail_window import TailWindow
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.train import load_config
from sparroll.train.schedules import make_controller
from tail_worlds import BIN, evidence, measured

RULES = Rules(target=0.86)
BINS = LengthBins(BIN, 8000, PageMean())


def controller(budgets: list[int] | None = None, rules: Rules = RULES, bins: LengthBins = BINS) -> Controller:
    return Controller(rules, bins, budgets or [512] * 4)


def shown(one: Controller, tails: list[dict[int, float]], first: int = 1) -> list[list[int]]:
    """Budgets after each step."""
    budgets = []
    for step, each in enumerate(tails, start=first):
        one.watch(evidence(step, measured(step, each)))
        budgets.append(one.budgets)
    return budgets


def test_a_longer_context_than_the_longest_is_reported_in_the_last_bin() -> None:
    report = controller().watch(evidence(1, measured(1, {3: 0.9, 5: 0.9}))).report
    budgets = {name: value for name, value in report.items() if "budget_tokens" in name}
    assert budgets == {"controller/budget_tokens/6k-8k": 512}


@pytest.mark.parametrize("longest", [6000, 16_000])
def test_a_state_of_another_longest_context_is_refused(longest: int) -> None:
    wrote = controller()
    with pytest.raises(UserError, match=f"budgets for 4 length bins .* up to {longest} tokens have {longest // 2000}"):
        controller([512] * (longest // 2000), bins=LengthBins(BIN, longest, PageMean())).restore(wrote.state())


# -- raising ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "budget"),
    [(0.82, 736), (0.80, 864), (0.75, 1024), (0.40, 1024), (0.859, 528)],
    ids=["(.18/.14)**(1/.7) = 1.432", "1.665", "capped at 2", "capped", "one page at least"],
)
def test_a_breach_raises_at_once_by_the_power_law_of_the_shortfall(tail: float, budget: int) -> None:
    one = controller()
    decision = one.watch(evidence(1, measured(1, {0: 0.9, 1: tail})))
    assert one.budgets[:2] == [512, budget]
    assert decision.schedule is not None
    assert decision.schedule.kv_budget_tokens(3000) == budget
    assert decision.report["controller/moves"] == 1
    assert f"controller: 2k-4k: 512 -> {budget} tokens: tail 0." in decision.events[0]
    assert "2000 tokens of 20 rollouts" in decision.events[0]


def test_a_bound_that_a_full_window_cannot_lift_raises_by_one_small_step() -> None:
    """The percentile is .8605, the lower bound of 1600 tokens .002 less."""
    one = controller(rules=Rules(0.86, window_steps=2))
    assert one.watch(evidence(1, measured(1, {1: 0.8605}, rollouts=8))).report["controller/moves"] == 0
    decision = one.watch(evidence(2, measured(2, {1: 0.8605}, rollouts=8)))
    assert one.budgets == [544, 544, 816, 1088]
    assert "lower bound of the tail 0.860 (0.858 to 0.864, 1600 tokens of 16 rollouts)" in decision.events[0]


def test_between_target_and_margin_nothing_moves() -> None:
    one = controller()
    assert shown(one, [{0: 0.867, 1: 0.867, 2: 0.867, 3: 0.867}] * 20) == [[512] * 4] * 20
    assert all(state.good_steps == 0 for state in one.states)


def test_a_new_budget_starts_a_new_window() -> None:
    """Two steps at .80 do not weigh on the budget that came after them."""
    one = controller()
    budgets = shown(one, [{0: 0.8}, {0: 0.867}, {0: 0.867}])
    assert [each[0] for each in budgets] == [864, 864, 864]
    row = one.window.row(0, one.states[0].since_step)
    assert row is not None and row.tokens == 4000


def test_a_step_that_is_surely_under_the_target_is_not_watered_down_by_older_ones() -> None:
    one = controller()
    shown(one, [{0: 0.9}] * 4)
    assert one.budgets[0] == 512
    decision = one.watch(evidence(5, measured(5, {0: 0.82})))
    # Pooled with three steps at .9 the tail would be above .82, and the raise smaller.
    assert one.budgets[0] == 736
    assert "2000 tokens of 20 rollouts" in decision.events[0]


def test_raising_a_bin_raises_the_longer_ones_that_were_below_it() -> None:
    one = controller([512, 528, 1024, 2048])
    decision = one.watch(evidence(1, measured(1, {0: 0.82, 1: 0.87, 2: 0.87, 3: 0.87})))
    assert one.budgets == [736, 736, 1024, 2048]
    assert decision.events[1] == "controller: 2k-4k: 528 -> 736 tokens: is not to read less than a shorter one"
    assert one.states[1].since_step == 1 and one.states[2].since_step == 0


def test_at_the_limit_it_says_so_once() -> None:
    one = controller([1600, 2000, 2000, 2000])
    decisions = [one.watch(evidence(step, measured(step, {0: 0.6004}))) for step in range(1, 5)]
    assert [each.report["controller/moves"] for each in decisions] == [1, 0, 0, 0]
    assert [each.action for each in decisions] == ["switch", "warn", "none", "none"]
    assert "1600 -> 2000 tokens" in decisions[0].events[0]
    assert len(decisions[1].events) == 1
    assert "0-2k: tail 0.600" in decisions[1].events[0] and "2000 tokens are its limit" in decisions[1].events[0]
    assert decisions[2].events == decisions[3].events == ()
    assert decisions[1].schedule is None


def test_a_bin_that_comes_back_to_its_limit_says_so_again() -> None:
    one, said = controller([2000, 4000, 6000, 8000]), []
    for step in range(1, 60):
        good = 5 < step < 40
        tails = dict.fromkeys(range(4), 0.97) if good else {0: 0.6004}
        events = one.watch(evidence(step, measured(step, tails))).events
        said += [step for event in events if "0-2k" in event and "2000 tokens are its limit" in event]
        if step == 39:
            assert one.budgets[0] < 2000
    assert len(said) == 2 and said[0] < 6 and said[1] >= 40


def test_groups_of_layers_move_by_a_common_factor_each_within_the_limits() -> None:
    start = Schedule((Step(0, (512, 256)), Step(4000, (768, 1024))), dense_layers=(0,), layer_groups=((1,), (2, 3)))
    budgets = BINS.of_schedule(start)
    assert budgets == [(512, 256), (512, 256), (768, 1024), (768, 1024)]
    about = {"dense_layers": start.dense_layers, "layer_groups": start.layer_groups}
    one = Controller(RULES, BINS, budgets, **about)
    assert one.schedule().plain_budgets() == start.plain_budgets()
    decision = one.watch(evidence(1, measured(1, {0: 0.867, 1: 0.80, 2: 0.867})))
    # By 1.665: 853 and 426 tokens, in whole pages.
    assert decision.schedule is not None and decision.schedule.step_at(3000).kv_budget_tokens == (864, 432)
    assert decision.events[0].startswith("controller: 2k-4k: 512 / 256 -> 864 / 432 tokens: tail 0.")
    # No group falls with length, also where the largest one of a bin is another one than before.
    assert [one.schedule().step_at(at).kv_budget_tokens for at in (0, 5000)] == [(512, 256), (864, 1024)]
    assert decision.report["controller/budget_tokens/2k-4k"] == 512
    one.schedule().check_layers(4), one.widest().check_layers(4)
    events = [one.watch(evidence(step, measured(step, {0: 0.5}))).events for step in range(2, 8)]
    # The first group has come to the whole bin, and the second one goes on until it has, too.
    assert [words[0].split(" tokens")[0].rpartition(": ")[2] for words in events[:3]] == [
        "512 / 256 -> 1024 / 512", "1024 / 512 -> 2000 / 1024", "2000 / 1024 -> 2000 / 2000"
    ]  # fmt: skip
    assert "2000 / 2000 tokens are its limit" in events[3][-1] and events[4] == events[5] == ()
    for _ in range(2):
        again = Controller(RULES, BINS, budgets, **about)
        again.restore(one.state())
        assert again.schedule() == one.schedule()
    down = Controller(RULES, BINS, [(64, 96)] * 4, **about)
    shown(down, [HIGH] * 60)
    assert down.schedule().plain_budgets() == [[0, [[[1], 64], [[2, 3], 64]]]]


def test_no_budget_exceeds_the_limit_that_was_given() -> None:
    one = controller([512] * 4, bins=LengthBins(BIN, 8000, PageMean(), most_budget_tokens=640))
    shown(one, [{2: 0.5}] * 3)
    assert one.budgets == [640] * 4


def test_no_budget_is_below_the_floor_that_was_given() -> None:
    bins = LengthBins(BIN, 8000, PageMean(), least_budget_tokens=480)
    assert bins.of_schedule(Schedule.fixed(128)) == [480] * 4 and bins.share(0.01) == [480] * 4
    one = controller([512] * 4, bins=bins)
    assert shown(one, [HIGH] * 60)[-1] == [480] * 4


def test_two_raises_in_a_row_are_no_lowering_that_failed() -> None:
    one = controller([512] * 4)
    shown(one, [{0: 0.82}] * 2)
    state = one.states[0]
    assert (state.budget, state.failed, state.wait) == (1056, 0, 1)


# -- lowering --------------------------------------------------------------------------------------------------------------

HIGH = {0: 0.95, 1: 0.95, 2: 0.95, 3: 0.95}


def test_lowering_takes_patience_and_goes_one_small_step_at_a_time() -> None:
    one = controller([512, 1024, 2048, 2048])
    budgets = shown(one, [HIGH] * 11)
    assert budgets[3] == [512, 1024, 2048, 2048]
    assert budgets[4] == [496, 976, 1952, 1952]
    assert budgets[8] == budgets[4]
    assert budgets[9] == [480, 928, 1856, 1856]


def test_one_doubtful_step_starts_the_count_again() -> None:
    # Within a window of one step, so that the dip is over when it is over.
    one = controller(rules=Rules(0.86, window_steps=1))
    budgets = shown(one, [HIGH] * 4 + [dict.fromkeys(range(4), 0.867)] + [HIGH] * 5)
    assert [each[0] for each in budgets] == [512] * 9 + [496]


def test_a_lowering_that_did_not_hold_is_taken_back_and_the_next_one_waits_twice_as_long() -> None:
    one = controller(rules=Rules(0.86, window_steps=1))
    waits, steps = [], 0
    for step in range(1, 120):
        held = one.budgets[0] >= 512
        before = one.budgets[0]
        one.watch(evidence(step, measured(step, {0: 0.95 if held else 0.858})))
        steps += 1
        if one.budgets[0] < before:
            waits.append(steps)
        if one.budgets[0] > before:
            assert one.budgets[0] == 512
            steps = 0
    assert waits == [5, 10, 20, 40]


def test_a_failed_lowering_goes_back_to_the_budget_that_held() -> None:
    one = controller([512, 1024, 2048, 2048], Rules(0.86, window_steps=1))
    shown(one, [{2: 0.95}] * 5 + [{2: 0.858}])
    assert one.budgets[2] == 2048


def test_a_lowering_that_holds_later_clears_the_wait() -> None:
    one = controller(rules=Rules(0.86, window_steps=1))
    shown(one, [{0: 0.95}] * 5 + [{0: 0.858}])
    assert (one.budgets[0], one.states[0].failed, one.states[0].wait) == (512, 496, 2)
    shown(one, [{0: 0.95}] * 10, first=7)
    assert one.budgets[0] == 496
    shown(one, [{0: 0.95}] * 5, first=17)
    assert (one.budgets[0], one.states[0].failed, one.states[0].wait) == (480, 0, 1)


def test_the_selectors_least_budget_is_the_floor_and_a_shorter_bin_too() -> None:
    one = controller([64, 512, 512, 512])
    budgets = shown(one, [{0: 0.867, 1: 0.867, 2: 0.95}] * 10)
    assert budgets[-1] == [64, 512, 512, 683 // 16 * 16 + 16]
    one = controller([64] * 4)
    assert shown(one, [HIGH] * 6)[-1] == [64] * 4


# -- evidence ----------------------------------------------------------------------------------------------------------


def test_a_bin_with_few_tokens_is_judged_on_several_steps_together() -> None:
    one = controller()
    few = [measured(step, {0: 0.7}, rollouts=6, tokens=20) for step in (1, 2)]
    assert one.watch(evidence(1, few[0])).schedule is None
    one.watch(evidence(2, few[1]))
    assert one.budgets[0] == 1024


def test_a_bin_that_waits_for_tokens_after_a_move_can_be_judged() -> None:
    """At steps of 360 tokens it is judged by three together, and moved; the window of four ends one step later."""
    one = controller(rules=Rules(target=0.86, window_steps=4, least_tokens=1000))
    said = [one.watch(evidence(step, measured(step, {0: 0.5}, rollouts=8, tokens=45))).events for step in range(1, 5)]
    assert said[0] == said[1] == () and "512 -> 1024" in said[2][0] and said[3] == ()


def test_a_handful_of_rollouts_judges_nothing_however_long_they_are() -> None:
    one = controller()
    assert one.watch(evidence(1, measured(1, {0: 0.5}, rollouts=7, tokens=1000))).schedule is None


def test_the_pooled_row_is_the_row_of_the_merged_statistics() -> None:
    many = [measured(step, {0: 0.8 + step / 100, step: 0.9}) for step in (1, 2, 3)]
    window = TailWindow(2)
    for step, statistics in enumerate(many, start=1):
        window.add(step, statistics)
    merged = measured(2, {0: 0.82, 2: 0.9})
    merged.merge(many[2])
    rows = {row.from_context_tokens: row for row in merged.table("exact").rows}
    assert window.row(0, 0) == rows[0]
    assert window.row(2 * BIN, 0) == rows[2 * BIN]
    assert window.row(BIN, 0) is None
    assert window.row(0, 2) == many[2].table("exact").rows[0]


# -- bins that nobody measured -------------------------------------------------------------------------------------------


def test_longer_bins_that_were_never_measured_read_the_share_of_the_last_measured_one() -> None:
    one = controller()
    decision = one.watch(evidence(1, measured(1, {1: 0.867})))
    assert one.budgets == [512, 512, 768, 1024]
    assert any("from 4000 on (512 -> 768 tokens, ...): not measured yet, follows 2k-4k" in e for e in decision.events)
    one.watch(evidence(2, measured(2, {1: 0.78})))
    assert one.budgets == [992, 992, 1488, 1984]


def test_after_a_calibrated_start_longer_bins_keep_their_proportions() -> None:
    one = Controller(RULES, BINS, [512, 768, 800, 896], trust_start=True)
    one.watch(evidence(1, measured(1, {0: 0.867, 1: 0.867})))
    assert one.budgets == [512, 768, 800, 896]
    one.watch(evidence(2, measured(2, {0: 0.867, 1: 0.5})))
    assert one.budgets == [512, 1536, 1600, 1792]


def test_only_bins_that_were_measured_are_lowered_from_a_trusted_start() -> None:
    one = Controller(RULES, BINS, [512] * 4, trust_start=True)
    shown(one, [{0: 0.95, 1: 0.95}] * 5)
    assert one.budgets == [496, 496, 512, 512]


def test_bins_that_follow_have_held_nothing_of_their_own() -> None:
    one = controller([512] * 4)
    shown(one, [{3: 0.95}] * 5)
    assert [state.held for state in one.states] == [0, 0, 0, 512]


def test_shorter_bins_that_were_never_measured_give_way_to_a_lowering() -> None:
    one = controller([512, 512, 512, 512])
    budgets = shown(one, [{3: 0.95}] * 5)
    assert budgets[-1] == [496] * 4


def test_a_calibrated_short_bin_comes_back_up_to_its_start_with_its_neighbour() -> None:
    one = Controller(RULES, BINS, [512, 512, 512, 512], trust_start=True)
    shown(one, [{1: 0.99}] * 40)
    lowered = one.budgets[0]
    assert lowered == one.budgets[1] < 512
    decision = one.watch(evidence(41, measured(41, {1: 0.3})))
    assert one.budgets[1] > 512
    assert one.budgets[0] == 512
    assert any("0-2k" in event and "was never measured: follows" in event for event in decision.events)


# -- properties ------------------------------------------------------------------------------------------------------------

TAILS = st.lists(st.dictionaries(st.integers(0, 3), st.floats(0.0, 1.0), min_size=1), min_size=1, max_size=12)
SETTINGS = st.tuples(
    st.sampled_from([(1, 0, 1), (4, 4, 8), (16, 16, 32), (128, 0, 128)]),
    st.one_of(st.none(), st.integers(3, 30)),
    st.integers(1, 3),
    st.booleans(),
    st.floats(0.05, 1.0),
)


@settings(max_examples=60, deadline=None)
@given(TAILS, SETTINGS)
def test_whatever_is_measured_budgets_are_whole_units_within_limits_and_do_not_fall_with_length(
    tails: list[dict[int, float]], drawn: tuple
) -> None:
    (unit, first, recent), most_units, patience, trust, share = drawn
    selector = PageMean(page_tokens=unit, first_tokens=first, recent_tokens=recent)
    most = None if most_units is None else selector.least_budget_tokens + most_units * unit
    bins = LengthBins(BIN, 4 * BIN, selector, most)
    rules = Rules(0.86, patience=patience, window_steps=2, least_tokens=20)
    one = Controller(rules, bins, bins.share(share), trust_start=trust)
    other = Controller(rules, bins, bins.share(share), trust_start=trust)
    for step, each in enumerate(tails, start=1):
        statistics = measured(step, each, rollouts=8, tokens=10)
        before = one.budgets
        decision = one.watch(evidence(step, statistics))
        budgets = one.budgets
        assert budgets == sorted(budgets)
        assert all(budget % unit == 0 for budget in budgets)
        assert all(bins.least <= budget <= bins.most(place) for place, budget in enumerate(budgets))
        assert (decision.schedule is None) == (budgets == before)
        assert decision.schedule is None or decision.schedule == one.schedule()
        assert [one.schedule().kv_budget_tokens(place * BIN) for place in range(4)] == budgets
        assert sum(new != old for new, old in zip(budgets, before, strict=True)) == 0 or decision.events
        # Another process, or a run resumed here, decides alike.
        resumed = Controller(rules, bins, bins.share(share), trust_start=trust)
        plain = {"bins": json.loads(json.dumps(other.state()["bins"]))}
        resumed.restore(other.state() | plain)
        assert resumed.watch(evidence(step, statistics)) == decision
        other = resumed


# -- start, end and what is kept -------------------------------------------------------------------------------------------


def test_evidence_survives_a_file_to_the_bit(tmp_path: Path) -> None:
    window = TailWindow(3)
    for step in range(1, 6):
        window.add(step, measured(step, {0: 0.8, step % 4: 0.9}))
    path = tmp_path / "window.safetensors"
    save_file(window.state(), path)
    restored = TailWindow(3)
    restored.restore(load_file(path))
    assert [step for step, _ in restored.evidence] == [3, 4, 5]
    for (_, one), (_, other) in zip(window.evidence, restored.evidence, strict=True):
        assert one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def test_the_final_schedule_loads_and_says_what_was_measured(tmp_path: Path) -> None:
    one = Controller(RULES, BINS, [512] * 4, model="tiny", target={"at_least": 0.86})
    shown(one, [{0: 0.867, 1: 0.867}] * 3)
    path = one.measured_schedule({"command": "a test"}).save(tmp_path / "schedule.toml")
    loaded = Schedule.load(path, model="tiny")
    assert [(step.from_context_tokens, step.kv_budget_tokens) for step in loaded.steps] == [
        (0, 512),
        (2000, 512),
        (4000, 768),
        (6000, 1024),
    ]
    first = loaded.steps[0].measured
    assert first is not None and first["tokens"] == 6000 and first["rollouts"] == 60
    assert first["low"] < first["value"] < first["high"] and first["value"] == pytest.approx(0.867, abs=2e-3)
    assert loaded.steps[2].measured is None
    assert loaded.made_by == {"command": "a test"} and loaded.target == {"at_least": 0.86}


SCALED = "scaled, to be calibrated on the real model"


def test_a_saved_schedule_has_the_figures_of_its_own_budget_alone() -> None:
    one = controller([512] * 4)
    shown(one, [{0: 0.8}, {0: 0.867}])
    step = one.measured_schedule({}).steps[0]
    assert (step.kv_budget_tokens, step.measured["tokens"]) == (864, 2000)


def test_what_must_be_known_of_the_start_stays_true_of_bins_that_nobody_measured(tmp_path: Path) -> None:
    one = Controller(RULES, BINS, [512] * 4, caveat=SCALED)
    assert one.schedule().caveat == SCALED
    shown(one, [{1: 0.867}])
    assert one.schedule().caveat == f"{SCALED}, at 0-2k and 4k-8k"
    path = one.measured_schedule({"command": "a test"}).save(tmp_path / "schedule.toml")
    loaded = Schedule.load(path)
    assert loaded.caveat == f"{SCALED}, at 0-2k and 4k-8k" and loaded.made_by is not None
    assert loaded.made_by["command"] == "a test"
    # The next run starts from that file, and measures what this one did not.
    config = load_config(None, ["control.by=controller", "control.target=0.86"])
    next_run = make_controller(config, loaded, 8000)
    assert next_run is not None and next_run.schedule().caveat == f"{SCALED}, at 0-2k and 4k-8k"
    shown(next_run, [{0: 0.867, 2: 0.867}], first=2)
    assert next_run.schedule().caveat == f"{SCALED}, at 6k-8k"
    shown(next_run, [{3: 0.867}], first=3)
    assert next_run.schedule().caveat is None and next_run.schedule().made_by is None
    assert next_run.measured_schedule({"command": "b"}).made_by == {"command": "b"}


def test_a_start_that_needs_no_word_gets_none(tmp_path: Path) -> None:
    one = Controller(RULES, BINS, [512] * 4)
    assert one.schedule().made_by is None and one.measured_schedule({"command": "a"}).made_by == {"command": "a"}
