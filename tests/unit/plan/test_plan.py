"""Predictions: the published rooflines, and plans small enough to compute by hand."""

import json
import math
from dataclasses import replace

import pytest

from sparroll.cli.plan import text
from sparroll.errors import UserError
from sparroll.plan.hardware import Hardware
from sparroll.plan.model_shape import ModelShape
from sparroll.plan.speedup import plan
from sparroll.plan.time_model import MeasuredStep, TimeModel, fit_time_model
from sparroll.schedule import Schedule, Step

TOY = ModelShape("toy", parameters=1_000_000, layers=4, query_heads=4, kv_heads=2, head_dim=8, vocabulary=100)
SLOW = Hardware("slow", flops_per_second=1e12, bandwidth_bytes_per_second=1e6, memory_bytes=1e8)


@pytest.mark.parametrize(("size", "expected"), [("1.7B", 3.40), ("4B", 3.00), ("8B", 2.62), ("14B", 1.88)])
def test_published_rooflines_are_reproduced(size, expected):
    got = plan(f"Qwen/Qwen3-{size}", f"qwen3-{size.lower()}-0.86", hardware="H200", lengths="0-32768")
    assert got.speedup == pytest.approx(expected, rel=0.005)
    assert got.dense.bound == got.sparse.bound == "memory"


def test_a_memory_bound_step_by_hand():
    got = plan(TOY, 512, hardware=SLOW, lengths=1024, batch=3)
    # K and V of a token in a layer: 2 * 2 heads * 8 * 2 bytes = 64. Two dense layers read 1024 tokens, two sparse ones
    # 512 and an index of 1024/32 = 32.
    weights = 2e6 / 1e6
    assert got.dense.seconds == pytest.approx(weights + 3 * 4 * 1024 * 64 / 1e6)
    assert got.sparse.kv_seconds == pytest.approx(3 * (2 * 1024 + 2 * 512) * 64 / 1e6)
    assert got.sparse.index_seconds == pytest.approx(3 * 2 * 32 * 64 / 1e6)
    assert got.sparse.seconds == pytest.approx(weights + got.sparse.kv_seconds + got.sparse.index_seconds)
    assert got.kv_read_share == 0.75
    assert got.dense.tokens_per_second == pytest.approx(3 / got.dense.seconds)
    assert got.speedup == pytest.approx(got.dense.seconds / got.sparse.seconds)


def test_layers_of_other_groups_read_their_own_budgets():
    grouped = Schedule((Step(0, (512, 256)),), dense_layers=(0,), layer_groups=((1, 3), (2,)))
    got = plan(TOY, grouped, hardware=SLOW, lengths=1024, batch=3)
    # By hand as above: the dense layer, two of 512 tokens, one of 256; and 32 of the index in each of the three.
    assert got.sparse.kv_seconds == pytest.approx(3 * (1024 + 2 * 512 + 256) * 64 / 1e6)
    assert got.sparse.index_seconds == pytest.approx(3 * 3 * 32 * 64 / 1e6)
    assert got.kv_read_share == (1024 + 2 * 512 + 256) / 4096
    assert got.by_length[0].kv_budget_tokens == (512, 256) and got.table()["by_length"][0]["kv_budget_tokens"]
    assert "512 / 256" in "\n".join(text(got))
    # At 512 tokens only the second group selects, and a fitted model adds the cost of one layer.
    model = TimeModel(1.0, 0.0, 1e12, 10.0, 0.0, 3)
    step = plan(TOY, grouped, hardware=SLOW, lengths=512, batch=1, time_model=model).sparse
    assert step.seconds == pytest.approx(11.0)
    equal = replace(grouped, steps=(Step(0, 512),))
    alone = plan(TOY, Schedule.fixed(512, dense_layers=(0,)), hardware=SLOW, lengths="0-4096", batch=3)
    assert plan(TOY, equal, hardware=SLOW, lengths="0-4096", batch=3).sparse == alone.sparse
    with pytest.raises(UserError, match="layer_groups leaves out the layers"):
        plan(TOY, replace(grouped, layer_groups=((1,), (2,))), hardware=SLOW, lengths=512, batch=1)


def test_an_incomplete_last_unit_is_a_whole_one_of_the_budget():
    got = plan(TOY, 512, hardware=SLOW, lengths=1025, batch=3)
    # 1025 tokens are 65 units of 16; 32 of them are read, and the last holds one token.
    assert got.sparse.kv_seconds == pytest.approx(3 * (2 * 1025 + 2 * (512 - 15)) * 64 / 1e6)
    between = plan(TOY, 512, hardware=SLOW, lengths="1024.4", batch=3)
    assert between.sparse.kv_seconds == pytest.approx(3 * (2 * 1024.4 + 2 * (512 - 15.6)) * 64 / 1e6)


def test_a_context_within_its_budget_is_dense():
    got = plan(TOY, 512, hardware=SLOW, lengths=512, batch=3)
    assert got.speedup == 1
    assert got.sparse.index_seconds == 0
    assert got.kv_read_share == 1


def test_a_compute_bound_step_does_not_gain():
    fast_memory = Hardware("x", flops_per_second=1e9, bandwidth_bytes_per_second=1e15, memory_bytes=1e8)
    got = plan(TOY, 512, hardware=fast_memory, lengths=1024, batch=3)
    assert got.dense.bound == "compute"
    flops = 3 * (2 * 1_000_000 + 4 * 4 * 8 * 4 * 1024)
    assert got.dense.seconds == pytest.approx(flops / 1e9)


def test_the_batch_is_what_memory_holds():
    got = plan(TOY, 512, hardware=SLOW, lengths=[1000, 3000], reserved_bytes=1e6)
    # 0.85 * 1e8 - 2e6 - 1e6 = 82e6 bytes; a request of 2,000 tokens takes 4 * 64 * 2000 = 512,000.
    assert got.batch == 160
    assert got.batch_is == "what memory holds"
    with pytest.raises(UserError, match="leaves no room for a request of 2000 tokens"):
        plan(TOY, 512, hardware=SLOW, lengths=[1000, 3000], reserved_bytes=8.4e7)


def test_a_given_batch_that_memory_cannot_hold_is_remarked():
    # 2e6 bytes of weights, and 4 * 64 * 2000 = 512,000 of cache for each request: 191 of them fit into 1e8.
    fits, larger = (plan(TOY, 512, hardware=SLOW, lengths=2000, batch=batch) for batch in (191, 192))
    assert not any("cannot hold" in line for line in fits.assumptions)
    assert [line for line in larger.assumptions if "cannot hold" in line] == [
        "slow cannot hold this batch: with 0.0 GB of weights and 0.1 GB of cache, 192 requests at the mean context need "
        "more than its 0.1 GB; without a given batch the plan has as many as fit"
    ]
    huge = plan("Qwen3-1.7B", "qwen3-1.7b-0.86", lengths=32768, batch=5000)
    assert "with 3.4 GB of weights and 18,790.5 GB of cache, 5,000 requests" in "\n".join(text(huge))


def test_overhead_per_layer_dampens_the_speedup():
    bare = plan(TOY, 512, hardware=SLOW, lengths=4096, batch=3)
    damped = plan(TOY, 512, hardware=SLOW, lengths=4096, batch=3, overhead_seconds_per_layer=1.0)
    assert damped.dense.seconds == pytest.approx(bare.dense.seconds + 4)
    assert 1 < damped.speedup < bare.speedup


def test_rollouts_of_one_length_are_decoded_at_uniform_contexts():
    rollouts = plan(TOY, 512, hardware=SLOW, lengths=8192, lengths_are="rollouts", batch=8)
    contexts = plan(TOY, 512, hardware=SLOW, lengths="0-8192", batch=8)
    assert rollouts.speedup == pytest.approx(contexts.speedup, rel=1e-9)


def test_a_fitted_time_model_replaces_the_roofline():
    truth = {"fixed": 0.01, "request": 0.001, "bandwidth": 2e8, "layer": 0.0005}

    def seconds(batch, read, layers):
        return truth["fixed"] + truth["request"] * batch + read / truth["bandwidth"] + truth["layer"] * layers

    cells = [(1, 1e6, 0), (1, 4e6, 0), (4, 4e6, 0), (4, 1.6e7, 2), (8, 1e6, 2)]
    model = fit_time_model([MeasuredStep(seconds(*cell), *cell) for cell in cells])
    got = plan(TOY, 512, hardware=SLOW, lengths=1024, batch=3, time_model=model)
    assert got.dense.bound == "measured"
    assert got.dense.seconds == pytest.approx(seconds(3, 3 * 4 * 1024 * 64, 0), rel=1e-6)
    read = 3 * 64 * (2 * 1024 + 2 * 512 + 2 * 32)
    assert got.sparse.seconds == pytest.approx(seconds(3, read, 2), rel=1e-6)


def test_by_length_follows_the_schedule():
    got = plan("Qwen3-1.7B", "qwen3-1.7b-0.86", lengths="0-32768")
    assert [row.context_tokens for row in got.by_length][-1] == 32764
    assert [row.kv_budget_tokens for row in got.by_length][:2] == [1536, 2048]
    assert all(
        later.speedup > earlier.speedup for earlier, later in zip(got.by_length, got.by_length[1:], strict=False)
    )


def test_a_plan_is_plain_data():
    table = json.loads(json.dumps(plan(TOY, 512, hardware=SLOW, lengths=1024, batch=3).table()))
    assert table["speedup"] > 1
    assert table["model"]["layers"] == 4
    assert table["sparse"]["bound"] == "memory"


def test_a_control_group_reads_all_of_its_context():
    got = plan(TOY, 512, hardware=SLOW, lengths=1024, batch=4, control_share=0.25)
    assert got.control is not None
    # Of four requests one is dense; both steps are bound by memory.
    extra = (got.dense.kv_seconds - got.sparse.kv_seconds - got.sparse.index_seconds) / 4
    assert got.control.step.seconds == pytest.approx(got.sparse.seconds + extra, rel=1e-9)
    assert got.control.lost_share == pytest.approx(extra / (got.sparse.seconds + extra), rel=1e-9)
    assert got.table()["control"]["share"] == 0.25
    without = plan(TOY, 512, hardware=SLOW, lengths=1024, batch=4)
    assert without.control is None and "control" not in without.table()
    assert without.sparse == got.sparse


def test_a_schedule_of_another_model_is_refused_unless_forced():
    with pytest.raises(UserError, match=r"was made for Qwen/Qwen3-4B, not for Qwen3-1\.7B"):
        plan("Qwen3-1.7B", "qwen3-4b-0.86")
    assert plan("Qwen3-1.7B", "qwen3-4b-0.86", force_schedule=True).speedup > 1


def test_dense_layers_must_exist():
    with pytest.raises(UserError, match=r"layers 0\.\.3"):
        plan(TOY, Schedule.fixed(512, dense_layers=(0, 7)), hardware=SLOW, lengths=1024, batch=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch must be a whole number from 1 to 1,073,741,824, got 0"),
        ({"batch": math.nan}, "batch must be a whole number from 1 to 1,073,741,824, got nan"),
        ({"batch": 10**400}, "batch must be a whole number from 1 to 1,073,741,824, got 1000"),
        ({"control_share": 1.0}, "control_share must be from 0 to below 1, got 1.0"),
        ({"lengths_are": "responses"}, "lengths_are must be 'contexts' or 'rollouts'"),
        ({"hardware": "V100"}, "unknown hardware 'V100'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        plan(TOY, 512, **{"hardware": SLOW, "lengths": 1024, "batch": 3, **arguments})
