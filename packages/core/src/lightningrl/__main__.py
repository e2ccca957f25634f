"""`python -m lightningrl`."""

from lightningrl.cli import main

if __name__ == "__main__":
    main()
