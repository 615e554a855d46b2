"""`python -m specdecpp` is the command line."""

from specdecpp.cli import main

if __name__ == "__main__":
    main()
