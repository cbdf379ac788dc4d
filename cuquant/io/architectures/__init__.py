"""Architectures of models that GGUF and transformers both know: names of tensors, settings, tokens.

GGUF says all of these in metadata, a checkpoint of transformers in config.json and tokenizer.json.
"""
