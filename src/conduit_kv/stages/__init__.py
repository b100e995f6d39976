"""What runs a stage's method on a request: the loops that methods must not know of."""
