"""OpenAI's completions and chat completions: conversations of bodies, and answers. Knows no engine."""
