"""Options that would have no effect beside the others are refused, before anything is loaded or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import error_of

ROLLOUT = ["rollout", "--model", "tiny-reasoner"]
PROFILE = ["profile", "--model", "tiny-reasoner", "--task", "synthetic"]
CALIBRATE = ["calibrate", "--model", "tiny-reasoner", "--task", "synthetic"]
IMPOSSIBLE = ["--statistic", "impossible_share", "--at-most", "1e-3"]
EVALUATE = ["evaluate", "--model", "tiny-reasoner", "--tasks", "synthetic"]
PLAN = ["plan", "--model", "Qwen3-1.7B"]
SCHEDULE = ["--schedule", "qwen3-1.7b-0.86"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ROLLOUT, "--prompts", "p.txt", "--level", "2"], "--level has no effect with --prompts"),
        ([*ROLLOUT, "--task", "gsm8k", "--level", "2"], "--level has no effect with --task gsm8k"),
        ([*ROLLOUT, "--task", "synthetic", "--force-schedule"], "--force-schedule has no effect without --schedule"),
        ([*ROLLOUT, "--task", "synthetic", "--check-floor", "0.1"], "--check-floor checks what is drafted under"),
        ([*ROLLOUT, "--task", "synthetic", "--temperature", "0", "--top-p", "0.9"], "top_p = 0.9 does nothing"),
        ([*PROFILE, *SCHEDULE, "--page-tokens", "32"], "--page-tokens has no effect without --budget"),
        ([*PROFILE, *SCHEDULE, "--dense-layers", "0"], "--dense-layers has no effect without --budget"),
        ([*PROFILE, "--budget", "64", "--force-schedule"], "--force-schedule has no effect without --schedule"),
        ([*CALIBRATE, "--gpu", "H100"], "--gpu has no effect where no times are compared"),
        ([*CALIBRATE, "--check-over-2-nats", "0.1"], "--check-over-2-nats bounds what a check leaves"),
        ([*CALIBRATE, "--nats", "5"], "--nats has no effect without --statistic impossible_share"),
        ([*CALIBRATE, "--at-most", "1e-4"], "--at-most has no effect without --statistic impossible_share"),
        ([*CALIBRATE, *IMPOSSIBLE, "--target", "0.9"], "--target has no effect with --statistic impossible_share"),
        ([*CALIBRATE, *IMPOSSIBLE[:2]], "--statistic impossible_share needs --at-most"),
        ([*CALIBRATE, *IMPOSSIBLE, "--nats", "7"], "nats must be one of 2, 5, 10, 20, got 7"),
        ([*CALIBRATE, *IMPOSSIBLE, "--mode", "replay"], "a replay samples nothing under sparse attention"),
        ([*CALIBRATE, *IMPOSSIBLE, "--check-windows", "64"], "fitted for one selector at the objective time"),
        ([*EVALUATE, "--also-dense"], "--also-dense has no effect without --schedule"),
        ([*EVALUATE, "--reward", "a:b", "--test-seconds", "3"], "--test-seconds has no effect with --reward"),
        (["evaluate", "--compare", "a", "b", "--samples", "4"], "--samples has no effect with --compare"),
        ([*PLAN, *SCHEDULE, "--prompt-tokens", "9"], "--prompt-tokens has no effect with --lengths-are contexts"),
        ([*PLAN, *SCHEDULE, "--cut-share", "0.1"], "checks no drafts, so nothing is taken back"),
        ([*PLAN, "--budget", "512", "--force-schedule"], "--force-schedule has no effect without --schedule"),
        (["distill", "--prompts", "p.txt", "--level", "2"], "--level has no effect with --prompts"),
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    said, hint = error_of([*words, "--out", str(out)], capsys)
    assert message in said and hint
    assert not any(out.rglob("*"))
