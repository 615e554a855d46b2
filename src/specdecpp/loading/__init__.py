"""From names to a pair of models with the fastest runners, or a refusal with its reason.

pair          the front door: `load_pair`             models          a checkpoint, and the runners it can have
tokenizers    whether two are one                     gguf            a GGUF file, and the runners it can have
choice        which runners a pair gets               gguf_header     metadata and places of tensors, checked
checks        what has been tried before              gguf_config     metadata -> a configuration of transformers
fingerprints  what tells weights from others          gguf_reading    tensors -> weights by transformers' names
gguf_writing  a checkpoint as a GGUF file             gguf_tokenizer  metadata -> a tokenizer of transformers
"""

PAIRS = "smollm2", "reference"
"""Those that have a name of their own (`shipped`)."""
