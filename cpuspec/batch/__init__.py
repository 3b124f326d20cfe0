"""Files of prompts, answered by one LLM in this process. Knows OpenAI's batch format, and no HTTP."""
