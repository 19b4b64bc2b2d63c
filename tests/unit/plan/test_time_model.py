"""The fitted time model, on steps made by a known rule and on vLLM's measured ones."""

import json
import math

import pytest

from sparroll.errors import UserError
from sparroll.plan.model_shape import model_shape
from sparroll.plan.speedup import plan
from sparroll.plan.time_model import MeasuredStep, fit_time_model, measure_steps, time_model_here
from sparroll.schedule import Schedule

KV_BYTES = 28 * 2 * 8 * 128 * 2


def test_a_planted_model_is_found_again():
    cells = [(1, 1e6, 0), (1, 4e6, 0), (4, 4e6, 0), (4, 1.6e7, 2), (8, 1e6, 2)]
    steps = [MeasuredStep(0.01 + 0.001 * b + r / 2e8 + 0.0005 * s, b, r, s) for b, r, s in cells]
    model = fit_time_model(steps)
    assert model.fixed_seconds == pytest.approx(0.01)
    assert model.request_seconds == pytest.approx(0.001)
    assert model.cache_bytes_per_second == pytest.approx(2e8)
    assert model.sparse_layer_seconds == pytest.approx(0.0005)
    assert model.worst_relative_error < 1e-9
    assert model.seconds(2, 2e6, 1) == pytest.approx(0.01 + 0.002 + 0.01 + 0.0005)


def test_measured_decode_steps_of_qwen3_1_7b_on_an_h200():
    # vLLM 0.26, dense: milliseconds at batch x context.
    measured = {(32, 1000): 2.96, (32, 15_000): 15.1, (32, 30_000): 28.8, (8, 30_000): 8.5}
    steps = [MeasuredStep(ms / 1e3, b, b * c * KV_BYTES) for (b, c), ms in measured.items()]
    model = fit_time_model(steps)
    assert 3.8e12 < model.cache_bytes_per_second < 4.4e12
    assert model.worst_relative_error < 0.05
    assert any("sparse layers" in note for note in model.notes)


def test_terms_that_cannot_be_told_apart_are_named():
    model = fit_time_model([MeasuredStep(0.01 + read / 1e8, 4, read) for read in (1e6, 2e6, 5e6)])
    assert model.request_seconds == 0
    assert model.fixed_seconds == pytest.approx(0.01)
    assert [note.split(" cost of ")[1].split(" apart")[0] for note in model.notes] == ["sparse layers", "requests"]


def test_no_term_is_ever_negative():
    model = fit_time_model([MeasuredStep(1.0 - read / 1e8, 1, read) for read in (1e6, 2e6, 5e6)])
    assert math.isinf(model.cache_bytes_per_second)
    assert json.loads(json.dumps(model.table()))["cache_bytes_per_second"] is None


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([MeasuredStep(1, 1, 1), MeasuredStep(1, 1, 2)], "at least 3 measured steps, got 2"),
        ([MeasuredStep(1, 1, 5)] * 3, "read the same number of bytes"),
        ([MeasuredStep(0, 1, 1), MeasuredStep(1, 1, 2), MeasuredStep(1, 1, 3)], "must be positive"),
        ([MeasuredStep(1, 1, 1), MeasuredStep(1, 1, 2), MeasuredStep(1, 1, 3, 0, 4)], r"caches with \[2, 4\] bytes"),
    ],
)
def test_too_little_to_fit_is_refused(steps, message):
    with pytest.raises(UserError, match=message):
        fit_time_model(steps)


def test_a_plan_counts_the_bytes_that_the_timed_steps_had():
    """Steps of a cache in fp32 predict themselves."""
    shape = model_shape("Qwen3-1.7B")
    read = lambda batch, context: batch * context * 2 * shape.kv_width * 4  # noqa: E731
    cells = [(1, 512), (1, 4096), (4, 512), (4, 4096)]
    model = fit_time_model([MeasuredStep(0.1 + read(*cell) / 1e10, cell[0], read(*cell), 0, 4) for cell in cells])
    asked = {"lengths": 4096, "batch": 4, "time_model": model, "force_schedule": True}
    found = plan(shape, 512, **asked)
    assert found.dense.seconds == pytest.approx(0.1 + read(4, 4096) / 1e10, rel=1e-6)
    assert any(line.startswith("4 bytes per weight and per cached number") for line in found.assumptions)
    with pytest.raises(UserError, match="timed with 4 bytes per cached number, not 2"):
        plan(shape, 512, element_bytes=2, **asked)
    with pytest.raises(UserError, match="timed with 4 bytes per cached number, not 2"):
        time_model_here("tiny-reasoner", Schedule.fixed(64, dense_layers=()), 2)


def test_decode_steps_of_a_real_engine_are_timed():
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sparroll.engines import HFEngine
    from sparroll.schedule import Schedule

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(0)
    engine = HFEngine(Qwen3ForCausalLM(config).eval(), schedule=Schedule.fixed(64, dense_layers=(0,)))
    steps = measure_steps(
        engine, model_shape(config), contexts=(32, 256), batches=(2,), element_bytes=4, new_tokens=4, repeats=1
    )
    assert [step.batch for step in steps] == [2, 2]
    assert [step.sparse_layers for step in steps] == [0, 2]
    token_bytes = 2 * 2 * 16 * 4
    # Contexts 33..36 are read whole by all three layers; beyond the budget two layers read 64 tokens and the index.
    assert steps[0].cache_bytes_read == 2 * 3 * token_bytes * 34.5
    assert steps[1].cache_bytes_read > 2 * token_bytes * (258.5 + 2 * 50)
    assert steps[1].cache_bytes_read < 2 * token_bytes * (258.5 + 2 * (64 + 258.5 / 32))


def test_steps_of_a_schedule_with_a_check_are_timed_without_it(monkeypatch):
    timed = []

    def measured(engine, shape, element_bytes):
        timed.append(engine.schedule)
        return [MeasuredStep(0.01 + read / 1e8, 4, read) for read in (1e6, 2e6)]

    monkeypatch.setattr("sparroll.plan.time_model.measure_steps", measured)
    schedule = Schedule.fixed(64)
    time_model_here("tiny-reasoner", schedule.checked(16))
    assert timed[0] is None and timed[1].steps == schedule.steps and timed[1].check is None
