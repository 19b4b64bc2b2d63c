"""How many code verdicts a second, and whether memory stays flat: distinct programs, ten tests each.

python benchmarks/code_verdicts.py --out benchmarks/results/verdicts-code-cpu.json
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import psutil

from sparroll import records
from sparroll.tasks.code.limits import SandboxLimits
from sparroll.tasks.code.reward import CodeReward, StdinTests

CASES = tuple((f"{n} {n * n}", str(n + n * n)) for n in range(10))
PROGRAMS = (
    "print(sum(map(int, input().split())))",
    "a, b = map(int, input().split())\nprint(a + b)",
    "a, b = map(int, input().split())\nprint(a - b)",
    "print(int(input()))",
)
"""Two that pass, one wrong, one that crashes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--verdicts", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    process, resident, ends = psutil.Process(), [], Counter[str]()
    with CodeReward(SandboxLimits(), workers=options.workers, cache_entries=options.batch) as reward:
        started = time.perf_counter()
        for start in range(0, options.verdicts, options.batch):
            numbers = range(start, min(start + options.batch, options.verdicts))
            # A comment makes each program one that the cache does not know.
            pairs = [(StdinTests(CASES), f"```python\n{PROGRAMS[n % 4]}  # {n}\n```") for n in numbers]
            ends.update(verdict.status for verdict in reward.grade_batch(pairs))
            resident.append(round(process.memory_info().rss / 2**20, 1))
        wall = time.perf_counter() - started
        results = {
            "sandbox": reward.boundary.name,
            "tests_per_program": len(CASES),
            "verdicts": options.verdicts,
            "verdicts_per_second": round(options.verdicts / wall, 2),
            "statuses": dict(ends),
            "resident_mib_after_each_batch": resident,
        }
    config = {name: value for name, value in vars(options).items() if name != "out"}
    path = records.write(options.out, "code-verdicts", results, config=config, wall_seconds=wall)
    print(f"wrote {path}: {results}")


if __name__ == "__main__":
    main()
