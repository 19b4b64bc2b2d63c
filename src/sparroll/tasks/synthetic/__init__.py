"""Problems made from a seed, with answers that a program checks. kinds.py writes them, task.py makes tasks of them.
Their solutions must look far back in the context, which is hard for sparse attention."""
