"""The training file of Sparse-RL's release as a file of ours: its `label` is our `answer`. Nothing else is touched.

python recipes/sparse-rl-math-qwen2.5-3b/prepare.py dataset/simplelr_qwen_level3to5/train.jsonl data/sparse-rl-math.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def prepare(source: Path, target: Path) -> int:
    """-> rows written. A row that lacks one of the two columns is an error: then the file is another one."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": row["prompt"], "answer": str(row["label"])}) for row in rows]
    target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    print(f"{prepare(Path(sys.argv[1]), Path(sys.argv[2])):,} rows")
