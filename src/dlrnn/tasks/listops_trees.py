"""Trees of ListOps, drawn exactly, by numba.

An attempt is one unconditioned tree, level by level instead of depth first: the
choices of a node (operator or digit, how many children, which name, which digit) do not depend on
anything else, so the order in which they are drawn does not matter. A node is an operator if two
fair bits are both 1: probability 1/4, 64 nodes from two words. The length, nodes + operators, is
known from the shape alone and only grows, so an attempt that reaches max_length is given up at
once, as it would be at its end; names and digits are drawn only for trees that are accepted.
What is left is the distribution given that the length lies between its limits.
"""

from typing import no_type_check

import numpy as np

from dlrnn.tasks.listops_text import CLOSE, DIGIT, OPERATOR
from dlrnn.tasks.streams import GOLDEN, ONE, ZERO, below, bits, compiled, mix, part, start


@part
@no_type_check
def _lowest(word):
    """The position of the lowest 1, by counting the zeros below it."""
    x = (word & (~word + ONE)) - ONE
    x -= (x >> ONE) & np.uint64(0x5555555555555555)
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@part
@no_type_check
def _grow(stream, limits, where, arity):
    """The shape of one tree, level by level: how many nodes and operators; -1 when too long.

    Nodes are counted from the root on, level after level, siblings side by side. Operator j is node
    `where[j]` and has `arity[j]` children, which follow those of operator j - 1.
    """
    max_depth, max_args, _, max_length = limits
    first, nodes, operators = 0, 1, 0
    for _ in range(1, max_depth):  # the nodes of this level are first .. stop-1
        stop = nodes
        for at in range(first, stop, 64):
            word = bits(stream) & bits(stream)
            if stop - at < 64:
                word &= (ONE << np.uint64(stop - at)) - ONE
            while word != ZERO:
                where[operators] = at + _lowest(word)
                word &= word - ONE
                arity[operators] = 2 + below(stream, max_args - 1)
                nodes += arity[operators]
                operators += 1
                if nodes + operators >= max_length:
                    return -1, -1
        first = stop
        if nodes == stop:
            break
    return nodes, operators


@part
@no_type_check
def _value(operator, values, count):
    """MIN, MAX, MED or SM of a few digits, which it sorts."""
    if operator == 3:
        return values[:count].sum() % 10
    for i in range(1, count):
        value, j = values[i], i
        while j > 0 and values[j - 1] > value:
            values[j] = values[j - 1]
            j -= 1
        values[j] = value
    if operator == 0:
        return values[0]
    if operator == 1:
        return values[count - 1]
    return (values[(count - 1) // 2] + values[count // 2]) // 2


@part
@no_type_check
def _hash(low, high, token):
    """Two hashes of a template, one token further."""
    word = np.uint64(token)
    return mix(low + word * GOLDEN), mix((high ^ word) * GOLDEN)


@part
@no_type_check
def _write(stream, limits, size, where, arity):
    """Names and digits of a tree, depth first: tokens, what is known of operators, the template."""
    (max_depth, max_args, _, _), (nodes, operators) = limits, size
    tokens = np.empty(nodes + operators, np.uint8)
    known = np.empty((3, operators), np.uint8)  # value, height, token
    positions = np.empty(operators, np.uint16)
    operator_of = np.full(nodes, -1, np.int32)
    child = np.empty(operators, np.int32)  # the next one to write
    following = 1
    for j in range(operators):
        operator_of[where[j]], child[j] = j, following
        following += arity[j]
    # What is open, from the root down: the operator, its name, values so far, height so far.
    opened = np.empty(max_depth + 1, np.int32)
    name = np.empty(max_depth + 1, np.int64)
    values = np.empty((max_depth + 1, max_args), np.int64)
    count, height = np.empty(max_depth + 1, np.int64), np.empty(max_depth + 1, np.int64)
    depth, length, closed, node = -1, 0, 0, 0
    low, high = np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344)  # pi
    while True:
        j = operator_of[node]
        if j >= 0:
            depth += 1
            opened[depth], name[depth] = j, below(stream, 4)
            count[depth], height[depth] = 0, 0
            tokens[length] = OPERATOR + name[depth]
            low, high = _hash(low, high, tokens[length])
            length += 1
        else:
            digit = below(stream, 10)
            tokens[length] = DIGIT + digit
            length += 1
            if depth < 0:
                break
            values[depth, count[depth]] = digit
            count[depth] += 1
        while depth >= 0 and count[depth] == arity[opened[depth]]:
            value = _value(name[depth], values[depth], count[depth])
            known[0, closed], known[1, closed] = value, height[depth] + 1
            known[2, closed], positions[closed] = OPERATOR + name[depth], length
            tokens[length] = CLOSE
            low, high = _hash(low, high, CLOSE)
            length += 1
            closed += 1
            depth -= 1
            if depth >= 0:
                values[depth, count[depth]] = value
                count[depth] += 1
                height[depth] = max(height[depth], height[depth + 1] + 1)
        if depth < 0:
            break
        node = child[opened[depth]]
        child[opened[depth]] += 1
    return tokens, known, positions, low, high


@compiled
@no_type_check
def draw(seed, split, index, attempts, limits):
    """The first attempt of some with a tree of the right length, and that tree; or -1."""
    _, _, min_length, max_length = limits
    stream = np.empty(4, np.uint64)
    where = np.empty(max_length, np.int32)
    arity = np.empty(max_length, np.int32)
    for attempt in range(attempts[0], attempts[1]):
        start(stream, seed, split, index, attempt)
        nodes, operators = _grow(stream, limits, where, arity)
        if nodes + operators > min_length:
            tree = _write(stream, limits, (nodes, operators), where, arity)
            return attempt, tree[0], tree[1], tree[2], tree[3], tree[4]
    empty = np.empty(0, np.uint8)
    return -1, empty, np.empty((3, 0), np.uint8), np.empty(0, np.uint16), ZERO, ZERO
