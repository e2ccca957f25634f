"""The public names and where each is defined: type checkers and `__init__.py` read this list."""

from lightningrl_traces.records import (
    Call as Call,
)
from lightningrl_traces.records import (
    Ending as Ending,
)
from lightningrl_traces.records import (
    LogRecord as LogRecord,
)
from lightningrl_traces.records import (
    Sample as Sample,
)
from lightningrl_traces.records import (
    Span as Span,
)
from lightningrl_traces.records import (
    ToolRun as ToolRun,
)
from lightningrl_traces.records import (
    TraceImporter as TraceImporter,
)
from lightningrl_traces.records import (
    TraceRecord as TraceRecord,
)

__all__: list[str]
