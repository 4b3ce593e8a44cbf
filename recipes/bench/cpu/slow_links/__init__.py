"""Training steps of several systems over links of two speeds, in network namespaces of one machine."""
