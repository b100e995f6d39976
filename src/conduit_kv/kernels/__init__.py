"""Fused decode kernels over packed segments; each has a plain PyTorch reference."""
