"""The hold stage: how kept keys and values are stored and read."""

from conduit_kv.methods.hold.base import FULL_BITS, HoldMethod, Quantiser, Scene, Where
from conduit_kv.methods.hold.fp8 import Fp8
from conduit_kv.methods.hold.kivi import Kivi
from conduit_kv.methods.hold.kvcapsule import KvCapsule
from conduit_kv.methods.hold.pca import Pca
from conduit_kv.methods.hold.random_windows import RandomWindows
from conduit_kv.methods.hold.rtn import Rtn
from conduit_kv.methods.hold.stride_interpolate import StrideInterpolate
from conduit_kv.methods.hold.windowquant import WindowQuant

__all__ = [
    "FULL_BITS",
    "Fp8",
    "HoldMethod",
    "Kivi",
    "KvCapsule",
    "Pca",
    "Quantiser",
    "RandomWindows",
    "Rtn",
    "Scene",
    "StrideInterpolate",
    "Where",
    "WindowQuant",
]
