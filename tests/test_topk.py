"""Merging tables: associative, commutative, and equal to one sort of everything."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from icebear.actmax.index.top_activations import EMPTY, strongest

rows = st.lists(
    st.tuples(
        st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, 3.25]),
        st.integers(0, 10**18),
        st.integers(1, 99),
        st.integers(0, 4),
    ),
    max_size=30,
    unique_by=lambda row: row[1],
)
"""Value, sentence id, position of the top token, its id."""


def table(row_list, k):
    """The strongest rows of a neuron and of a head, which have the same rows, on both polarities."""
    values, sentences, tokens, written_at = list(zip(*row_list, strict=True)) or [()] * 4
    return strongest(
        torch.tensor([values], dtype=torch.float32).repeat(2, 2, 1),
        torch.tensor([sentences], dtype=torch.int64).repeat(2, 2, 1),
        torch.tensor([tokens], dtype=torch.int16).repeat(2, 2, 1),
        torch.tensor([written_at], dtype=torch.int32),
        k,
    )


def join(a, b, k):
    return strongest(*(torch.cat(pair, -1) for pair in zip(a, b, strict=True)), k)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def ranked(row_list):
    return sorted(row_list, key=lambda row: (-row[0], row[1]))


@given(rows, st.integers(1, 8))
def test_the_strongest_of_a_neuron_are_a_sort_and_those_of_a_head_have_each_token_once(row_list, k):
    *parts, written_at = table(row_list, k)
    best_of_token = {row[3]: row for row in reversed(ranked(row_list))}
    for number, expected in enumerate((ranked(row_list)[:k], ranked(best_of_token.values())[:k])):
        result = list(zip(*(part[0, number].tolist() for part in parts), strict=True))
        assert result[: len(expected)] == [row[:3] for row in expected]
        assert all(row == (-torch.inf, EMPTY, 0) for row in result[len(expected) :])
    assert written_at[0, : len(expected)].tolist() == [row[3] for row in expected]


@given(rows, st.integers(0, 30), st.integers(0, 30), st.integers(1, 8))
def test_merging_is_associative_and_commutative(row_list, i, j, k):
    i, j = sorted((i, j))
    a, b, c = (table(part, k) for part in (row_list[:i], row_list[i:j], row_list[j:]))
    once = table(row_list, k)
    assert same(join(join(a, b, k), c, k), once)
    assert same(join(a, join(b, c, k), k), once)
    assert same(join(join(c, a, k), b, k), once)
