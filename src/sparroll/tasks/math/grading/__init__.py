"""Whether an answer is the gold answer, once both are text: what a worker process runs.

typography.py takes off everything that is only looks, numbers.py writes numbers in one way, sentences.py finds the
answer in a sentence, units.py and words.py read quantities, choice letters, words and dates, structure.py splits lists,
sets and relations, real_sets.py reads sets of real numbers, algebra.py compares expressions that math-verify's grammar
has parsed, and compare.py puts them together.

Not here: processes, limits of time, and where in a response the answer stands. Nothing here imports torch, because a
worker starts often.
"""
