from __future__ import annotations

import pytest
import torch

from sparroll.mismatch import TailStatistics, acceptance_of
from sparroll.mismatch.threads import one_thread
from sparroll.types import Rollout, TokenScores


@pytest.fixture
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_torch_has_one_thread_inside_and_its_own_number_afterwards(three_threads: None) -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="inside"), one_thread():
        raise ValueError("inside")
    assert torch.get_num_threads() == 3


def test_what_is_measured_of_a_rollout_takes_one_thread(three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from inside: torch.bincount counts a rollout's tokens, and an estimator makes their acceptance."""
    seen: list[int] = []
    bincount, minimum = torch.bincount, torch.minimum

    def counted(*arguments: object, **named: object) -> object:
        seen.append(torch.get_num_threads())
        return bincount(*arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "bincount", counted)
    TailStatistics().add(torch.full((4,), 0.5), torch.arange(4), "a")
    assert seen == [1]
    rollout = Rollout([1], [2, 3], torch.tensor([-1.0, -2.0]), "length")
    monkeypatch.setattr(
        "sparroll.mismatch.of_rollouts.acceptance_sampled",
        lambda dense, sparse: seen.append(torch.get_num_threads()) or minimum(dense, sparse),
    )
    acceptance_of([rollout], [TokenScores(torch.tensor([-1.0, -2.0]))], "sampled")
    assert seen == [1, 1]
    assert torch.get_num_threads() == 3
