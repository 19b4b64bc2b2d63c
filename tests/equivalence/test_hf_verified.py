"""HFEngine with checked drafts: what floor 1 and temperature 0 must give, what any floor must hold, ends and batches."""

from __future__ import annotations

import math

import pytest
import torch

from equivalence.models import ARCHITECTURES, VOCABULARY, prompts, tiny_model
from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.draft_check import sampling_logp
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer, response_logp
from sparroll.errors import UserError
from sparroll.mismatch import acceptance_of
from sparroll.schedule import Schedule, Step
from sparroll.types import Checks, Rollout, TokenBatch, TopK

SMALL_PAGES = PageMean(page_tokens=4, first_tokens=4, recent_tokens=8)
TIGHT = Schedule.fixed(16, SMALL_PAGES, dense_layers=())
ASKED = [5, 1, 37, 16, 3]


def _same(left: list[Rollout], right: list[Rollout]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.response_ids == other.response_ids
        torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=2e-5, rtol=0)
        torch.testing.assert_close(one.dense_logp, other.dense_logp, atol=2e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_at_floor_1_is_dense_greedy(architecture: str) -> None:
    model, asked = tiny_model(architecture), prompts(ASKED)
    engine = HFEngine(model, max_batch=3)
    dense = engine.generate(asked, max_new_tokens=41, temperature=0)
    engine.set_schedule(TIGHT)
    sparse = engine.generate(asked, max_new_tokens=41, temperature=0)
    assert [r.response_ids for r in sparse] != [r.response_ids for r in dense], "then the check would show nothing"
    for window_tokens in (2, 5, 64) if architecture == "qwen3" else (5,):
        engine.set_schedule(TIGHT.checked(window_tokens, floor=1.0))
        engine.reset_report()
        verified = engine.generate(asked, max_new_tokens=41, temperature=0)
        assert [r.response_ids for r in verified] == [r.response_ids for r in dense]
        assert engine.report().checks.cut_windows > 0


@pytest.mark.parametrize("selector", [SMALL_PAGES, QuantizedMean(page_tokens=4, first_tokens=4, recent_tokens=8)])
@pytest.mark.parametrize("floor", [1e-3, 0.1, 1.0])
def test_dense_log_probabilities_are_the_scorers_and_no_token_is_further_off_than_the_floor_allows(
    floor: float, selector: PageMean
) -> None:
    model = tiny_model()
    engine = HFEngine(model, schedule=Schedule.fixed(16, selector, dense_layers=(1,)).checked(7, floor), max_batch=4)
    rollouts = engine.generate(prompts(ASKED), n=2, max_new_tokens=30, seed=3, top_k=VOCABULARY)
    scores = Scorer(model).dense(rollouts, top_k=VOCABULARY)
    for rollout, score in zip(rollouts, scores, strict=True):
        assert rollout.dense is not None and rollout.dense_logp is not None and rollout.checks is not None
        torch.testing.assert_close(rollout.dense_logp, score.logp, atol=2e-5, rtol=0)
        torch.testing.assert_close(rollout.dense.top_k.logp, score.top_k.logp, atol=2e-5, rtol=0)
        assert float((rollout.sparse_logp - rollout.dense_logp).max()) <= -math.log(floor) + 1e-5
        # q~ is a distribution, and the sampled token's entry in it is what the rollout says.
        torch.testing.assert_close(rollout.top_k.logp.exp().sum(-1), torch.ones(30), atol=1e-5, rtol=0)
        at = (rollout.top_k.ids == torch.tensor(rollout.response_ids)[:, None]).float().argmax(-1, keepdim=True)
        torch.testing.assert_close(rollout.top_k.logp.gather(-1, at)[:, 0], rollout.sparse_logp, atol=1e-6, rtol=0)
        # With the whole vocabulary in the lists, their acceptance is the one that the checks saw.
        (listed,) = acceptance_of([rollout], [score], "top_k_lower")
        torch.testing.assert_close(rollout.acceptance, listed, atol=2e-5, rtol=0)
        checks = rollout.checks
        assert checks.drafted_tokens == 29 + checks.taken_back_tokens - checks.cut_windows - checks.extra_tokens
        assert rollout.attention == "sparse"
        if floor == 1:
            torch.testing.assert_close(rollout.sparse_logp, rollout.dense_logp, atol=1e-5, rtol=0)


def test_a_replay_does_not_pass_off_unchecked_drafts_as_checked_ones() -> None:
    model, checked = tiny_model(), TIGHT.checked(7, 0.1)
    rollouts = HFEngine(model, schedule=checked).generate(prompts([5]), max_new_tokens=9)
    scorer, batch = Scorer(model), TokenBatch.from_rollouts(rollouts, 0)
    for replay in (
        lambda: scorer.sparse(rollouts, checked),
        lambda: scorer.exact_replay(rollouts, checked),
        lambda: response_logp(model, batch, 1.0, checked),
    ):
        with pytest.raises(UserError, match="a replay drafts nothing") as refused:
            replay()
        assert "rollout.dense" in str(refused.value.hint)


def test_a_batch_of_one_is_a_batch_of_many_and_refills_do_not_matter() -> None:
    model, asked = tiny_model(), prompts(ASKED)
    schedule = Schedule((Step(0, 16), Step(20, 20), Step(33, 28)), SMALL_PAGES, (1,)).checked(6, 0.05)
    many = HFEngine(model, schedule=schedule, max_batch=10).generate(asked, n=2, max_new_tokens=33, seed=1)
    for rows in (1, 3):
        _same(HFEngine(model, schedule=schedule, max_batch=rows).generate(asked, n=2, max_new_tokens=33, seed=1), many)


def test_a_stop_id_inside_a_window_ends_the_response_only_once_it_stands() -> None:
    model, asked = tiny_model(), prompts(ASKED)
    engine = HFEngine(model, schedule=TIGHT.checked(16, 0.2), max_batch=10)
    free = engine.generate(asked, n=8, max_new_tokens=40, seed=5)
    stop = 7
    stopped = engine.generate(asked, n=8, max_new_tokens=40, seed=5, stop_ids=[stop])
    ends = 0
    for whole, cut in zip(free, stopped, strict=True):
        # Draws belong to positions, so the response is the same up to its first stop id.
        assert cut.response_ids == whole.response_ids[: len(cut.response_ids)]
        assert stop not in cut.response_ids[:-1]
        if stop in whole.response_ids:
            ends += 1
            assert cut.finish_reason == "stop" and cut.response_ids[-1] == stop
    assert ends > 5


def test_what_the_report_counts_adds_up() -> None:
    model, asked = tiny_model(), prompts(ASKED)
    engine = HFEngine(model, schedule=TIGHT.checked(9, 0.5), max_batch=4)
    rollouts = engine.generate(asked, max_new_tokens=30, seed=2)
    report, checks = engine.report(), engine.report().checks
    assert checks.windows == sum(r.checks.windows for r in rollouts)
    assert checks.taken_back_tokens == sum(r.checks.taken_back_tokens for r in rollouts)
    assert report.generated_tokens == sum(len(r.response_ids) for r in rollouts) == 150
    steps = report.layers[0].dense_steps + report.layers[0].sparse_steps
    assert steps == checks.drafted_tokens == 145 + checks.taken_back_tokens - checks.cut_windows - checks.extra_tokens
    assert 0 < checks.extra_tokens < checks.windows - checks.cut_windows
    dense_reads = sum(len(r.prompt_ids) * 29 + 29 * 30 // 2 for r in rollouts)
    assert report.read_and_context_tokens[1] == dense_reads * len(report.layers)
    read = sum(r.kv_read_share * (len(r.prompt_ids) * 29 + 29 * 30 // 2) for r in rollouts)
    assert report.kv_read_share * dense_reads == pytest.approx(read)
    assert type(report).from_table(report.table()) == report


@pytest.mark.parametrize("floor", [0.01, 0.3, 1.0])
def test_tokens_are_drawn_from_q_tilde(floor: float) -> None:
    """Chi-square of three tokens over 2,000 rollouts of one prompt, against the sum of the rollouts' own q~."""
    from scipy.stats import chisquare

    model = tiny_model()
    prompt = prompts([29])
    engine = HFEngine(model, schedule=TIGHT.checked(3, floor), max_batch=512)
    rollouts = engine.generate(prompt, n=2000, max_new_tokens=5, temperature=0.5, seed=9, top_k=VOCABULARY)
    # Position 2 is drafted on K and V of a first draft, so its q~ is that of the rollout's own prefix. Position 3 is drawn
    # behind a window that stood whole in some rollouts, and drafted in others.
    for position in (1, 2, 3):
        expected, observed = torch.zeros(VOCABULARY, dtype=torch.float64), torch.zeros(VOCABULARY, dtype=torch.float64)
        for rollout in rollouts:
            expected[rollout.top_k.ids[position]] += rollout.top_k.logp[position].double().exp()
            observed[rollout.response_ids[position]] += 1
        likely = expected >= 5
        pooled_expected = torch.cat([expected[likely], expected[~likely].sum()[None].clamp_min(1e-9)])
        pooled_observed = torch.cat([observed[likely], observed[~likely].sum()[None]])
        pooled_expected *= pooled_observed.sum() / pooled_expected.sum()
        assert chisquare(pooled_observed.numpy(), pooled_expected.numpy()).pvalue > 1e-3
    checks = engine.report().checks
    assert checks.cut_windows > 0 and checks.extra_tokens > 0, "a rule that keeps everything would prove nothing"


@pytest.mark.parametrize(
    ("response_tokens", "checks"),
    [
        (1, Checks()),
        (4, Checks(windows=1, drafted_tokens=3)),
        (5, Checks(windows=1, drafted_tokens=4)),
        (6, Checks(windows=1, drafted_tokens=4, extra_tokens=1)),
        (7, Checks(windows=2, drafted_tokens=5, extra_tokens=1)),
        (11, Checks(windows=2, drafted_tokens=8, extra_tokens=2)),
    ],
)
def test_a_window_that_does_not_end_the_response_gives_one_token_more(response_tokens: int, checks: Checks) -> None:
    """Windows of 5 under a floor that keeps everything. The first token comes with the prompt."""
    engine = HFEngine(tiny_model(), schedule=TIGHT.checked(5, 1e-6), max_batch=1)
    (rollout,) = engine.generate(prompts([21]), max_new_tokens=response_tokens, seed=4)
    assert len(rollout.response_ids) == response_tokens and rollout.checks == checks
    undrafted = {0, *(5 * (each + 1) for each in range(checks.extra_tokens))}
    assert {int(each) for each in (rollout.draft_acceptance == 1).nonzero()} == undrafted
    extra = sorted(undrafted)
    torch.testing.assert_close(rollout.sparse_logp[extra], rollout.dense_logp[extra], atol=0, rtol=0)


def test_a_check_replaces_the_drafts_keys_so_a_later_draft_reads_dense_ones() -> None:
    """After a window at floor 1e-6 everything stands, and the next draft is that of a prefill of what stands."""
    model = tiny_model()
    engine = HFEngine(model, schedule=TIGHT.checked(9, 1e-6), max_batch=1)
    (rollout,) = engine.generate(prompts([21]), max_new_tokens=11, seed=4, top_k=VOCABULARY)
    assert rollout.checks == Checks(windows=2, drafted_tokens=9, extra_tokens=1)
    # 10 tokens stand after the first window. The draft of response token 10 then reads dense K and V, but for its own.
    scorer = Scorer(model)
    prefix = Rollout(
        rollout.prompt_ids + rollout.response_ids[:9], rollout.response_ids[9:11], torch.zeros(2), "length"
    )
    (draft,) = scorer.sparse([prefix], TIGHT, top_k=VOCABULARY)
    dense = rollout.dense.top_k

    def row(top: TopK, position: int) -> torch.Tensor:
        return torch.empty(VOCABULARY).scatter(0, top.ids[position], top.logp[position])

    q, p = row(draft.top_k, 1), row(dense, 10)
    expected = sampling_logp(p[None], q[None], 1e-6)[0, rollout.response_ids[10]]
    torch.testing.assert_close(rollout.sparse_logp[10], expected, atol=2e-5, rtol=0)
