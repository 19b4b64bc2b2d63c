"""The same choice of units inside a training pass, with gradients: every position of a whole sequence reads its own units."""
