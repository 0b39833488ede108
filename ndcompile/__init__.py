"""ndcompile: one call turns a Hugging Face model into a sharded, compiled one on an N-D device mesh."""

from ndcompile.compiler import compile, prepare
from ndcompile.derive import derive_tp_plan
from ndcompile.errors import (
    AgreementError,
    CaptureError,
    MeshError,
    NdcompileError,
    PlanError,
    RoutingError,
    UnsupportedError,
    VerifyError,
)
from ndcompile.inspection.api import Plan, load_plan, plan
from ndcompile.loader import CheckpointError
from ndcompile.loader.planning import read_plan
from ndcompile.mesh import init_mesh
from ndcompile.model_calls import (
    check_every_input,
    data_rank,
    data_world_size,
    drop_held_gradients,
    dropped_tokens,
    init_weights,
    load,
    local_parameters,
    lower_only,
    no_sync,
    save_pretrained,
    set_agreement_timeout,
)

__all__ = [
    "AgreementError",
    "CaptureError",
    "CheckpointError",
    "MeshError",
    "NdcompileError",
    "Plan",
    "PlanError",
    "RoutingError",
    "UnsupportedError",
    "VerifyError",
    "check_every_input",
    "compile",
    "data_rank",
    "data_world_size",
    "derive_tp_plan",
    "drop_held_gradients",
    "dropped_tokens",
    "init_mesh",
    "init_weights",
    "load",
    "load_plan",
    "local_parameters",
    "lower_only",
    "no_sync",
    "plan",
    "prepare",
    "read_plan",
    "save_pretrained",
    "set_agreement_timeout",
]
