"""Requests sent to a server on this machine, and how long it took to answer them. Knows OpenAI's protocol, and no model."""
