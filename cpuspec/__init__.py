"""Quantized language models on x86 CPUs, with speculative decoding that is exact.

A name is loaded when it is first used, so that importing cpuspec costs nothing: no numpy, no numba, no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuspec.config import ModelConfig
    from cpuspec.engine.async_llm import AsyncLLM
    from cpuspec.engine.engine import Output
    from cpuspec.engine.llm import LLM, Completion
    from cpuspec.engine.lora import LoRARequest
    from cpuspec.errors import (
        BackendError,
        CacheError,
        CheckpointError,
        ConfigError,
        CpuspecError,
        DownloadError,
        FormatError,
        TokenizerError,
    )
    from cpuspec.settings import EngineConfig, LevelSpec, SamplingParams, SpecConfig
    from cpuspec.speculation.draft import Draft
    from cpuspec.speculation.proposer import Proposer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BackendError",
    "CacheError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "CpuspecError",
    "DownloadError",
    "Draft",
    "EngineConfig",
    "FormatError",
    "LevelSpec",
    "LoRARequest",
    "ModelConfig",
    "Output",
    "Proposer",
    "SamplingParams",
    "SpecConfig",
    "TokenizerError",
]

_HOMES = {
    "LLM": "cpuspec.engine.llm",
    "AsyncLLM": "cpuspec.engine.async_llm",
    "Completion": "cpuspec.engine.llm",
    "Output": "cpuspec.engine.engine",
    "EngineConfig": "cpuspec.settings",
    "LevelSpec": "cpuspec.settings",
    "LoRARequest": "cpuspec.engine.lora",
    "ModelConfig": "cpuspec.config",
    "SamplingParams": "cpuspec.settings",
    "SpecConfig": "cpuspec.settings",
    "Draft": "cpuspec.speculation.draft",
    "Proposer": "cpuspec.speculation.proposer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cpuspec' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "cpuspec.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
