"""GGUF files, the format of llama.cpp: config, tokenizer, chat template and weights of a model in one file.

Knows bytes, tensors and the words of the format; knows no module of a model.
"""
