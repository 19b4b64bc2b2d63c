"""Tables and sentences about what sparroll may be installed beside, and about other trainers' code. Measures nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from record_tables import RESULTS, ROOT, results, table

from sparroll import records

NAMES = {"prime-rl": "prime-rl", "skyrl": "SkyRL", "openrlhf": "OpenRLHF"}
RAN = {
    "prime-rl": "its configuration of `recipes/prime-rl`, vLLM's arguments that it makes of it, its `compute_loss`",
    "skyrl": "its configuration, vLLM's arguments and sampling parameters, its policy loss",
    "openrlhf": "its command line and sampling parameters, its policy loss, its Ray actor",
}


def transformers_versions() -> str:
    """Which versions of transformers run our tests."""
    rows = results("transformers-versions-cpu", "transformers-versions")
    passed = [row["transformers"] for row in rows if not row["failed"]]
    failed = [f"{row['transformers']} ({row['failed']} of them)" for row in rows if row["failed"]]
    (count,) = {row["passed"] + row["failed"] for row in rows}
    text = (
        f"sparroll itself works with transformers from {passed[0]}: {count} tests of models, engines and training pass with "
        f"{_listed(passed)} on a CPU{f', and fail with {_listed(failed)}' if failed else ''} "
        f"(`transformers-versions-cpu.json`, `benchmarks/transformers_versions.py`). CI has {_of_ci('transformers')}."
    )
    return _filled(text)


def extras() -> str:
    """What the extras of verl and TRL come to."""
    record = records.read(RESULTS / "extras-resolution.json", "extras-resolution")
    said = []
    for row in record["results"]:
        names = ("TRL" if row["extra"] == "trl" else row["extra"], "vLLM", "torch", "transformers")
        versions = [f"{name} {row['versions'][name.lower()]}" for name in names]
        said.append(f'`"sparroll[{row["extra"]}]"` to {_listed(versions)} ({len(row["versions"])} packages)')
    python = record["results"][0]["python"].rpartition(".")[0]
    broken = sum(len(row["broken"]) for row in record["results"])
    met = "what each package asks of the others is met" if not broken else f"{broken} conditions are not met"
    text = (
        f"On {record['date'][:10]}, on Python {python}, pip resolved {_listed(said)}; {met} (`extras-resolution.json`, "
        "`benchmarks/extras_resolution.py`)."
    )
    return _filled(text)


def other_trainers() -> str:
    """Whose code was run against our settings, and what came of it."""
    rows = []
    for name, found in results("other-trainers-cpu", "other-trainers").items():
        ran = RAN[name]
        if "actor" in found:
            ran += f": {_sparse_steps(found['actor'])}"
        # A commit by its first letters, a version whole.
        code = f"`{found['read_at'][:7]}`" if len(found["read_at"]) == 40 else found["read_at"]
        same = _listed([f"`{row['ours']}`" for row in found["corrections"]])
        worst = max(row["difference"] for row in found["corrections"])
        rows.append([NAMES[name], code, ran, same, "0" if worst == 0 else f"{worst:.1e}"])
    return table(["trainer", "code", "what of it ran here", "corrections that are ours", "largest difference"], rows)


def _sparse_steps(actor: dict[str, Any]) -> str:
    sparse = [layer for layer in actor["layers"] if not layer["dense_steps"]]
    (steps,) = {layer["sparse_steps"] for layer in sparse}
    return f"all {steps} decode steps of {len(sparse)} of {len(actor['layers'])} layers were sparse"


def _of_ci(package: str) -> str:
    """The version that CI's constraints name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (version,) = [line.partition("==")[2] for line in lines if line.partition("==")[0] == package]
    return version


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


TABLES: dict[str, Callable[[], str]] = {
    "transformers-versions": transformers_versions,
    "extras": extras,
    "other-trainers": other_trainers,
}
