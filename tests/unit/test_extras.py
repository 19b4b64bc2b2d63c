"""The extras of pyproject.toml say the same as the code and as each other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sparroll.engines.vllm import compat

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {(required := Requirement(text)).name: required for text in PROJECT["dependencies"]}


def extra(name: str) -> dict[str, Requirement]:
    return {(required := Requirement(text)).name: required for text in PROJECT["optional-dependencies"][name]}


def pinned(required: Requirement) -> Version:
    """The one version that is allowed."""
    (only,) = required.specifier
    assert only.operator == "==", required
    return Version(only.version)


@pytest.mark.parametrize("name", ["verl", "trl"])
def test_a_frameworks_vllm_is_one_that_the_plugin_runs_on_a_gpu(name: str) -> None:
    version = pinned(extra(name)["vllm"])
    compat.check_version((version.major, version.minor), "cuda")
    assert extra("vllm")["vllm"].specifier.contains(version)


def test_verls_pins_fit_the_core_and_its_versions_are_those_that_ran() -> None:
    assert CORE["torch"].specifier.contains(pinned(extra("verl")["torch"]))
    assert pinned(extra("verl")["verl"]) == Version("0.9.1")
    # verl 0.9.1 wants transformers below 5.11, vLLM 0.26 takes 5.9 and prime-rl 0.8 takes 5.6.2.
    assert all(CORE["transformers"].specifier.contains(version) for version in ("5.6.1", "5.6.2", "5.9.0", "5.10.4"))
    assert not CORE["transformers"].specifier.contains("5.6.0")


def test_beside_verl_verdicts_come_from_the_same_math_verify_with_the_antlr_of_hydra() -> None:
    ours, theirs = extra("math")["math-verify"], extra("verl")["math-verify"]
    assert pinned(ours) == pinned(theirs)
    assert (ours.extras, theirs.extras) == ({"antlr4-13-2"}, {"antlr4-9-3"})
    # Without this, `[math,verl]` would install a hydra-core that verl cannot use.
    assert not extra("verl")["hydra-core"].specifier.contains("0.11.3")


def test_verl_and_trl_are_never_asked_for_together() -> None:
    assert all(not {"verl", "trl"} <= extra(name).keys() for name in PROJECT["optional-dependencies"])
