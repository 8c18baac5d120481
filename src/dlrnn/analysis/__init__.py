"""Kronecker products, conversions, fits, compression, pictures."""
