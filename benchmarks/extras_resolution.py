"""What `pip install "sparroll[verl]"` and `"sparroll[trl]"` come to: pip's resolver on this checkout, which installs
nothing. A few minutes, and a few MB of metadata.

    python benchmarks/extras_resolution.py --python python3.12 --out benchmarks/results/extras-resolution.json

For each extra, `pip install --dry-run --report` runs in an empty environment of the given Python, with the newest pip and
packages from PyPI alone: no constraints, no configuration, no wheels of this machine. `fast-deps` lets pip read a wheel's
metadata without the wheel. Should pip begin to fetch a file of more than MOST_MB all the same, it is stopped.

The record has all versions, and what sparroll, the framework and vLLM ask for. What every chosen package asks of the others
is checked once more, with `packaging`: `broken` is empty where all of it holds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparroll import records
from sparroll.errors import UserError

KIND = "extras-resolution"
ROOT = Path(__file__).parents[1]
EXTRAS = ("verl", "trl")
MOST_MB = 20
"""Of one file. The source distributions that pip has to open are smaller."""
KEPT = ("PATH", "HOME", "LANG", "PIP_CERT", "SSL_CERT_FILE", "HTTPS_PROXY", "https_proxy")
"""Of the caller's environment, so that nothing but PyPI decides."""


def resolved(python: Path, extra: str, folder: Path) -> dict[str, Any]:
    """pip's report."""
    report = folder / f"{extra}.json"
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-cache-dir"]
    command += ["--use-feature=fast-deps", "--progress-bar=off", "--report", str(report), f"{ROOT}[{extra}]"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if megabytes(line) > MOST_MB:
                process.kill()
                raise UserError(
                    f"pip began to fetch a large file: {line.strip()}",
                    "the index gives no part of a wheel, so nothing can be resolved here without fetching gigabytes",
                )
    if process.returncode:
        raise UserError(f"pip found no versions for sparroll[{extra}]:\n{''.join(said)[-2000:]}")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in KEPT if name in os.environ} | {"PIP_CONFIG_FILE": os.devnull}


def megabytes(line: str) -> float:
    """The size in a line of pip's that says it downloads something; 0 for any other line."""
    found = re.search(r"Downloading .*\(([\d.]+) (kB|MB|GB)\)", line)
    return float(found[1]) * {"kB": 1e-3, "MB": 1.0, "GB": 1e3}[found[2]] if found else 0.0


def versions_of(report: dict[str, Any]) -> dict[str, str]:
    """Package -> version, by names as pip compares them."""
    return {
        str(canonicalize_name(each["metadata"]["name"])): each["metadata"]["version"]
        for each in sorted(report["install"], key=lambda each: canonicalize_name(each["metadata"]["name"]))
    }


def asks(report: dict[str, Any], metadata: dict[str, Any], extra: str = "") -> list[Requirement]:
    """What a package asks for, with that extra or none, on the Python and system that pip resolved for."""
    place = {**default_environment(), **report["environment"], "extra": extra}
    wanted = [Requirement(text) for text in metadata.get("requires_dist", ())]
    return [each for each in wanted if each.marker is None or each.marker.evaluate(place)]


def broken(wanted: Iterable[Requirement], versions: dict[str, str]) -> list[str]:
    """Those that the chosen versions do not meet; a package that was not chosen meets nothing."""
    found = {each: versions.get(canonicalize_name(each.name)) for each in wanted}
    return [
        str(each)
        for each, version in found.items()
        if version is None or not each.specifier.contains(version, prereleases=True)
    ]


def row_of(report: dict[str, Any], extra: str) -> dict[str, Any]:
    """A row of the record."""
    versions, unmet, shown = versions_of(report), [], {}
    for each in report["install"]:
        name = canonicalize_name(each["metadata"]["name"])
        wanted = asks(report, each["metadata"], extra if name == "sparroll" else "")
        unmet += [f"{name}: {text}" for text in broken(wanted, versions)]
        if name in ("sparroll", extra, "vllm"):
            shown[name] = [str(each) for each in wanted]
    python = report["environment"]["python_full_version"]
    return {"extra": extra, "python": python, "asks": shown, "broken": unmet, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--python", default=sys.executable, help="which Python to resolve for")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "extras-resolution", help="for the environment")
    options = parser.parse_args()
    began, work = time.perf_counter(), options.work.resolve()
    subprocess.run([options.python, "-m", "venv", "--clear", str(work)], check=True)
    python = work / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "-U", "pip"], check=True, env=environment())
    rows = []
    for extra in EXTRAS:
        rows.append(row_of(resolved(python, extra, work), extra))
        print(
            f"sparroll[{extra}]: {len(rows[-1]['versions'])} packages, broken: {rows[-1]['broken'] or 'none'}",
            flush=True,
        )
    config = {"extras": EXTRAS, "index": "PyPI"}
    print(f"wrote {records.write(options.out, KIND, rows, config=config, wall_seconds=time.perf_counter() - began)}")


if __name__ == "__main__":
    main()
