"""A script that compiles one grammar. Its parent limits its time and memory, so a hostile grammar costs this process only.

llguidance limits its steps, and still takes exponential time for some schemas, as for `allOf` with many patterns. The script reads
JSON from stdin: the grammar's source, llguidance's limits, and the directory that llguidance is in. It does not report the
grammar's own errors: the parent gets them when it compiles the grammar itself. It imports nothing of the package, to start quickly.
"""

import json
import sys


def main() -> None:
    given = json.load(sys.stdin)
    sys.path.append(given["directory"])
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    LLMatcher(LLTokenizer("byte"), given["source"], log_level=0, limits=LLParserLimits(**given["limits"]))


if __name__ == "__main__":
    main()
