"""A user's own proposer, named by the place of its class: `module:Class` or `path/to/file.py:Class`.

It is untrusted input: a missing method, a wrong draft or an exception becomes an error that names the class.
"""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.settings import LevelSpec
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import Proposer
from cpuspec.speculation.verify import Verdict

_IMPORT_PATH = re.compile(r"(?P<home>.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)", re.DOTALL)
_T = TypeVar("_T")


def is_import_path(drafter: str) -> bool:
    """Whether the text names a class in a module or in a Python file."""
    return _IMPORT_PATH.fullmatch(drafter) is not None


class UserProposer(Proposer):
    """Stands between the engine and an object of the user's class, which is made without arguments, or `proposer`, a made one.

    The class may leave out the second argument of `begin`, the number of cached tokens.
    """

    def __init__(self, level: LevelSpec, proposer: Any = None) -> None:
        if level.min_confidence:
            raise ConfigError(f"{level.drafter} decides itself when it is unsure; leave out :{level.min_confidence:g}")
        self._num_tokens = level.num_tokens
        self._failed = False
        self.name = level.drafter
        if proposer is None:
            proposer = self._call("making it", imported(level.drafter))
        if not callable(getattr(proposer, "propose", None)):
            raise ConfigError(f"{level.drafter} has no method propose; a proposer has one, and may have begin, accept and end")
        name, layers = getattr(proposer, "name", None), getattr(proposer, "hidden_layers", ())
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name of {level.drafter} must be a text that is not empty, got {name!r}")
        if not isinstance(layers, tuple) or not all(isinstance(layer, int) for layer in layers):
            raise ConfigError(f"hidden_layers of {level.drafter} must be a tuple of layer numbers, as (), got {layers!r}")
        self.name, self.hidden_layers = name, layers
        self._proposer = proposer
        begin = getattr(proposer, "begin", lambda seq: None)
        self._num_begin_arguments = next((n for n in (2, 1) if _takes(begin, n)), 0)
        if not self._num_begin_arguments:
            raise ConfigError(f"begin of {level.drafter} must take a sequence and the number of its cached tokens")

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Call the user's `begin`, if there is one, and turn its exceptions into ConfigError."""
        self._hook("begin", *(seq, num_cached)[: self._num_begin_arguments])

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """Call the user's `propose`, and check its drafts."""
        capped = limits if self._num_tokens is None else [min(limit, self._num_tokens) for limit in limits]
        drafts = self._call("propose", self._proposer.propose, seqs, capped)
        if not isinstance(drafts, list) or not all(isinstance(draft, Draft) for draft in drafts):
            raise ConfigError(f"propose of {self.name} must return a list of Draft, got {repr(drafts)[:100]}")
        if len(drafts) != len(seqs):
            raise ConfigError(f"propose of {self.name} returned {len(drafts)} drafts for {len(seqs)} sequences; wanted one each")
        for draft in drafts:
            for what, array in (("tokens", draft.tokens), ("parents", draft.parents)):
                if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
                    raise ConfigError(f"{what} of a draft by {self.name} must be a vector of int32, got {repr(array)[:100]}")
        return drafts

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Call the user's `accept`, if there is one."""
        self._hook("accept", seq, verdict, hidden)

    def end(self, seq: Sequence) -> None:
        """Call the user's `end`, unless an earlier call has failed: requests then end without it."""
        if not self._failed:
            self._hook("end", seq)

    def _hook(self, name: str, *arguments: Any) -> None:
        if method := getattr(self._proposer, name, None):
            self._call(name, method, *arguments)

    def _call(self, what: str, function: Callable[..., _T], *arguments: Any) -> _T:
        self._failed = True
        try:
            result = function(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, or a panic of a Rust library, which is no Exception
            raise ConfigError(f"{what} of {self.name} failed with {type(error).__name__}: {error}") from error
        self._failed = False
        return result


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """Whether the function can be called with that many arguments. A function without a signature counts as such."""
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # a built-in function
        return True
    return True


def imported(drafter: str) -> Callable[..., Any]:
    """The class or the function at an import path. Raises ConfigError where there is none, or its module cannot be imported."""
    found = _IMPORT_PATH.fullmatch(drafter)
    assert found is not None, "an import path has a module and a name"
    home, name = found["home"], found["name"]
    try:
        if home.endswith(".py"):
            path = Path(home).expanduser()
            if not path.is_file():
                raise ConfigError(f"there is no file {home!r} to take {name} from")
            spec = spec_from_file_location(f"cpuspec_user_{path.stem}", path)
            assert spec is not None, "a .py file has a loader"
            assert spec.loader is not None, "a .py file has a loader"
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = import_module(home)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"{home} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"{home} has no class or function {name}")
    found_there: Callable[..., Any] = getattr(module, name)
    return found_there
