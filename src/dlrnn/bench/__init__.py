"""Measurements: correctness first, then numbers, with what the machine was."""
