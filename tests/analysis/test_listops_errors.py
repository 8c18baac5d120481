"""Errors of ListOps-SubTrees by height and operator, against the generator's own bookkeeping."""

import numpy as np

from dlrnn.analysis.listops_errors import NAMES, error_rates, nodes
from dlrnn.tasks import listops
from dlrnn.tasks.listops.text import OPERATOR


def test_the_paper_s_example():
    tokens = listops.from_text("[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]")
    tree = nodes(tokens)
    assert tree.heights.tolist() == [1, 2, 3]
    assert [NAMES[k] for k in tree.operators] == ["SM", "MED", "MAX"]
    assert tree.positions.tolist() == [8, 11, 14]


def test_nodes_are_the_generator_s():
    tree = listops.lra().draw("test", 3)
    found = nodes(tree.tokens)
    assert (found.positions == tree.positions).all()
    assert (found.heights == tree.heights).all()
    assert (found.operators == tree.operators - OPERATOR).all()


def test_rates():
    tree = listops.lra().draw("test", 0)
    targets = np.arange(len(tree.tokens)) % 10  # only those of closing brackets count
    wrong_at_height_2 = targets.copy()
    wrong_at_height_2[tree.positions[tree.heights == 2]] += 1
    rates = error_rates([(tree.tokens, targets, wrong_at_height_2)])
    for row in rates["by height"]:
        assert row["error"] == (row["height"] == 2)
        assert row["nodes"] == (tree.heights == row["height"]).sum()
    total = sum(row["nodes"] * row["error"] for row in rates["by operator"] if row["nodes"])
    assert round(total) == (tree.heights == 2).sum()
    assert error_rates([]) == {"by height": [], "by operator": []}
