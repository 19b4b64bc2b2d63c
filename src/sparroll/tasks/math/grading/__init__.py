"""Whether an answer is the gold answer, once both are text: what a worker process runs.

typography.py takes off everything that is only looks, numbers.py writes numbers in one way, sentences.py finds the
answer in a sentence, splitting.py says where an answer splits. units.py (with unit_table.py) reads quantities, words.py
choice letters, words and dates, relations.py equations and inequalities, real_sets.py sets of real numbers. hedges.py
finds words that name several answers, and magnitude.py keeps from computing what is too large. algebra.py compares
expressions that math-verify's grammar has parsed, quantities.py single values, shapes.py answers of any shape, and
compare.py decides.

Not here: processes, limits of time, and where in a response the answer stands. Nothing here imports torch, because a
worker starts often.
"""
