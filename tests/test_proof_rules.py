"""Every row of the table of rules, by its own example."""

import proof_cases
import pytest

from ndcompile.proof.rules import ROWS

by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.operators.split()[0])


@by_name
def test_the_example_of_a_row_gives_what_it_says(row):
    proof, found = proof_cases.proven(row.code, row.given)
    assert (found, proof_cases.reasons(proof)) == (row.gives, [])


@pytest.mark.parametrize(
    ("given", "code", "gives"),
    [
        ("x=I", "x.flatten().repeat_interleave(2)", "I"),
        ("x=I", "x.repeat_interleave(2)", "I"),
        ("x=P", "x.repeat_interleave(2)", "P"),
    ],
)
def test_values_that_no_dim_is_cut_of_are_repeated_over_all_their_dims(given, code, gives):
    proof, found = proof_cases.proven(code, given)
    assert (found, proof_cases.reasons(proof)) == (gives, [])


def test_shards_are_not_repeated_over_all_their_dims():
    proof, _ = proof_cases.proven("x.repeat_interleave(2)", "x=S(1)")
    assert proof_cases.reasons(proof)


@by_name
def test_what_a_row_refuses_is_refused(row):
    if row.refused:
        try:
            proof, _ = proof_cases.proven(row.refused, row.given)
        except (RuntimeError, IndexError):
            return  # the shapes do not fit without tp
        assert proof_cases.reasons(proof)
