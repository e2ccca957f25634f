"""`python -m lightningrl`."""

from lightningrl.commands import main

if __name__ == "__main__":
    main()
