"""`python -m cpuspec` is the `cpuspec` command."""

from cpuspec.cli import main

if __name__ == "__main__":
    main()
