"""What a calibration takes at most, with figures computed by hand: beside an evaluation, and as it was in the end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from sparroll.calibrate.defaults import MOST_BUDGETS, PROMPTS, SAMPLES, SCORED_SHARE, VERIFY_ROUNDS
from sparroll.calibrate.effort.cost_ahead import CostAhead, Evaluation, Spent, cost_ahead
from sparroll.calibrate.measure import MeasureSettings
from sparroll.calibrate.run import calibrate
from sparroll.calibrate.sweep import PUBLISHED_PAGES
from sparroll.cli.calibration.asked import checks_of
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.plan.check_rate import CheckRate
from sparroll.plan.model_shape import ModelShape

from .fakes import study

DOCS = Path(__file__).parents[3] / "docs"
RECORDS = Path(__file__).parents[3] / "benchmarks" / "results"
SHAPE = ModelShape("toy", parameters=1_000_000, layers=4, query_heads=4, kv_heads=2, head_dim=64, vocabulary=100)
LONG = 16_384


def cost(budgets: int = MOST_BUDGETS, prompts: int = PROMPTS, samples: int = SAMPLES, **more) -> CostAhead:
    mode = more.pop("mode", "faithful")
    tokens = more.pop("tokens", LONG)
    settings = MeasureSettings(max_new_tokens=tokens, samples=samples, mode=mode)
    about = {"budgets": budgets, "verify_rounds": VERIFY_ROUNDS} | more
    return cost_ahead(settings, prompts, Evaluation.parse(None, tokens), **about)


def test_the_defaults_stay_below_a_third_of_an_evaluation_of_the_same_length() -> None:
    """A dense set, five budgets and four rounds are ten sets of 24 rollouts; the evaluation has 60 x 16 rollouts."""
    found = cost()
    assert (PROMPTS * SAMPLES, MOST_BUDGETS, VERIFY_ROUNDS) == (24, 5, 4)
    assert found.sampled_tokens == found.scored_tokens == 10 * 24 * LONG == 3_932_160
    assert found.evaluation.tokens == 960 * LONG == 15_728_640
    assert found.share == pytest.approx(240 * 1.15 / 960) and not found.is_dear
    assert str(found).startswith(
        "this samples at most 3,932,160 tokens and scores 3,932,160: 29% of an evaluation (60 "
    )
    assert str(found).endswith("problems x 16 samples x 16,384 tokens, 15,728,640 tokens; a scored one counts 0.15)")
    # At any length, with the least KL in a step's time, and with a check of drafts, of which more are drafted than stand.
    assert cost(tokens=1024).share == found.share
    checked = cost(checks=[DraftCheck()])
    drafted = CheckRate.of_study(DraftCheck()).drafted_per_kept
    assert checked.share == pytest.approx((1 + 9 * drafted) * 24 * 1.15 / 960)
    assert found.share < checked.share < 1 / 3 and not checked.is_dear
    assert str(checked).startswith("this samples about ")


def test_a_set_with_short_windows_counts_at_least_once() -> None:
    """Of windows of 16 tokens 15 are drafts, so that fewer drafts than tokens are made where little is taken back."""
    short = DraftCheck(16, 0.1)
    assert CheckRate.of_study(short).drafted_per_kept < 1
    # One dense set, three budgets and one round, each of 24 rollouts of 200 tokens.
    assert cost(3, checks=[short], tokens=200, verify_rounds=1).sampled_tokens == 5 * 24 * 200 == 24_000


def test_what_used_to_be_the_default_was_many_times_as_much() -> None:
    before = cost(len(PUBLISHED_PAGES), 64, 8)
    assert before.sampled_tokens == 23 * 64 * 8 * LONG
    assert before.share > 14 and before.is_dear
    assert before.warning.startswith("warning: that is more than a third of an evaluation; a smaller --most-budgets")


def test_more_selectors_groups_and_checks_count_and_a_replay_samples_dense_rollouts_and_rounds_alone() -> None:
    rollouts = 24 * LONG
    assert cost(selectors=3).sampled_tokens == (1 + 3 * 5 + 4) * rollouts
    # Each group alone under the four smaller budgets, and the largest in all of them once.
    assert cost(layer_groups=2).sampled_tokens == (1 + 1 + 2 * 4 + 4) * rollouts
    # Where the largest one holds every context, it is not run, and all others are run in each group.
    assert cost(layer_groups=2, largest_is_run=False).sampled_tokens == (1 + 2 * 5 + 4) * rollouts
    replay = cost(mode="replay")
    assert replay.sampled_tokens == (1 + 4) * rollouts and replay.scored_tokens == (1 + 5 + 4) * rollouts
    two = [DraftCheck(32, 0.01), DraftCheck(32, 0.1)]
    rate = CheckRate.of_study(two[0]).drafted_per_kept
    assert cost(checks=two).sampled_tokens == pytest.approx((1 + (2 * 5 + 4) * rate) * rollouts, rel=1e-3)
    assert cost(0).sampled_tokens == (1 + 4) * rollouts


def test_an_evaluation_is_said_in_problems_samples_and_tokens() -> None:
    assert Evaluation.parse("30x8", 100) == Evaluation(30, 8, 100)
    assert Evaluation.parse("30x8x4096", 100).tokens == 30 * 8 * 4096
    for wrong in ("30", "30x", "0x8", "30x8x9x7", "a few"):
        with pytest.raises(UserError, match="--evaluation takes problems x samples") as found:
            Evaluation.parse(wrong, 100)
        assert "60x16" in found.value.hint


def test_a_scored_token_counts_what_it_took_at_most_beside_a_sampled_one() -> None:
    shares = []
    for name in ("training-step-h200", "training-step-verified-h200"):
        for case in json.loads((RECORDS / f"{name}.json").read_text())["results"]:
            for step in case["steps"]:
                if case["schedule"] == "qwen3-1.7b-0.86":
                    checks = step.get("check_seconds") or 0.0
                    shares.append((step["score_seconds"] + checks) / (step["rollout_seconds"] - checks))
    assert len(shares) == 6 and 0.11 < min(shares) < max(shares) < SCORED_SHARE + 0.005


def _commands(page: str) -> list[list[str]]:
    """Of a calibration, as words."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    return [shlex.split(line.strip()) for line in text.splitlines() if line.strip().startswith("sparroll calibrate")]


def test_every_calibration_that_the_docs_recommend_stays_below_a_third() -> None:
    """What a command says of prompts, samples, budgets, mode and checks, and the defaults for the rest."""
    own = _commands("own-model.md")
    wide = [words for words in _commands("calibration.md") if "--group-times" in words]
    assert (len(own), len(wide)) == (3, 1)
    for words in own + wide:
        said = {name: value for name, value in zip(words, words[1:], strict=False) if name.startswith("--")}
        budgets = words.count("--budget") or MOST_BUDGETS
        about = {"prompts": int(said.get("--count", PROMPTS)), "samples": int(said.get("--samples", SAMPLES))}
        checks = checks_of(said.get("--check-windows"), said.get("--check-floors"))
        found = cost(
            budgets, **about, tokens=int(said["--max-new-tokens"]), mode=said.get("--mode", "faithful"), checks=checks
        )
        assert not found.is_dear, words


def test_what_it_took_is_counted_in_the_end(tmp_path: Path) -> None:
    grid = [64, 96, 128, 192, 256]
    about = {"budgets": grid, "dense_layers": (0,), "min_tokens": 100, "min_rollouts": 4, "shape": SHAPE}
    plain = calibrate(study(), out=tmp_path / "plain", **about, verify_rounds=1)
    tokens = [each.statistics.tokens for each in (plain.sweep.ceiling, *plain.sweep.measurements)]
    tokens.append(plain.verification.measurement.statistics.tokens)
    assert plain.spent.sampled_tokens == plain.spent.scored_tokens == sum(tokens) == plain.generated_tokens
    assert plain.spent.taken_back_tokens == 0
    replay = calibrate(study(mode="replay"), out=tmp_path / "replay", **about, verify_rounds=0)
    assert replay.spent.sampled_tokens == tokens[0] and replay.spent.scored_tokens == 6 * tokens[0]
    checked = calibrate(
        study(), out=tmp_path / "checked", **about, checks=[DraftCheck(16, 0.01)], target=0.6, verify_rounds=1
    )
    checks = [each.checked.checks for each in (*checked.sweep.measurements, checked.verification.measurement)]
    assert checked.spent.taken_back_tokens == sum(each.taken_back_tokens for each in checks) != 0
    assert checked.spent.scored_tokens == tokens[0] + sum(each.drafted_tokens for each in checks)
    table = checked.table()
    assert (table["taken_back_tokens"], table["scored_tokens"]) == (
        checked.spent.taken_back_tokens, checked.spent.scored_tokens,
    )  # fmt: skip
    said = str(Spent(12_000, 340, 12_400))
    assert said == "12,000 tokens were generated for this, 340 drafts were taken back, and 12,400 scored"
