"""Long sequences cut into slices, short ones packed into chunks."""
