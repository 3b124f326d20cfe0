"""`cpuspec serve`: a model behind HTTP, for the clients that speak OpenAI's or Anthropic's protocol. See README.md here."""
