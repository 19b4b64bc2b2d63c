"""sparroll inside trainers of others. tail.py turns what replicas measured into a step's metrics, and corrections.py turns
a framework's batch into weights and masks. Both are pure functions on tensors and import no framework and no engine.
prime_rl.py is a loss that prime-rl imports by name.

Not here: how an engine measures itself (engines/vllm/rescoring.py), the corrections' formulas (corrections/), and who may
move the schedule (control/).
"""
