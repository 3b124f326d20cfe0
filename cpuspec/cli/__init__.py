"""The command line: thin, and the only package that prints. Results go to stdout, everything else to stderr."""


def main() -> None:
    """Run the `cpuspec` command with this process's arguments, and exit."""
    from cpuspec.cli.app import run

    run()
