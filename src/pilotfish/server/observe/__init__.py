"""Records of steps, levels and requests; metrics, timelines and traces of them."""
