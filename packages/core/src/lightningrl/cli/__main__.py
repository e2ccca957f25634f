"""`python -m lightningrl.cli`."""

from lightningrl.cli import main

main()
