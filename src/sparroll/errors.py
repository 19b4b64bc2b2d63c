"""The one error a user can fix. Everything else that goes wrong is our bug and keeps its traceback."""


class UserError(ValueError):
    """What was wrong, with the value, and how to go on.

    The command line prints both lines without a traceback and exits with code 2.
    """

    def __init__(self, message: str, hint: str | None = None):
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


def nearest(name: str, known: list[str]) -> str:
    """A hint that names the known name closest to a misspelt one, or lists them all."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
