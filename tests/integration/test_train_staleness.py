"""Rollouts that are some steps old: which weights sample, which ratio takes the staleness in, and what a checkpoint
holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.train_runs import assert_same_run, lines, short_config, steps
from sparroll.engines import HFEngine
from sparroll.errors import UserError
from sparroll.train import train
from sparroll.train.staleness import PastWeights

DENSE = {"attention": {"kind": "dense"}, "evaluate": {"prompts": 0}}


def run(model: str, out: Path, *, steps: int = 4, **train_section: object) -> Path:
    train(short_config(model, **DENSE, train={"steps": steps, **train_section}), out)
    return out


@pytest.fixture(scope="module")
def stale(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(model, tmp_path_factory.mktemp("stale") / "run", rollouts_behind_steps=2)


@pytest.fixture(scope="module")
def separate(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("separate") / "run"
    return run(model, out, steps=3, rollouts_behind_steps=2, dense_of="sampler")


def test_the_first_steps_have_fewer_steps_before_them(stale: Path) -> None:
    assert [step["staleness/steps_behind"] for step in steps(stale)] == [0, 1, 2, 2]


def test_the_first_step_is_that_of_a_run_without_staleness(model: str, stale: Path, tmp_path: Path) -> None:
    first, fresh = steps(stale)[0], steps(run(model, tmp_path / "fresh", steps=1))[0]
    assert fresh == {name: value for name, value in first.items() if not name.startswith("staleness/")}


def test_dense_rollouts_of_older_weights_differ_from_the_policy_by_their_staleness_alone(stale: Path) -> None:
    for step in steps(stale):
        # With dense rollouts sparse and dense are one policy, up to the two passes' rounding.
        assert step["staleness/kl_sparse_to_dense"] == pytest.approx(0, abs=1e-5)
        assert step["staleness/kl_sparse_to_now"] == pytest.approx(step["staleness/kl_dense_to_now"], abs=1e-5)
    # Lists of 20 of 28 words do not hold all of the probability, so even equal policies stay below 1.
    accepted = "staleness/acceptance_mean_{}".format
    moved = [step[accepted("sparse_to_dense")] - step[accepted("dense_to_now")] for step in steps(stale)]
    assert abs(moved[0]) < 1e-4 < 1e-3 < moved[2]
    assert moved[1] < moved[2]


def test_the_differences_of_the_pairs_add_up(model: str, tmp_path: Path) -> None:
    config = short_config(model, evaluate={"prompts": 0}, train={"steps": 2, "rollouts_behind_steps": 1})
    train(config, tmp_path / "run")
    last = steps(tmp_path / "run")[-1]
    both = last["staleness/kl_sparse_to_dense"] + last["staleness/kl_dense_to_now"]
    assert last["staleness/kl_sparse_to_dense"] > 1e-3
    assert last["staleness/kl_sparse_to_now"] == pytest.approx(both, abs=1e-6)


def test_the_correction_or_the_clipped_ratio_takes_the_staleness_in(stale: Path, separate: Path) -> None:
    together, apart = steps(stale)[2], steps(separate)[2]
    assert together["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert together["mismatch/kl_sparse_to_dense"] == pytest.approx(together["staleness/kl_sparse_to_now"], abs=1e-6)
    assert abs(apart["policy/ratio_mean"] - 1) > 1e-3
    assert apart["mismatch/kl_sparse_to_dense"] == pytest.approx(0, abs=1e-5)


def test_a_run_that_was_cut_resumes_to_the_bit(model: str, stale: Path, tmp_path: Path, monkeypatch) -> None:
    config = short_config(model, **DENSE, train={"rollouts_behind_steps": 2}, checkpoint={"every_steps": 1})
    generate, left = HFEngine.generate, 3

    def cut(self: HFEngine, *args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(HFEngine, "generate", cut)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut")
    saved = tmp_path / "cut" / "checkpoints" / "latest"
    assert sorted(path.name for path in saved.glob("past-weights-*")) == [
        f"past-weights-{n}.safetensors" for n in (0, 1)
    ]
    monkeypatch.setattr(HFEngine, "generate", generate)
    train(config, tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut") == lines(stale)
    assert_same_run(tmp_path / "cut", stale)


def test_the_oldest_version_samples(model: str) -> None:
    policy = HFEngine(model).model
    past, weight = PastWeights(policy, 2), policy.model.norm.weight
    seen = []
    for value in (2.0, 3.0, 4.0):
        weight.data.fill_(value)
        past.keep()
        seen.append((past.behind, float(past.merged()["model.norm.weight"][0])))
    assert seen == [(1, 1.0), (2, 1.0), (2, 2.0)]
    assert past.scorer.model is not policy and past.merged().keys() == policy.state_dict().keys()


def test_what_does_not_fit_older_rollouts_is_refused(model: str) -> None:
    with pytest.raises(UserError, match='dense_of = "sampler" does nothing'):
        short_config(model, train={"dense_of": "sampler"})
    older = {"rollouts_behind_steps": 1}
    for section, table in (("check", {"floor": 0.1}), ("distill", {"rank": 4}), ("rollout", {"control_share": 0.25})):
        with pytest.raises(UserError, match="exclude each other"):
            short_config(model, train=older, **{section: table})
