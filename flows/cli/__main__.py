"""`python -m metaloom.flows.cli`."""

from metaloom.flows.cli import main

if __name__ == "__main__":
    main()
