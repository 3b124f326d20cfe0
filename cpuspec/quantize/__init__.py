"""From weights to other formats: at load for drafts, or offline. Knows no model beyond the names of its tensors."""
