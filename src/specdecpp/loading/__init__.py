"""From names to a pair of models with the fastest runners, or a refusal with its reason.

pair        the front door: `load_pair`              models         a checkpoint or a GGUF file, and the runners it can have
tokenizers  whether two are one                      gguf_writing   a checkpoint as llama.cpp reads it
choice      which runners a pair gets
"""
