"""OpenAI's completions and chat completions: bodies and answers."""
