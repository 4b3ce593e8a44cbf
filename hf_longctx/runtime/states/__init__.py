"""States along the sequence (linear attention, SSM, convolution) under plans: documents apart, slices in a row, heads spread."""
