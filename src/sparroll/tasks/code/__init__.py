"""Whether a program passes its tests. reward.py gives the verdict outside of the sandbox, by the rules in rules.py.
sandbox.py finds a boundary that works on this machine, and session.py talks to runner.py inside of it.

Expected answers never enter the sandbox of the program that is judged. Not here: prompts and data sets (tasks/data/).
"""
