"""GGUF files, the format of llama.cpp: config, tokenizer, chat template and weights of a model in one file."""
