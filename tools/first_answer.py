"""A first user's way, timed: an empty virtual environment, `pip install`, `cpuspec serve`, and an answer on the page in a browser.

    python -m tools.first_answer --pictures DIR

Everything happens in a directory of its own, with an empty cache: the model is fetched and the kernels are compiled. --cache takes
a cache that has both, as a second start does. pip's own cache is used. Chromium types a question, sends it with Enter, and waits
for the end of the answer. --pictures keeps what it shows: light, dark, narrow, and the settings.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.server.browser import Browser, browsing

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Name three uses of a brick."
BODY = "document.querySelector('.assistant .body')"
WORD, END = f"{BODY} && {BODY}.textContent.trim()", f"{BODY} && !document.querySelector('[aria-busy]')"
START_S = 1800
PICTURES = {"light": (1280, 800, False), "dark": (1280, 800, True), "narrow": (390, 844, False), "narrow-dark": (390, 844, True)}


class Stopwatch:
    """The seconds of each part of the way, in their order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def note(self, part: str) -> None:
        """The part that ends now."""
        now_s = time.monotonic()
        self.seconds[part], self._last_s = round(now_s - self._last_s, 1), now_s
        print(f"{part}: {self.seconds[part]} s", file=sys.stderr, flush=True)


def main() -> None:
    """Print the seconds of each part as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="a cache with models and kernels; without it, an empty one")
    parser.add_argument("--pictures", type=Path, help="keep pictures of the page in this directory")
    options = parser.parse_args()
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
        watch.note("python -m venv")
        install = ("install", "-qq", "--disable-pip-version-check", f"{ROOT}[server]")
        subprocess.run([str(home / "venv/bin/pip"), *install], check=True)
        watch.note("pip install")
        environment = {**os.environ, "CPUSPEC_CACHE": str(options.cache or home / "cache")}
        command = [str(home / "venv/bin/cpuspec"), "serve", "--port", "0"]
        with (
            (home / "log").open("wb") as log,
            subprocess.Popen(command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as server,
        ):
            guard = threading.Timer(START_S, server.kill)
            guard.start()
            try:
                url = ready(home / "log", server)
                watch.note("cpuspec serve, until it is ready")
                with browsing(home / "profile") as browser:
                    ask(browser, url, watch)
                    if options.pictures is not None:
                        take_pictures(browser, options.pictures)
            finally:
                guard.cancel()
                server.send_signal(signal.SIGTERM)
    print(json.dumps({**watch.seconds, "in all": round(sum(watch.seconds.values()), 1)}))


def ready(log: Path, server: "subprocess.Popen[bytes]") -> str:
    """The address that the server tells, once it answers."""
    while server.poll() is None:
        text = log.read_text("utf-8", "replace")
        if (found := re.search(r"http://127\.0\.0\.1:\d+", text)) and "ready: " in text:
            return found[0]
        time.sleep(0.05)
    raise SystemExit(f"the server has ended: {log.read_text('utf-8', 'replace')[-1000:]}")


def ask(browser: Browser, url: str, watch: Stopwatch) -> None:
    """Open the page, and ask."""
    browser.shape(1280, 800)
    browser.open(url)
    browser.until("document.activeElement.id === 'input'")
    watch.note("the page, until it takes a message")
    browser.type(QUESTION)
    browser.press("Enter")
    browser.until(WORD)
    watch.note("the answer's first word")
    browser.until(END)
    watch.note("the rest of the answer")


def take_pictures(browser: Browser, directory: Path) -> None:
    """What the page shows, in each shape."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (width, height, dark) in PICTURES.items():
        browser.shape(width, height, dark)
        browser.picture(directory / f"{name}.png")
    browser.shape(1280, 800)
    browser.value("document.getElementById('settings').showModal()")
    browser.picture(directory / "settings.png")


if __name__ == "__main__":
    main()
