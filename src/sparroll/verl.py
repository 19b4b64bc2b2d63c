"""`python -m sparroll.verl <overrides>` starts verl with sparse rollouts (integrations/verl/). Everything but
`trainer.v1.trainer_mode=sparroll_sync` and `+actor_rollout_ref.rollout.custom.sparroll...` is verl's own."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    if importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None:
        print("error: verl is not installed\nhint: pip install -e '.[verl]'", file=sys.stderr)
        sys.exit(2)
    from sparroll.integrations.verl.main import main as run

    run()


if __name__ == "__main__":
    main()
