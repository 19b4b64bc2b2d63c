"""What a run can be told: one small class for each section of its file, and how a file becomes a checked configuration.

base.py       what a section is, and sections with several kinds
task.py rollout.py control.py reward.py training.py adapter.py outputs.py    the sections
run.py        TrainConfig: all sections of `sparroll train`, and the rules between them
distill.py    DistillConfig: those of `sparroll distill`, an adapter alone
check.py      from plain tables to one of both, every mistake in one line (moved.py: where old keys went)
file.py       TOML, `--set`, and what a resumed run may change
"""
