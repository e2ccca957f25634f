"""`python -m lightningrl_server`: settings on stdin, readiness on stdout."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    # Until it serves: what is imported stays, and looking through it again and again is a sixth of a start.
    gc.disable()
    from lightningrl_server.process import main

    sys.exit(main())
