"""`python -m lightningrl.server`: settings on stdin, readiness on stdout."""

from __future__ import annotations

import sys

from lightningrl.server.process import main

if __name__ == "__main__":
    sys.exit(main())
