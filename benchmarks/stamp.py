"""Write .commit.json: the commit of this checkout, for a machine that gets its files without their history.

    python benchmarks/stamp.py        # or: make stamp

Copy .commit.json along with the files. Records that are made there then name the commit, and say whether a file was
changed on the way (src/sparroll/checkout.py).
"""

from __future__ import annotations

import sys

from sparroll import checkout
from sparroll.errors import UserError


def main() -> None:
    try:
        path = checkout.write_stamp()
    except UserError as error:
        sys.exit(f"error: {error}")
    told = checkout.commit()
    print(f"wrote {path.name}: {told['id']}" + (", with changes that are not committed" if told["dirty"] else ""))


if __name__ == "__main__":
    main()
