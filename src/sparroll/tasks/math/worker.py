r"""The program that a worker process runs: compares one answer at a time with math-verify. Imports nothing of sparroll.

Started as a file by math_pool.py. Standard input: one JSON line a question, {"gold", "answer" or null}. Standard output: the
line "ready" once, then for each question "gold" when its gold answer has parsed, and "= right", "= wrong" or
"= unparsable_gold". The kernel's timers end a question that runs too long, whatever Python is doing then: SIGPROF after
cpu_seconds of this process's own time, SIGALRM as a guard that needs no parent.
"""

import json
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Killed by the kernel when the thread that started us ends (Linux); elsewhere the end of standard input does it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def limit(memory_bytes: int) -> None:
    """No more memory than this, no core dumps, and no byte into any file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def main(parent: int, cpu_seconds: float, wall_seconds: float, memory_bytes: int) -> None:
    die_with_parent(parent)
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    # What a library prints must not look like a reply.
    os.dup2(2, 1)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)

    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    limit(memory_bytes)
    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(latex: str) -> list:
        return parse(rf"\boxed{{{latex}}}", extraction_config=config, parsing_timeout=None)

    def say(line: str) -> None:
        print(line, file=replies, flush=True)

    def judge(gold_latex: str, answer_latex: str | None) -> str:
        gold = parsed(gold_latex)
        # math-verify falls back to the string itself where it cannot parse; comparing strings is not its job.
        if all(isinstance(one, str) for one in gold):
            return "unparsable_gold"
        say("gold")
        if answer_latex is None:
            return "right"
        return "right" if verify(gold, parsed(answer_latex), timeout_seconds=None) else "wrong"

    say("ready")
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, 2 * wall_seconds)
        verdict = judge(question["gold"], question["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(f"= {verdict}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
