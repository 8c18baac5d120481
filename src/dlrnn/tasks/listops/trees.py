"""ListOps trees by rejection sampling from the exact distribution, in numba.

An attempt draws one unconditioned tree, level by level instead of depth first: the choices of a
node (operator or digit, number of children, name, digit) are independent, so their order does not
matter. A node is an operator if two fair bits are both 1, with probability 1/4; two words decide 64
nodes. The length, nodes + operators, depends on the shape alone and only grows, so an attempt that
reaches max_length is rejected at once; names and digits are drawn for accepted trees only. The
result is the distribution conditioned on min_length < length < max_length.
"""

from typing import no_type_check

import numpy as np

from dlrnn.tasks.listops.text import CLOSE, DIGIT, OPERATOR
from dlrnn.tasks.numba_random import GOLDEN, ONE, ZERO, below, bits, compiled, inlined, mix, start


@inlined
@no_type_check
def _lowest(word):
    """Return the position of the lowest 1, by counting the zeros below it."""
    x = (word & (~word + ONE)) - ONE
    x -= (x >> ONE) & np.uint64(0x5555555555555555)
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inlined
@no_type_check
def _grow(stream, limits, where, arity):
    """Draw the shape of a tree; return its numbers of nodes and operators, -1 if it is too long.

    Nodes are numbered level by level from the root, siblings next to each other. Operator j is node
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


@inlined
@no_type_check
def _value(operator, values, count):
    """Return MIN, MAX, MED or SM of `values[:count]`, which may be sorted in place."""
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


@inlined
@no_type_check
def _hash(low, high, token):
    """Update the two hashes of a template with a token."""
    word = np.uint64(token)
    return mix(low + word * GOLDEN), mix((high ^ word) * GOLDEN)


@inlined
@no_type_check
def _write(stream, limits, size, where, arity):
    """Draw names and digits of a tree, depth first.

    Return tokens [L], operators (value, height, token) [3, O], the positions of their closing
    brackets [O], and both hashes of the template.
    """
    (max_depth, max_args, _, _), (nodes, operators) = limits, size
    tokens = np.empty(nodes + operators, np.uint8)
    found = np.empty((3, operators), np.uint8)  # value, height, token
    positions = np.empty(operators, np.uint16)
    operator_of = np.full(nodes, -1, np.int32)
    child = np.empty(operators, np.int32)  # the next child to write
    following = 1
    for j in range(operators):
        operator_of[where[j]], child[j] = j, following
        following += arity[j]
    # Open operators from the root down: number, name, values so far, height so far.
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
            found[0, closed], found[1, closed] = value, height[depth] + 1
            found[2, closed], positions[closed] = OPERATOR + name[depth], length
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
    return tokens, found, positions, low, high


@compiled
@no_type_check
def draw(seed, split, index, attempts, limits):
    """Return the first attempt whose tree has a valid length, and that tree; attempt -1 if none."""
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
