"""`sparroll doctor`: what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

import typer

from sparroll.cli.shared.common import print_json
from sparroll.cli.shared.options import Json


def doctor(json: Json = False) -> None:
    """Check versions, devices, memory and folders. The exit code is 1 if something that sparroll needs is missing."""
    from sparroll import doctor as checks

    findings = checks.examine()
    if json:
        print_json({"ok": checks.healthy(findings), "findings": findings})
    else:
        widths = [max(len(getattr(finding, name)) for finding in findings) for name in ("what", "value")]
        for finding in findings:
            line = f"{finding.status:<3} {finding.what:<{widths[0]}}  {finding.value:<{widths[1]}}  {finding.note}"
            print(line.rstrip())
    raise typer.Exit(0 if checks.healthy(findings) else 1)
