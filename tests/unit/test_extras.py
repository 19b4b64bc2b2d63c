"""The extras of pyproject.toml say the same as the code, as each other, and as the records of what was installed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sparroll import records
from sparroll.engines.vllm import compat

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {(required := Requirement(text)).name: required for text in PROJECT["dependencies"]}


def extra(name: str) -> dict[str, Requirement]:
    return {(required := Requirement(text)).name: required for text in PROJECT["optional-dependencies"][name]}


def recorded(name: str, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = records.read(ROOT / "benchmarks" / "results" / f"{name}.json", kind)["results"]
    return found


def resolution(extra: str) -> dict[str, Any]:
    (row,) = [each for each in recorded("extras-resolution", "extras-resolution") if each["extra"] == extra]
    return row


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


def test_our_tests_pass_with_the_least_transformers_that_is_allowed_and_with_those_of_every_trainer() -> None:
    rows = recorded("transformers-versions-cpu", "transformers-versions")
    ran = [Version(row["transformers"]) for row in rows]
    (least,) = [each.version for each in CORE["transformers"].specifier if each.operator == ">="]
    assert ran == sorted(ran) and ran[0] == Version(least)
    assert all(CORE["transformers"].specifier.contains(version) for version in ran)
    assert not CORE["transformers"].specifier.contains("5.6.0")
    for row in rows:
        assert (row["failed"], row["skipped"]) == (0, 0) and row["passed"] > 190
        assert {"tests.equivalence.test_hf_engine", "tests.integration.test_train"} <= row["files"].keys()
    # prime-rl, SkyRL, what sparroll[verl] and sparroll[trl] come to, and OpenRLHF.
    found = {str(version) for version in ran}
    assert {"5.6.2", "5.8.0", "5.15.0"} <= found
    assert {resolution(name)["versions"]["transformers"] for name in ("verl", "trl")} <= found


@pytest.mark.parametrize("name", ["verl", "trl"])
def test_the_extra_resolves_to_versions_that_all_packages_bear(name: str) -> None:
    found = resolution(name)
    assert found["broken"] == [] and len(found["versions"]) > 100
    versions = {package: Version(version) for package, version in found["versions"].items()}
    for required in [*CORE.values(), *extra(name).values()]:
        chosen = versions.get(required.name.lower())
        assert chosen is not None and required.specifier.contains(chosen), (
            f"{required}, not {chosen}: pyproject.toml has changed, run benchmarks/extras_resolution.py again"
        )


def test_verls_own_bound_on_transformers_is_the_one_that_decides() -> None:
    asked = {(each := Requirement(text)).name: each.specifier for text in resolution("verl")["asks"]["verl"]}
    assert asked["transformers"].contains("5.10.4") and not asked["transformers"].contains("5.11.0")
    assert CORE["transformers"].specifier.contains("5.11.0")


def test_beside_verl_verdicts_come_from_the_same_math_verify_with_the_antlr_of_hydra() -> None:
    ours, theirs = extra("math")["math-verify"], extra("verl")["math-verify"]
    assert pinned(ours) == pinned(theirs)
    assert (ours.extras, theirs.extras) == ({"antlr4-13-2"}, {"antlr4-9-3"})
    # Without this, `[math,verl]` would install a hydra-core that verl cannot use.
    assert not extra("verl")["hydra-core"].specifier.contains("0.11.3")


def test_verl_and_trl_are_never_asked_for_together() -> None:
    assert all(not {"verl", "trl"} <= extra(name).keys() for name in PROJECT["optional-dependencies"])
