"""The two scripts that try what sparroll may be installed beside: versions of transformers, and the extras of verl and TRL.
They count what they say they count, and fetch nothing large."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark_scripts import benchmark
from sparroll.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def versions() -> ModuleType:
    return benchmark("transformers_versions")


@pytest.fixture(scope="module")
def extras() -> ModuleType:
    return benchmark("extras_resolution")


def test_an_error_before_a_test_counts_as_failed_and_each_file_by_itself(versions: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="x"/>'
        '<testcase classname="tests.a" name="y"><failure message="no"/></testcase>'
        '<testcase classname="tests.a" name="z"><error message="in its setup"/></testcase>'
        '<testcase classname="tests.b" name="x"><skipped message="no GPU"/></testcase>'
        '<testcase classname="" name="tests.c"><error message="not collected"/></testcase></testsuite></testsuites>'
    )
    assert versions.outcomes(report) == {
        "tests.a": {"passed": 1, "failed": 2, "skipped": 0},
        "tests.b": {"passed": 0, "failed": 0, "skipped": 1},
        "tests.c": {"passed": 0, "failed": 1, "skipped": 0},
    }


def test_transformers_chooses_its_own_packages_and_ci_those_of_everybody_else(versions: ModuleType) -> None:
    text = "# a comment\nhuggingface_hub==2.4.0\ntokenizers==0.23.3\ntorch==2.13.0\ntransformers==5.19.0\n"
    assert versions.constraints_without(text, versions.OWN) == "# a comment\ntorch==2.13.0\n"
    held = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"torch=={versions.TORCH}\n" in versions.constraints_without(held, versions.OWN)
    assert all((ROOT / name).exists() for name in versions.TESTS)


def report_of(*packages: tuple[str, str, list[str]]) -> dict[str, Any]:
    """pip's report of packages: name, version, what it asks for."""
    return {
        "environment": {"python_full_version": "3.12.1", "python_version": "3.12", "sys_platform": "linux"},
        "install": [
            {"metadata": {"name": name, "version": version, "requires_dist": wanted}}
            for name, version, wanted in packages
        ],
    }


def test_a_version_that_a_package_does_not_bear_is_found_and_other_extras_do_not_count(extras: ModuleType) -> None:
    packages = [
        ("sparroll", "0.1.0", ["torch>=2.11", 'verl==0.9.1; extra == "verl"', 'trl>=1.16; extra == "trl"']),
        ("verl", "0.9.1", ["transformers<5.11", 'vllm==0.24.0; extra == "vllm"', 'dill; python_version < "3.9"']),
        ("torch", "2.11.0", []),
    ]
    row = extras.row_of(report_of(*packages, ("Transformers", "5.10.4", [])), "verl")
    assert row["broken"] == [] and row["versions"]["transformers"] == "5.10.4" and row["python"] == "3.12.1"
    assert row["asks"]["sparroll"] == ["torch>=2.11", 'verl==0.9.1; extra == "verl"']
    assert row["asks"]["verl"] == ["transformers<5.11"]
    assert extras.row_of(report_of(*packages, ("transformers", "5.11.0", [])), "verl")["broken"] == [
        "verl: transformers<5.11"
    ]
    assert extras.row_of(report_of(*packages), "verl")["broken"] == ["verl: transformers<5.11"]


PIP = """#!{python}
print("  Downloading small-1.tar.gz (117 kB)", flush=True)
print("  Downloading torch-2.11.0.whl (915.6 MB)", flush=True)
import time
time.sleep(60)
"""


def test_a_large_file_stops_the_resolution(extras: ModuleType, tmp_path: Path) -> None:
    assert extras.megabytes("  Downloading antlr4-python3-runtime-4.9.3.tar.gz (117 kB)") == pytest.approx(0.117)
    assert extras.megabytes("Collecting torch (from sparroll)") == 0
    pip = tmp_path / "python"
    pip.write_text(PIP.format(python=sys.executable))
    pip.chmod(0o755)
    with pytest.raises(UserError, match=r"torch-2\.11\.0\.whl \(915\.6 MB\)"):
        extras.resolved(pip, "verl", tmp_path)


def test_nothing_of_this_machine_decides_what_pip_takes(extras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    assert not {"PIP_FIND_LINKS", "PIP_CONSTRAINT"} & extras.environment().keys()
