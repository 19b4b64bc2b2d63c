"""Refuses a trainer in another version than the one whose methods we override. The trainer is not imported."""

from __future__ import annotations

from importlib import metadata

from sparroll.errors import UserError


def check(trainer: str, tested: str, install: str, *, needs: tuple[str, ...] = ()) -> None:
    """Raise UserError unless the trainer is installed, with the packages that it needs, in the version `tested`
    ("1.16": any of these; "0.9.1": this one alone). install: what the hint says to do."""
    package = trainer.lower()
    try:
        found, *_ = [metadata.version(name) for name in (package, *needs)]
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{trainer} is not installed: there is no {error.name}", install) from None
    parts = tested.split(".")
    if found.split(".")[: len(parts)] != parts:
        raise UserError(
            f"sparroll overrides methods of {trainer} {tested}, and {trainer} {found} is installed",
            f"{install}, or {package}=={tested}{'.*' if len(parts) < 3 else ''}",
        )
