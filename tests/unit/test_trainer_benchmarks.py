"""benchmarks/other_trainers.py: a loss that is not ours shows as a difference, and code is known by commit or version."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from benchmark_scripts import benchmark
from sparroll.errors import UserError


@pytest.fixture(scope="module")
def world() -> ModuleType:
    return benchmark("trainer_world")


def clipped_at(most: float, least: float = 0.0) -> Callable[[Tensor, Any], Tensor]:
    """A trainer's policy loss with clamped weights, summed over tokens, as they are all written."""

    def theirs(now_BT: Tensor, world: Any) -> Tensor:
        weight_BT = (world.dense_BT - world.sparse_BT).exp().clamp(least, most)
        ratio_BT = (now_BT - world.dense_BT).exp()
        return -(weight_BT * ratio_BT * world.advantage_B[:, None] * world.mask_BT).sum()

    return theirs


def test_the_same_correction_has_no_difference_and_another_bound_has(world: ModuleType) -> None:
    assert world.compared("tis", {}, clipped_at(2.0))["difference"] < 1e-6
    assert world.compared("tis", {}, clipped_at(5.0), weight_max=5.0)["difference"] < 1e-6
    # Too low a bound, a lower end, and weights where tokens should be dropped.
    assert world.compared("tis", {}, clipped_at(5.0))["difference"] > 0.1
    assert world.compared("tis", {}, clipped_at(2.0, 0.5))["difference"] > 0.1
    assert world.compared("icepop", {}, clipped_at(2.0))["difference"] > 0.1


@pytest.mark.parametrize("name", ["icepop", "mis", "geometric", "veto", "sparse_rl"])
def test_the_made_up_responses_give_every_correction_something_to_drop_and_to_keep(
    name: str, world: ModuleType
) -> None:
    gradient, kept_share = world.our_gradient(name, world.World.made())
    assert 0.1 < kept_share < 0.99 and 0 < int((gradient != 0).sum()) < gradient.numel()


def test_methods_are_read_without_importing_the_file(world: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "worker.py"
    file.write_text("import nothing_of_that_name\nclass A:\n    def __init__(self): ...\n    def b(self): ...\n"
                    "    async def c(self): ...\n    def a(self): ...\nclass B:\n    def d(self): ...\n")  # fmt: skip
    assert world.methods_of(file, ["A"]) == ["a", "b", "c"]
    assert world.methods_of(file, ["A", "B"]) == ["a", "b", "c", "d"]


def test_code_is_known_by_the_commit_of_a_checkout_or_the_version_of_a_wheel(tmp_path: Path) -> None:
    read_at = benchmark("other_trainers").read_at
    checkout, wheel = tmp_path / "checkout", tmp_path / "wheel" / "package-1.2.data" / "purelib"
    git = ["git", "-C", str(checkout), "-c", "user.name=n", "-c", "user.email=e"]
    checkout.mkdir()
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    told = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert read_at(checkout) == told
    wheel.mkdir(parents=True)
    with pytest.raises(UserError, match="neither a checkout nor an unpacked wheel"):
        read_at(wheel)
    about = tmp_path / "wheel" / "package-1.2.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: package\nVersion: 1.2\n")
    assert read_at(wheel) == "1.2"
