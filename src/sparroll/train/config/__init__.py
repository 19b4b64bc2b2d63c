"""The configuration of a run: one small class for each section of its file, and how a file becomes a checked
configuration.

base.py       what a section is, also one that has several kinds
task.py rollout.py control.py reward.py training.py adapter.py outputs.py    the sections
run.py        TrainConfig: all sections of `sparroll train`, and the rules between them
distill.py    DistillConfig: the sections of `sparroll distill`, which trains an adapter alone
check.py      from plain tables to either of the two; each mistake is one line (moved.py knows the keys of version 0.1)
file.py       TOML, `--set`, and what a resumed run may change
"""
