"""Python imports this first, in every process of a run. Each of them imports torch, vLLM and verl, and a seventh of that
time goes to the garbage collector, which looks again and again at objects that stay."""

import gc

gc.set_threshold(200_000, 50, 50)
