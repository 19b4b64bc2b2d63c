"""HFEngine under a compression against the oracle; what a batch, a refill or a shared prompt must not change; memory that is
really freed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from equivalence import models
from equivalence.eviction_oracle import Oracle
from equivalence.models import prompts
from sparroll.compression import RKV, Compression, SnapKV, StreamingLLM, compression_kinds, make_compression
from sparroll.engines import HFEngine
from sparroll.engines.base import under
from sparroll.types import Rollout

# Two layers: the second one reads what the first made of its evicted cache.
tiny_model = partial(models.tiny_model, num_hidden_layers=2)
ODD_LENGTHS = [5, 1, 37, 16, 3]
POLICIES = [
    StreamingLLM(budget_tokens=15, every_tokens=7),
    SnapKV(budget_tokens=15, every_tokens=7, window_tokens=4, pool_tokens=3),
    RKV(budget_tokens=15, every_tokens=7, window_tokens=4, pool_tokens=3),
    # Compressions that follow each other at once; a window as long as the interval.
    RKV(budget_tokens=9, every_tokens=3, window_tokens=3),
    SnapKV(budget_tokens=6, every_tokens=5, window_tokens=5, pool="mean"),
    StreamingLLM(budget_tokens=6, every_tokens=1, first_tokens=2),
]
by_name = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}-{policy.every_tokens}")


def check(
    model: torch.nn.Module, policy: Compression, rollout: Rollout, greedy: bool = False, within: float = 2e-5
) -> None:
    """Every token's log-probability is the oracle's, and the share read what it held."""
    oracle, held, context = Oracle(model, policy), 0, 0
    oracle.prefill(rollout.prompt_ids)
    for number, token in enumerate(rollout.response_ids):
        logp = torch.log_softmax(oracle.logits, -1)
        assert float(logp[token]) == pytest.approx(float(rollout.sparse_logp[number]), abs=within)
        if greedy:
            assert token == int(logp.argmax())
        if number + 1 < len(rollout.response_ids):
            before = oracle.held_tokens
            oracle.decode(token)
            held, context = held + before + 1, context + len(rollout.prompt_ids) + number + 1
    assert rollout.kv_read_share == pytest.approx(held / context if context else 1.0)


@by_name
@pytest.mark.parametrize("greedy", [False, True])
def test_the_engine_equals_the_oracle(policy: Compression, greedy: bool) -> None:
    model = tiny_model()
    engine = HFEngine(model, compression=policy, max_batch=4)
    rollouts = engine.generate(prompts(ODD_LENGTHS), max_new_tokens=33, temperature=0.0 if greedy else 1.0, seed=3)
    for rollout in rollouts:
        assert (rollout.attention, rollout.compression_name, rollout.schedule_name) == ("evicted", policy.name, None)
        check(model, policy, rollout, greedy)


@pytest.mark.parametrize("heads", [1, 4])
def test_multi_query_and_multi_head_attention_equal_the_oracle(heads: int) -> None:
    model = tiny_model(num_key_value_heads=heads)
    for policy in POLICIES[1:3]:
        (rollout,) = HFEngine(model, compression=policy).generate(prompts([20]), max_new_tokens=25)
        check(model, policy, rollout)


@pytest.mark.parametrize("architecture", ["llama", "gemma", "qwen3_moe"])
def test_other_architectures_equal_the_oracle(architecture: str) -> None:
    model = tiny_model(architecture)
    (rollout,) = HFEngine(model, compression=POLICIES[2]).generate(prompts([9]), max_new_tokens=25)
    check(model, POLICIES[2], rollout)


@pytest.mark.parametrize("kind", compression_kinds())
def test_a_budget_above_every_context_is_dense(kind: str) -> None:
    model, asked = tiny_model(), prompts(ODD_LENGTHS)
    engine = HFEngine(model, max_batch=3)
    dense = engine.generate(asked, n=2, max_new_tokens=24, seed=4)
    allocated = engine.report().peak_kv_bytes
    engine.set_compression(make_compression(kind, budget_tokens=61, every_tokens=9))
    engine.reset_report()
    for rollout, expected in zip(engine.generate(asked, n=2, max_new_tokens=24, seed=4), dense, strict=True):
        assert rollout.response_ids == expected.response_ids
        assert rollout.sparse_logp.equal(expected.sparse_logp)
        assert (rollout.attention, rollout.kv_read_share) == ("dense", 1.0)
    assert engine.report().peak_dense_kv_bytes == allocated
    assert engine.report().kv_read_share == 1.0


@by_name
def test_a_batch_of_many_equals_one_at_a_time(policy: Compression) -> None:
    """Rows with prompts of other lengths, that end at other times and are refilled by siblings and strangers."""
    model, asked, stops = tiny_model(), prompts([9, 40, 23, 6, 31, 2]), [3, 17, 40, 41]
    one = HFEngine(model, compression=policy, max_batch=1)
    many = HFEngine(model, compression=policy, max_batch=5)
    settings = dict(n=2, max_new_tokens=40, seed=2, stop_ids=stops)
    alone, together = one.generate(asked, **settings), many.generate(asked, **settings)
    assert len({len(rollout.response_ids) for rollout in alone}) > 5
    for expected, rollout in zip(alone, together, strict=True):
        assert rollout.response_ids == expected.response_ids
        assert rollout.attention == expected.attention
        assert rollout.kv_read_share == pytest.approx(expected.kv_read_share)
        torch.testing.assert_close(rollout.sparse_logp, expected.sparse_logp, atol=2e-5, rtol=0)
    if policy.budget_tokens > 9:
        assert {rollout.attention for rollout in together} == {"dense", "evicted"}
    again = many.generate(asked, **settings)
    assert [rollout.response_ids for rollout in again] == [rollout.response_ids for rollout in together]
    for rollout in together[::4]:
        check(model, policy, rollout)


@pytest.mark.parametrize(("ends", "prefills"), [(range(2, 7), 1), (range(9, 29), 2)])
def test_a_prompt_is_computed_again_when_its_row_has_lost_a_part_of_it(ends: range, prefills: int) -> None:
    """Two of three samples share a prompt of 12 tokens. When the first one ends, the third copies the prompt from the second
    row, unless that was compressed, which happens after 7 steps."""
    model, policy, (asked,) = tiny_model(), POLICIES[2], prompts([12])
    engine = HFEngine(model, compression=policy, max_batch=2)
    first, second, _ = (rollout.response_ids for rollout in engine.generate([asked], n=3, max_new_tokens=30))
    end = next(p for p in ends if first[p] not in first[:p] + second[: p + 1])
    engine.reset_report()
    rollouts = engine.generate([asked], n=3, max_new_tokens=30, stop_ids=[first[end]])
    assert len(rollouts[0].response_ids) == end + 1 < len(rollouts[1].response_ids)
    assert engine.report().prefill_tokens == prefills * 12
    for rollout in rollouts:
        check(model, policy, rollout)


@pytest.mark.parametrize("kind", compression_kinds())
def test_memory_stays_near_budget_and_interval_whatever_the_context(kind: str) -> None:
    model, asked = tiny_model(), prompts([200, 90, 10])
    policy = make_compression(kind, budget_tokens=32, every_tokens=16)
    engine = HFEngine(model, compression=policy, max_batch=8)
    engine.generate(asked, n=2, max_new_tokens=300)
    report = engine.report()
    # 6 rows, 2 heads of 16 in fp32; K and V of 2 layers, the last of which is there twice while it grows from 33 to 48.
    token_bytes = 6 * 2 * 16 * 4
    recent = 2 * policy.query_tokens * 2 * token_bytes
    assert report.peak_kv_bytes == (4 * 48 + 33) * token_bytes + recent
    dense = HFEngine(model, max_batch=8)
    dense.generate(asked, n=2, max_new_tokens=300)
    assert report.peak_dense_kv_bytes == dense.report().peak_kv_bytes == dense.report().peak_dense_kv_bytes
    assert report.kv_saved_share == 1 - report.peak_kv_bytes / report.peak_dense_kv_bytes > 0.85
    assert dense.report().kv_saved_share == 0.0
    assert report.table()["kv_saved_share"] == report.kv_saved_share
    assert type(report).from_table(report.table()) == report


def test_tokens_are_really_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies behind the tokens that stay is never read again."""
    from sparroll.engines.hf.kv_cache import KVCache

    model, keep = tiny_model(), KVCache.keep

    def spoiling(self: KVCache, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        keep(self, layer, rows, slots)
        for held in (self.keys[layer], self.values[layer]):
            for row in rows.tolist():
                held[row, :, slots.shape[2] :] = 1e4

    for policy in POLICIES[:3]:
        engine = HFEngine(model, compression=policy)
        expected = engine.generate(prompts([5, 37]), n=2, max_new_tokens=33)
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "keep", spoiling)
            spoilt = engine.generate(prompts([5, 37]), n=2, max_new_tokens=33)
        assert [rollout.response_ids for rollout in spoilt] == [rollout.response_ids for rollout in expected]


def test_the_report_counts_what_was_left_to_read() -> None:
    engine = HFEngine(tiny_model(), compression=StreamingLLM(budget_tokens=15, every_tokens=7))
    (rollout,) = engine.generate(prompts([10]), max_new_tokens=31)
    contexts, held, reads = list(range(11, 41)), 10, []
    for step in range(1, 31):
        held += 1
        reads.append(held)
        held = 15 if step % 7 == 0 and held > 15 else held
    report = engine.report()
    for layer in report.layers:
        assert (layer.context_tokens, layer.read_tokens) == (sum(contexts), sum(reads))
        assert layer.sparse_steps == sum(read < context for read, context in zip(reads, contexts, strict=True))
        assert layer.dense_steps + layer.sparse_steps == 30
    assert report.compression_name == "streaming-15"
    assert rollout.kv_read_share == pytest.approx(sum(reads) / sum(contexts))


def test_dense_for_a_while_is_dense_and_brings_the_compression_back() -> None:
    model, asked = tiny_model(), prompts(ODD_LENGTHS)
    expected = HFEngine(model).generate(asked, max_new_tokens=30, temperature=0)
    engine = HFEngine(model, compression=POLICIES[0])
    with under(engine, schedule=None):
        dense = engine.generate(asked, max_new_tokens=30, temperature=0)
    assert [rollout.response_ids for rollout in dense] == [rollout.response_ids for rollout in expected]
    assert {rollout.attention for rollout in dense} == {"dense"}
    assert engine.compression == POLICIES[0]
    evicted = engine.generate(asked, max_new_tokens=30, temperature=0)
    assert [rollout.response_ids for rollout in evicted] != [rollout.response_ids for rollout in expected]
