"""`python -m sparroll.verl <overrides>` starts verl with sparse rollouts (integrations/verl/). Everything but
`trainer.v1.trainer_mode=sparroll_sync` and `+actor_rollout_ref.rollout.custom.sparroll...` is verl's own."""

from __future__ import annotations

import sys

from sparroll.errors import UserError
from sparroll.integrations.verl.refusals import check_version


def main() -> None:
    # Before what is imported below, which may be missing in another version, or do something else there.
    try:
        check_version()
    except UserError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(2)
    from sparroll.integrations.verl.main import main as run

    run()


if __name__ == "__main__":
    main()
