"""What ndcompile mends in torch, and what it says where a symbol is missing."""

import subprocess
import sys

from ndcompile.private.inductor import launch_empty_grids, two_dimensional_grid


def test_a_kernel_over_no_rows_launches_no_block():
    launch_empty_grids()
    assert 0 in two_dimensional_grid(columns=64, rows=0)
    assert two_dimensional_grid(columns=64, rows=7) == (64, 7, 1)


def test_a_missing_private_symbol_is_named_with_the_versions_that_have_it():
    module = "torch._higher_order_ops.invoke_subgraph"
    script = f"import importlib; del importlib.import_module({module!r}).invoke_subgraph; import ndcompile"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert run.returncode != 0
    error = run.stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: cannot import name 'invoke_subgraph'")
    assert "tried on torch 2.11 and 2.13 with transformers 5.24, and here is torch 2." in error
