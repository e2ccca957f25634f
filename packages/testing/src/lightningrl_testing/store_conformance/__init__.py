"""The specification of a store: subclass `StoreConformance`, give it a `store` fixture, and its tests are yours.

class TestMyStore(StoreConformance):
    @pytest.fixture
    async def store(self, tmp_path): ...

A deviation is `xfail(reason=…)`.
"""

from lightningrl_testing.store_conformance.call_log import CallLogConformance
from lightningrl_testing.store_conformance.inputs import leased, make_call, make_spec
from lightningrl_testing.store_conformance.ledger import LedgerConformance
from lightningrl_testing.store_conformance.look import LookConformance
from lightningrl_testing.store_conformance.queue import QueueConformance
from lightningrl_testing.store_conformance.tool_calls import ToolCallConformance

__all__ = ["StoreConformance", "leased", "make_call", "make_spec"]


class StoreConformance(QueueConformance, CallLogConformance, ToolCallConformance, LedgerConformance, LookConformance):
    """All that a store does."""
