"""Do the tests of models, engines and training pass with every version of transformers that somebody is bound to? Minutes a
version on one CPU core.

    python benchmarks/transformers_versions.py --out benchmarks/results/transformers-versions-cpu.json

Each version gets an environment of its own in the work folder: torch as in CI, that transformers, sparroll with its
dependencies and its extra `data` under CI's constraints, and nothing else. `pip check` must find no conflict there. Then
TESTS run in one process with one thread. The record has, for each version, how many tests passed, failed and were skipped,
file by file, how long they took, and the versions of what transformers brings along. An environment that is there already
is used again; tests always run. Ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.utils import canonicalize_name
from packaging.version import Version

from sparroll import records
from sparroll.errors import UserError

KIND = "transformers-versions"
ROOT = Path(__file__).parents[1]
NEWEST = "newest"
VERSIONS = {
    "5.6.1": "the least that pyproject.toml allows",
    "5.6.2": "prime-rl 0.8",
    "5.8.0": "SkyRL, main branch of August 2026",
    "5.9.0": "verl 0.9.1 with its own extra for vLLM",
    "5.10.4": "sparroll[verl]",
    "5.15.0": "OpenRLHF 0.11.2",
    NEWEST: "what pip takes, in sparroll[trl] too",
}
"""Version -> who is bound to it."""
TESTS = ("tests/equivalence/test_hf_engine.py", "tests/unit/engines", "tests/integration/test_train.py")
"""HFEngine against the oracle and against transformers' own generate; models, weights and tokenizers of engines; whole
training runs with checkpoints."""
TORCH = "2.13.0"
OWN = ("transformers", "tokenizers", "huggingface_hub")
"""What transformers decides itself, so CI's constraints do not hold for it."""
SHOWN = ("transformers", "tokenizers", "huggingface-hub", "torch", "numpy", "peft", "accelerate", "safetensors")
COUNTS = ("passed", "failed", "skipped")


def constraints_without(text: str, names: tuple[str, ...]) -> str:
    """A file of constraints without the lines of some packages."""
    left_out = {canonicalize_name(name) for name in names}
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if canonicalize_name(line.partition("==")[0].strip()) not in left_out
    )


def outcomes(report: Path) -> dict[str, dict[str, int]]:
    """File of tests -> how many passed, failed and were skipped, from pytest's report in XML. An error in a test's setup
    counts as failed, and so does a file that could not be collected."""
    found: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("classname") or case.get("name") or "unknown"
        kinds = {child.tag for child in case}
        how = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found.setdefault(name, dict.fromkeys(COUNTS, 0))[how] += 1
    return found


def prepared(folder: Path, version: str) -> Path:
    """The Python of an environment with that version, which is made unless it is there."""
    python, done = folder / "bin" / "python", folder / "installed"
    if done.is_file():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    held = folder / "constraints.txt"
    held.write_text(constraints_without((ROOT / "constraints.txt").read_text(encoding="utf-8"), OWN))
    wanted = "transformers" if version == NEWEST else f"transformers=={version}"
    install = [str(python), "-m", "pip", "install", "-q", "--no-compile", "-c", str(held)]
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([*install, f"torch=={TORCH}"])
    _run([*install, f"torch=={TORCH}", wanted, "-e", f"{ROOT}[data]", "pytest", "pytest-xdist"])
    _run([str(python), "-m", "pip", "check"])
    done.touch()
    return python


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if ran.returncode:
        raise UserError(f"{' '.join(command)} failed:\n{(ran.stdout + ran.stderr)[-2000:]}")
    return ran.stdout


def _environment() -> dict[str, str]:
    """Of every process that runs in an environment: what is installed there, and nothing of who called."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def tested(python: Path, report: Path) -> dict[str, Any]:
    """Run TESTS. -> counts, in all and file by file, and seconds"""
    began = time.perf_counter()
    ran = subprocess.run(
        [str(python), "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS],
        cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if ran.returncode not in (0, 1) or not report.is_file():
        raise UserError(f"pytest did not run:\n{(ran.stdout + ran.stderr)[-2000:]}")
    if ran.returncode:
        print(ran.stdout[-4000:])
    files = outcomes(report)
    sums = {how: sum(counts[how] for counts in files.values()) for how in COUNTS}
    return {**sums, "test_seconds": round(seconds, 1), "files": files}


def installed(python: Path) -> dict[str, str]:
    """Versions of SHOWN there."""
    listed = json.loads(_run([str(python), "-m", "pip", "list", "--format", "json"]))
    found = {canonicalize_name(each["name"]): each["version"] for each in listed}
    return {name: found[name] for name in SHOWN}


def one_version(folder: Path, version: str) -> dict[str, Any]:
    """A row of the record."""
    python = prepared(folder, version)
    versions = installed(python)
    if version != NEWEST and versions["transformers"] != version:
        raise UserError(f"pip installed transformers {versions['transformers']} where {version} was asked for")
    row = {"transformers": versions["transformers"], "asked_for": version, "who": VERSIONS.get(version, "")}
    return row | {"versions": versions, **tested(python, folder / "report.xml")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "transformers-versions", help="for environments")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS))
    options = parser.parse_args()
    began, rows = time.perf_counter(), []
    for version in options.versions:
        rows.append(one_version(options.work.resolve() / version, version))
        print({name: rows[-1][name] for name in ("transformers", *COUNTS, "test_seconds")}, flush=True)
    rows.sort(key=lambda row: Version(row["transformers"]))
    config = {"versions": options.versions, "tests": TESTS, "torch": TORCH, "python": sys.version.split()[0]}
    path = records.write(options.out, KIND, rows, config=config, wall_seconds=time.perf_counter() - began)
    print(f"wrote {path}")
    sys.exit(int(any(row["failed"] for row in rows)))


if __name__ == "__main__":
    main()
