"""Everything that exists only because of the paper.

`numbers` holds its numbers, `recipes` the runs that reproduce them; `reproduce` and `sweep` train
them; `records` and the modules around it keep results on disk; `comparison` compares them.
"""
