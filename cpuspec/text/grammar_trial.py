"""A script that compiles one grammar within limits of time and memory, so that one that exceeds them costs its own process only.

llguidance limits its steps, and still takes exponential time for some schemas, as for `allOf` with many patterns. Reads JSON from
stdin: the grammar's source, llguidance's limits, seconds, bytes, and the directory that llguidance is in. The grammar's own errors
are no failure: whoever compiles it next gets them, too. Imports nothing of the package, so that it starts quickly.
"""

import json
import sys
from contextlib import suppress


def main() -> None:
    given = json.load(sys.stdin)
    with suppress(ImportError):  # on Windows the caller's own limit of time must do
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
        with suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (given["bytes"], given["bytes"]))
    sys.path.append(given["directory"])
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    LLMatcher(LLTokenizer("byte"), given["source"], log_level=0, limits=LLParserLimits(**given["limits"]))


if __name__ == "__main__":
    main()
