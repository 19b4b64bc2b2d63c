"""A state goes through its files, and a run with other settings than those that it was written with is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll import Schedule
from sparroll.errors import UserError
from sparroll.integrations import saved_state
from sparroll.integrations.trl.settings import SparseRollouts, SparseSetup, TrainerFacts

STATE: dict[str, Any] = {
    "schedule": None,
    "ceiling": {"mismatch/dense_ceiling_mean": 0.5},
    "watchers": {"guard": {"steps": 3, "counts": torch.tensor([1, 2])}, "empty_steps": {}},
}
SETTINGS = {"guard": {"at_least": 0.86, "stricter": ("dense",)}, "path": Path("a"), "seed": 0}
HINT = "start anew"


def read_again(folder: Path, settings: dict[str, Any] | None) -> dict[str, Any]:
    return saved_state.read(folder, HINT, settings)


def test_a_state_comes_back_with_its_tensors_and_without_the_settings(tmp_path: Path) -> None:
    saved_state.write(tmp_path, STATE, SETTINGS)
    found = read_again(tmp_path, SETTINGS)
    counts = found["watchers"]["guard"].pop("counts")
    assert torch.equal(counts, torch.tensor([1, 2]))
    assert found == STATE | {"watchers": {"guard": {"steps": 3}, "empty_steps": {}}}


def test_a_kill_while_a_state_is_replaced_leaves_one_of_both_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    after = STATE | {"watchers": {"guard": {"steps": 4, "counts": torch.tensor([3, 4])}, "empty_steps": {}}}
    for name, steps in (("write_bytes", 3), ("write_json", 3), ("unlink", 4)):
        saved_state.write(tmp_path, STATE)
        with monkeypatch.context() as patched:
            patched.setattr(Path if name == "unlink" else saved_state.files, name, killed)
            with pytest.raises(Killed):
                saved_state.write(tmp_path, after)
        guard = read_again(tmp_path, None)["watchers"]["guard"]
        assert (guard["steps"], guard["counts"].tolist()) == (steps, [1, 2] if steps == 3 else [3, 4])
    saved_state.write(tmp_path, after)
    assert len(list(tmp_path.iterdir())) == 2, "what nothing names is gone"


def test_other_settings_are_refused_with_the_first_that_differs_both_values_and_the_way_out(tmp_path: Path) -> None:
    saved_state.write(tmp_path, STATE, SETTINGS)
    other = SETTINGS | {"guard": {"at_least": 0.9, "stricter": ("dense",)}, "seed": 1}
    with pytest.raises(UserError) as refused:
        read_again(tmp_path, other)
    assert refused.value.message == (
        f"{tmp_path} was made with guard.at_least = 0.86, and guard.at_least = 0.9 is asked for now; "
        "also different: seed"
    )
    assert refused.value.hint == "go on with the old value, or start anew"


@pytest.mark.parametrize(("was", "now"), [({}, {"seed": 1}), ({"seed": 1}, {})])
def test_a_setting_that_only_one_of_both_runs_has_is_refused(
    was: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    saved_state.write(tmp_path, STATE, was)
    with pytest.raises(UserError, match="seed = (null|1), and seed = (null|1) is asked for now"):
        read_again(tmp_path, now)


def test_the_error_uses_the_names_that_a_user_types(tmp_path: Path) -> None:
    facts = TrainerFacts("m", 8, 8, 300, 400, 1000)
    setups = [SparseSetup.of(SparseRollouts(Schedule.fixed(budget)), facts) for budget in (128, 256)]
    saved_state.write(tmp_path, STATE, setups[0].table())
    saved_state.read(tmp_path, HINT, setups[0].table())
    with pytest.raises(UserError) as refused:
        saved_state.read(tmp_path, HINT, setups[1].table(), in_their_words=setups[1].in_their_words)
    message = refused.value.message
    assert " schedule = " in message and "attention.name" not in message
    # Both schedules are long texts that begin alike.
    assert "128" in message and "256" in message


def test_without_settings_on_one_side_there_is_nothing_to_compare(tmp_path: Path) -> None:
    saved_state.write(tmp_path, STATE)
    assert "settings" not in json.loads((tmp_path / saved_state.PLAIN).read_text())
    read_again(tmp_path, SETTINGS)
    saved_state.write(tmp_path, STATE, SETTINGS)
    assert "settings" not in read_again(tmp_path, None)


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not written by a run with sparroll") as refused:
        read_again(tmp_path, SETTINGS)
    assert refused.value.hint == HINT


@pytest.mark.parametrize("damage", ["missing", "cut", "unnamed"])
def test_a_checkpoint_that_was_copied_in_part_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    saved_state.write(tmp_path, STATE, SETTINGS)
    (tensors,) = tmp_path.glob("sparroll-*.safetensors")
    if damage == "missing":
        tensors.unlink()
    elif damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:5])
    else:
        table = json.loads((tmp_path / saved_state.PLAIN).read_text())
        del table["tensors"]
        (tmp_path / saved_state.PLAIN).write_text(json.dumps(table))
    with pytest.raises(UserError, match=f"the checkpoint {tmp_path} is damaged") as refused:
        read_again(tmp_path, SETTINGS)
    assert refused.value.hint == HINT
