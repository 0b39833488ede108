"""Errors, all raised before a collective could pair with another rank's."""


class NdcompileError(Exception):
    """Base of all errors of ndcompile."""


class MeshError(NdcompileError, ValueError):
    """The mesh and the config do not fit each other or the world."""


class PlanError(NdcompileError, ValueError):
    """The sharding plan cannot be applied to this model on this mesh."""


class CaptureError(NdcompileError, RuntimeError):
    """The model could not be traced to one graph."""


class VerifyError(NdcompileError, RuntimeError):
    """A graph would compute something else than the model."""


class AgreementError(NdcompileError, RuntimeError):
    """The ranks would run different collectives."""


class UnsupportedError(NdcompileError, NotImplementedError):
    """A use of a compiled model that is refused by name."""


class RoutingError(NdcompileError, RuntimeError):
    """A router chose experts that do not exist, or ranks that exchange tokens in fixed shapes have different ones."""
