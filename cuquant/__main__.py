"""`python -m cuquant`: the command line."""

from cuquant.cli import main

if __name__ == "__main__":
    main()
