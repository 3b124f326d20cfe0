"""What can go wrong, by whose fault. A message says what, got, wanted, remedy."""


class CpuspecError(Exception):
    """Base of every error that cpuspec raises on purpose."""


class ConfigError(CpuspecError, ValueError):
    """An argument or a combination of arguments that cannot be honoured."""


class FormatError(CpuspecError, ValueError):
    """Bytes or shapes that a weight format cannot have."""


class CheckpointError(CpuspecError):
    """A model file or directory that is missing, truncated, hostile or not supported."""


class DownloadError(CpuspecError):
    """A model that no source delivered, or delivered with other bytes than wanted."""


class TokenizerError(CpuspecError, ValueError):
    """A vocabulary or a chat template that cannot be used."""


class CacheError(CpuspecError):
    """A KV-cache request that the cache cannot satisfy."""


class BackendError(CpuspecError):
    """A backend that is not installed, or cannot run this model or batch."""
