"""A draft for a target that has none: cut from the target, trained on its own text, with a head and a verdict.

plan         what is asked                                target     the model, and what writes with it
run          the phases, each of which goes on after a kill          shapes   which layers and tokens, by predicted speed
writing      the target writes                            text       what is kept of it on disk
network      the draft as a model                         start      its start in closed form
training     its own layers learn                         measuring  how often it is accepted
saving       checkpoint and GGUF file                     finishing  the head, the check, the card
"""
