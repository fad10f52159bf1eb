"""Layer-wise relevance propagation: rules, the table of operations, methods.

`relevance_rules` (in `icebear.concepts.lrp.operations`) needs torch; the methods in
`icebear.concepts.lrp.method` are plain values and do not.
"""
