"""What every folder uses: reading and writing files safely, figures, numba."""
