"""Real data as tasks: published sets by name, and your own files. Reads rows, filters them and writes prompts.

catalog.py names the sets, hub.py finds their files, and read.py streams a file. math_sets.py and code_sets.py know the
columns of each set, and local.py reads your own files, with `prompt` and `answer` or `tests`. select.py and
contamination.py leave rows out, rewards.py picks the reward of a row, and task.py puts all of it together.

Not here: how responses are judged (tasks/math/, tasks/code/). Nothing here runs a model, or code that came with the
data.
"""
