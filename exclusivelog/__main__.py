"""`python -m exclusivelog` is the command."""

from exclusivelog.cli import main

if __name__ == "__main__":
    main()
