"""`python -m atoll`: the command line, where no script is installed."""

from atoll.cli.main import main

if __name__ == "__main__":
    main()
