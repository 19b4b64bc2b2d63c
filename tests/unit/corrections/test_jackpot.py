"""Jackpot against plain loops: what is kept, the mass under both lists, weights at any policy, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparroll.corrections import AcceptedMass, TopKLists, correction
from sparroll.corrections.accepted_mass import accepted_mass
from sparroll.errors import UserError
from sparroll.types import TopK

INF = math.inf
LENGTHS = [11, 1, 0, 6, 9, 3]


def batch(seed: int) -> dict[str, Tensor]:
    """Six rollouts, one empty; log ratios of +-40 and -inf, a policy that has moved on, and anything in the padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = (6, 11)
    sparse = -50 - 3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    dense = sparse + 0.8 * torch.randn(shape, generator=generator, dtype=torch.float64)
    dense[0, 3], dense[0, 5], dense[3, 2] = sparse[0, 3] - 40, sparse[0, 5] + 40, -INF
    now = dense + 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)
    now[0, 1], now[4, 4] = dense[0, 1] - 40, -INF
    mask = torch.arange(11) < torch.tensor(LENGTHS)[:, None]
    dense[~mask], sparse[~mask], now[~mask] = math.nan, -INF, math.nan
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
    # Kept, so that every hard case is a kept one where it can be.
    uniforms[0, 1] = uniforms[4, 4] = uniforms[3, 2] = 0.0
    return {"dense_logp": dense, "sparse_logp": sparse, "mask": mask, "uniforms": uniforms, "now_logp": now}


def lists(seed: int, shape: tuple[int, ...] = (6, 11), vocabulary: int = 12, k: int = 4) -> TopKLists:
    """Both sides complete: the sparse policy's values on the dense list too."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)
    dense = (logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64)).log_softmax(-1)
    sparse = logits.log_softmax(-1)
    dense_ids, sparse_ids = dense.topk(k, -1).indices, sparse.topk(k + 1, -1).indices
    return TopKLists(
        sparse=TopK(sparse_ids, sparse.gather(-1, sparse_ids)),
        dense=TopK(dense_ids, dense.gather(-1, dense_ids)),
        dense_at_sparse=dense.gather(-1, sparse_ids),
        sparse_at_dense=sparse.gather(-1, dense_ids),
    )


def exp(log_weight: float) -> float:
    return 0.0 if log_weight == -INF else math.exp(max(-20.0, min(20.0, log_weight)))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("settings", [{}, {"scale": 1.7, "weight_max": 1.2, "drift_max": 1.1}, {"scale": 0.4}])
def test_kept_tokens_and_weights_equal_plain_loops(settings: dict[str, float], moved: bool) -> None:
    given, masses = batch(1), lists(2)
    if not moved:
        del given["now_logp"]
    result = correction("jackpot", **settings)(**given, top_k=masses)
    scale, c1, c2 = (settings.get(name, d) for name, d in (("scale", 1.0), ("weight_max", 3.0), ("drift_max", 3.0)))
    places = [(b, t) for b, length in enumerate(LENGTHS) for t in range(length)]
    kept, mass = {}, {}
    for b, t in places:
        log_ratio = float(given["dense_logp"][b, t] - given["sparse_logp"][b, t])
        chance = 0.0 if log_ratio == -INF else min(1.0, math.exp(log_ratio) / scale)
        kept[b, t] = float(given["uniforms"][b, t]) < chance
        mass[b, t] = union_mass(masses, (b, t), scale)
    kappa = sum(kept.values()) / sum(mass.values())
    cut = 0
    for b, t in places:
        p_log, q_log = float(given["dense_logp"][b, t]), float(given["sparse_logp"][b, t])
        now_log = float(given["now_logp"][b, t]) if moved else p_log
        reach = kappa * mass[b, t] * max(scale, exp(now_log - q_log)) if kept[b, t] else 0.0
        drift = (INF if now_log == -INF else exp(p_log - now_log)) if kept[b, t] else 0.0
        cut += reach > c1 or drift > c2
        assert bool(result.keep[b, t]) == kept[b, t]
        assert float(result.weights[b, t]) == pytest.approx(min(reach, c1) * min(drift, c2), rel=1e-9, abs=0)
    assert not result.kept(given["mask"])[~given["mask"]].any()
    assert not result.weights[~given["mask"]].any()
    assert result.metrics["correction/accepted_mass_mean"] == pytest.approx(sum(mass.values()) / 30)
    assert result.metrics["correction/accepted_mass_calibration"] == pytest.approx(kappa)
    assert result.metrics["correction/whole_union_share"] == 1.0
    assert result.metrics["correction/masked_token_share"] == pytest.approx(1 - sum(kept.values()) / 30)
    assert result.metrics["correction/truncated_share"] == pytest.approx(cut / 30)


def union_mass(of: TopKLists, place: tuple[int, int], scale: float) -> float:
    q = dict(zip(of.sparse.ids[place].tolist(), of.sparse.logp[place].exp().tolist(), strict=True))
    p = dict(zip(of.sparse.ids[place].tolist(), of.dense_at_sparse[place].exp().tolist(), strict=True))
    if of.sparse_at_dense is not None:
        q |= dict(zip(of.dense.ids[place].tolist(), of.sparse_at_dense[place].exp().tolist(), strict=True))
        p |= dict(zip(of.dense.ids[place].tolist(), of.dense.logp[place].exp().tolist(), strict=True))
    return sum(min(q[v], p[v] / scale) for v in q)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_without_the_sparse_values_on_the_dense_list_the_mass_is_a_lower_bound_and_says_where_it_is_whole(
    scale: float,
) -> None:
    both = lists(5, (200,), vocabulary=9, k=3)
    own = replace(both, sparse_at_dense=None)
    union, lower = accepted_mass(both, scale), accepted_mass(own, scale)
    assert union.whole.all()
    assert 0 < int(lower.whole.sum()) < 200
    assert (lower.values <= union.values + 1e-15).all()
    assert torch.equal(lower.values == union.values, lower.whole)
    for t in range(200):
        assert float(lower.values[t]) == pytest.approx(union_mass(own, (t,), scale), rel=1e-12)  # type: ignore[arg-type]
        held = set(own.dense.ids[t].tolist()) <= set(own.sparse.ids[t].tolist())
        assert bool(lower.whole[t]) == held


def test_padding_in_a_list_adds_nothing_and_a_dense_zero_misses_nothing() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]).double().log(), torch.tensor([0.25, 0.75, 0.0]).double().log()
    ids = torch.tensor([7, 3, 7])
    # Token 3 stands only in the sparse list as padding: it is not known there.
    sparse = TopK(torch.tensor([7, 9, 3]), torch.tensor([0.25, 0.75, 0.0]).double().log())
    made = accepted_mass(TopKLists(sparse, TopK(ids, p), torch.tensor([0.5, 0.0, 0.5]).double().log()), 1.0)
    assert (float(made.values), bool(made.whole)) == (0.25, False)
    made = accepted_mass(TopKLists(TopK(ids, q), TopK(ids, p), dense_at_sparse=p), 1.0)
    assert (float(made.values), bool(made.whole)) == (0.75, True)


def test_condensed_lists_and_lists_are_the_same_correction() -> None:
    given, masses = batch(4), replace(lists(4), sparse_at_dense=None)
    by = correction("jackpot", scale=1.3)
    condensed = by.condense(masses)  # type: ignore[attr-defined]
    one, other = by(**given, top_k=masses), by(**given, top_k=condensed)  # type: ignore[call-arg]
    assert torch.equal(one.weights, other.weights)
    assert one.metrics == other.metrics


def test_weights_follow_the_policy_while_what_is_kept_stays() -> None:
    given = batch(6)
    now = given.pop("now_logp")
    first = correction("jackpot")(**given, top_k=lists(6))
    later = correction("jackpot")(**given, top_k=lists(6), now_logp=now)
    assert first.now_weights is not None
    assert torch.equal(first.now_weights(now), later.weights)
    assert torch.equal(first.now_weights(given["dense_logp"]), first.weights)
    assert torch.equal(first.keep, later.keep)
    assert not torch.equal(first.weights, later.weights)
    rows = first.now_weights.rows([4, 0], 9)
    assert torch.equal(rows(now[[4, 0], :9]), later.weights[[4, 0], :9])
    leaf = now.clone().requires_grad_()
    assert not first.now_weights(leaf).requires_grad


def test_the_same_policies_keep_everything_at_a_weight_of_one() -> None:
    logp, mask = -torch.rand(3, 7).double(), torch.ones(3, 7, dtype=torch.bool)
    whole = lists(1, (3, 7), vocabulary=4, k=4 - 1)
    same = TopKLists(whole.sparse, whole.sparse, dense_at_sparse=whole.sparse.logp)
    result = correction("jackpot")(dense_logp=logp, sparse_logp=logp, mask=mask, uniforms=torch.rand(3, 7), top_k=same)
    assert result.keep.all()
    assert result.weights.flatten().tolist() == pytest.approx([1.0] * 21, rel=1e-12)


def test_calibration_makes_up_for_what_short_lists_leave_out() -> None:
    """The mean of the rescaled mass is the kept share, whatever the lists held."""
    given = batch(7)
    for part in (1.0, 0.5):
        mass = AcceptedMass(torch.full((6, 11), 0.8 * part), torch.zeros(6, 11, dtype=torch.bool))
        result = correction("jackpot", weight_max=1e9, drift_max=1e9)(**given, top_k=mass)
        scaled = 0.8 * part * result.metrics["correction/accepted_mass_calibration"]
        assert scaled == pytest.approx(1 - result.metrics["correction/masked_token_share"])
        assert result.metrics["correction/whole_union_share"] == 0.0


def test_nothing_kept_and_no_mass_at_all_break_nothing() -> None:
    given = batch(8)
    whole = torch.ones(6, 11, dtype=torch.bool)
    none = correction("jackpot")(
        **given
        | {"uniforms": torch.full((6, 11), 1 - 1e-12, dtype=torch.float64), "dense_logp": given["sparse_logp"] - 40},
        top_k=AcceptedMass(torch.full((6, 11), 0.5), whole),
    )
    assert not none.kept(given["mask"]).any()
    massless = correction("jackpot")(**given, top_k=AcceptedMass(torch.zeros(6, 11), whole))
    assert not massless.weights.any()
    for result in (none, massless):
        assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uniforms": None}, r"(?s)'jackpot' needs uniforms.*torch\.rand"),
        ({"top_k": None}, r"(?s)'jackpot' needs top_k.*TopKLists"),
        (
            {"uniforms": torch.zeros(6, 10)},
            r"uniforms must have the shape \[B, T\] of the mask, \[6, 11\], got \[6, 10\]",
        ),
        ({"uniforms": torch.ones(6, 11)}, r"uniforms must lie in \[0, 1\)"),
        ({"uniforms": torch.full((6, 11), math.nan)}, r"uniforms must lie in \[0, 1\)"),
        ({"now_logp": torch.zeros(1, 11)}, r"now_logp must have the shape"),
        ({"now_logp": torch.full((6, 11), math.nan)}, r"now_logp is NaN or \+inf \(rollout 0, token 0; 30 in all\)"),
        ({"now_logp": torch.full((6, 11), 0.5)}, r"now_logp must be log-probabilities \(at most 0\), got 0\.5"),
        ({"top_k": lists(1, (6, 10))}, r"lists for each token, \[B, T\] = \[6, 11\], got \[6, 10\]"),
        ({"top_k": AcceptedMass(torch.zeros(6, 1), torch.ones(6, 1).bool())}, r"top_k must hold a mass for each token"),
        ({"top_k": AcceptedMass(torch.full((6, 11), math.nan), torch.ones(6, 11).bool())}, "finite and not negative"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    given = batch(9) | {"top_k": lists(9)} | change
    with pytest.raises(UserError, match=message):
        correction("jackpot")(**given)


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    whole = lists(3, (8,))
    with pytest.raises(UserError, match=r"dense_at_sparse must have the shape of its list, \[8, 5\], got \[8, 4\]"):
        replace(whole, dense_at_sparse=whole.dense_at_sparse[:, :4])
    with pytest.raises(UserError, match="an entry for each token"):
        replace(whole, dense=whole.dense[:7], sparse_at_dense=None)
    with pytest.raises(UserError, match="dense_at_sparse must be log-probabilities"):
        accepted_mass(replace(whole, dense_at_sparse=whole.dense_at_sparse * math.nan), 1.0)
    with pytest.raises(UserError, match="sparse.ids lists token"):
        accepted_mass(replace(whole, sparse=TopK(whole.sparse.ids * 0, whole.sparse.logp)), 1.0)


@pytest.mark.parametrize("settings", [{"scale": 0.0}, {"scale": -1.0}, {"weight_max": 0.0}, {"drift_max": math.inf}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match="must be a positive number"):
        correction("jackpot", **settings)


def test_without_a_mass_of_its_own_every_token_has_the_share_that_was_kept() -> None:
    given, masses = batch(1), lists(2)
    del given["now_logp"]
    own, same = (correction("jackpot", mass=each)(**given, top_k=masses) for each in ("token", "step"))
    assert torch.equal(own.kept(given["mask"]), same.kept(given["mask"]))
    kept_BT, share = same.kept(given["mask"]), float(same.kept(given["mask"]).sum()) / 30
    reach_BT = (given["dense_logp"] - given["sparse_logp"]).exp().clamp(min=1.0)
    torch.testing.assert_close(same.weights[kept_BT], (share * reach_BT).clamp(max=3.0)[kept_BT].to(same.weights.dtype))
    assert not torch.allclose(own.weights[kept_BT], same.weights[kept_BT])
