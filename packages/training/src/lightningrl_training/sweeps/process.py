"""A run of a sweep: `lightningrl train` in a process that ends with the sweep's, also when that is killed.

python -m lightningrl_training.sweeps.process PARENT train RECIPE --run FOLDER …
"""

from __future__ import annotations

import sys

from lightningrl.commands import main
from lightningrl.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    sys.argv[0] = "lightningrl"
    main()
