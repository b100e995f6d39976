"""One page from bench results: which plan to take, and why."""

from conduit_kv.report.advice import Advice, Entry, Usage, advise
from conduit_kv.report.page import write_page
from conduit_kv.report.results import Results, load

__all__ = ["Advice", "Entry", "Results", "Usage", "advise", "load", "write_page"]
