"""Make the picture of the server's page in README.md: a running server answers a message, and Chromium shows its tokens by drafter.

python tools/make_page_picture.py http://127.0.0.1:8000 "Write a function ..." benchmarks/pictures/page.png
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.server.browser import CHROMIUM, browsing

_DONE = "document.querySelector('.assistant') && !document.querySelector('[aria-busy]')"


def main() -> int:
    """Make the picture; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make a picture of the page of a running server.")
    parser.add_argument("url", help="of the server")
    parser.add_argument("message", help="what its model is asked")
    parser.add_argument("out", type=Path, help="the PNG file")
    parser.add_argument("--size", type=int, nargs=2, default=(900, 620), metavar=("W", "H"), help="of the window, in pixels")
    given = parser.parse_args()
    if CHROMIUM is None:
        print("error: there is no Chromium; install it, under the name chromium or google-chrome", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory, browsing(Path(directory)) as browser:
        browser.shape(*given.size)
        browser.open(given.url)
        browser.until("document.activeElement.id === 'input'")
        browser.type(given.message)
        browser.press("Enter")
        browser.until(_DONE)
        browser.picture(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
