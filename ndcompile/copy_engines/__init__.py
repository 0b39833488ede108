"""Gathers of weights and reductions of gradients by the copy engines of the GPUs, for `copy_engines=True`.

protocol.py says which rank copies what when, lanes.py does it on streams of CUDA, group.py is the process group that
compiled graphs call, watch.py its time-out, connect.py what is asked of the GPUs. The pass is
passes/use_copy_engines.py.
"""
