"""What the views share: jobs, links, tables, the header."""
