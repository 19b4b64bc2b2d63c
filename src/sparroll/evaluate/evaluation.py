"""An evaluation from the request to the figures: load the model if samples are missing, sample and judge, sum up.

OUT/config.json      the request; a resumed evaluation must have the same
OUT/samples.jsonl    the samples, see log.py; once all are there, it may be deleted
OUT/samples.parquet  the same samples, as soon as all are there
OUT/evaluation.json  the figures, which the command writes last
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

from sparroll import records
from sparroll.engines.adapter import load_adapter
from sparroll.engines.base import Engine
from sparroll.engines.make import dtype_named, make_engine
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.evaluate.compare import RECORD
from sparroll.evaluate.log import SampleLog
from sparroll.evaluate.parquet import write_parquet
from sparroll.evaluate.request import EvaluationRequest
from sparroll.evaluate.run import run
from sparroll.evaluate.summary import summarise
from sparroll.locks import locked
from sparroll.progress import OnProgress
from sparroll.resume import begin_or_resume, refuse_results_of_nothing

SAMPLES = "samples.parquet"
SAMPLE_LOG = "samples.jsonl"


def evaluate(request: EvaluationRequest, out: Path, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """Sample what is missing in `out`, and return the figures of all samples, see summary.py. Continues where it was
    interrupted. Where an evaluation was finished and its log deleted, the figures are those of its record."""
    with locked(out, "sparroll evaluate"):
        asked, log_path, samples, record = (out / name for name in ("config.json", SAMPLE_LOG, SAMPLES, RECORD))
        logged = log_path.exists() and log_path.stat().st_size > 0
        finished = asked.exists() and samples.exists() and record.exists()
        begun = logged or samples.exists() or record.exists()
        refuse_results_of_nothing(asked, begun)
        begin_or_resume(asked, request.table(), begun=begun)
        if finished and not logged:
            results: dict[str, Any] = records.read(record, "evaluation")["results"]
            return results
        with SampleLog(log_path) as log:
            if not _complete(log, request):
                _sample(request, log, on_progress)
            results = summarise(log, request.tasks, request.policies, request.settings)
            write_parquet(log, samples)
    return results


def _complete(log: SampleLog, request: EvaluationRequest) -> bool:
    """Whether nothing is left to sample, so that no model has to be loaded."""
    groups = sum(line["kind"] == "group" for line in log.lines())
    return bool(groups == len(request.policies) * sum(len(task.problems) for task in request.tasks))


def _sample(request: EvaluationRequest, log: SampleLog, on_progress: OnProgress | None) -> None:
    engine, scorer = _engine(request)
    bring_adapter = None
    if request.adapter is not None:
        bring_adapter = partial(load_adapter, engine, request.model, request.adapter)
    # Closing the judge's calls ends the event loop that async functions run on.
    with engine, contextlib.closing(request.judge.calls) if request.judge else contextlib.nullcontext():
        run(
            engine,
            scorer,
            request.tasks,
            request.policies,
            request.settings,
            log,
            PromptEncoder(engine.tokenizer, request.chat, request.thinking),
            on_progress,
            bring_adapter,
        )


def _engine(request: EvaluationRequest) -> tuple[Engine, Scorer | None]:
    """The engine, and a scorer with the model's weights if the tail is asked for. With an adapter the scorer loads the
    weights itself, because the engine's weights change when it gets the adapter."""
    dtype = dtype_named(request.dtype)
    engine = make_engine(
        request.engine,
        request.model,
        capacity=request.policies[-1].schedule,
        dtype=dtype,
        device=request.device,
        max_batch=request.max_batch,
        gpu_memory_share=0.5 if request.settings.tail else 0.85,
    )
    if not request.settings.tail:
        return engine, None
    if request.adapter is None:
        return engine, Scorer.beside(engine, device=request.device, dtype=dtype)
    return engine, Scorer(request.model, device=request.device, dtype=dtype)
