"""One measurement: which rollouts it takes, which estimator it applies, what it says was read."""

import json

import pytest
import torch

from sparroll.attention.selectors import QuantizedMean
from sparroll.calibrate import measure
from sparroll.calibrate.measure import MeasureSettings, Study, read_share
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.types import Rollout

from .fakes import CEILING, FIXED, FakeEngine, FakeScorer, study


def test_a_faithful_measurement_generates_with_its_schedule_and_follows_the_law():
    bench = study()
    got = bench.measure(FIXED)
    assert bench.engine.generated == [("fixed-128", 0)]
    rows = {row.from_context_tokens: row for row in got.tail().rows}
    # Jitter is +-0.01 around the law; at 300..400 the law is .97 - .1 * (context/128 - 1), so .757 at 400.
    assert rows[0].quantile_value == pytest.approx(CEILING - 0.009, abs=0.002)
    assert 0.757 - 0.011 < rows[300].quantile_value < 0.79
    assert got.kv_read_share == bench.engine.report().kv_read_share < 0.51
    assert (got.mode, got.seed, got.name) == ("faithful", 0, "fixed-128")


def test_a_replay_reads_one_set_of_dense_rollouts_again():
    bench = study(mode="replay")
    first, second = bench.measure(FIXED), bench.measure(Schedule.fixed(256, dense_layers=(0,)))
    assert bench.engine.generated == [(None, 0)]
    assert bench.scorer.calls == ["dense", "fixed-128", "fixed-256"]
    assert first.tail().overall.quantile_value < second.tail().overall.quantile_value
    assert first.kv_read_share == read_share(bench.rollouts, FIXED, 4)
    assert first.kv_read_share < second.kv_read_share < 1


def test_the_ceiling_is_dense_against_dense():
    bench = study()
    got = bench.ceiling()
    assert bench.engine.generated == [(None, 0)]
    assert got.schedule is None
    assert got.kv_read_share == 1
    assert got.tail().overall.quantile_value == pytest.approx(CEILING - 0.009, abs=0.002)


def test_a_seed_of_its_own_gives_fresh_rollouts():
    bench = study()
    bench.measure(FIXED, seed=7)
    assert bench.engine.generated == [("fixed-128", 7)]


def test_the_engine_gets_its_schedule_back_even_when_it_breaks():
    bench = study()
    before = Schedule.fixed(64, dense_layers=())
    bench.engine.set_schedule(before)
    bench.measure(FIXED)
    assert bench.engine.schedule is before
    bench.engine.fail = True
    with pytest.raises(RuntimeError):
        bench.measure(FIXED)
    assert bench.engine.schedule is before


def test_exact_reads_the_engines_own_distributions_and_a_replay_the_scorers():
    for mode, calls in (("faithful", ["exact"]), ("replay", ["exact replay"])):
        bench = study(mode=mode, estimator="exact")
        assert bench.measure(FIXED).tail().estimator == "exact"
        assert bench.scorer.calls == calls
    bench = study(mode="replay", estimator="exact")
    # The ceiling is of the engine, in both modes.
    assert bench.ceiling().tail().overall.quantile_value == pytest.approx(CEILING - 0.009, abs=0.002)
    assert bench.scorer.calls == ["exact"] and all(rollout.top_k is None for rollout in bench.rollouts)


def test_exact_takes_as_many_prompts_at_a_time_as_fit_and_draws_what_one_call_would(monkeypatch):
    whole = study(estimator="exact")
    expected = whole.measure(FIXED)
    per_prompt = 4 * 400 * 3 * 12
    monkeypatch.setattr(measure, "WHOLE_BYTES", 2 * per_prompt + 1)
    parts = study(estimator="exact")
    found = parts.measure(FIXED)
    assert len(parts.engine.generated) == 3 and len(whole.engine.generated) == 1
    assert found.tail().table() == expected.tail().table()
    monkeypatch.setattr(measure, "WHOLE_BYTES", per_prompt - 1)
    with pytest.raises(
        UserError, match=r"(?s)4 responses of 400 tokens over 3 ids.*hint: use the estimator top_k_lower"
    ):
        study(estimator="exact").ceiling()


def test_exact_needs_rollouts_of_its_own():
    bench = Study(FakeEngine(), FakeScorer(), [[1] * 20], study(estimator="exact").settings, study().dense_rollouts())
    with pytest.raises(UserError, match="which the given rollouts do not hold"):
        bench.ceiling()


@pytest.mark.parametrize("mode", ["faithful", "replay"])
def test_estimators_are_ordered_where_they_must_be(mode):
    # The fake's lists hold all mass, so both bounds are the acceptance; the sampled token always is token 0.
    values = {
        name: study(mode=mode, estimator=name).measure(FIXED).tail().overall.mean
        for name in ("top_k_lower", "top_k_upper", "exact")
    }
    assert values["top_k_lower"] == pytest.approx(values["top_k_upper"], abs=1e-6)
    assert values["top_k_lower"] == pytest.approx(values["exact"], abs=1e-6)


def test_replay_swaps_the_roles_of_the_sampled_estimator():
    # Tokens were drawn from the dense policy (probability 1), so min(1, q/p) is the acceptance itself.
    sampled = study(mode="replay", estimator="sampled").measure(FIXED).tail().overall.mean
    exact = study(mode="replay", estimator="exact").measure(FIXED).tail().overall.mean
    assert sampled == pytest.approx(exact, abs=1e-6)


def test_given_rollouts_are_not_generated_again():
    rollouts = study().dense_rollouts()
    bench = Study(FakeEngine(), FakeScorer(), [[1] * 20] * 6, study(mode="replay").settings, rollouts)
    bench.measure(FIXED)
    assert bench.engine.generated == []
    assert bench.given_rollouts


def test_rollouts_without_lists_are_refused_where_lists_are_needed():
    bare = [Rollout([1] * 20, [0] * 30, torch.zeros(30), "stop")]
    bench = Study(FakeEngine(), FakeScorer(), [[1] * 20], MeasureSettings(max_new_tokens=30), bare)
    with pytest.raises(UserError, match="top_k_lower needs the top-k lists of both sides"):
        bench.ceiling()


def test_read_share_by_hand():
    # Contexts 101..103 after a prompt of 100 (the first token comes from the prefill); budget 64 in pages of 16, the
    # last page holds 5, 6 and 7 tokens, so 64 - 11, 64 - 10 and 64 - 9 tokens are read. One of two layers is dense.
    rollout = Rollout([1] * 100, [0] * 4, torch.zeros(4), "stop")
    schedule = Schedule.fixed(64, dense_layers=(0,))
    assert read_share([rollout], schedule, 2) == pytest.approx((306 + 53 + 54 + 55) / (2 * 306))
    whole = Schedule((Step(0, 1024),), dense_layers=(0,))
    assert read_share([rollout], whole, 2) == 1


def test_progress_counts_up_to_its_total():
    seen = []
    study().measure(FIXED, on_progress=lambda *call: seen.append(call))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[0][1] == 200
    assert "rollouts with fixed-128" in seen[0][2]


def test_settings_are_plain_data():
    settings = MeasureSettings(max_new_tokens=30)
    assert MeasureSettings(**json.loads(json.dumps(settings.table()))) == settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "faithfull"}, "unknown mode 'faithfull'\nhint: did you mean 'faithful'"),
        ({"estimator": "top_k"}, "unknown estimator 'top_k'"),
        ({"samples": 0}, "samples must be a whole number of 1 or more, got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be"),
        ({"quantile": 0.0}, "quantile must be between 0 and 1"),
        ({"bin_tokens": 0}, "bin_tokens must be"),
        (
            {"bin_tokens": 16, "max_new_tokens": 32_768},
            "responses of 32,768 tokens lie in more than 1024 bins of 16 tokens\nhint: use a larger bin_tokens",
        ),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(change, message):
    with pytest.raises(UserError, match=message):
        MeasureSettings(**{"max_new_tokens": 30, **change})


def test_where_an_engine_has_one_selector_another_is_started_for_each_and_the_last_one_is_closed() -> None:
    class OneSelector(FakeEngine):
        closed = False

        def close(self) -> None:
            self.closed = True

    pages, small = Schedule.fixed(64), Schedule.fixed(64, QuantizedMean(16, bits=4))
    made = [OneSelector()]

    def restart(schedule: Schedule) -> OneSelector:
        assert made[-1].closed, "two engines do not fit beside each other"
        made.append(OneSelector())
        return made[-1]

    settings = study().settings
    with Study(made[0], FakeScorer(), [[1] * 20], settings, restart=restart, indexed=pages.selector) as bench:
        for schedule in (pages, pages.checked(16, 0.1), small, small):
            bench.measure(schedule)
        bench.measure(pages, mode="replay")
        bench.dense_rollouts()
        assert len(made) == 2 and bench.engine is made[1] and not made[1].closed
        bench.measure(pages)
    assert len(made) == 3 and all(each.closed for each in made)
    assert Study(FakeEngine(), FakeScorer(), [[1] * 20], settings).measure(small).schedule == small
