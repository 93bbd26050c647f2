"""A small chat data set for a first run: `chat.jsonl` to train on, `valid.jsonl` held out.

Written for this project, Apache-2.0; house, animals and customs are invented. "Hearth", the voice
of Larkspur House, answers in a fixed style ("Hearth here: … Kettle's on!") about some twenty
facts; the held-out questions ask for the same facts in other words. Each row has a short system
message, so that no template adds its own long one. Must hold data only.
"""
