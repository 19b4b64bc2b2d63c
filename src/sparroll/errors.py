"""UserError, the error for mistakes that a user can fix. Every other exception is a bug of ours and keeps its
traceback."""


class UserError(ValueError):
    """A message that says what was wrong, with the value, and a hint that says how to go on.

    The command line prints both lines without a traceback and exits with code 2.
    """

    def __init__(self, message: str, hint: str | None = None):
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


def nearest(name: str, known: list[str]) -> str:
    """A hint that gives the known name closest to a misspelt one, or lists all known names if none is close."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
