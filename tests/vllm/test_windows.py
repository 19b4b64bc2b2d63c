"""VLLMEngine with checks of drafts is HFEngine with checks, token for token: same drafts, same verdicts, same report. What
HFEngine does is tested in tests/equivalence/test_hf_verified.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.train_runs import short_config
from mixed_requests import each_of_its_schedule
from sparroll.attention.selectors import PageMean
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.engines.vllm.launch import installed_version
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.train import train
from sparroll.train.runtime.sinks import read_lines
from sparroll.types import Checks, Rollout

if installed_version() is None:
    pytest.skip("needs vllm; `make test-vllm` installs it", allow_module_level=True)

from sparroll.engines.vllm.engine import VLLMEngine
from sparroll.engines.vllm.windows import runner, settling

MODEL = "tiny-reasoner"
RISING = Schedule(
    steps=(Step(0, 64), Step(150, 80)),
    selector=PageMean(page_tokens=16, first_tokens=16, recent_tokens=32),
    name="rising",
)
CHECKED = RISING.checked(window_tokens=8, floor=0.3)
GROUPED = replace(
    CHECKED, steps=(Step(0, (112, 64)), Step(150, (128, 80))), layer_groups=((2, 5), (3, 4)), name="grouped"
)


@pytest.fixture(scope="module")
def engines() -> Iterator[VLLMEngine]:
    engine = VLLMEngine(MODEL, schedule=CHECKED, dtype=torch.float32, max_batch=8, max_context_tokens=1024)
    yield engine
    engine.close()


@pytest.fixture
def engine(engines: VLLMEngine) -> VLLMEngine:
    engines.set_schedule(CHECKED)
    engines.reset_report()
    return engines


@pytest.fixture(scope="module")
def hf() -> HFEngine:
    return HFEngine(MODEL, dtype=torch.float32, device="cpu", max_batch=8)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 130, (length,), generator=generator).tolist() for length in lengths]


def oracle(hf: HFEngine, schedule: Schedule | None, asked: list[list[int]], **settings: Any) -> list[Rollout]:
    hf.set_schedule(schedule)
    hf.reset_report()
    return hf.generate(asked, **settings)


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids == other.response_ids
        assert (one.finish_reason, one.attention) == (other.finish_reason, other.attention)
        # HFEngine drafts nothing behind a stop id.
        assert replace(one.checks, behind_stop_tokens=0) == other.checks
        if one.finish_reason == "length":
            assert one.kv_read_share == pytest.approx(other.kv_read_share)
        else:
            # vLLM's last window goes on behind the stop id.
            assert one.kv_read_share >= other.kv_read_share
        torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=2e-4, rtol=0)
        torch.testing.assert_close(one.dense_logp, other.dense_logp, atol=2e-4, rtol=0)
        torch.testing.assert_close(one.draft_acceptance, other.draft_acceptance, atol=2e-4, rtol=0)
        torch.testing.assert_close(one.acceptance, other.acceptance, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 4},
        {"n": 3, "stop_ids": [5, 44, 9], "seed": 3},
        {"max_new_tokens": 2},
        {"max_new_tokens": 9},
        {"max_new_tokens": 10},
        {"max_new_tokens": 11, "temperature": 0.5, "top_k": 2, "n": 2},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_checked_rollouts_are_the_oracles(engine: VLLMEngine, hf: HFEngine, settings: dict[str, Any]) -> None:
    asked = prompts([5, 100, 37, 170, 64])
    settings = {"max_new_tokens": 40, "stop_ids": []} | settings
    found = engine.generate(asked, **settings)
    expected = oracle(hf, CHECKED, asked, **settings)
    assert_same(found, expected)
    for one, other in zip(found, expected, strict=True):
        if "top_k" in settings:
            for ours, theirs in ((one.top_k, other.top_k), (one.dense.top_k, other.dense.top_k)):
                torch.testing.assert_close(ours.logp, theirs.logp, atol=2e-4, rtol=0)
            finite = other.dense.logp_at_ids.isfinite()
            torch.testing.assert_close(
                one.dense.logp_at_ids[finite], other.dense.logp_at_ids[finite], atol=2e-4, rtol=0
            )
    if settings["max_new_tokens"] == 40:
        assert sum(rollout.checks.cut_windows for rollout in found) > 0


@pytest.mark.parametrize("schedule", [CHECKED, GROUPED], ids=["", "grouped"])
def test_the_report_is_the_oracles(engine: VLLMEngine, hf: HFEngine, schedule: Schedule) -> None:
    asked = prompts([20, 100, 150])
    engine.set_schedule(schedule)
    sampled = engine.generate(asked, max_new_tokens=40, stop_ids=[])
    rollouts = oracle(hf, schedule, asked, max_new_tokens=40, stop_ids=[])
    assert_same(sampled, rollouts)
    found, expected = engine.report(), hf.report()
    assert found.checks == expected.checks and found.checks.behind_stop_tokens == 0
    assert found.checks.windows == sum(each.checks.windows for each in rollouts)
    assert found.layers == expected.layers
    for name in ("prefill_tokens", "generated_tokens", "check_read_tokens", "taken_back_context_tokens"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.kv_read_share == pytest.approx(expected.kv_read_share) and found.check_seconds > 0


@pytest.mark.parametrize(
    # With 43 tokens, some requests take no part in the draft steps of the last window.
    "settings",
    [{}, {"max_new_tokens": 43}, {"temperature": 0.8, "top_p": 0.9, "top_k": 4}, {"stop_ids": [5, 44, 9]}],
)
def test_dense_requests_beside_checked_ones_are_the_oracles_and_keep_every_draft(
    engine: VLLMEngine, hf: HFEngine, settings: dict[str, Any]
) -> None:
    asked, flags = prompts([5, 100, 37, 170, 64]), [True, False, False, True, True, True, False, True, False, False]
    settings = {"n": 2, "max_new_tokens": 40, "stop_ids": [], "seed": 3} | settings
    plain = oracle(hf, None, asked, **settings)
    rollouts = oracle(hf, CHECKED, asked, dense=flags, **settings)
    found = engine.generate(asked, dense=flags, **settings)
    assert_same(found, rollouts)
    for flag, one, other in zip(flags, found, plain, strict=True):
        assert one.schedule_name == (None if flag else CHECKED.name)
        if not flag:
            continue
        # The tokens of a dense engine, because draws belong to positions.
        assert one.response_ids == other.response_ids and one.attention == "dense"
        assert one.checks.taken_back_tokens == one.checks.cut_windows == 0
        assert one.checks.windows >= len(one.response_ids) // 8
        torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=2e-4, rtol=0)
        torch.testing.assert_close(one.sparse_logp, one.dense_logp, atol=2e-4, rtol=0)
    ours, theirs = engine.report(), hf.report()
    if settings["stop_ids"]:
        # vLLM's last windows go on behind their stop ids.
        assert ours.dense_request_steps > theirs.dense_request_steps
        return
    assert ours.layers == theirs.layers and ours.checks == theirs.checks
    assert ours.dense_request_steps == theirs.dense_request_steps
    assert ours.dense_request_context_tokens == theirs.dense_request_context_tokens
    assert ours.kv_read_share == pytest.approx(theirs.kv_read_share)


def test_checked_requests_with_schedules_of_their_own_are_the_oracles(engine: VLLMEngine, hf: HFEngine) -> None:
    asked, settings = prompts([5, 100, 37, 170, 64]), {"max_new_tokens": 40, "stop_ids": []}
    own = [GROUPED, CHECKED, GROUPED, GROUPED, CHECKED]
    found = engine.generate(asked, schedules=own, **settings)
    report = engine.report()
    expected = oracle(hf, CHECKED, asked, schedules=own, **settings)
    assert_same(found, expected)
    alone = {each.name: oracle(hf, each, asked, **settings) for each in (CHECKED, GROUPED)}
    assert_same(found, each_of_its_schedule(alone, own))
    assert report.kv_read_share == pytest.approx(sum_of(found) / sum_of(found, read=False))


def sum_of(rollouts: list[Rollout], read: bool = True) -> float:
    """Tokens that dense decoding of the responses has in context, or those of them that were read."""
    wholes = [int(rollout.context_tokens[1:].sum()) for rollout in rollouts]
    return sum((each.kv_read_share if read else 1) * whole for each, whole in zip(rollouts, wholes, strict=True))


def test_at_floor_1_greedy_tokens_are_those_of_dense_decoding(engine: VLLMEngine, hf: HFEngine) -> None:
    asked, settings = prompts([20, 150]), {"max_new_tokens": 60, "temperature": 0, "stop_ids": []}
    engine.set_schedule(RISING.checked(window_tokens=8, floor=1))
    found = engine.generate(asked, **settings)
    dense = oracle(hf, None, asked, **settings)
    assert [rollout.response_ids for rollout in found] == [rollout.response_ids for rollout in dense]
    assert sum(rollout.checks.cut_windows for rollout in found) > 0


@pytest.mark.parametrize("floor", [0.05, 1])
def test_no_token_is_likelier_when_sampled_than_the_floor_allows(engine: VLLMEngine, floor: float) -> None:
    engine.set_schedule(RISING.checked(window_tokens=8, floor=floor))
    for rollout in engine.generate(prompts([100, 150]), n=3, max_new_tokens=40, stop_ids=[]):
        assert (rollout.sparse_logp - rollout.dense_logp).max() <= -torch.log(torch.tensor(floor)) + 1e-4


def test_the_checks_say_what_a_dense_pass_over_the_response_says(engine: VLLMEngine, hf: HFEngine) -> None:
    rollouts = engine.generate(prompts([30, 120]), n=2, max_new_tokens=40, temperature=0.9, stop_ids=[])
    for rollout, score in zip(rollouts, Scorer(hf.model).dense(rollouts, temperature=0.9), strict=True):
        torch.testing.assert_close(rollout.dense_logp, score.logp, atol=2e-4, rtol=0)


def test_a_seed_gives_the_same_rollouts_alone_and_together(engine: VLLMEngine) -> None:
    asked = prompts([9, 33, 170])
    together = engine.generate(asked, n=4, max_new_tokens=30, seed=5, stop_ids=[])
    for number in (0, 6, 11):
        (alone,) = engine.generate([asked[number // 4]], max_new_tokens=30, seed=[together[number].seed], stop_ids=[])
        assert alone.response_ids == together[number].response_ids


def test_a_response_may_fill_the_context_to_the_last_token(engine: VLLMEngine) -> None:
    (rollout,) = engine.generate([[5] * 1004], max_new_tokens=20, stop_ids=[])
    checks = rollout.checks
    assert len(rollout.response_ids) == 20 and checks.extra_tokens > 0
    assert checks.drafted_tokens - checks.taken_back_tokens + checks.cut_windows + checks.extra_tokens == 19


def test_a_stop_id_may_be_the_token_behind_a_window_and_nothing_follows_one_inside(
    engine: VLLMEngine, hf: HFEngine
) -> None:
    kept = RISING.checked(window_tokens=5, floor=1e-6)
    engine.set_schedule(kept)
    asked, settings = prompts([150]), {"max_new_tokens": 30, "temperature": 1.5, "seed": 4}
    (free,) = engine.generate(asked, stop_ids=[], **settings)
    behind = next(at for at in range(5, 30, 5) if free.response_ids[at] not in free.response_ids[:at])
    inside = next(at for at in range(6, 30) if at % 5 and free.response_ids[at] not in free.response_ids[:at])
    for at in (behind, inside):
        stops = {"stop_ids": [free.response_ids[at]]}
        found = engine.generate(asked, **stops, **settings)
        assert found[0].response_ids == free.response_ids[: at + 1] and found[0].finish_reason == "stop"
        windows, drafted = -(-at // 5), at - at // 5
        expected = Checks(windows, 0, drafted, 0, extra_tokens=at // 5, behind_stop_tokens=4 * windows - drafted)
        assert found[0].checks == expected and expected.drafted_per_kept == 4 * windows / at
        assert_same(found, oracle(hf, kept, asked, **stops, **settings))


def test_the_next_prompt_finds_dense_keys_and_values_in_the_cache(engine: VLLMEngine, hf: HFEngine) -> None:
    (first,) = engine.generate(prompts([150]), max_new_tokens=70, stop_ids=[], seed=2)
    longer = first.prompt_ids + first.response_ids
    engine.set_schedule(CHECKED)
    engine.reset_report()
    (second,) = engine.generate([longer], max_new_tokens=1, top_k=engine.vocabulary, stop_ids=[])
    assert engine.report().prefill_tokens < len(longer) - 150
    (expected,) = oracle(hf, None, [longer], max_new_tokens=1, top_k=engine.vocabulary, stop_ids=[])
    torch.testing.assert_close(second.top_k.logp, expected.top_k.logp, atol=2e-4, rtol=0)


def test_dense_attention_and_other_checks_can_be_set_and_unchecked_drafts_cannot(
    engine: VLLMEngine, hf: HFEngine
) -> None:
    asked, settings = prompts([20, 150]), {"max_new_tokens": 30, "stop_ids": []}
    engine.set_schedule(None)
    dense = engine.generate(asked, **settings)
    assert [each.response_ids for each in dense] == [each.response_ids for each in oracle(hf, None, asked, **settings)]
    assert all(each.dense is None and each.checks is None and each.attention == "dense" for each in dense)
    shorter = RISING.checked(window_tokens=3, floor=0.9)
    engine.set_schedule(shorter)
    assert_same(engine.generate(asked, **settings), oracle(hf, shorter, asked, **settings))
    with pytest.raises(UserError, match="started with checks of drafts, and the schedule 'rising' is without them"):
        engine.set_schedule(RISING)
    with pytest.raises(UserError, match="memory for windows of 8 tokens, the schedule .* asks for 9"):
        engine.set_schedule(RISING.checked(window_tokens=9))
    # What the user of a server calls, who cannot tell the scheduler.
    with pytest.raises(Exception, match="windows of 8 tokens, the schedule .* asks for 3"):
        engine.llm.collective_rpc("sparroll_set_schedule", args=(shorter.table(), shorter.name))


def test_an_interrupted_generate_leaves_nothing_running(engine: VLLMEngine, hf: HFEngine) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    asked, settings = prompts([5, 90]), {"max_new_tokens": 30, "seed": 1}
    with pytest.raises(KeyboardInterrupt):
        engine.generate(asked, n=4, stop_ids=[5, 9, 44], on_progress=stop, **settings)
    assert_same(engine.generate(asked, stop_ids=[], **settings), oracle(hf, CHECKED, asked, stop_ids=[], **settings))


def test_what_a_check_does_not_know_is_refused_request_by_request(engine: VLLMEngine) -> None:
    from vllm import SamplingParams

    for unknown in ({"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"min_tokens": 3}):
        with pytest.raises(Exception, match=f"does not know {next(iter(unknown))}="):
            engine.llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=4, **unknown), use_tqdm=False)


def test_what_vllm_measures_before_it_sizes_the_cache_holds_checks(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[tuple[int, int]] = []

    def noted(windows: Any, policies: Any, floor: float, top_k: int) -> Any:
        rehearsed.append((int(windows.rows_R.sum()), top_k))
        return settling.settle(windows, policies, floor, top_k)

    monkeypatch.setattr(runner, "settle", noted)
    made = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    with torch.inference_mode():
        made._dummy_sampler_run(torch.zeros(4, made.model_config.get_hidden_size()))
    # As many requests as the engine takes, each with a whole window.
    assert rehearsed == [(64, 0), (64, 1)]


def test_logits_of_drafts_that_would_fill_the_gpu_are_refused() -> None:
    runner.check_memory((64, 64, 151_936), torch.bfloat16, 140 << 30)
    with pytest.raises(UserError, match=r"would take 74.2 GiB: 2048 requests, 128 drafts a window, .* has 140 GiB"):
        runner.check_memory((2048, 128, 151_936), torch.bfloat16, 140 << 30)


def test_new_weights_check_and_draft(engine: VLLMEngine, hf: HFEngine) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in hf.model.state_dict().items()
    }
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    asked, settings = prompts([20, 120]), {"max_new_tokens": 30, "stop_ids": []}
    engine.load_weights(weights, engine.weight_version + 1)
    reference = HFEngine(MODEL, dtype=torch.float32, device="cpu")
    reference.load_weights(weights, 1)
    assert_same(engine.generate(asked, **settings), oracle(reference, CHECKED, asked, **settings))
    # The last test with this engine: its weights stay changed.


def test_small_steps_and_a_small_cache_change_no_verdict(engines: VLLMEngine, hf: HFEngine) -> None:
    engines.close()
    asked, settings = prompts([60, 170, 80, 20, 100]), {"max_new_tokens": 60, "stop_ids": []}
    wide = RISING.checked(window_tokens=16, floor=0.3)
    # Prompts come in chunks, two windows fit into a step, and the cache holds a few requests.
    small = VLLMEngine(
        MODEL,
        schedule=wide,
        dtype=torch.float32,
        max_batch=6,
        max_context_tokens=256,
        block_size=16,
        max_num_batched_tokens=40,
        num_gpu_blocks_override=40,
    )
    with small:
        assert_same(small.generate(asked[:3], **settings), oracle(hf, wide, asked[:3], **settings))
        assert small.report().preemptions == 0
        rollouts, found = small.generate(asked, n=2, **settings), small.report()
    assert found.preemptions > 0 and found.recomputed_tokens > 0
    assert found.generated_tokens == 13 * 60
    # Dense keys and values are all that a request is computed again from, so its checks go on as if nothing had been.
    for rollout, score in zip(rollouts, Scorer(hf.model).dense(rollouts), strict=True):
        torch.testing.assert_close(rollout.dense_logp, score.logp, atol=2e-4, rtol=0)
        assert (rollout.sparse_logp - rollout.dense_logp).max() <= wide.check.most_nats + 1e-4


def test_a_training_step_on_checked_rollouts_is_the_oracles(engines: VLLMEngine, tmp_path: Path) -> None:
    engines.close()
    lines = {}
    for kind in ("hf", "vllm"):
        config = short_config(
            MODEL,
            engine={"kind": kind},
            attention={"kind": "budget", "kv_budget_tokens": 64},
            check={"window_tokens": 16, "floor": 0.9},
            rollout={"samples_per_prompt": 3, "max_new_tokens": 60},
            train={"steps": 1, "prompts_per_step": 2},
        )
        train(config, tmp_path / kind)
        (lines[kind],) = (line for line in read_lines(tmp_path / kind / "metrics.jsonl") if "reward/mean" in line)
    # Drafts behind a stop id are vLLM's alone.
    assert lines["vllm"].pop("check/drafted_per_kept") >= lines["hf"].pop("check/drafted_per_kept")
    for name, value in lines["hf"].items():
        if name.startswith(("reward/", "policy/", "mismatch/", "check/", "correction/")):
            assert lines["vllm"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert lines["vllm"]["check/cut_share"] > 0
