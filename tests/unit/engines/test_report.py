"""What ran between two reports of one engine."""

from __future__ import annotations

import copy
import dataclasses

from sparroll.engines.report import EngineReport, LayerReport
from sparroll.types import Checks


def test_what_ran_since_an_earlier_report_is_the_growth_of_its_counters() -> None:
    before = EngineReport("vllm", "m", "a", 3, generated_tokens=5, peak_kv_bytes=80, layers=[LayerReport(9, 0, 90, 90)])
    now = copy.deepcopy(before)
    now.schedule_name, now.weight_version, now.generated_tokens, now.check_seconds = "b", 4, 12, 0.5
    now.layers[0].sparse_steps, now.layers[0].index_read_share, now.checks.windows = 7, 0.1, 3
    grown = now.since(before)
    assert (grown.schedule_name, grown.weight_version, grown.peak_kv_bytes) == ("b", 4, 80)
    assert (grown.generated_tokens, grown.check_seconds, grown.checks.windows) == (7, 0.5, 3)
    assert grown.layers == [LayerReport(0, 7, 0, 0, index_read_share=0.1)]
    assert now.generated_tokens == 12


def test_layers_that_had_not_run_before_count_whole() -> None:
    nothing = EngineReport("vllm", "m", None, 0)
    now = EngineReport("vllm", "m", None, 0, layers=[LayerReport(1, 2, 30, 20), LayerReport(3, 0, 30, 30)])
    assert now.since(nothing).layers == now.layers


def test_what_sparse_requests_read_is_told_apart_unless_drafts_were_checked() -> None:
    layers = [LayerReport(context_tokens=300, read_tokens=150)] * 2
    report = EngineReport("hf", "m", "s", 0, dense_request_context_tokens=100, layers=layers)
    assert report.read_and_context_tokens == (300, 600)
    assert report.sparse_read_and_context_tokens == (100, 400)
    checked = dataclasses.replace(report, checks=Checks(windows=1), check_read_tokens=10)
    assert checked.sparse_read_and_context_tokens == (0, 0)
