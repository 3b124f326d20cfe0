"""Where one machine is not enough: the server and files of prompts over a Ray cluster, with Ray's public interfaces.

`cpuspec.ray.app` makes a Ray Serve application; importing this package loads neither Ray nor the server.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuspec.ray.serving import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cpuspec.ray' has no attribute {name!r}")
    from cpuspec.ray.serving import app

    return app
