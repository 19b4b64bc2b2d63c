"""Real data as tasks: published sets by name, and files of one's own. Reads rows, filters them, writes prompts; rewards
are other modules' part, and nothing here runs a model or code that came with the data.

`catalog` names the sets, `hub` finds their files, `read` streams a file, `math_sets` and `code_sets` know each schema,
`local` any file with `prompt` and `answer` or `tests`, `select` and `contamination` leave rows out, `task` is the result.
"""
