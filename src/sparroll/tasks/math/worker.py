r"""The program that a worker process runs. It compares one answer at a time by grading/, and loads no other part of
sparroll, so that it starts without torch.

pool.py starts it as a file. Standard input has one JSON line per question: {"gold", "answer" or null}. Standard output
has the line "ready" once, and then for each question the line "gold" when its gold answer has parsed, and "= right", "=
wrong", "= timeout" or "= unparsable_gold". A question that takes too long is given up by an exception at half of its
time. Where that cannot interrupt Python, timers of the kernel end the process: SIGPROF after cpu_seconds of its own
time, and SIGALRM in case the parent is gone.
"""

import json
import os
import resource
import signal
import sys
import types
from pathlib import Path

PR_SET_PDEATHSIG = 1


SOFT_SHARE = 0.5
"""After this share of the processor time a question is given up without ending the worker, if Python can be
interrupted."""


class OutOfTime(BaseException):
    """A question has used its soft share of the time. Not an Exception, which libraries would swallow."""


def give_up(number: int, frame: object) -> None:
    raise OutOfTime


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends (Linux). Elsewhere it ends with its
    standard input."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def limit(memory_bytes: int) -> None:
    """Allow no more memory than this, no core dumps, and no writing to files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def without_packages(folder: Path) -> None:
    """Let modules of tasks/math/ be imported by their names without the packages around it, which load torch."""
    for name, path in (("sparroll", folder.parents[1]), ("sparroll.tasks", folder.parent)):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module


def main(parent: int, cpu_seconds: float, wall_seconds: float, memory_bytes: int, folder: Path) -> None:
    die_with_parent(parent)
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    # What a library prints must not look like a reply.
    os.dup2(2, 1)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGVTALRM, give_up)

    import logging

    without_packages(folder)
    from sparroll.tasks.math.grading.compare import readable, same_answer

    logging.disable(logging.CRITICAL)
    limit(memory_bytes)

    def say(line: str) -> None:
        print(line, file=replies, flush=True)

    def judge(gold_latex: str, answer_latex: str | None) -> str:
        # Parsers and sympy raise whatever they like on strange input; what they cannot handle is not equal.
        try:
            if not readable(gold_latex):
                return "unparsable_gold"
        except OutOfTime:
            return "unparsable_gold"
        except MemoryError:
            raise
        except Exception:
            return "unparsable_gold"
        say("gold")
        if answer_latex is None:
            return "right"
        try:
            return "right" if same_answer(gold_latex, answer_latex) else "wrong"
        except OutOfTime:
            return "timeout"
        except MemoryError:
            raise
        except Exception:
            return "wrong"

    say("ready")
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_VIRTUAL, SOFT_SHARE * cpu_seconds)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, 2 * wall_seconds)
        try:
            verdict = judge(question["gold"], question["answer"])
        except OutOfTime:
            # It came between a verdict and its return.
            verdict = "timeout"
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(f"= {verdict}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
