"""Real data as tasks: published sets by name, and your own files. Reads rows, filters them and writes prompts.

`catalog` names the sets, `hub` finds their files, `read` streams a file, `math_sets` and `code_sets` know each schema,
`local` reads any file with `prompt` and `answer` or `tests`, `select` and `contamination` leave rows out, `task` is the
result.

Not here: rewards (tasks/math/, tasks/code/). Nothing here runs a model, or code that came with the data.
"""
