"""Requests to answers: scheduler, engine, and the LLM that users hold."""
