"""Merging tables: associative, commutative, and equal to one sort of everything."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from icebear.actmax.index.activation_statistics import EMPTY, top_k

rows = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, 3.25]), st.integers(0, 10**18), st.integers(1, 99)),
    max_size=30,
    unique_by=lambda row: row[1],
)


def table(row_list, k):
    columns = list(zip(*row_list, strict=True)) or [(), (), ()]
    return top_k(
        torch.tensor([columns[0]], dtype=torch.float32),
        torch.tensor([columns[1]], dtype=torch.int64),
        torch.tensor([columns[2]], dtype=torch.int16),
        k,
    )


def join(a, b, k):
    return top_k(*(torch.cat(pair, -1) for pair in zip(a, b, strict=True)), k)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@given(rows, st.integers(1, 8))
def test_top_k_is_a_sort(row_list, k):
    values, sentences, tokens = table(row_list, k)
    expected = sorted(row_list, key=lambda row: (-row[0], row[1]))[:k]
    result = list(zip(values[0].tolist(), sentences[0].tolist(), tokens[0].tolist(), strict=True))
    assert result[: len(expected)] == expected
    assert all(row[:2] == (-torch.inf, EMPTY) for row in result[len(expected) :])


@given(rows, st.integers(0, 30), st.integers(0, 30), st.integers(1, 8))
def test_merging_is_associative_and_commutative(row_list, i, j, k):
    i, j = sorted((i, j))
    a, b, c = (table(part, k) for part in (row_list[:i], row_list[i:j], row_list[j:]))
    whole = table(row_list, k)
    assert same(join(join(a, b, k), c, k), whole)
    assert same(join(a, join(b, c, k), k), whole)
    assert same(join(join(c, a, k), b, k), whole)
