"""How many math verdicts a second, whether the workers' memory stays flat, and how often the verdict on the graded pairs
in tests/graded_pairs/ is the known one, by family.

    python benchmarks/verdicts.py --workers 2 --out benchmarks/results/verdicts-math-cpu.json
    python benchmarks/verdicts.py --verdicts 0 --pairs first_sight \\
        --out benchmarks/results/verdicts-math-first-sight-cpu.json

The timed pairs are generated and all differ, so none is cached. Every one has a known verdict; the run fails if one is
otherwise. Workers are not replaced on the way, so what they keep shows.
"""

from __future__ import annotations

import argparse
import os
import time
import tomllib
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import psutil

from sparroll import records
from sparroll.tasks.math.pool import Pool, PoolLimits
from sparroll.tasks.math.reward import MathReward

PAIRS = Path(__file__).parents[1] / "tests" / "graded_pairs"
FIRST_SIGHT = ("first_sight", "examiner", "examiner_again", "examiner_third", "examiner_last")
"""Files whose pairs were judged once, and recorded, before anything was mended for them; in the order of their writing.
Those records are never made again."""
FILES = (
    "ordinary",
    "families",
    "unseen",
    "more",
    *FIRST_SIGHT,
)


def first_sight_record(name: str) -> str:
    """The name of the record of how the pairs of a file were judged at first sight."""
    return f"verdicts-math-{name.replace('_', '-')}-cpu"


def graded_pairs(name: str) -> dict[str, list[tuple[str, str, bool]]]:
    """Gold answer, response and whether it is right, by family. Outside the families of whole responses, the second
    text of a pair in the file is the content of the box."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for family, rows in tomllib.loads((PAIRS / f"{name}.toml").read_text(encoding="utf-8")).items():
        whole = family.startswith("response")
        found[family] = [
            (gold, text if whole else rf"\boxed{{{text}}}", verdict == "right")
            for verdict in ("right", "wrong")
            for gold, text in rows.get(verdict, [])
        ]
    return found


def judged(math: MathReward, name: str) -> dict[str, Any]:
    """How the pairs of a file were judged: counts by family, the pairs judged wrongly, and verdicts that are neither
    right nor wrong."""
    families: dict[str, dict[str, int]] = {}
    misjudged, others = [], Counter[str]()
    for family, rows in graded_pairs(name).items():
        verdicts = math.grade_all([(gold, text) for gold, text, _ in rows])
        counts = {"right": 0, "right_refused": 0, "wrong": 0, "wrong_accepted": 0}
        for (gold, text, right), verdict in zip(rows, verdicts, strict=True):
            counts["right" if right else "wrong"] += 1
            if verdict.status not in ("right", "wrong", "no_answer"):
                others[verdict.status] += 1
            if (verdict.status == "right") != right:
                counts["right_refused" if right else "wrong_accepted"] += 1
                misjudged.append({"gold": gold, "response": text, "right": right, "status": verdict.status})
        families[family] = counts
    return {"families": families, "misjudged": misjudged, "neither_right_nor_wrong": dict(others)}


def pair(rng: Random, index: int) -> tuple[str, str, bool]:
    """A gold answer, an answer, and whether it is right; of eight kinds in turn."""
    a, b, c = (rng.randint(2, 999) for _ in range(3))
    n, right = 1000 * index + a, rng.random() < 0.5
    m = n if right else n + 1
    kinds = [
        (f"{n}", f"{m}.0"),
        (rf"\frac{{{n}}}{{{b}}}", f"{2 * m}/{2 * b}"),
        (rf"{n}\sqrt{{2}}", rf"\sqrt{{2}} \cdot {m}"),
        (f"x = {n}", f"{m}"),
        (f"[{-b},{n})", f"[{-b},{m})"),
        (f"{n}, {-b}, {-c}", f"{-c}, {m}, {-b}"),
        (rf"\begin{{pmatrix}}{n}&{b}\\0&1\end{{pmatrix}}", rf"\begin{{pmatrix}}{m}&{b}\\0&1\end{{pmatrix}}"),
        (f"x^2+{n}x+{b}", f"{b}+x(x+{m})"),
    ]
    return (*kinds[index % len(kinds)], right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--verdicts", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", nargs="*", choices=FILES, default=list(FILES))
    options = parser.parse_args()
    rng = Random(options.seed)
    pairs = [pair(rng, index) for index in range(options.verdicts)]
    load_before = os.getloadavg()

    pool = Pool(options.workers, PoolLimits(questions_per_worker=10**9))
    math = MathReward(pool)
    graded = {name: judged(math, name) for name in options.pairs}
    started = time.perf_counter()
    math.grade_answers([("5", "5.0"), ("6", "6.0")] * options.workers)
    start_seconds = time.perf_counter() - started
    rows, wrong = [], 0
    started = time.perf_counter()
    for first in range(0, len(pairs), options.batch):
        batch = pairs[first : first + options.batch]
        verdicts = math.grade_answers([(gold, answer) for gold, answer, _ in batch])
        wrong += sum((v.status == "right") != right for v, (_, _, right) in zip(verdicts, batch, strict=True))
        rows.append(
            {
                "verdicts": first + len(batch),
                "wall_seconds": round(time.perf_counter() - started, 2),
                "workers_rss_mib": sorted(psutil.Process(n).memory_info().rss / 2**20 for n in pool.process_ids()),
                "own_rss_mib": psutil.Process().memory_info().rss / 2**20,
            }
        )
    wall_seconds = time.perf_counter() - started
    pool.close()
    results = {
        "verdicts": len(pairs),
        "wrong_verdicts": wrong,
        "verdicts_per_second": len(pairs) / wall_seconds if pairs else None,
        "graded": graded,
        "start_seconds": start_seconds,
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "rows": rows,
    }
    config = {name: value for name, value in vars(options).items() if name != "out"}
    path = records.write(
        options.out, "verdicts-math", results, config=config, seed=options.seed, wall_seconds=wall_seconds
    )
    for name, found in graded.items():
        total = sum(counts["right"] + counts["wrong"] for counts in found["families"].values())
        print(f"{name}: {total - len(found['misjudged'])} of {total} pairs as graded")
    print(f"{len(pairs)} verdicts in {wall_seconds:.0f} s, {wrong} wrong; wrote {path}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
