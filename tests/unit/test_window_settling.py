"""The rule as vLLM's worker applies it to the windows of a step: its float32 form against draft_check's, its draws against
HFEngine's, and what is counted of them. Needs no vLLM."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparroll.draft_check import sampling_probability, sampling_probability_of_tokens
from sparroll.engines import sampling
from sparroll.engines.vllm.attention.decode_rows import ENGINES
from sparroll.engines.vllm.attention.state import State
from sparroll.engines.vllm.windows import settling, step_record
from sparroll.engines.vllm.windows.draws import Tempers, draw
from sparroll.engines.vllm.windows.requests import WindowRequest
from sparroll.engines.vllm.windows.settling import Policies, Settled, Windows, settle
from sparroll.engines.vllm.windows.step_record import WindowCounters, record_step
from sparroll.types import Checks

VOCABULARY = 700
FLOOR = 0.2


def logits(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def settled(temperatures: list[float], rows: list[int], drafts: list[int], **settings: Any) -> tuple[Windows, Settled]:
    """Requests with these rows, drafted from logits of one seed and checked against those of another near them."""
    requests, longest = len(rows), max(rows)
    draft_RDV = logits(requests, longest, seed=1)
    dense_NV = torch.cat([draft_RDV[r, :n] for r, n in enumerate(rows)]) + logits(sum(rows), seed=2) / 2
    draws = torch.rand(3, requests, longest, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tempers = Tempers.of(temperatures, settings.get("top_ps", [1.0] * requests), torch.from_numpy)
    ids_RD = torch.zeros(requests, longest, dtype=torch.int64)
    everyone = np.arange(requests)
    for place in range(longest):
        mass = tempers.probabilities(draft_RDV[:, place], everyone, torch.from_numpy(everyone))
        ids_RD[:, place] = tempers.draw(mass, draws[0, :, place], everyone, torch.from_numpy(everyone))
    windows = Windows(np.array(rows), np.array(drafts), ids_RD, draws, tempers)
    policies = Policies(lambda numbers: dense_NV[numbers], draft_RDV, torch.from_numpy)
    return windows, settle(windows, policies, settings.get("floor", FLOOR), settings.get("top_k", 0))


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 640, 100, 128])
def test_a_draw_by_blocks_is_the_draw_over_the_whole_vocabulary(vocabulary: int) -> None:
    raw = logits(500, seed=0)[:, :vocabulary]
    raw[:, 40:60] = -torch.inf
    uniform = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = draw(torch.softmax(raw, -1), uniform)
    expected = sampling.sample(torch.log_softmax(raw, -1), uniform, greedy=False)
    # Rounding may move a draw that falls between two tokens.
    assert (drawn == expected).sum() >= 499
    assert raw.gather(-1, drawn[:, None]).isfinite().all()


@pytest.mark.parametrize("floor", [0.01, 0.2, 1.0])
def test_a_tokens_sampling_probability_follows_from_the_mass_that_is_kept(floor: float) -> None:
    dense, draft = (torch.softmax(logits(20, seed=seed).double(), -1) for seed in (0, 1))
    kept = torch.minimum(draft, dense / floor).sum(-1, keepdim=True)
    found = sampling_probability_of_tokens(dense, draft, kept, floor)
    torch.testing.assert_close(found, sampling_probability(dense, draft, floor), atol=1e-14, rtol=1e-10)


@pytest.mark.parametrize("floor", [0.01, 0.2, 1.0])
def test_float32_says_what_float64_says(floor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "LEAN_ROWS", 7)
    monkeypatch.setattr(settling, "EXACT_ROWS", 3)
    shape = [1.0, 0.7, 1.0, 1.3], [9, 1, 6, 9], [8, 0, 5, 8]
    _, lean = settled(*shape, floor=floor)
    _, exact = settled(*shape, floor=floor, top_k=2)
    assert torch.equal(lean.stands_RD, exact.stands_RD)
    stands = exact.stands_RD
    assert torch.equal(lean.token_ids_RD[stands], exact.token_ids_RD[stands])
    for one, other in (
        (lean.sparse_logp_RD, exact.sparse_logp_RD),
        (lean.dense_logp_RD, exact.dense_logp_RD),
        (lean.acceptance_RD, exact.acceptance_RD),
    ):
        torch.testing.assert_close(one[stands], other[stands], atol=2e-5, rtol=0)
    assert lean.top_ids_RDK is None and exact.top_ids_RDK is not None
    # The second request has no draft: its token is the dense policy's own.
    assert stands[1].tolist() == [True] + [False] * 8
    assert lean.sparse_logp_RD[1, 0] == lean.dense_logp_RD[1, 0] and lean.acceptance_RD[1, 0] == 1


def test_a_window_stands_up_to_its_first_rejected_draft_whose_place_the_residual_takes() -> None:
    windows, found = settled([1.0] * 6, [9] * 6, [8] * 6)
    cut = 0
    for row in range(6):
        kept = found.kept_RD[row].tolist()
        assert kept[8], "the row behind the drafts has nothing that could be rejected"
        stand = kept.index(False) + 1 if False in kept else 9
        assert found.stands_RD[row].tolist() == [True] * stand + [False] * (9 - stand)
        assert torch.equal(found.token_ids_RD[row, : stand - 1], windows.draft_ids_RD[row, : stand - 1])
        cut += not kept[stand - 1]
        nats = (found.sparse_logp_RD - found.dense_logp_RD)[row, :stand]
        assert nats.max() <= -np.log(FLOOR) + 1e-5
    assert cut > 0


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_behind_a_window_kept_whole_stands_a_token_of_the_dense_policy(temperature: float, top_k: int) -> None:
    windows, found = settled([temperature] * 5, [4] * 5, [3] * 5, floor=1e-9, top_k=top_k)
    assert found.stands_RD.all()
    assert torch.equal(found.token_ids_RD[:, :3], windows.draft_ids_RD[:, :3])
    torch.testing.assert_close(found.sparse_logp_RD[:, 3], found.dense_logp_RD[:, 3], atol=1e-6, rtol=0)
    torch.testing.assert_close(found.acceptance_RD[:, 3], torch.ones(5))
    draft_RDV = logits(5, 4, seed=1)
    dense_RV = (draft_RDV.flatten(0, 1) + logits(20, seed=2) / 2).unflatten(0, (5, 4))[:, 3]
    expected = sampling.sample(
        sampling.log_probs(dense_RV, temperature), windows.draws_3RD[0, :, 3], greedy=temperature == 0
    )
    assert torch.equal(found.token_ids_RD[:, 3], expected), "its draw is the position's own, as in HFEngine"


def test_greedy_and_sampled_windows_share_a_step() -> None:
    shape = [6, 6, 6], [5, 5, 5]
    _, mixed = settled([0.0, 1.0, 0.0], *shape)
    _, sampled = settled([1.0, 1.0, 1.0], *shape)
    _, greedy = settled([0.0, 0.0, 0.0], *shape)
    for row, alone in ((0, greedy), (1, sampled), (2, greedy)):
        stands = alone.stands_RD[row]
        assert torch.equal(mixed.stands_RD[row], stands)
        assert torch.equal(mixed.token_ids_RD[row, stands], alone.token_ids_RD[row, stands])


def test_under_top_p_no_token_stands_that_the_dense_nucleus_leaves_out() -> None:
    _, found = settled([1.0] * 4, [8] * 4, [7] * 4, top_ps=[0.3] * 4)
    assert not found.kept_RD.all()
    assert found.dense_logp_RD[found.stands_RD].isfinite().all()
    assert found.sparse_logp_RD[found.stands_RD].isfinite().all()


def test_drafts_behind_a_stop_id_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows of 8 drafts that all stand. The first one's third draft is a stop id; the second one has none."""
    state = State()
    state.configure(None, 2, "cpu")
    monkeypatch.setattr(step_record, "STATE", state)
    windows, found = settled([1.0, 1.0], [8, 8], [8, 8], floor=1e-9)
    assert found.stands_RD.all()
    ids_RD = windows.draft_ids_RD
    stop = int(ids_RD[0, 2])
    assert stop not in ids_RD[0, :2] and stop not in ids_RD[1]
    requests = [WindowRequest(1.0, 1.0, frozenset({stop}), ENGINES, torch.empty(3, 0)) for _ in range(2)]
    counters = WindowCounters()
    record_step(windows, found, np.array([20, 30]), requests, np.array([True, True]), counters)
    assert requests[0].said.checks == Checks(windows=1, drafted_tokens=3, behind_stop_tokens=5)
    assert requests[1].said.checks == Checks(windows=1, drafted_tokens=8)
    assert counters.checks == Checks(windows=2, drafted_tokens=11, behind_stop_tokens=5)
    assert counters.checks.drafted_per_kept == 16 / 11


def test_verdicts_that_a_benchmark_forces_are_draws_and_change_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    verdicts_forced, judge = importlib.import_module("forced_verdicts").verdicts_forced, settling._judge_lean
    asked = [1.0, 0.7], [9, 6], [8, 6]
    _, plain = settled(*asked)
    with verdicts_forced(0.6):
        windows, forced = settled(*asked)
    assert settling._judge_lean is judge
    for row, drafts in enumerate(asked[2]):
        # The row behind the drafts always stands.
        expected = [*(windows.draws_3RD[1, row, :drafts] < 0.6).tolist(), *[True] * (asked[1][row] - drafts)]
        assert forced.kept_RD[row, : asked[1][row]].tolist() == expected
    assert not forced.kept_RD[0].all() and not torch.equal(forced.kept_RD, plain.kept_RD)
    torch.testing.assert_close(forced.acceptance_RD, plain.acceptance_RD)
