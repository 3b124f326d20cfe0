"""Measures a model's output against text and against other backends, its speed, and the exactness of drafts."""
