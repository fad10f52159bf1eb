"""Layer-wise relevance propagation: rules, the table of operations, methods.

`relevance_rules` (in `concepts.lrp.operations`) needs torch; the methods in
`concepts.lrp.method` are plain values and do not.
"""
