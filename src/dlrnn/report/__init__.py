"""Pages and pictures of recorded results: `dlrnn report`."""
