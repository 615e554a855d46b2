"""From names to a pair of models with the first backends that can run them, or a refusal with its reason.

pair          the front door: `load_pair`             models          a checkpoint, and the backends it can have
tokenizers    checks that two are one                 gguf            a GGUF file, and the backends it can have
choice        the backends of a pair                  gguf_header     metadata and places of tensors, checked
vocabulary    a draft's reduced vocabulary            gguf_reading    metadata and tensors -> a model of transformers
fingerprints  digests of weights                      gguf_tokenizer  metadata -> a tokenizer of transformers
shipped       the pairs with names of their own       gguf_writing    a model, or part of a file -> a GGUF file
"""

PAIRS = "smollm2", "reference"
"""Pairs that have a name of their own (`shipped`)."""
