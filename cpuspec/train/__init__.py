"""Training of draft heads: answers by the target itself, and its hidden states as samples to train on."""
