"""Polaris-53K and AIME as the Parquet files that verl reads: sparroll's prompts, without rows that share words with the
evaluation's or whose answer no grader can read.

python recipes/verl-polaris/prepare.py data/verl-polaris                          # from the hub
python recipes/verl-polaris/prepare.py data/verl-polaris --mirror FOLDER          # from local copies
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from sparroll import files
from sparroll.tasks.base import Split
from sparroll.tasks.data.settings import DataSettings
from sparroll.tasks.data.task import DataTask

ALL = 10**9


def rows(task: DataTask, split: Split) -> list[dict[str, Any]]:
    """A split's prompts in verl's columns. `data_source` names verl's metrics, so evaluation sets keep their own."""
    made = []
    for prompt in task.prompts(split, level=0, seed=0, count=ALL):
        turns = prompt.messages or (("user", prompt.text),)
        made.append(
            {
                "data_source": prompt.prompt_id.rpartition("/")[0].partition(":")[0],
                "prompt": [{"role": role, "content": content} for role, content in turns],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": prompt.answer},
                "extra_info": {"index": prompt.prompt_id, "split": split},
            }
        )
    return made


def prepare(out: Path, train: str, evaluation: tuple[str, ...], mirror: str | None = None) -> dict[str, int]:
    """-> rows written, by file."""
    task = DataTask("verl-polaris", DataSettings(train=train, eval=evaluation, mirror=mirror))
    counts = {}
    for split, name in (("train", "train.parquet"), ("eval", "eval.parquet")):
        table, buffer = pyarrow.Table.from_pylist(rows(task, split)), io.BytesIO()
        pyarrow.parquet.write_table(table, buffer)
        files.write_bytes(out / name, buffer.getvalue())
        counts[name] = table.num_rows
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", default="polaris", help="a set of sparroll's, or a file")
    parser.add_argument("--eval", nargs="+", default=["aime24", "aime25"])
    parser.add_argument("--mirror", help="folder with copies of the sets")
    given = parser.parse_args()
    for name, count in prepare(given.out, given.train, tuple(given.eval), given.mirror).items():
        print(f"{given.out / name}: {count:,} rows")
