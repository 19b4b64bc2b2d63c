"""The sweep: what it measures, that it resumes after a kill anywhere, and what it refuses."""

import json
import os
import signal

import pytest
import torch

from sparroll import files
from sparroll.calibrate import store
from sparroll.calibrate.allocation.wanted import Wanted
from sparroll.calibrate.effort.coarse_to_fine import Fine
from sparroll.calibrate.sweep import sweep, sweep_budget
from sparroll.errors import UserError
from sparroll.schedule import Schedule

from .fakes import study

GRID = [64, 128, 256]


def run(bench, out, budgets=GRID):
    return sweep(bench, out=out, budgets=budgets, dense_layers=(0,))


def figures(out):
    """The measured tables, by file."""
    return {
        path.name: json.loads(path.read_text())["tail"]
        for path in sorted(out.glob("*.json"))
        if path.stem != "settings"
    }


@pytest.mark.parametrize("mode", ["faithful", "replay"])
def test_every_budget_and_the_ceiling_are_measured(tmp_path, mode):
    bench = study(mode=mode)
    got = run(bench, tmp_path)
    assert got.budgets == GRID
    lows = [measurement.tail().overall.quantile_value for measurement in got.measurements]
    assert lows == sorted(lows)
    assert got.ceiling.tail().overall.quantile_value >= lows[-1]
    expected = [(None, 0)] if mode == "replay" else [(None, 0), *((f"fixed-{budget}", 0) for budget in GRID)]
    assert bench.engine.generated == expected
    assert json.loads(json.dumps(got.table()))["budgets"][0]["kv_budget_tokens"] == 64


def test_a_finished_sweep_is_not_measured_again_and_budgets_may_be_added(tmp_path):
    first = run(study(), tmp_path)
    bench = study()
    again = run(bench, tmp_path, [*GRID, 192])
    assert bench.engine.generated == [("fixed-192", 0)]
    assert again.budgets == [64, 128, 192, 256]
    assert again.measurements[0].tail() == first.measurements[0].tail()
    assert again.ceiling.tail() == first.ceiling.tail()


def mixing(max_batch=96, **settings):
    """A study whose engine decodes requests of several schedules together: of each schedule it has 24."""
    bench = study(**settings)
    bench.engine.most_schedules, bench.engine.max_batch = 31, max_batch
    return bench


def test_budgets_that_are_sampled_together_are_measured_as_each_would_be_alone(tmp_path):
    bench, budgets = mixing(), [64, 96, 112, 128, 192, 512]
    got = run(bench, tmp_path / "together", budgets)
    apart = run(study(), tmp_path / "apart", budgets)
    # Four fit into the batch, and the last one holds every context.
    fixed = [f"fixed-{budget}" for budget in budgets]
    assert bench.engine.generated == [(None, 0), (tuple(fixed[:4]), bench.engine.generated[1][1]), (fixed[4], 0)]
    assert [each.tail() for each in got.measurements] == [each.tail() for each in apart.measurements]
    assert figures(tmp_path / "together") == figures(tmp_path / "apart")
    together = [each.wall_seconds for each in got.measurements[:4]]
    assert all(together) and got.measurements[5].mode == "dense"
    shares = [[each.kv_read_share for each in found.measurements] for found in (got, apart)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4) and len(set(shares[0])) == 6


def test_an_engine_that_is_started_for_a_sweep_says_how_many_budgets_fit(tmp_path):
    """Another engine has another cache: here 2 budgets fit into the first one, and 3, or a single one, into the next."""
    budgets = [64, 96, 112, 128, 192, 224]
    for fit, expected in ((3, [3, 3]), (1, [1] * 6)):
        bench, next_engine = mixing(max_batch=50), mixing(max_batch=24 * fit).engine
        bench.restart, bench.indexed, bench.engine.close = lambda _, engine=next_engine: engine, None, lambda: None
        got = run(bench, tmp_path / str(fit), budgets)
        sizes = [len(names) if isinstance(names, tuple) else 1 for names, _ in next_engine.generated]
        assert sizes == expected and got.budgets == budgets
        assert bench.engine is next_engine


@pytest.mark.parametrize("fit", [2, 31])
def test_how_many_fit_into_a_batch_changes_no_budget_that_is_chosen(tmp_path, fit):
    fine = Fine(Wanted("time", 0.86, min_tokens=100, min_rollouts=4), 5)
    grid = [64, 80, 96, 112, 128, 160, 192, 224, 256, 320]
    bench = mixing(max_batch=24 * fit)
    found = fine.swept(bench, budgets=grid, out=tmp_path, dense_layers=(0,))
    first = bench.engine.generated[1:]
    assert len(found.budgets) == 5
    again = mixing(max_batch=24)
    assert fine.swept(again, budgets=grid, out=tmp_path, dense_layers=(0,)).budgets == found.budgets
    assert again.engine.generated == [] and first


def test_a_kill_while_budgets_are_sampled_together_costs_these_alone(tmp_path):
    bench = mixing(max_batch=50)
    run(bench, tmp_path, [64, 96])
    bench.engine.fail = True
    with pytest.raises(RuntimeError, match="the engine broke"):
        run(bench, tmp_path, [64, 96, 128, 192])
    again = mixing()
    found = run(again, tmp_path, [64, 96, 128, 192])
    assert [names for names, _ in again.engine.generated] == [("fixed-128", "fixed-192")]
    assert [each.tail() for each in found.measurements] == [
        each.tail() for each in run(study(), tmp_path / "apart", [64, 96, 128, 192]).measurements
    ]


@pytest.mark.parametrize(
    ("settings", "max_batch", "expected"),
    [
        ({}, 96, 4),
        ({}, 24, 1),
        ({}, 10, 1),
        ({}, 10_000, 31),
        ({"mode": "replay"}, 96, 1),
        ({"estimator": "exact"}, 96, 1),
    ],
)
def test_so_many_schedules_are_sampled_together_as_the_engine_and_the_study_allow(settings, max_batch, expected):
    bench, schedule = mixing(max_batch, **settings), Schedule.fixed(64, dense_layers=(0,))
    assert bench.schedules_at_once(schedule) == expected
    # Each of 24 requests may grow to 20 + 400 tokens.
    bench.engine.cache_tokens = 24 * 420 * 3 - 1
    assert bench.schedules_at_once(schedule) == min(2, expected)
    assert study(**settings).schedules_at_once(schedule) == 1 and not study(**settings).samples_together


@pytest.mark.parametrize("mode", ["faithful", "replay"])
def test_a_kill_at_any_write_loses_nothing_that_was_written(tmp_path, mode):
    straight = tmp_path / "straight"
    run(study(mode=mode), straight)
    killed = tmp_path / "killed"
    kills = 0
    for write in range(1, 100):
        if _killed_at_write(write, killed, mode):
            kills += 1
            assert not _differing(killed, straight)
        else:
            break
    # Settings, rollouts, and two files for the ceiling and each budget; every other kill leaves one write behind.
    assert kills >= 5
    assert figures(killed) == figures(straight)
    assert not list(killed.glob(".*"))
    for path in straight.glob("*.safetensors"):
        assert (killed / path.name).read_bytes() == path.read_bytes()


def test_a_kill_while_a_measurement_is_replaced_leaves_none_and_not_a_mixture(tmp_path, monkeypatch):
    kept = store.Store(tmp_path, {})
    found = [study().measure(Schedule.fixed(budget, dense_layers=(0,)), mode="faithful") for budget in (64, 256)]
    kept.save("verify-0", found[0])
    assert kept.load("verify-0").tail() == found[0].tail()
    monkeypatch.setattr(files, "write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept.save("verify-0", found[1])
    assert kept.load("verify-0") is None


def test_damaged_rollouts_are_named_in_the_hint(tmp_path):
    run(study(mode="replay"), tmp_path, [64])
    (tmp_path / "rollouts.safetensors").write_text("{")
    with pytest.raises(UserError, match=r"(?s)hint: delete .*rollouts\.safetensors to measure it again"):
        run(study(mode="replay"), tmp_path, [64, 96])


def _differing(part, whole):
    complete = figures(whole)
    return [name for name, table in figures(part).items() if table != complete[name]]


def _killed_at_write(write, out, mode):
    """Run the sweep in a child that dies by SIGKILL right before (odd) or after (even) its write-th rename."""
    child = os.fork()
    if child == 0:
        replace, count = os.replace, [0]

        def dying(source, target):
            count[0] += 1
            if count[0] == 1 + write // 2 and write % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if count[0] == 1 + write // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = dying
        try:
            torch.set_num_threads(1)
            run(study(mode=mode), out)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def test_a_resumed_replay_reads_the_saved_rollouts(tmp_path):
    run(study(mode="replay"), tmp_path, [64])
    bench = study(mode="replay")
    run(bench, tmp_path, [64, 128])
    assert bench.engine.generated == []
    assert bench.scorer.calls == ["dense", "fixed-128"]


def test_budgets_measured_one_by_one_are_those_of_the_sweep(tmp_path):
    apart, straight = tmp_path / "apart", tmp_path / "straight"
    for budget in GRID:
        sweep_budget(study(), budget, out=apart, dense_layers=(0,))
    bench = study()
    got = run(bench, apart)
    # Only the ceiling was left to do.
    assert bench.engine.generated == [(None, 0)]
    assert [each.tail() for each in got.measurements] == [each.tail() for each in run(study(), straight).measurements]
    with pytest.raises(UserError, match="only in faithful mode"):
        sweep_budget(study(mode="replay"), 64, out=tmp_path / "replay", dense_layers=(0,))


def test_another_process_may_be_writing_while_a_budget_is_measured(tmp_path):
    run(study(), tmp_path, [64])
    unfinished = tmp_path / ".dense.json.abc123_x.tmp"
    unfinished.write_text("{")
    sweep_budget(study(), 128, out=tmp_path, dense_layers=(0,))
    assert unfinished.exists()
    run(study(), tmp_path, [64])
    assert not unfinished.exists()


def test_only_what_a_kill_left_is_removed_and_only_from_a_folder_of_this_sweep(tmp_path):
    notes, unfinished = tmp_path / ".my-notes.tmp", tmp_path / ".dense.json.abc123_x.tmp"
    notes.write_text("mine"), unfinished.write_text("{")
    (tmp_path / ".cache.json.abc123_x.tmp").mkdir()
    settings = tmp_path / "settings.json"
    settings.write_text('{"of_another_command": 1}')
    with pytest.raises(UserError, match="was made by another command"):
        store.Store(tmp_path, {"a": 1})
    assert unfinished.exists()
    settings.unlink()
    store.Store(tmp_path, {"a": 1})
    assert notes.read_text() == "mine" and (tmp_path / ".cache.json.abc123_x.tmp").is_dir() and not unfinished.exists()


def test_a_budget_that_holds_every_context_is_dense_by_construction(tmp_path):
    bench = study()
    # Prompts of 20 and 400 new tokens: the last one is drawn at a context of 419.
    got = run(bench, tmp_path, [128, 416, 432])
    assert [name for name, _ in bench.engine.generated] == [None, "fixed-128", "fixed-416"]
    assert got.measurements[2].mode == "dense"
    assert got.measurements[2].tail() == got.ceiling.tail()
    assert run(study(), tmp_path, [128, 416, 432]).measurements[2].mode == "dense"


def test_the_fit_meets_the_target_in_every_bin(tmp_path):
    fitted = run(study(prompts=12, samples=8), tmp_path, [64, 96, 128, 192, 256]).fit(0.86, min_tokens=100)
    assert [found.from_context_tokens for found in fitted.bins] == [0, 100, 200, 300, 400]
    assert all(found.measured["low"] >= 0.86 for found in fitted.bins if found.measured)
    budgets = [found.kv_budget_tokens for found in fitted.bins]
    assert budgets == sorted(budgets)
    # By the law, .86 + .01 of jitter at the end of 200..300 needs 300 / 2 = 150 tokens.
    assert 128 <= budgets[2] <= 160
    assert fitted.schedule.target["at_least"] == 0.86
    assert fitted.bins[0].dense_ceiling["value"] > 0.95


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"temperature": 0.7}, "temperature = 1.0, and temperature = 0.7 is asked for now"),
        ({"seed": 1}, "seed = 0, and seed = 1 is"),
        ({"prompts": 7}, "other prompts than are asked for now"),
        ({"mode": "replay"}, 'mode = "faithful", and mode = "replay" is'),
    ],
)
def test_other_settings_do_not_resume(tmp_path, change, key):
    run(study(), tmp_path, [64])
    with pytest.raises(UserError, match=f"was made with {key}") as error:
        run(study(**change), tmp_path, [64])
    assert "another folder with --out" in error.value.hint


def test_the_same_weights_in_another_precision_do_not_resume(tmp_path):
    first, second = study(), study()
    first.scorer.model.bfloat16()
    second.scorer.model.load_state_dict(first.scorer.model.state_dict())
    assert store.weights_digest(first.scorer.model) == store.weights_digest(second.scorer.model)
    run(first, tmp_path, [64])
    with pytest.raises(UserError, match=r'was made with dtype = \["bfloat16"\], and dtype = \["float32"\]'):
        run(second, tmp_path, [64])
    run(first, tmp_path, [64])


def test_other_weights_or_dense_layers_do_not_resume(tmp_path):
    run(study(), tmp_path, [64])
    bench = study()
    with torch.no_grad():
        bench.scorer.model.weight += 1e-3
    with pytest.raises(UserError, match="was made with weights = "):
        run(bench, tmp_path, [64])
    with pytest.raises(UserError, match=r"was made with dense_layers = \[0\], and dense_layers = \[0, 1\]"):
        sweep(study(), out=tmp_path, budgets=[64])


@pytest.mark.parametrize("name", ["budget-000064.safetensors", "budget-000064.json", "settings.json"])
def test_a_damaged_file_is_named(tmp_path, name):
    run(study(), tmp_path, [64])
    (tmp_path / name).write_text("{")
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        run(study(), tmp_path, [64])


def test_measurements_without_settings_are_not_taken_over(tmp_path):
    run(study(), tmp_path, [64])
    (tmp_path / "settings.json").unlink()
    with pytest.raises(UserError, match="holds results but no settings"):
        run(study(), tmp_path, [64])


@pytest.mark.parametrize(
    ("budgets", "settings", "message"),
    [
        ([], {}, "budget grid is empty"),
        ([64, 100], {}, r"must be a multiple of page_tokens \(16\), got 100"),
        ([64], {"estimator": "sampled"}, "cannot be fitted to the estimator 'sampled'"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(tmp_path, budgets, settings, message):
    bench = study(**settings)
    with pytest.raises(UserError, match=message):
        run(bench, tmp_path / "out", budgets)
    assert bench.engine.generated == []
    assert not (tmp_path / "out").exists()


def test_rollouts_come_back_from_their_file_as_they_were():
    rollouts = study().dense_rollouts()
    for before, after in zip(rollouts, store.rollouts_from(store.rollout_tensors(rollouts)), strict=True):
        assert before.prompt_ids == after.prompt_ids
        assert before.response_ids == after.response_ids
        assert torch.equal(before.sparse_logp, after.sparse_logp)
        assert torch.equal(before.top_k.ids, after.top_k.ids)
        assert torch.equal(before.top_k.logp, after.top_k.logp)
        for name in ("prompt_index", "sample_index", "seed", "finish_reason", "weight_version"):
            assert getattr(before, name) == getattr(after, name)


def test_progress_goes_over_all_cells_to_the_end(tmp_path):
    seen = []
    sweep(study(), out=tmp_path, budgets=GRID, dense_layers=(0,), on_progress=lambda *call: seen.append(call))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][:2] == (400, 400)
    assert any("fixed-128" in text for _, _, text in seen)


@pytest.mark.parametrize("mode", ["faithful", "replay"])
def test_the_kl_is_measured_with_every_budget_and_comes_back_from_the_files(tmp_path, mode):
    first = sweep(study(mode=mode), out=tmp_path, budgets=GRID, dense_layers=(0,))
    again = sweep(study(mode=mode), out=tmp_path, budgets=GRID, dense_layers=(0,))
    assert [each.divergence for each in again.measurements] == [each.divergence for each in first.measurements]
    means = [each.divergence.overall().kl for each in (*first.measurements, first.ceiling)]
    assert means == sorted(means, reverse=True) and means[-1] > 0
    # The fake's other token, which the dense policy has 30 nats below, has what the acceptance leaves; a replay takes its
    # share from the dense list, where it is not, so it has at most the mass that the list leaves.
    missing = 1 - first.measurements[0].tail().overall.mean
    assert first.measurements[0].divergence.overall().over(5) == pytest.approx(missing, abs=1e-4)
    for cell in first.cells():
        assert cell.divergence is not None and cell.divergence.tokens == cell.tokens


def test_measurements_without_the_kl_are_refused_with_what_to_do(tmp_path):
    sweep(study(), out=tmp_path, budgets=[64], dense_layers=(0,))
    path = tmp_path / "settings.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    bench = study()
    with pytest.raises(UserError, match="holds measurements of format 1, and this sparroll reads format 2") as found:
        sweep(bench, out=tmp_path, budgets=[64], dense_layers=(0,))
    assert "another folder" in found.value.hint and bench.engine.generated == []


def test_an_estimator_without_lists_has_no_kl(tmp_path):
    found = sweep(study(estimator="exact", mode="replay"), out=tmp_path, budgets=[64], dense_layers=(0,))
    assert found.measurements[0].divergence is None and found.cells()[0].divergence is None
