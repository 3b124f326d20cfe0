"""`python -m cpuspec` is the `cpuspec` command."""

try:
    from cpuspec.cli import main
except KeyboardInterrupt:
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
