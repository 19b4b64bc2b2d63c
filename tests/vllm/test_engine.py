"""HFEngine and VLLMEngine answer alike: the same tests run against both, and VLLMEngine against HFEngine's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparroll.attention.selectors import PageMean
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.engines.vllm import requests
from sparroll.engines.vllm.launch import installed_version
from sparroll.engines.vllm.rescoring import InForce, Rescorer, RescoringSettings, measure, measure_async
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics, acceptance_of
from sparroll.schedule import Schedule, Step
from sparroll.types import Rollout

MODEL = "tiny-reasoner"
CONTEXT_TOKENS = 4096
SPARSE = Schedule(
    steps=(Step(0, 64), Step(150, 80)),
    selector=PageMean(page_tokens=16, first_tokens=16, recent_tokens=32),
    name="rising",
)
GROUPED = replace(
    SPARSE, steps=(Step(0, (96, 64)), Step(150, (128, 80))), layer_groups=((2, 5), (3, 4)), name="grouped"
)
KINDS = ["hf", "vllm"]


def make(kind: str) -> Any:
    if kind == "hf":
        return HFEngine(MODEL, dtype=torch.float32, device="cpu", max_batch=8)
    if installed_version() is None:
        pytest.skip("needs vllm; `make test-vllm` installs it")
    from sparroll.engines.vllm.engine import VLLMEngine

    return VLLMEngine(MODEL, dtype=torch.float32, max_batch=8)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Any]]:
    """Made when first asked for: vLLM takes seconds to start."""
    made: dict[str, Any] = {}
    yield made
    if "vllm" in made:
        made["vllm"].close()


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, engines: dict[str, Any]) -> Iterator[Any]:
    """Dense, with the model's own weights, and its report empty."""
    kind = request.param
    if kind not in engines:
        engines[kind] = make(kind)
    engine = engines[kind]
    engine.set_schedule(None)
    engine.reset_report()
    yield engine
    if getattr(engine, "changed", False):
        engine.load_weights(original(), engine.weight_version + 1)
        engine.changed = False


def oracle() -> HFEngine:
    return HFEngine(MODEL, dtype=torch.float32, device="cpu", max_batch=8)


def original() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in oracle().model.state_dict().items()}


def perturbed(seed: int = 0) -> dict[str, Tensor]:
    """Other weights that give other responses; the tied head stays tied."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator) for name, tensor in original().items()
    }
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 130, (length,), generator=generator).tolist() for length in lengths]


def change(engine: Any, weights: Any) -> None:
    engine.load_weights(weights, engine.weight_version + 1)
    engine.changed = True


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_greedy_tokens_and_their_log_probs_are_the_oracles(engine: Any, schedule: Schedule | None) -> None:
    asked = prompts([5, 100, 37, 170, 16, 64])
    engine.set_schedule(schedule)
    rollouts = engine.generate(asked, max_new_tokens=60, temperature=0, stop_ids=[])
    reference = oracle()
    reference.set_schedule(schedule)
    for rollout, expected in zip(
        rollouts, reference.generate(asked, max_new_tokens=60, temperature=0, stop_ids=[]), strict=True
    ):
        assert rollout.response_ids == expected.response_ids
        torch.testing.assert_close(rollout.sparse_logp, expected.sparse_logp, atol=1e-4, rtol=0)
        assert (rollout.attention, rollout.finish_reason) == (expected.attention, "length")
        assert rollout.kv_read_share == pytest.approx(expected.kv_read_share)
        assert rollout.schedule_name == expected.schedule_name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_those_of_the_sampling_policy(engine: Any, temperature: float) -> None:
    rollouts = engine.generate(prompts([12, 40, 90]), n=2, max_new_tokens=40, temperature=temperature, top_k=5)
    for rollout, score in zip(
        rollouts, Scorer(oracle().model).dense(rollouts, temperature=temperature, top_k=5), strict=True
    ):
        torch.testing.assert_close(rollout.sparse_logp, score.logp, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(rollout.top_k.logp, score.top_k.logp, atol=1e-4, rtol=1e-5)
        assert rollout.top_k.ids.dtype == torch.int64
        clear = (rollout.top_k.logp.diff(dim=-1) < -1e-3).all(-1)
        assert clear.any() and torch.equal(rollout.top_k.ids[clear], score.top_k.ids[clear])


def test_top_p_cuts_and_renormalises_alike(engine: Any) -> None:
    settings: dict[str, Any] = dict(temperature=0.8, top_p=0.7, top_k=5)
    rollouts = engine.generate(prompts([12, 40, 90]), n=2, max_new_tokens=40, stop_ids=[], **settings)
    for rollout, score in zip(rollouts, Scorer(oracle().model).dense(rollouts, **settings), strict=True):
        torch.testing.assert_close(rollout.sparse_logp, score.logp, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(rollout.top_k.logp, score.top_k.logp, atol=1e-4, rtol=1e-5)
    assert any((rollout.top_k.logp == -torch.inf).any() for rollout in rollouts)
    with pytest.raises(UserError, match="top_p must be above 0 and at most 1, got 2"):
        engine.generate([[5]], max_new_tokens=2, top_p=2)


def test_sparse_samples_replay_to_the_same_log_probs(engine: Any) -> None:
    engine.set_schedule(SPARSE)
    rollouts = engine.generate(prompts([30, 120]), n=2, max_new_tokens=60, seed=4, stop_ids=[])
    assert {rollout.attention for rollout in rollouts} == {"sparse"}
    for rollout, score in zip(rollouts, Scorer(oracle().model).sparse(rollouts, SPARSE), strict=True):
        torch.testing.assert_close(rollout.sparse_logp, score.logp, atol=1e-4, rtol=1e-5)


def test_n_samples_come_in_order_and_differ(engine: Any) -> None:
    rollouts = engine.generate(prompts([9, 14]), n=3, max_new_tokens=20, seed=1, stop_ids=[])
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(p, s) for p in range(2) for s in range(3)]
    assert len({tuple(r.response_ids) for r in rollouts}) == 6
    assert len({r.seed for r in rollouts}) == 6
    assert all(len(r.response_ids) == 20 and r.finish_reason == "length" for r in rollouts)


def test_a_seed_gives_the_same_rollouts_alone_and_together(engine: Any) -> None:
    asked = prompts([9, 33, 70])
    together = engine.generate(asked, n=2, max_new_tokens=30, seed=5)
    again = engine.generate(asked, n=2, max_new_tokens=30, seed=5)
    other = engine.generate(asked, n=2, max_new_tokens=30, seed=6)
    seeds = [rollout.seed for rollout in together]
    alone = [engine.generate([asked[i // 2]], max_new_tokens=30, seed=[seed])[0] for i, seed in enumerate(seeds)]
    ids = [rollout.response_ids for rollout in together]
    assert [rollout.response_ids for rollout in again] == ids
    assert [rollout.response_ids for rollout in alone] == ids
    assert [rollout.response_ids for rollout in other] != ids


def test_a_stop_id_ends_a_response_and_is_its_last_token(engine: Any) -> None:
    stops = [5, 44]
    rollouts = engine.generate(prompts([9, 14, 23]), n=4, max_new_tokens=50, seed=2, stop_ids=stops)
    assert "stop" in {rollout.finish_reason for rollout in rollouts}
    for rollout in rollouts:
        assert (rollout.response_ids[-1] in stops) == (rollout.finish_reason == "stop")
        assert not set(rollout.response_ids[:-1]) & set(stops)
        assert len(rollout.sparse_logp) == len(rollout.response_ids)
    for rollout, score in zip(rollouts, Scorer(oracle().model).dense(rollouts), strict=True):
        torch.testing.assert_close(rollout.sparse_logp, score.logp, atol=1e-4, rtol=0)


def test_the_models_end_ids_stop_unless_others_are_given(engine: Any) -> None:
    expected = oracle().generate(prompts([9, 14, 23, 31]), max_new_tokens=60, temperature=0)
    rollouts = engine.generate(prompts([9, 14, 23, 31]), max_new_tokens=60, temperature=0)
    assert [(r.response_ids, r.finish_reason) for r in rollouts] == [
        (r.response_ids, r.finish_reason) for r in expected
    ]


def test_new_weights_give_the_new_models_responses(engine: Any) -> None:
    asked, weights = prompts([20, 60, 110]), perturbed()
    before = engine.generate(asked, max_new_tokens=40, temperature=0, stop_ids=[])
    version = engine.weight_version + 1
    change(engine, weights)
    reference = oracle()
    reference.load_weights(weights, 1)
    for schedule in (None, SPARSE):
        engine.set_schedule(schedule)
        reference.set_schedule(schedule)
        rollouts = engine.generate(asked, max_new_tokens=40, temperature=0, stop_ids=[])
        expected = reference.generate(asked, max_new_tokens=40, temperature=0, stop_ids=[])
        assert [r.response_ids for r in rollouts] == [r.response_ids for r in expected]
        assert [r.response_ids for r in rollouts] != [r.response_ids for r in before]
        for rollout, other in zip(rollouts, expected, strict=True):
            torch.testing.assert_close(rollout.sparse_logp, other.sparse_logp, atol=1e-4, rtol=0)
            assert rollout.weight_version == version


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_the_exact_acceptance_measures_the_engine(engine: Any, schedule: Schedule | None) -> None:
    asked, scorer = prompts([100, 130]), Scorer(oracle().model)
    engine.set_schedule(schedule)
    settings: dict[str, Any] = dict(max_new_tokens=20, stop_ids=[], top_k=engine.vocabulary)
    rollouts = engine.generate(asked, **settings)
    found = torch.cat(scorer.exact_acceptance(rollouts))
    # A replay shares nothing with the engine but the tokens.
    expected = torch.ones(40) if schedule is None else torch.cat(scorer.exact_replay(rollouts, schedule))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    change(engine, perturbed())
    assert torch.cat(scorer.exact_acceptance(engine.generate(asked, **settings))).mean() < found.mean() - 0.01
    with pytest.raises(UserError, match="a rollout holds 5"):
        scorer.exact_acceptance(engine.generate(asked, max_new_tokens=3, top_k=5))


def test_a_module_is_loaded_as_its_tensors_are(engine: Any) -> None:
    module = oracle().model
    module.load_state_dict(perturbed(3))
    change(engine, module)
    expected = HFEngine(module).generate(prompts([20]), max_new_tokens=30, temperature=0)[0]
    assert engine.generate(prompts([20]), max_new_tokens=30, temperature=0)[0].response_ids == expected.response_ids


def test_weights_must_fit_and_their_version_must_rise(engine: Any) -> None:
    weights = original()
    with pytest.raises(UserError, match="must rise above"):
        engine.load_weights(weights, engine.weight_version)
    version = engine.weight_version
    missing = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    wider = weights | {"model.norm.weight": torch.ones(193)}
    unknown = weights | {"model.extra.weight": torch.ones(3)}
    for wrong in (missing, wider, unknown):
        with pytest.raises(UserError, match="do not fit the engine's model"):
            engine.load_weights(wrong, version + 1)
    assert engine.weight_version == version
    engine.generate(prompts([5]), max_new_tokens=2)


def test_nan_weights_are_an_error_not_a_token(engine: Any) -> None:
    change(engine, original() | {"model.norm.weight": torch.full((192,), torch.nan)})
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="NaN logits"):
            engine.generate(prompts([5]), max_new_tokens=4, temperature=temperature)


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ([], {}, "there are no prompts"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [136]], {}, "prompt 1 has token ids outside 0..135"),
        (
            [[5] * CONTEXT_TOKENS],
            {},
            f"prompt 0 has {CONTEXT_TOKENS} tokens, the model's context holds {CONTEXT_TOKENS}",
        ),
        ([[5] * (CONTEXT_TOKENS - 4)], {}, "set max_new_tokens to at most 4"),
        ("text", {}, "prompts must be a list"),
        ([[1]], {"n": 0}, "n=0"),
        ([[1]], {"temperature": -1.0}, "the temperature must be 0 or from 0.001 up, and finite, got -1.0"),
        ([[1]], {"seed": [1, 2]}, "a list of seeds needs one per request, 1 in all, got 2"),
    ],
)
def test_bad_requests_are_the_same_errors(engine: Any, given: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine.generate(given, **{"max_new_tokens": 8, **settings})


def test_a_prompt_may_fill_the_context_to_the_last_token(engine: Any) -> None:
    (rollout,) = engine.generate([[5] * (CONTEXT_TOKENS - 3)], max_new_tokens=3, temperature=0, stop_ids=[])
    assert len(rollout.response_ids) == 3


def test_strings_are_tokenised(engine: Any) -> None:
    text = engine.tokenizer.decode([5, 9, 20])
    (rollout,) = engine.generate([text], max_new_tokens=2)
    assert rollout.prompt_ids == list(engine.tokenizer(text)["input_ids"])


def test_the_schedule_switches_and_back(engine: Any) -> None:
    asked = prompts([150, 90])
    settings: dict[str, Any] = dict(max_new_tokens=50, temperature=0, stop_ids=[])
    dense = engine.generate(asked, **settings)
    engine.set_schedule(SPARSE)
    sparse = engine.generate(asked, **settings)
    engine.set_schedule(Schedule.fixed(1024))
    full = engine.generate(asked, **settings)
    engine.set_schedule(None)
    again = engine.generate(asked, **settings)
    assert [r.response_ids for r in full] == [r.response_ids for r in again] == [r.response_ids for r in dense]
    assert any(not torch.allclose(s.sparse_logp, d.sparse_logp) for s, d in zip(sparse, dense, strict=True))
    assert [each[0].attention for each in (dense, sparse, full, again)] == ["dense", "sparse", "dense", "dense"]


def test_groups_of_layers_with_equal_budgets_are_no_groups(engine: Any) -> None:
    asked, settings = prompts([150, 90]), dict(max_new_tokens=50, temperature=0, stop_ids=[])
    engine.set_schedule(SPARSE)
    engine.reset_report()
    plain, report = engine.generate(asked, **settings), engine.report()
    # The running engine goes from no groups to two, four and three.
    of_four = (Step(0, (64, 64, 64, 64)), Step(150, (80, 80, 80, 80)))
    for groups, steps in (
        (((2, 3), (4, 5)), SPARSE.steps),
        (((5,), (3,), (2,), (4,)), of_four),
        (((2,), (3, 5), (4,)), SPARSE.steps),
    ):
        engine.set_schedule(replace(SPARSE, steps=steps, layer_groups=groups))
        engine.reset_report()
        for one, other in zip(engine.generate(asked, **settings), plain, strict=True):
            assert one.response_ids == other.response_ids and torch.equal(one.sparse_logp, other.sparse_logp)
            assert one.kv_read_share == other.kv_read_share
        assert engine.report().layers == report.layers
    with pytest.raises(UserError, match=r"layer_groups leaves out the layers \[4\]"):
        engine.set_schedule(replace(GROUPED, layer_groups=((2, 5), (3,))))


@pytest.mark.parametrize("schedule", [SPARSE, GROUPED], ids=lambda schedule: schedule.name)
def test_the_report_counts_what_ran(engine: Any, schedule: Schedule) -> None:
    engine.set_schedule(schedule)
    engine.reset_report()
    settings: dict[str, Any] = dict(max_new_tokens=70, temperature=0, stop_ids=[])
    rollouts = engine.generate(prompts([20, 100]), **settings)
    reference = oracle()
    reference.set_schedule(schedule)
    reference.reset_report()
    for one, other in zip(rollouts, reference.generate(prompts([20, 100]), **settings), strict=True):
        assert one.response_ids == other.response_ids
        torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=1e-4, rtol=0)
        assert one.kv_read_share == pytest.approx(other.kv_read_share)
    found, expected = engine.report(), reference.report()
    assert found.schedule_name == schedule.name and found.weight_version == engine.weight_version
    assert found.generated_tokens == expected.generated_tokens == 140
    assert found.prefill_tokens == expected.prefill_tokens
    assert found.kv_read_share == pytest.approx(expected.kv_read_share)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert (one.dense_steps, one.sparse_steps) == (other.dense_steps, other.sparse_steps)
        assert (one.context_tokens, one.read_tokens) == (other.context_tokens, other.read_tokens)
    engine.reset_report()
    assert engine.report().generated_tokens == 0 and engine.report().kv_read_share == 1.0


def test_progress_counts_every_rollout(engine: Any) -> None:
    seen: list[tuple[int, int]] = []
    engine.generate(
        prompts([5, 9]), n=2, max_new_tokens=6, stop_ids=[], on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (4, 4) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_rollouts_carry_their_text_without_special_tokens(engine: Any) -> None:
    (rollout,) = engine.generate(prompts([5]), max_new_tokens=6, stop_ids=[])
    if engine.tokenizer is None:
        assert rollout.text is None
    else:
        assert rollout.text == engine.tokenizer.decode(rollout.response_ids, skip_special_tokens=True)


def test_an_interrupted_generate_leaves_nothing_running(engine: Any) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    asked = prompts([5, 9, 12])
    with pytest.raises(KeyboardInterrupt):
        engine.generate(asked, n=4, max_new_tokens=40, seed=1, stop_ids=[5], on_progress=stop)
    fresh = oracle().generate(asked, max_new_tokens=10, temperature=0)
    rollouts = engine.generate(asked, max_new_tokens=10, temperature=0)
    assert [r.response_ids for r in rollouts] == [r.response_ids for r in fresh]


@pytest.fixture
def vllm_engine(engines: dict[str, Any]) -> Iterator[Any]:
    """The vLLM engine under the sparse schedule."""
    if "vllm" not in engines:
        engines["vllm"] = make("vllm")
    engine = engines["vllm"]
    engine.set_schedule(SPARSE)
    engine.reset_report()
    yield engine
    engine.set_schedule(None)


def sampled(engine: Any, **settings: Any) -> list[Rollout]:
    asked = prompts([12, 100, 170, 16])
    return engine.generate(asked, n=2, max_new_tokens=60, stop_ids=[], **{"top_k": 20} | settings)


def test_re_scoring_is_the_trainers_forward_and_runs_no_sparse_step(vllm_engine: Any) -> None:
    rollouts = sampled(vllm_engine)
    before = vllm_engine.report()
    scores = vllm_engine.dense_scores(rollouts, top_k=20)
    after = vllm_engine.report()
    assert [layer.sparse_steps for layer in after.layers] == [layer.sparse_steps for layer in before.layers]
    assert before.layers[-1].sparse_steps > 0 and after.generated_tokens == before.generated_tokens
    assert after.prefill_tokens - before.prefill_tokens == sum(
        len(r.prompt_ids) + len(r.response_ids) for r in rollouts
    )
    expected = Scorer(oracle().model).dense(rollouts, top_k=20)
    for score, reference in zip(scores, expected, strict=True):
        # In other batches HFEngine's own model differs by 4e-5 here.
        torch.testing.assert_close(score.logp, reference.logp, atol=1e-4, rtol=0)
        torch.testing.assert_close(score.top_k.logp.exp(), reference.top_k.logp.exp(), atol=1e-5, rtol=0)
    ours, theirs = acceptance_of(rollouts, scores, "top_k_lower"), acceptance_of(rollouts, expected, "top_k_lower")
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=1e-5, rtol=0)
    assert torch.cat(ours).min() < 0.9, "nothing was sparse enough to measure"
    bare = vllm_engine.dense_scores(rollouts[:1])[0]
    torch.testing.assert_close(bare.logp, scores[0].logp, atol=1e-4, rtol=0)
    assert bare.top_k is None


@pytest.mark.parametrize("way", [{"temperature": 0.7}, {"top_p": 0.9}])
def test_re_scoring_at_another_temperature_is_exact_from_whole_lists_and_else_refused(
    vllm_engine: Any, way: dict[str, float]
) -> None:
    rollouts = sampled(vllm_engine, **way)[:2]
    with pytest.raises(UserError, match="at temperature 1 without top_p") as refused:
        vllm_engine.dense_scores(rollouts, top_k=20, **way)
    assert f"top_k={vllm_engine.vocabulary}" in str(refused.value.hint)
    scores = vllm_engine.dense_scores(rollouts, top_k=vllm_engine.vocabulary, **way)
    for score, reference in zip(
        scores, Scorer(oracle().model).dense(rollouts, top_k=vllm_engine.vocabulary, **way), strict=True
    ):
        torch.testing.assert_close(score.logp, reference.logp, atol=1e-4, rtol=0)
        torch.testing.assert_close(score.top_k.logp.exp(), reference.top_k.logp.exp(), atol=1e-5, rtol=0)


def test_prompts_of_more_tokens_than_a_step_takes_are_sampled_with_their_seeds(vllm_engine: Any) -> None:
    """vLLM would cut the last one of the first step, and could not go on with its seed on a CPU."""
    asked = prompts([900] * 6)
    together = vllm_engine.generate(asked, max_new_tokens=3, stop_ids=[])
    alone = vllm_engine.generate(asked[-1:], max_new_tokens=3, stop_ids=[], seed=[together[-1].seed])
    assert [len(each.response_ids) for each in together] == [3] * 6
    assert alone[0].response_ids == together[-1].response_ids


def test_a_full_context_is_re_scored_but_for_its_last_token(vllm_engine: Any) -> None:
    asked = prompts([CONTEXT_TOKENS - 20])
    rollouts = vllm_engine.generate(asked, max_new_tokens=20, stop_ids=[], top_k=20)
    rescorer = Rescorer(RescoringSettings())
    rescorer.in_force = InForce(vllm_engine.weight_version)
    rescorer.hold(rollouts[0], "full", 0, rescorer.in_force)
    rescorer.hold(rollouts[0], "of other weights", 0, InForce(vllm_engine.weight_version + 1))
    measure(rescorer, vllm_engine)
    assert len(rollouts[0].response_ids) == 20 and rescorer.counts.measured_tokens == 19
    assert rescorer.counts.weights_changed == 1 and rescorer.counts.read_tokens == CONTEXT_TOKENS - 1


def test_a_server_measures_what_an_engine_in_this_process_measures(vllm_engine: Any) -> None:
    rollouts = sampled(vllm_engine)
    in_force = InForce(vllm_engine.weight_version)
    here, there = (Rescorer(RescoringSettings(probe_rollouts=5), in_force) for _ in range(2))
    for rescorer in (here, there):
        for number, rollout in enumerate(rollouts):
            rescorer.hold(rollout, str(number), rollout.prompt_index, in_force)
    measure(here, vllm_engine)

    async def generate(prompt: dict[str, Any], sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        for output, _, _ in requests.run(vllm_engine.llm, [prompt], [sampling_params], dict, None):
            yield output

    asyncio.run(measure_async(there, generate, vllm_engine.vocabulary, CONTEXT_TOKENS))
    (mine, counts), (theirs, also) = here.take(), there.take()
    assert (counts.held, counts.measured, counts.not_chosen) == (also.held, also.measured, also.not_chosen) == (8, 5, 3)
    assert counts.measured_tokens == 5 * 60 and counts.seconds > counts.host_seconds > 0
    one, two = (TailStatistics.from_state(state).table("top_k_lower").overall for state in (mine, theirs))
    assert one.tokens == two.tokens == 300 and one.q05 == pytest.approx(two.q05, abs=1e-3)


def test_rollouts_of_other_weights_are_not_scored(vllm_engine: Any) -> None:
    rollouts = [replace(rollout, weight_version=vllm_engine.weight_version + 1) for rollout in sampled(vllm_engine)[:1]]
    with pytest.raises(UserError, match="cannot be scored with version"):
        vllm_engine.dense_scores(rollouts)
