"""Whether a program passes its tests: the rules, the sandbox that runs it, and the sessions with the sandbox."""
