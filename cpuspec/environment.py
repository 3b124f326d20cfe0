"""The one place that reads environment variables, and what follows from them: where caches lie, and defaults for this machine.

CPUSPEC_CACHE      directory for models and everything else that can be fetched or built again
CPUSPEC_PACKED_GB  gigabytes of it that packed weights may take, by default 20; 0 keeps none
CPUSPEC_OFFLINE    set to anything but 0, no or false: nothing is downloaded
CPUSPEC_API_KEY    key that requests to `cpuspec serve` must have
FORWARDED_ALLOW_IPS   addresses of proxies that `cpuspec serve` believes when they name a client (X-Forwarded-For); by default none
HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_CACHE, HF_HOME and the other variables of the model hub, its cache and its token mean what they
mean to huggingface_hub, and OLLAMA_MODELS what it means to Ollama.
"""

import hashlib
import math
import os
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from cpuspec.errors import ConfigError
from cpuspec.platform import SYSTEM

_STACK_BYTES = 8 << 20  # as glibc gives; it becomes memory as it is written


def cache_dir() -> Path:
    """Directory for downloads and caches, absolute; not created here.

    CPUSPEC_CACHE if set, else `cpuspec` under XDG_CACHE_HOME, else in the system's place. A user without a home directory, as in
    containers, has none: then it lies below a file, where nothing can be made, and everything that is kept there stays in memory.
    Raises ConfigError if CPUSPEC_CACHE names the home directory of a user who has none.
    """
    if chosen := os.environ.get("CPUSPEC_CACHE"):
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise ConfigError(f"CPUSPEC_CACHE is {chosen!r}: {error}; name the directory in full") from error
    try:
        # The XDG specification has relative values ignored.
        if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
            return Path(xdg) / "cpuspec"
        return SYSTEM.cache_home(os.environ)
    except RuntimeError:
        return Path(os.devnull).absolute() / "no home directory" / "cpuspec"


def trusts_proxies() -> bool:
    """Whether FORWARDED_ALLOW_IPS names proxies; uvicorn reads it."""
    return bool(os.environ.get("FORWARDED_ALLOW_IPS"))


def packed_limit_bytes() -> int:
    """Bytes of the cache directory that packed weights may take. Raises ConfigError if CPUSPEC_PACKED_GB is no number."""
    text = os.environ.get("CPUSPEC_PACKED_GB") or "20"
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit <= 1e9:
        raise ConfigError(f"CPUSPEC_PACKED_GB is {text!r}; wanted a number of gigabytes, or 0 to keep no packed weights")
    return int(limit * 1e9)


def sources_digest(*modules: ModuleType) -> str:
    """A hash of the sources of modules and packages, with a package's tables. A cache of what they make has it in its name."""
    digest = hashlib.sha256()
    for module in modules:
        file = Path(module.__file__ or "")
        of_package = sorted(one for one in file.parent.iterdir() if one.suffix in (".py", ".json"))
        for source in of_package if file.stem == "__init__" else [file]:
            digest.update(f"{source.name} {source.stat().st_size} ".encode() + source.read_bytes())
    return digest.hexdigest()


def who_else_writes(status: os.stat_result) -> str:
    """Says, as a verb and an object, that others than this user and root can change a file or fill a directory; "" if none can.

    On Windows always "": the cache directory belongs to the user there.
    """
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (id {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    # The mode of a link says nothing: only its owner can change where it leads.
    return f"can be written by others (mode {mode:04o})" if mode & 0o022 and not stat.S_ISLNK(status.st_mode) else ""


def api_key() -> str:
    """The key that CPUSPEC_API_KEY asks of those who use the server; "" for none."""
    return os.environ.get("CPUSPEC_API_KEY", "").strip()


def offline() -> bool:
    """Whether CPUSPEC_OFFLINE forbids downloads."""
    return os.environ.get("CPUSPEC_OFFLINE", "").strip().lower() not in ("", "0", "no", "false")


def hub_endpoint() -> str:
    """Address of the model hub, without a trailing slash."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_offline() -> str:
    """The variable that forbids the model hub; "" if none does. HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE: 1, on, yes or true."""
    if offline():
        return "CPUSPEC_OFFLINE"
    # An empty HF_HUB_OFFLINE leaves the question to TRANSFORMERS_OFFLINE (huggingface_hub/constants.py).
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return name if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") else ""


def hub_cache_dir() -> Path:
    """Where huggingface_hub keeps repositories (huggingface_hub/constants.py), without importing it: that takes 0.4 s."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    there = os.path.expandvars(os.path.expanduser(chosen))
    return Path(there).absolute() if not there.startswith("~") else cache_dir() / "hub"  # of a user without a home directory


def has_proxy() -> bool:
    """Whether requests go through a proxy: then a host may be reached though its name cannot be resolved here."""
    return any(os.environ.get(name) for kind in ("http", "https", "all") for name in (f"{kind}_proxy", f"{kind}_PROXY".upper()))


def lm_studio_dirs() -> list[Path]:
    """Where LM Studio keeps models, its present directory first."""
    return [Path(os.path.expanduser(path)) for path in ("~/.lmstudio/models", "~/.cache/lm-studio/models")]


def ollama_dirs() -> list[Path]:
    """Where Ollama keeps models: OLLAMA_MODELS if set, else the user's directory and that of the Linux service."""
    if chosen := os.environ.get("OLLAMA_MODELS", "").strip("\"' "):
        return [Path(os.path.expanduser(chosen))]
    return [Path(os.path.expanduser("~/.ollama/models")), Path("/usr/share/ollama/.ollama/models")]


def usable_cores() -> int:
    """Threads to compute with by default (`platform.Topology.usable_cores`)."""
    return SYSTEM.topology().usable_cores


def start_thread(thread: threading.Thread) -> None:
    """Start a thread that kernels may run in: they keep up to 288 KiB on its stack, and some C libraries give 128 (musl)."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)


def default_prefix_cache_bytes(weight_bytes: int = 0) -> int:
    """Bytes that keys and values of finished requests may take by default: an eighth of the memory, and up to a quarter of what the
    weights leave; 1 GB where the memory is unknown.
    """
    usable = SYSTEM.memory().usable
    return 10**9 if usable is None else min(usable // 8, max(usable - weight_bytes, 0) // 4)


def default_models_bytes() -> int:
    """Bytes that the loaded models of a server may take by default: three quarters of the memory; 8 GB where that is unknown."""
    return (SYSTEM.memory().usable or 11 * 10**9) * 3 // 4


def commit() -> str:
    """The commit that this package is of: a build's file, or in a checkout what git says; "" where neither is there."""
    package = Path(__file__).parent
    with suppress(OSError):
        return (package / "commit.txt").read_text(encoding="ascii").strip()[:12]
    if (package.parent / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "rev-parse", "--short=12", "HEAD"]
            return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return ""


def importing_environment() -> dict[str, str]:
    """This process's environment for a child that imports from the places that this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def child_environment(temporary: Path) -> dict[str, str]:
    """This process's environment for a child that keeps its temporary files in `temporary`."""
    return {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
