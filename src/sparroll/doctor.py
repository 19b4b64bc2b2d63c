"""What this machine has, whether sparroll can use it, and if not, why. It only looks: it installs and changes
nothing."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

from sparroll import checkout, records
from sparroll.errors import UserError
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule

if TYPE_CHECKING:
    from sparroll.attention.kernel_check import Heads
    from sparroll.attention.selectors import Selector

USES = {
    "pyarrow": "Parquet files: tasks on real data, samples of an evaluation",
    "math-verify": "verdicts on mathematical answers",
    "evalplus": "sets of programming problems",
    "tensorboard": "training logs for TensorBoard",
    "wandb": "training logs for Weights & Biases",
    "trackio": "training logs for trackio",
    "triton": "kernels of sparse rollouts in vLLM on a GPU",
}
"""Optional packages and what each is for. vLLM is examined separately. The versions that are known to work come from
the metadata of the installed package, and those from pyproject.toml."""


KERNEL_BLOCKS = (16, 64)
"""Tokens of the cache's blocks that kernels are compared in: vLLM's default, and that of our engines."""


@dataclass(frozen=True)
class KernelCase:
    """Kernels that are compared with their references."""

    selector: Selector
    heads: Heads
    block_tokens: int


@dataclass(frozen=True)
class Finding:
    """One line of the examination. Only the status "bad" means that sparroll cannot run here."""

    status: Literal["ok", "--", "bad"]
    what: str
    value: str
    note: str = ""


def healthy(findings: list[Finding]) -> bool:
    return all(finding.status != "bad" for finding in findings)


def examine() -> list[Finding]:
    """All findings, in the order in which they are printed."""
    return [
        _python(),
        _sparroll(),
        *_requirements(),
        *_vllm(),
        *_devices(),
        _memory(),
        *_sandboxes(),
        *_folders(),
        _presets(),
        _tiny_model(),
    ]


def kernel_cases(schedule: Schedule | None = None) -> list[KernelCase]:
    """What `examine_kernels` compares: the usual selectors, or the schedule's, with its model's group and head size.

    Raises UserError where torch sees no GPU, and for heads that no model has.
    """
    import torch

    from sparroll.attention import kernel_check

    if not torch.cuda.is_available():
        raise UserError("the kernels of decode steps run on a GPU, and torch sees none", "sparroll doctor says why")
    model = None if schedule is None else schedule.fingerprint
    heads = kernel_check.of_model(*(model.query_heads, model.kv_heads, model.head_dim) if model else (None, None, None))
    return [
        KernelCase(selector, heads, block)
        for selector in (kernel_check.USUAL if schedule is None else (schedule.selector,))
        for block in sorted({math.lcm(block, selector.row_tokens) for block in KERNEL_BLOCKS})
    ]


def examine_kernels(cases: list[KernelCase], on_progress: OnProgress | None = None) -> list[Finding]:
    """Whether the kernels of sparse decode steps agree with their references on this GPU. The first time they are compiled,
    which takes a minute or two. A kernel that does not run is a finding, too."""
    from sparroll.attention import kernel_check
    from sparroll.plan.kernel_times import timed_as

    findings = []
    for number, case in enumerate(cases):
        what = f"{timed_as(case.selector)}, blocks of {case.block_tokens}"
        if on_progress is not None:
            on_progress(number, len(cases), what)
        try:
            wrong = kernel_check.differences(case.selector, case.heads, block_tokens=case.block_tokens)
        except UserError as error:
            note = f"not compared: {error.message}"
        except Exception as error:
            # Whatever a compiler or a driver raises. After an error of the GPU, nothing else would run either.
            note = f"it does not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        else:
            told = f"not as the reference: {'; '.join(wrong)}; do not sample with it, try another triton"
            note = told if wrong else "as the reference"
        findings.append(Finding("ok" if note == "as the reference" else "bad", "kernels", what, note))
    if on_progress is not None:
        on_progress(len(cases), len(cases))
    return findings


def _python() -> Finding:
    fit = sys.version_info >= (3, 11)
    return Finding(
        "ok" if fit else "bad", "python", platform.python_version(), "" if fit else "3.11 or newer is needed"
    )


def _sparroll() -> Finding:
    import sparroll

    code = checkout.commit()
    where = "installed package" if code["id"] is None else f"commit {code['id'][:12]}"
    return Finding("ok", "sparroll", sparroll.__version__, where + (", with changes" if code["dirty"] else ""))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Finding]:
    """The packages that the installed sparroll needs, and those of its optional ones that are in USES."""
    try:
        required = [Requirement(text) for text in metadata.requires("sparroll") or []]
    except metadata.PackageNotFoundError:
        why = "pip install it (with -e for a clone), so that its requirements are known"
        return [Finding("bad", "requirements", "sparroll is not installed", why)]
    needed = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    extras = {each.name: each for each in required if each not in needed}
    return [
        *(_needed(each) for each in needed),
        *(_optional(extras[name], use) for name, use in USES.items() if name in extras),
    ]


def _needed(required: Requirement) -> Finding:
    found, versions = _version(required.name), _range(required)
    if found is None:
        return Finding("bad", required.name, "missing", f"install {required.name}{versions}")
    return Finding("ok" if _fits(required, found) else "bad", required.name, found, f"supported: {versions}")


def _optional(required: Requirement, use: str) -> Finding:
    found = _version(required.name)
    if found is None:
        return Finding("--", required.name, "not installed", use)
    fits = _fits(required, found)
    known = "known" if fits else "not known to work"
    return Finding("ok" if fits else "--", required.name, found, f"{use}; {known}: {_range(required)}")


def _fits(required: Requirement, version: str) -> bool:
    return required.specifier.contains(version, prereleases=True)


def _range(required: Requirement) -> str:
    """The range of versions as it is usually written: ">=2.11,<2.16"."""
    return ",".join(sorted(map(str, required.specifier), reverse=True))


def _vllm() -> list[Finding]:
    """Whether vLLM can be imported, whether this version was tested, whether it sees the plugin, and which attention
    would run."""
    import torch

    from sparroll.engines.vllm import launch

    found = launch.installed_version()
    if found is None:
        return [
            Finding("--", "vllm", "not installed", "fast rollouts on a GPU, --engine vllm: pip install -e '.[vllm]'")
        ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = _import_problem("vllm")
    if problem:
        return [Finding("--", "vllm", found, f"cannot be imported: {problem}")]
    refusal, seen = _version_refusal(found, device), _plugin_seen()
    return [
        Finding("--" if refusal else "ok", "vllm", found, refusal or f"tested on {device}"),
        Finding("--" if seen else "ok", "vllm plugin", "not seen" if seen else "seen by vLLM", seen),
        _vllm_attention(device, refusal or seen),
    ]


def _version_refusal(found: str, device: str) -> str:
    """Why sparse attention would refuse this version; empty if it would not."""
    from sparroll.engines.vllm import compat

    try:
        compat.check_version(compat.parse_version(found), device)
    except UserError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return ""


def _plugin_seen() -> str:
    """Why vLLM would not load our plugin; empty if it would."""
    names = [entry.name for entry in metadata.entry_points(group="vllm.general_plugins")]
    if "sparroll" not in names:
        return "this installation of sparroll has no entry point for vLLM: pip install it again, with -e for a clone"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "sparroll" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves sparroll out"
    return ""


def _vllm_attention(device: str, why_not: str) -> Finding:
    what = "vllm attention"
    if why_not:
        return Finding("--", what, "vLLM's own", why_not)
    variable = os.environ.get("SPARROLL_VLLM_SCHEDULE")
    if variable:
        return Finding("ok", what, "sparroll", f"always, since SPARROLL_VLLM_SCHEDULE={variable}")
    return Finding("ok", what, "sparroll if asked", "by additional_config.sparroll; see `sparroll serve-args`")


def _import_problem(package: str) -> str:
    """The last line of the error that importing the package raises; empty if the import works. It is imported in
    another process, because importing vLLM sets up a lot."""
    command = [sys.executable, "-c", f"import {package}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "it takes more than two minutes"
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return lines[-1] if result.returncode else ""


def _devices() -> list[Finding]:
    import torch

    cpu = Finding(
        "ok",
        "cpu",
        records.hardware()["cpu"],
        f"{records.hardware()['cores']} cores, {torch.get_num_threads()} threads",
    )
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "no usable device or driver" if built else "this torch is built without it"
        return [cpu, Finding("--", "cuda", "not available", why)]
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        note = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        gpus.append(Finding("ok", f"cuda:{index}", torch.cuda.get_device_name(index), note))
    return [cpu, *gpus]


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    return Finding("ok", "memory", f"{memory.total / 2**30:.1f} GiB", f"{memory.available / 2**30:.1f} GiB available")


def _sandboxes() -> list[Finding]:
    """Which sandboxes contain a program that tries to get out."""
    from sparroll.tasks.code import sandbox

    found = sandbox.probes().values()
    lines = [
        Finding("ok" if one.holds else "--", one.name, "holds" if one.holds else "no", one.detail) for one in found
    ]
    if not any(one.holds for one in found):
        lines.append(Finding("--", "code rewards", "no sandbox", sandbox.INSTALL))
    return lines


def _folders() -> list[Finding]:
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return [_folder("model cache", Path(home)), _folder("working folder", Path.cwd())]


def _folder(what: str, path: Path) -> Finding:
    """Whether the folder can be written. If it does not exist yet, its nearest existing parent decides."""
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        return Finding("bad", what, str(path), f"cannot write there: {error.strerror}")
    return Finding("ok", what, str(path), f"writable, {shutil.disk_usage(parent).free / 2**30:.0f} GiB free")


def _presets() -> Finding:
    from sparroll.presets import presets
    from sparroll.schedule import Schedule

    names = [Schedule.load(name).name for name in presets()]
    return Finding("ok" if names else "bad", "schedules", f"{len(names)} presets", "`sparroll schedule list`")


def _tiny_model() -> Finding:
    from sparroll import models

    folder = Path(models.resolve("tiny-reasoner"))
    there = (folder / "model.safetensors").is_file()
    return Finding("ok" if there else "bad", "tiny-reasoner", "shipped" if there else "missing from this installation")
