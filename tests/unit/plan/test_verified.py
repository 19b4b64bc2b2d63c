"""The cost of verified rollouts: drafts for each token that stands, eFLOPs and seconds, with answers computed by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from types import ModuleType

import pytest

from benchmark_scripts import benchmark
from sparroll import cost
from sparroll.cli.plan import text
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.plan.check_rate import MEASURED_REJECTED_SHARE, CheckRate, drafts_per_token, rate_for
from sparroll.plan.check_time import (
    ATTENTION_SHARE,
    LAYERS_SHARE,
    LOGIT_BYTES,
    SCORING_LOGIT_BYTES,
    SCORING_SHARE,
    check_time,
    scoring_seconds,
)
from sparroll.plan.hardware import Hardware, find_hardware
from sparroll.plan.model_shape import ModelShape, model_shape
from sparroll.plan.speedup import plan
from sparroll.plan.time_model import MeasuredStep, fit_time_model
from sparroll.schedule import Schedule
from sparroll.types import Checks

TOY = ModelShape("toy", parameters=1_000_000, layers=4, query_heads=4, kv_heads=2, head_dim=8, vocabulary=100)
SLOW = Hardware("slow", flops_per_second=1e12, bandwidth_bytes_per_second=1e6, memory_bytes=1e8)
RECORDS = Path(__file__).parents[3] / "benchmarks" / "results"
ABOUT = {"parameters": 1e9, "prompt_tokens": 100, "response_tokens": 4000, "kv_width": 28 * 8 * 128, "gqa_ratio": 2}


@pytest.fixture(scope="module")
def check_times() -> ModuleType:
    return benchmark("check_times")


# -- drafts for each token that stands -----------------------------------------------------------------------------------


def test_drafts_per_token_are_those_of_windows_that_are_played() -> None:
    draws = random.Random(0)
    for rejected_share, window in ((0.5, 2), (0.03, 16), (0.2, 7)):
        played = Checks()
        for _ in range(20_000):
            kept = next((place for place in range(window) if draws.random() < rejected_share), window)
            played.add(Checks(1, int(kept < window), window, window - kept, int(kept == window)))
        assert drafts_per_token(rejected_share, window + 1) == pytest.approx(played.drafted_per_kept, rel=0.01)
        of_share = CheckRate.of_cut_share(played.cut_share, window + 1)
        assert of_share.drafted_per_kept == pytest.approx(played.drafted_per_kept, rel=0.01)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_drafts_per_token_are_those_of_all_verdicts(window: int) -> None:
    """By enumeration: each way in which a window's drafts may be judged, with its probability."""
    for rejected_share in (0.1, 0.5, 0.9):
        tokens = 0.0
        for verdicts in itertools.product([True, False], repeat=window):
            probability = math.prod(1 - rejected_share if kept else rejected_share for kept in verdicts)
            kept = verdicts.index(False) if False in verdicts else window
            checks = Checks(1, int(kept < window), window, window - kept, int(kept == window))
            tokens += probability * window / checks.drafted_per_kept
        assert drafts_per_token(rejected_share, window + 1) == pytest.approx(window / tokens)


def test_a_share_of_cut_windows_gives_the_drafts_that_vllm_counted() -> None:
    """Each draft was kept with a probability there, whatever the policies said; 40 windows a row or more."""
    found = 0
    for path in sorted(RECORDS.glob("verified-rollouts-*.json")):
        record = json.loads(path.read_text())
        cells = [cell for cell in record["results"] if "cut_share" in cell]
        # Windows shorter than the longest of their engine drafted every token there, as all did in earlier records.
        all_drafted = {
            cell["window_tokens"] for cell in cells if cell["cut_share"] == 0 and cell["drafted_per_kept"] == 1
        }
        for cell in cells:
            if cell["cut_share"]:
                rate = CheckRate.of_cut_share(cell["cut_share"], cell["window_tokens"]).drafted_per_kept
                if cell["window_tokens"] in all_drafted:
                    rejected_share = -math.expm1(math.log1p(-cell["cut_share"]) / cell["window_tokens"])
                    rate = rejected_share * cell["window_tokens"] / cell["cut_share"]
                assert rate == pytest.approx(cell["drafted_per_kept"], rel=0.05)
                found += 1
    assert found > 30


def test_a_check_that_rejects_nothing_gives_a_token_more_than_it_drafts() -> None:
    assert drafts_per_token(0, 64) == CheckRate.of_cut_share(0, 64).drafted_per_kept == 63 / 64
    # Half of the drafts rejected, two drafts: the first draft or its substitute stands, a second token half of the
    # time, and one behind both a quarter of the time.
    assert CheckRate.of_cut_share(0.75, 3).drafted_per_kept == pytest.approx(2 / 1.75)
    assert drafts_per_token(1, 64) == 63
    assert drafts_per_token(0.25, 2) == pytest.approx(1 / 1.75)


def test_the_default_rate_says_whose_it_is_and_a_lossless_check_drafts_the_most() -> None:
    rates = [rate_for(DraftCheck(64, floor)) for floor in (0.001, 0.02, 1.0)]
    assert [rate.drafted_per_kept for rate in rates] == sorted(rate.drafted_per_kept for rate in rates)
    assert rates[-1].drafted_per_kept > 1.5 > rates[0].drafted_per_kept
    assert all("study's model" in rate.source for rate in rates) and "floor 0.01" in rates[1].source


def test_a_rounded_figure_counts_as_that_of_whole_windows() -> None:
    assert rate_for(DraftCheck(24, 0.01), drafted_per_kept=0.9583).drafted_per_kept == 23 / 24


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cut_share": 0.1, "drafted_per_kept": 1.1}, "say the same thing"),
        ({"cut_share": 1.0}, "at least 0 and below 1, got 1.0"),
        ({"drafted_per_kept": 0.4}, "0.9844 where every window of 64 tokens stands, and you gave 0.4"),
        ({"drafted_per_kept": math.inf}, "0.5 or more, got inf"),
    ],
)
def test_impossible_rates_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rate_for(DraftCheck(), **given)


RECORD = RECORDS / "mismatch-study-checks-h200.json"


def test_the_default_rates_are_those_of_the_record() -> None:
    rows = json.loads(RECORD.read_text())["results"]["rows"]
    measured = {row["floor"]: row for row in rows if (row["kv_budget_tokens"], row["window_tokens"]) == (128, 64)}
    assert measured.keys() == MEASURED_REJECTED_SHARE.keys()
    for floor, row in measured.items():
        assert MEASURED_REJECTED_SHARE[floor] == pytest.approx(row["rejected_share"], rel=0.05)


# -- eFLOPs --------------------------------------------------------------------------------------------------------------


def test_a_window_of_two_costs_a_sparse_and_a_dense_step_for_two_tokens() -> None:
    about = ABOUT | {"prompt_tokens": 0}
    sparse, dense = cost.sparse(**about, kv_budget_tokens=512), cost.dense(**about)
    arithmetic, found = cost.scoring_pass(**about), cost.verified(**about, kv_budget_tokens=512, window_tokens=2)
    assert found == pytest.approx((sparse + dense + arithmetic) / 2)


def test_the_longest_window_costs_what_the_scoring_pass_saves() -> None:
    about = ABOUT | {"prompt_tokens": 0}
    sparse = cost.sparse(**about, kv_budget_tokens=512)
    verified = cost.verified(**about, kv_budget_tokens=512, window_tokens=1e12)
    assert verified - cost.scoring_pass(**about) == pytest.approx(sparse)


def test_verified_eflops_by_hand() -> None:
    # One token after ten: the sparse step reads 2 of 10.5 tokens, scoring is left out; a dense one all of them.
    about = {"parameters": 100.0, "prompt_tokens": 10, "response_tokens": 1, "kv_width": 3, "gqa_ratio": 2}
    sparse = 2 * 100 + 2 * (2 + 5) * 3 * 2
    arithmetic, reads = 2 * 100 + 2 * 2 * 3 * 10.5, 5 * 2 * 3 * 10.5
    found = cost.verified(
        **about, kv_budget_tokens=2, window_tokens=5, drafted_per_kept=1.25, intensity=5, scoring="none"
    )
    assert found == pytest.approx(1.25 * (sparse + arithmetic * 5 / 4 + reads / 4))


def test_all_samples_share_a_check_of_their_prompt_as_they_share_its_reads() -> None:
    one, many = (cost.verified(**ABOUT, kv_budget_tokens=512, window_tokens=64, samples=samples) for samples in (1, 8))
    assert one < many < 8 * one


@pytest.mark.parametrize("wrong", [{"window_tokens": 1}, {"window_tokens": 64, "drafted_per_kept": 0.5}])
def test_impossible_checks_have_no_cost(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"must be"):
        cost.verified(**ABOUT, kv_budget_tokens=512, **wrong)


# -- seconds -------------------------------------------------------------------------------------------------------------


def test_a_verified_token_by_hand() -> None:
    checked = Schedule.fixed(512).checked(16, 0.1)
    got = plan(TOY, checked, hardware=SLOW, lengths=1024, batch=3, drafted_per_kept=1.25)
    assert got.verified is not None
    # 1,024 tokens of 64 bytes in four layers for each of three requests; two bytes of a million weights; and for each of
    # 3 * 16 rows the logits of 100 tokens.
    attention, layers, logits = 3 * 4 * 1024 * 64 / 1e6, 2e6 / 1e6, 3 * 16 * 100 * LOGIT_BYTES / 1e6
    assert got.verified.check_attention_seconds == pytest.approx(attention)
    assert got.verified.check_layers_seconds == pytest.approx(layers)
    assert got.verified.check_logits_seconds == pytest.approx(logits)
    assert got.verified.check_seconds == pytest.approx(attention + layers + logits)
    assert got.verified.seconds == pytest.approx(1.25 * (got.sparse.seconds + got.verified.check_seconds / 15))
    assert got.verified.tokens_per_second == pytest.approx(3 / got.verified.seconds)
    arithmetic = (2e6 + 4 * 8 * 4 * 4 * 1024) / (SCORING_SHARE * 1e12)
    assert got.verified.scoring_seconds == pytest.approx(3 * (arithmetic + 100 * SCORING_LOGIT_BYTES / 1e6))
    assert got.table()["verified_speedup"] == got.verified_speedup == got.dense.seconds / got.verified.seconds


def test_a_control_group_beside_checked_drafts_by_hand() -> None:
    checked = Schedule.fixed(512).checked(16, 0.1)
    about = {"hardware": SLOW, "lengths": 1024, "batch": 4, "drafted_per_kept": 1.25}
    got = plan(TOY, checked, **about, control_share=0.25)
    assert got.control is not None and got.verified is not None
    # One of four requests reads everything, and none of its 15 drafts for 16 tokens is taken back.
    extra = (got.dense.kv_seconds - got.sparse.kv_seconds - got.sparse.index_seconds) / 4
    drafted = 0.75 * 1.25 + 0.25 * 15 / 16
    seconds = drafted * (got.sparse.seconds + extra + got.verified.check_seconds / 15)
    assert got.control.step.seconds == pytest.approx(got.sparse.seconds + extra)
    assert got.control.seconds == pytest.approx(seconds)
    assert got.control.lost_share == pytest.approx(1 - got.verified.seconds / seconds)
    assert plan(TOY, checked, **about).verified == got.verified
    line = next(line for line in text(got) if line.startswith("control"))
    assert f"{int(100 * got.dense.seconds / seconds) / 100:.2f}x with 0.25 of the requests dense" in line
    # Where sparse requests draft much in vain, dense ones are the cheaper ones.
    lossy = plan(TOY, checked, **about | {"drafted_per_kept": 9.0}, control_share=0.25)
    assert lossy.control is not None and lossy.control.lost_share < 0
    assert "which costs none of the tokens per second" in "\n".join(text(lossy))


def test_a_window_of_two_that_is_kept_is_a_dense_step_and_its_logits_beside_the_sparse_one_for_two_tokens() -> None:
    got = plan(TOY, Schedule.fixed(512).checked(2, 1.0), hardware=SLOW, lengths=1024, batch=3, cut_share=0)
    assert got.verified is not None and got.verified.drafted_per_kept == 0.5
    steps = got.sparse.seconds + got.dense.seconds
    assert got.verified.seconds == pytest.approx((steps + got.verified.check_logits_seconds) / 2)


def test_in_a_long_window_the_arithmetic_decides() -> None:
    quick_reads = Hardware("x", flops_per_second=1e9, bandwidth_bytes_per_second=1e8, memory_bytes=1e8)
    got = plan(TOY, Schedule.fixed(512).checked(4096), hardware=quick_reads, lengths=1024, batch=3, cut_share=0)
    assert got.verified is not None
    attention, layers = 4096 * 3 * 4 * 8 * 4 * 4 * 1024 / 1e9, 4096 * 3 * 2e6 / 1e9
    assert got.verified.check_attention_seconds == pytest.approx(attention / ATTENTION_SHARE)
    assert got.verified.check_layers_seconds == pytest.approx(layers / LAYERS_SHARE)


def test_a_row_more_than_a_tile_holds_costs_a_tile() -> None:
    quick_reads = Hardware("x", flops_per_second=1e9, bandwidth_bytes_per_second=1e12, memory_bytes=1e8)

    def attention_seconds(window_tokens: int) -> float:
        about = {"batch": 3, "mean_context_tokens": 1024, "window_tokens": window_tokens}
        return check_time(TOY, quick_reads, **about).attention_seconds

    # Two query heads for each KV head: a tile of 128 rows holds 64 tokens.
    assert attention_seconds(2) == attention_seconds(64) == attention_seconds(65) / 2 == attention_seconds(128) / 2
    assert attention_seconds(64) == pytest.approx(3 * 64 * 4 * 8 * 4 * 4 * 1024 / (ATTENTION_SHARE * 1e9))


def test_processors_without_a_tile_wait_for_the_others() -> None:
    device = Hardware("x", flops_per_second=1e9, bandwidth_bytes_per_second=1e12, memory_bytes=1e8, processors=10)

    def attention_seconds(batch: int) -> float:
        return check_time(TOY, device, batch=batch, mean_context_tokens=1024, window_tokens=64).attention_seconds

    # Two KV heads, so two tiles a request.
    assert attention_seconds(1) == attention_seconds(5) == attention_seconds(6) / 2 == attention_seconds(10) / 2
    assert attention_seconds(5) == pytest.approx(5 * 64 * 4 * 8 * 4 * 4 * 1024 / (ATTENTION_SHARE * 1e9))


def test_a_fitted_time_model_times_the_checks_too() -> None:
    steps = [MeasuredStep(0.01 + read / 1e9, 3, read) for read in (1e6, 2e6, 4e6)]
    quick = Hardware("quick", flops_per_second=1e12, bandwidth_bytes_per_second=1e10, memory_bytes=1e8)
    got = plan(
        TOY,
        Schedule.fixed(512).checked(16),
        hardware=quick,
        lengths=1024,
        batch=3,
        time_model=fit_time_model(steps),
        drafted_per_kept=1,
    )
    assert got.verified is not None
    dense = 0.01 + 3 * 4 * 1024 * 64 / 1e9
    assert got.dense.seconds == pytest.approx(dense, rel=1e-3)
    assert got.verified.check_seconds == pytest.approx(got.dense.seconds + got.verified.check_logits_seconds)


def test_planned_checks_take_what_they_took_in_vllm(check_times: ModuleType) -> None:
    """And the constants of the plan are those that fit the records best."""
    found = check_times.timed_checks()
    assert {each.rows for each in found} == {64}
    assert {each.model for each in found} == {f"qwen3-{size}" for size in ("1.7b", "4b", "8b", "14b")} and len(
        {each.batch for each in found}
    ) > 6
    assert max(abs(each.error) for each in found) < 0.17
    fitted = check_times.fitted(found)
    assert fitted["attention_share"] == pytest.approx(ATTENTION_SHARE, rel=0.01)
    assert fitted["layers_share"] == pytest.approx(LAYERS_SHARE, rel=0.01)
    assert fitted["logit_bytes"] == pytest.approx(LOGIT_BYTES, rel=0.01)


def test_verified_rollouts_have_the_share_of_unverified_tokens_that_is_planned(check_times: ModuleType) -> None:
    """Up to .05: a planned sparse step is at the device's peak rates, so a planned check weighs more beside it."""
    found = [
        each for each in check_times.timed_checks() if each.context_tokens > 5000 and "qwen3" in each.cell["schedule"]
    ]
    assert len(found) >= 14
    for each in found:
        schedule = Schedule.load(each.cell["schedule"]).checked(each.rows, each.cell["floor"])
        got = plan(
            each.model,
            schedule,
            lengths=f"{each.context_tokens:.0f}",
            batch=each.batch,
            drafted_per_kept=each.cell["drafted_per_kept"],
        )
        assert got.verified is not None
        # The records waited for the device, which a plan does not.
        check_seconds = each.planned() if each.waited else got.verified.check_seconds
        seconds, own_seconds = (
            each.cell["drafted_per_kept"] * (got.sparse.seconds + check / (each.rows - 1))
            for check in (check_seconds, got.verified.check_seconds)
        )
        assert got.verified.seconds == pytest.approx(own_seconds)
        assert each.cell["of_unverified"] - 0.05 < got.sparse.seconds / seconds < each.cell["of_unverified"]


def test_a_planned_scoring_pass_takes_what_the_trainer_took() -> None:
    record = json.loads((RECORDS / "training-step-h200.json").read_text())
    asked = record["config"]
    tokens, shape = asked["prompts"] * asked["samples"] * asked["response_tokens"], model_shape("Qwen3-1.7B")
    planned = scoring_seconds(shape, find_hardware("H200"), tokens, asked["response_tokens"] / 2)
    for case in record["results"]:
        for step in case["steps"]:
            assert planned == pytest.approx(step["score_seconds"], rel=0.12) or step["step"] == 1


def test_a_plan_without_a_check_says_nothing_of_one() -> None:
    got = plan(TOY, 512, hardware=SLOW, lengths=1024, batch=3)
    assert got.verified is None and not {"verified", "verified_speedup"} & got.table().keys()
    with pytest.raises(UserError, match="checks no drafts"):
        plan(TOY, 512, hardware=SLOW, lengths=1024, batch=3, cut_share=0.1)
