"""sparroll inside trainers of others. tail.py turns what replicas measured into a step's metrics, and corrections.py turns
a framework's batch into weights and masks. Both are pure functions on tensors and import no framework and no engine.
What verl and TRL have in common is here, too: settings.py turns what users type into a configuration of our own loop,
measured.py adds up what the engines measured and counted in a step, watched.py shows it and the control group to guard
and controller, saved_state.py writes what a resumed run needs, and tested_version.py refuses other versions
than those that were run. prime_rl.py is a loss that prime-rl imports by name.

Not here: how an engine measures itself (engines/vllm/rescoring.py), the corrections' formulas (corrections/), and who may
move the schedule (control/).
"""
