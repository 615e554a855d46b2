"""A draft for a target that has none: cut from the target, trained on its own text, with a verdict.

run        the plan, and the phases, each of which goes on after a kill
target     the model, and what writes with it          text       its answers, and the files of them
shapes     which layers and tokens, by speed           trials     which layers of a small model
network    the draft as a model                        start      its weights before training
training   of its own layers                           measuring  its acceptance
saving     checkpoint and GGUF file                    finishing  the check, the card
"""
