"""Python imports this first, in every process of a run. Each of them imports torch, vLLM and verl, and a seventh of that
time goes to the garbage collector, which looks again and again at objects that stay. Most of them do not even import: they
go on in a fork of a process that has."""

import gc
import os
import sys

gc.set_threshold(200_000, 50, 50)

if "SPARROLL_TEST_IMPORTED_AHEAD" in os.environ:
    import imported_ahead

    if imported_ahead.is_handed_over(sys.orig_argv[1:]):
        imported_ahead.hand_over(os.environ[imported_ahead.VARIABLE])
