"""All device code: loading, the forward, attention over slots, sampling."""
