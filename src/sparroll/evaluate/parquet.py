"""All samples of a finished evaluation as one Parquet file, with a row for each sample. Written atomically from the
log."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from sparroll.errors import UserError
from sparroll.evaluate.log import SampleLog

ROW_GROUP_TOKENS = 4_000_000


def check_installed() -> None:
    """Raise UserError if pyarrow, which writes Parquet, is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            "evaluation saves its samples as Parquet, and pyarrow is not installed", "pip install -e '.[data]'"
        )


def write_parquet(log: SampleLog, path: Path) -> Path:
    """Replace `path` by the samples of the log, in its order. Row groups have about ROW_GROUP_TOKENS tokens at most."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("task", pa.string()),
            ("policy", pa.string()),
            ("problem", pa.int32()),
            ("prompt_id", pa.string()),
            ("sample", pa.int32()),
            ("seed", pa.int64()),
            ("response", pa.string()),
            ("response_ids", pa.list_(pa.int32())),
            ("prompt_tokens", pa.int32()),
            ("finish_reason", pa.string()),
            ("attention", pa.string()),
            ("kv_read_share", pa.float64()),
            # Null if there is no verdict on the response.
            ("reward", pa.float64()),
            ("status", pa.string()),
            ("answer", pa.string()),
            # For each response token, estimator top_k_lower; null if the tail was not asked for.
            ("acceptance", pa.list_(pa.float32())),
        ]
    )
    part = path.with_name(f".{path.name}.part")
    rows: list[dict[str, Any]] = []
    tokens = 0
    with pq.ParquetWriter(part, schema, compression="zstd") as sink:
        for line in log.lines():
            if line["kind"] != "group":
                continue
            about = {name: line[name] for name in ("task", "policy", "problem", "prompt_id", "prompt_tokens")}
            rows += [about | sample for sample in line["samples"]]
            tokens += sum(len(sample["response_ids"]) for sample in line["samples"])
            if tokens > ROW_GROUP_TOKENS:
                sink.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows, tokens = [], 0
        sink.write_table(pa.Table.from_pylist(rows, schema=schema))
    return _rename(part, path)


def _rename(part: Path, path: Path) -> Path:
    with part.open("rb") as source:
        os.fsync(source.fileno())
    return part.replace(path)
