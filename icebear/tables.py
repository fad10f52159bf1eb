"""What has a table: pandas by `to_frame`, and Arrow, which takes along where it came from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from icebear.extras import need

if TYPE_CHECKING:
    import pandas
    import pyarrow


class Tabled:
    """A result with a table."""

    made_with: dict[str, Any]

    def to_frame(self) -> pandas.DataFrame:
        raise NotImplementedError

    def to_arrow(self, *args: Any, **how: Any) -> pyarrow.Table:
        """`to_frame` as an Arrow table, whose metadata has under ``icebear`` what it was made with, as JSON."""
        need("arrow")
        import pyarrow

        table = pyarrow.Table.from_pandas(self.to_frame(*args, **how), preserve_index=False)
        told = json.dumps(self.made_with, ensure_ascii=False)
        return table.replace_schema_metadata({**(table.schema.metadata or {}), "icebear": told})
