"""How good a model's output is: measured against text, and against the same model at higher precision."""
