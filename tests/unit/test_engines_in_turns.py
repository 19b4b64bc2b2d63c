"""Engines that take turns on one GPU: whose turn it is, what is timed, and what a record keeps of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark_scripts import benchmark


@pytest.fixture
def in_turns() -> ModuleType:
    return benchmark("engines_in_turns")


class Stub:
    """An engine whose steps all take the same. What was asked for stands in a list that engines share."""

    def __init__(self, name: str, step_seconds: float, asked: list[tuple[str, object]], holds: int = 9) -> None:
        self.name, self.step_seconds, self.asked, self.holds = name, step_seconds, asked, holds
        self.about = {"engine": name}

    @contextmanager
    def decoding(self, contexts: list[int], most_steps: int) -> Iterator[Callable[[int], float]]:
        if len(contexts) > self.holds:
            raise sys.modules["vllm_engines"].DoesNotFit(f"{self.name} is full")
        self.asked.append((self.name, most_steps))

        def run(steps: int) -> float:
            self.asked.append((self.name, steps))
            return steps * self.step_seconds

        yield run
        self.asked.append((self.name, "ended"))

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.append((self.name, "closed"))


def test_the_order_of_the_engines_turns_round_after_each_repeat(in_turns: ModuleType) -> None:
    asked: list[tuple[str, object]] = []
    engines = {name: Stub(name, seconds, asked) for name, seconds in (("dense", 0.5), ("sparse", 0.25))}
    found = in_turns.step_seconds(engines, [100, 100], steps=8, repeats=3)
    assert found == {"dense": [0.5] * 3, "sparse": [0.25] * 3}
    timed = [name for name, steps in asked if steps == 8]
    assert timed == ["dense", "sparse", "sparse", "dense", "dense", "sparse"]
    assert asked[-2:] == [("sparse", "ended"), ("dense", "ended")]


def test_requests_get_as_many_tokens_as_all_turns_decode(in_turns: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in the process of an engine, here without the process."""
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(in_turns, "_engine", Stub("dense", 0.5, asked))
    monkeypatch.setattr(in_turns.vllm_engines, "on_gpu", lambda: False)

    class Apart:
        @contextmanager
        def decoding(self, *given: Any) -> Iterator[Callable[[int], float]]:
            in_turns._begin(*given)
            yield in_turns._turn
            in_turns._end()

    assert in_turns.step_seconds({"dense": Apart()}, [100], steps=8, repeats=2) == {"dense": [0.5] * 2}
    (_, most), *ran, (_, ended) = asked
    # Before what is timed, a turn has steps of its own, and so has the first one of all.
    assert [steps for _, steps in ran] == [2, 4, 2, 8, 2, 8] and most == 26 and ended == "ended"
    with pytest.raises(AssertionError, match="nothing decodes"):
        in_turns._turn(8)


def test_a_cell_that_one_engine_does_not_hold_is_skipped_in_all(
    in_turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_step, asked, started = benchmark("decode_step"), [], []

    def apart(model: str, folder: Path, sparroll: dict[str, Any] | None, **settings: Any) -> Stub:
        started.append((model, sparroll, settings))
        return Stub("dense", 0.5, asked) if sparroll is None else Stub("triton", 0.25, asked, holds=1)

    monkeypatch.setattr(decode_step, "EngineApart", apart)
    options = argparse.Namespace(
        model="tiny", schedule="s.toml", folder="f", engines=["dense", "triton"], batches=[1, 2], contexts=[100],
        cells=None, short=1024, short_step_tokens=0, steps=8, repeats=2,
    )  # fmt: skip
    found = decode_step.measure_in_turns(options)
    cell = {"batch": 1, "context_tokens": 100}
    skipped = {"batch": 2, "context_tokens": 100, "skipped": "triton is full"}
    # Short contexts are measured in three rounds.
    for name, seconds in (("dense", 0.5), ("triton", 0.25)):
        assert found[name]["cells"] == [{"engine": name, **cell, "seconds": [seconds] * 6}, {"engine": name, **skipped}]
        assert found[name]["engine"] == {"engine": name}
    sparse = {"schedule": "s.toml", "attention": "triton", "short_step_tokens": 0}
    assert [each for _, each, _ in started] == [None, sparse]
    # The GPU's memory is shared.
    assert all(settings == {"max_num_seqs": 2, "gpu_memory_utilization": 0.46} for *_, settings in started)
    assert asked[-2:] == [("triton", "closed"), ("dense", "closed")]


def test_single_cells_take_the_place_of_all_contexts_with_all_batches() -> None:
    decode_step = benchmark("decode_step")
    cells = [decode_step.cell_of(text) for text in ("8x100", "1x2000")]
    options = argparse.Namespace(batches=[64], contexts=[1], cells=cells, short=1024)
    assert decode_step.rounds(options) == [(100, 8), (100, 8), (2000, 1), (100, 8)]
    assert decode_step.most_requests(options) == 8
