"""What a rollout benchmark has measured so far, in a file with a line for each measurement, written as it is made. A run
that was cut goes on from it. Runs nothing.

A line is {"key": [...], "value": ...}; of lines with the same key the last one counts. The keys:

    about                          what is measured: model, schedules, sets, GPU. A run goes on only where it is the same.
    windows                        set -> its moments, found from the first engine's cache
    engine, NAME                   settings, capacity
    left_over_gib, NAME            what the closed engine left on the GPU
    seconds, NAME, SET, PLACE      seconds of a step at a moment, once per repeat
    skipped, NAME, SET, PLACE      why an engine could not hold a moment
    rest, BATCH                    seconds of a dense step of so many requests with hardly any context
    one_token, before | after      seconds of a dense step of one request with one token of context, before and after the
                                   dense engine's moments
    bandwidth                      bytes per second of a large copy
    whole, NAME                    a whole run
    profile, SET                   kernels of a step, where a target was missed
    pieces                         how many calls the measurements come from
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from request_sets import Windows, measuring_order

Key = tuple[str | int, ...]


class Measured:
    """The lines of one file. `put` writes one at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[Key, Any] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                held = json.loads(line)
            except ValueError:
                # The call was cut in the middle of its last line.
                continue
            self.values[tuple(held["key"])] = held["value"]

    @staticmethod
    def begin(path: Path, about: dict[str, Any], continue_from: Path | None) -> Measured:
        """A new file, with the lines of a call that was cut. Refuses those of another measurement."""
        before = {} if continue_from is None else Measured.of_cut_call(continue_from, about).values
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        found = Measured(path)
        for key, value in (before | {("about",): about, ("pieces",): before.get(("pieces",), 0) + 1}).items():
            found.put(value, *key)
        return found

    @staticmethod
    def of_cut_call(path: Path, about: dict[str, Any]) -> Measured:
        if not path.exists():
            raise SystemExit(f"there is no {path} to go on from")
        found = Measured(path)
        held = found.get("about") or {}
        other = [name for name in about if held.get(name) != about[name]]
        if other:
            raise SystemExit(f"{path} holds another measurement: it differs in {', '.join(other)}")
        return found

    def put(self, value: Any, *key: str | int) -> None:
        line = json.dumps({"key": key, "value": value})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.values[key] = json.loads(line)["value"]

    def get(self, *key: str | int) -> Any:
        """None where it was not measured."""
        return self.values.get(key)

    def windows(self) -> dict[str, Windows]:
        return self.get("windows") or {}

    def done(self, engine: str, name: str) -> list[int]:
        """The places of a set's moments that an engine has measured, in the order of the run."""
        places = range(len(self.windows().get(name, [])))
        return [place for place in places if self.get("seconds", engine, name, place) is not None]

    def common(self, engines: list[str], name: str) -> list[int]:
        """The places that all these engines have measured."""
        return sorted(set.intersection(*(set(self.done(engine, name)) for engine in engines)))

    def enough(self, engines: list[str], name: str) -> bool:
        """Whether they say something about the set: both ends of the drained run, or of the moments of another set."""
        last = len(self.windows().get(name, [])) - 1
        return last >= 0 and {0, last} <= set(self.common(engines, name))

    def missing(self, engine: str, before: list[str]) -> list[tuple[str, int]]:
        """What an engine is still to measure, the most telling first. What an engine before it left out is of no use, so
        it is not asked for."""
        return [
            (name, place)
            for name, place in measuring_order(self.windows())
            if all(self.get("seconds", each, name, place) is not None for each in before)
            and self.get("seconds", engine, name, place) is None
            and self.get("skipped", engine, name, place) is None
        ]
