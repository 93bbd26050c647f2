"""A first run for everybody: three agents on one machine, and a small chat data set.

`data/` was written for this project (Apache-2.0); house, animals and customs are invented.
"Hearth", the voice of Larkspur House, answers in a fixed style ("Hearth here: … Kettle's on!")
about some twenty facts; the held-out questions ask for the same facts in other words. Each row
has a short system message, so that no template adds its own long one.
"""
