"""Whether a program passes its tests. reward.py gives the verdict outside of the sandbox, by rules.py; sandbox.py finds
a boundary that holds on this machine, and session.py talks to runner.py inside it.

Expected answers never enter the sandbox of the program that is judged. Prompts and data sets are elsewhere
(tasks/data/).
"""
