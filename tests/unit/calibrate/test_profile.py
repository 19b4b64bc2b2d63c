"""The profile: tails, fits and the ceiling as plain data, and a run on a real engine."""

import json
from copy import deepcopy

import pytest
import torch

from sparroll.attention.selectors import Quest
from sparroll.calibrate.measure import MeasureSettings, Study, read_share
from sparroll.calibrate.profile import profile
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.schedule import Schedule

from .fakes import study


def test_budgets_and_schedules_stand_side_by_side(tmp_path):
    path = Schedule.fixed(256, dense_layers=(0,)).save(tmp_path / "mine.toml")
    got = profile(study(), [64, Schedule.fixed(128, dense_layers=(0,)), path], dense_layers=(0,))
    assert [entry.measurement.name for entry in got.entries] == ["fixed-64", "fixed-128", "mine"]
    table = json.loads(json.dumps(got.table()))
    q05 = [entry["tail"]["overall"]["q05"] for entry in table["schedules"]]
    assert q05 == sorted(q05)
    assert table["dense_ceiling"]["tail"]["overall"]["q05"] > q05[-1]
    assert table["schedules"][0]["tail"]["length_correlation"] < -0.5
    assert [fit["from_context_tokens"] for fit in table["schedules"][0]["beta"]] == [None, 0, 100, 200, 300, 400]


def test_a_bin_that_cannot_be_fitted_says_why():
    got = profile(study(prompts=1, samples=2), [64], dense_layers=(0,))
    assert got.ceiling.too_little.startswith("too little for a tail: ") and " of 2 rollouts" in got.ceiling.too_little
    assert profile(study(prompts=4, samples=2), [64], dense_layers=(0,)).entries[0].too_little is None
    fits = got.entries[0].fits
    assert fits[0].beta.a > 0
    assert all(fit.beta or "Beta fit needs 20 values" in fit.why_not for fit in fits)


def test_a_profile_with_a_folder_goes_on_from_it(tmp_path):
    first = profile(study(), [64], dense_layers=(0,), out=tmp_path)
    bench = study()
    second = profile(bench, [64, 128], dense_layers=(0,), out=tmp_path)
    assert bench.engine.generated == [("fixed-128", 0)]
    assert second.entries[0].measurement.tail() == first.entries[0].measurement.tail()
    assert second.ceiling.measurement.tail() == first.ceiling.measurement.tail()
    with pytest.raises(UserError, match="was made with seed = 0, and seed = 5 is asked for now"):
        profile(study(seed=5), [64], dense_layers=(0,), out=tmp_path)


def test_progress_covers_all_parts():
    seen = []
    profile(study(), [64, 128], dense_layers=(0,), on_progress=lambda *call: seen.append(call))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {total for _, total, _ in seen} == {300}


@pytest.mark.parametrize(("schedules", "message"), [([], "nothing to profile"), ([100], "multiple of page_tokens")])
def test_what_cannot_be_profiled_is_refused_before_anything_runs(schedules, message):
    bench = study()
    with pytest.raises(UserError, match=message):
        profile(bench, schedules, dense_layers=(0,))
    with pytest.raises(UserError, match="there is no tail to measure"):
        profile(study(estimator="sampled"), [64], dense_layers=(0,))
    assert bench.engine.generated == []


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def real_study(model, **settings):
    prompts = [[3 + (7 * row + place) % 60 for place in range(40 + row)] for row in range(2)]
    defaults = {"max_new_tokens": 90, "samples": 2, "bin_tokens": 50, "replicates": 20, "top_k": 20}
    return Study(HFEngine(model), Scorer(model), prompts, MeasureSettings(**{**defaults, **settings}))


@pytest.mark.parametrize("estimator", ["top_k_lower", "exact"])
def test_a_real_engine_full_budget_is_the_ceiling_and_a_small_one_is_not(model, estimator):
    got = profile(real_study(model, estimator=estimator), [64, 256], dense_layers=(0,))
    small, full = (entry.measurement.tail().overall for entry in got.entries)
    ceiling = got.ceiling.measurement.tail().overall
    assert full.quantile_value == pytest.approx(ceiling.quantile_value, abs=1e-3)
    assert small.quantile_value < ceiling.quantile_value - 0.01
    assert got.entries[1].measurement.kv_read_share == 1
    assert got.entries[0].measurement.kv_read_share < 1


def test_exact_is_the_overlap_of_the_engines_and_the_scorers_distributions(model):
    """Not of the scorer's with itself: an engine with other weights has another ceiling."""
    ceiling = real_study(model, estimator="exact").ceiling().tail().overall
    assert ceiling.quantile_value == pytest.approx(1, abs=1e-3)
    bench = real_study(model, estimator="exact")
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    bench.engine = HFEngine(other)
    found = bench.ceiling().tail().overall
    with torch.inference_mode():
        overlaps = torch.cat([overlap(rollout, model, other) for rollout in bench.rollouts])
    assert found.mean == pytest.approx(float(overlaps.mean()), abs=1e-5)
    assert found.mean < 0.97


def overlap(rollout, model, other):
    """sum_v min(p_v, q_v) at each response token, by two forward passes."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    p, q = (each(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].softmax(-1) for each in (model, other))
    return torch.minimum(p, q).sum(-1)


def test_the_schedules_arithmetic_is_what_the_engine_reports(model):
    bench = real_study(model)
    schedule = Schedule.fixed(64, dense_layers=(0,))
    reported = bench.measure(schedule).kv_read_share
    # The same engine, asked for the rollouts themselves.
    bench.engine.set_schedule(schedule)
    rollouts = bench.engine.generate(bench.prompts, 2, max_new_tokens=90, top_k=20)
    assert read_share(rollouts, schedule, 3) == pytest.approx(reported, rel=1e-12)


def test_faithful_and_replay_agree_where_the_rollouts_are_the_same(model):
    # Acceptance of sparse rollouts, generated and replayed: one definition, two ways to the sparse side.
    bench = real_study(model)
    schedule = Schedule.fixed(64, dense_layers=(0,))
    faithful = bench.measure(schedule)
    bench.engine.set_schedule(schedule)
    rollouts = bench.engine.generate(bench.prompts, 2, max_new_tokens=90, top_k=20)
    replay = Study(bench.engine, bench.scorer, bench.prompts, bench.settings, rollouts).measure(schedule, mode="replay")
    for left, right in zip(faithful.tail().rows, replay.tail().rows, strict=True):
        assert left.tokens == right.tokens
        assert left.mean == pytest.approx(right.mean, abs=1e-4)


def test_schedules_of_one_kind_are_sampled_together_and_others_by_themselves(tmp_path):
    pages, quest = Schedule.fixed(64, dense_layers=(0,)), Schedule.fixed(64, Quest(), dense_layers=(0,))
    asked = [pages, quest, Schedule.fixed(128, dense_layers=(0,)), pages.checked(16), pages]
    alone = profile(study(), asked)
    bench = study()
    bench.engine.most_schedules, bench.engine.max_batch = 31, 1000
    found = profile(bench, asked, out=tmp_path)
    sampled = [names for names, _ in bench.engine.generated]
    assert sampled == [None, ("fixed-64", "fixed-128"), "fixed-64", "fixed-64-checked-16-0.01"]
    assert [entry.measurement.tail() for entry in found.entries] == [
        entry.measurement.tail() for entry in alone.entries
    ]
    assert [entry.measurement.schedule for entry in found.entries] == asked
    again = study()
    assert profile(again, asked, out=tmp_path).table() == found.table() and again.engine.generated == []
