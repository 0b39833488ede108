"""What ndcompile mends in torch."""

from ndcompile.torch_private import launch_empty_grids, two_dimensional_grid


def test_a_kernel_over_no_rows_launches_no_block():
    launch_empty_grids()
    assert 0 in two_dimensional_grid(columns=64, rows=0)
    assert two_dimensional_grid(columns=64, rows=7) == (64, 7, 1)
