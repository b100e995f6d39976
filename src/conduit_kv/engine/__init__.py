"""Load a model, run plans on it: for your own Transformers code, or as a session."""
