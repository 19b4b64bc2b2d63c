"""Do the settings of docs/other-trainers.md reach vLLM through the other trainers' own code, and are their corrections ours?
Some minutes on a CPU, for who has their code at hand: this fetches and installs nothing.

    python benchmarks/other_trainers.py --out benchmarks/results/other-trainers-cpu.json \\
        --prime-rl CHECKOUT PYTHON --skyrl CHECKOUT PYTHON --openrlhf FOLDER PYTHON

Each trainer's code is imported from its folder by the Python that is given with it, in a process of its own:
trainer_prime_rl.py, trainer_skyrl.py and trainer_openrlhf.py say what that Python needs and what they do. A checkout is
known by its commit, and the content of a wheel by its version. The record has vLLM's arguments and sampling parameters as
their code makes them, the largest difference of their loss's gradient from that of our correction, the fields of prime-rl's
loss, and what ran in OpenRLHF's actor. Tests hold our side against it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from sparroll import records
from sparroll.errors import UserError

KIND = "other-trainers"
HERE = Path(__file__).parent
TRAINERS = {"prime-rl": "trainer_prime_rl.py", "skyrl": "trainer_skyrl.py", "openrlhf": "trainer_openrlhf.py"}


def read_at(folder: Path) -> str:
    """Which code a folder holds: the commit of a checkout, or the version beside a package that was unpacked."""
    told = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if (folder / ".git").exists() and told.returncode == 0:
        return told.stdout.strip()
    for place in (folder, folder.parent, folder.parent.parent):
        for found in sorted(place.glob("*.dist-info")):
            return Distribution.at(found).version
    raise UserError(f"{folder} is neither a checkout nor an unpacked wheel", "give the folder that holds the package")


def seen(script: str, folder: Path, python: str) -> dict[str, Any]:
    """What a trainer's script writes."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "seen.json"
        path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [python, str(HERE / script), str(folder), str(out)]
        subprocess.run(command, env=environment, check=True, timeout=1800)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    for name in TRAINERS:
        parser.add_argument(f"--{name}", nargs=2, required=True, metavar=("FOLDER", "PYTHON"))
    options = vars(parser.parse_args())
    began, found = time.perf_counter(), {}
    for name, script in TRAINERS.items():
        folder, python = options[name.replace("-", "_")]
        found[name] = {"read_at": read_at(Path(folder)), **seen(script, Path(folder).resolve(), python)}
        print(f"{name} at {found[name]['read_at']}", flush=True)
    path = records.write(options["out"], KIND, found, wall_seconds=time.perf_counter() - began)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
