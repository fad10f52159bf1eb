"""Results as rich renderables: a `..._table` each, or a `..._report` of tables and lines."""
