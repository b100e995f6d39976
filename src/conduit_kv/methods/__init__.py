"""One file, one method: what each published system does, as a frozen dataclass.

Importing this package registers every method.
"""

from conduit_kv.methods import evict as evict
from conduit_kv.methods import hold as hold
from conduit_kv.methods import reduce as reduce
from conduit_kv.methods import retrieve as retrieve
from conduit_kv.methods import reuse as reuse
from conduit_kv.methods import route as route
from conduit_kv.methods.base import STAGES, Method, read_field, register, registry

__all__ = ["STAGES", "Method", "read_field", "register", "registry"]
