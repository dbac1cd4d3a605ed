"""Core implementations of eleven ICML 2025 papers, one module per paper."""

__version__ = "0.1.0"
__all__ = ["__version__"]
