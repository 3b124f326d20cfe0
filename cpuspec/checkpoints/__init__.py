"""Model files as checked, memory-mapped tensors under canonical names: GGUF and Hugging Face safetensors. Never pickles."""

from cpuspec.checkpoints.checkpoint import Checkpoint, GgufVocabulary, HfTokenizerFiles
from cpuspec.checkpoints.opening import open_checkpoint

__all__ = ["Checkpoint", "GgufVocabulary", "HfTokenizerFiles", "open_checkpoint"]
