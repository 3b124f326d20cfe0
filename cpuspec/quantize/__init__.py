"""Quantizes weights: at load for drafts, or offline. It knows no model beyond the names of its tensors."""
