"""The retrieve stage: methods against their formulas, questions against a cache by hand."""
